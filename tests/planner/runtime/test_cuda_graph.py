"""Recorded steps: what replays them is exact, on a stand-in for CUDA."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import planner
from benchmarks.models.parts import FunctionModule
from planner.capture.step import TrainingStep
from planner.capture.trace import capture
from planner.capture.workload.models import Workload
from planner.graphs.errors import MismatchError, PlannerError, TraceError
from planner.runtime.cuda.graphed_step import prepare_for_recording
from planner.runtime.executor import Executor
from planner.settings.budget import Bytes
from planner.settings.plan import PlanSettings
from planner.train.compile import per_batch
from planner.train.compile.per_batch import BatchPlans
from planner.train.compile.planning import Planning
from planner.train.distributed.ranks import SingleProcess
from planner.train.distributed.wrappers import Unwrapped, unwrap
from tests.support.cuda_device import on_device
from tests.support.cuda_device.steps import MODELS, dropout_and_norm, recorded, train
from tests.support.marks import slow_among
from tests.support.models.outcomes import assert_same
from tests.support.models.steps import make, random_schedule

pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning"), pytest.mark.usefixtures("_stand_in")]


@pytest.mark.parametrize("name", slow_among(MODELS, "vit", "tied", "frozen"))
def test_every_model_trains_as_eager_does(name: str) -> None:
    workload, other = MODELS[name](), MODELS[name]()
    step = TrainingStep(other.model, other.loss_fn)
    assert_same(train(other, step, batches=2), train(workload, recorded(workload, seed=2), batches=2))


def test_kept_loss_and_gradients_survive_the_next_replay() -> None:
    workload = dropout_and_norm()
    step = recorded(workload)
    parameters = list(workload.model.parameters())
    loss = step(*workload.batch)
    gradients = torch.autograd.grad(loss, parameters)
    before = [value.clone() for value in (loss.detach(), *gradients)]
    step(*(value.roll(1, 0) for value in workload.batch)).backward()
    assert all(torch.equal(value, then) for value, then in zip((loss.detach(), *gradients), before, strict=True))
    assert not any(torch.equal(p.grad, then) for p, then in zip(parameters[:1], before[1:], strict=False))


def test_gradients_of_inputs_and_other_results_are_copies_too() -> None:
    torch.manual_seed(0)
    model, _, (x, target) = on_device(Workload(nn.Linear(6, 3), None, (torch.randn(4, 6), torch.randn(4, 3))))
    x.requires_grad_()

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return F.mse_loss(output, target), output.argmax(1)

    step = recorded(Workload(model, loss_fn, (x, target)), seed=None)
    loss, classes = step(x, target)
    assert classes.dtype == torch.int64 and not classes.requires_grad
    wanted = model(x).argmax(1)
    loss.backward()
    (gradient,) = torch.autograd.grad(F.mse_loss(model(x), target), x)
    step((-x).detach().requires_grad_(), target)
    assert torch.equal(classes, wanted)
    assert torch.equal(x.grad, gradient)


def counts(m: Any, x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """Writes to what it is given."""
    count.add_(1)
    return (m.inner(x) * count).sum()


def test_writes_of_the_step_to_its_inputs_are_copied_back() -> None:
    workload = on_device(Workload(FunctionModule(counts, inner=nn.Linear(6, 3)), None, (torch.randn(4, 6), torch.zeros(3))))
    step = recorded(workload, seed=None)
    assert not workload.batch[1].any()  # recording left it alone
    count = torch.tensor([1.0, 2.0, 3.0]).to("cuda:0")
    step(workload.batch[0], count).backward()
    assert count.tolist() == [2.0, 3.0, 4.0]
    gradient = workload.model.inner.bias.grad
    assert torch.equal(gradient, 4 * count)


def test_recording_leaves_model_gradients_and_random_state_alone() -> None:
    workload = dropout_and_norm()
    for parameter in workload.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = {name: value.clone() for name, value in workload.model.state_dict().items()}
    state = torch.cuda.get_rng_state()
    recorded(workload)
    assert all(torch.equal(value, before[name]) for name, value in workload.model.state_dict().items())
    assert torch.equal(torch.cuda.get_rng_state(), state)
    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in workload.model.parameters())


def test_random_ops_are_not_computed_again_and_no_state_is_read() -> None:
    captured = prepare_for_recording(capture(*make("gpt2_written")))
    random = {op.id for op in captured.graph.ops if op.random}
    assert random
    assert not any(captured.graph.ops[op].recomputable for op in random)
    again = [op for op in range(len(captured.graph.ops)) if random_schedule(captured.graph, 2).computed.count(op) > 1]
    assert again and random.isdisjoint(again)
    executor = Executor(captured, random_schedule(captured.graph, 2), *make("gpt2_written")[:2])
    assert "generator" not in executor.code.source


def test_a_loss_whose_tensors_are_overwritten_has_no_backward_pass() -> None:
    workload = dropout_and_norm()
    step = recorded(workload)
    first, second = step(*workload.batch), step(*workload.batch)
    with pytest.raises(PlannerError, match=r"after another call of the step.*compile without cuda_graph"):
        first.backward()
    second.backward()
    with torch.no_grad():
        step(*workload.batch)
    step(*workload.batch).backward()  # losses that are dropped do no harm


@pytest.mark.parametrize("how", ["assign", "replace", "buffer"])
def test_a_tensor_that_was_put_elsewhere_is_refused(how: str) -> None:
    workload = dropout_and_norm()
    step = recorded(workload)
    values = copy.deepcopy(workload.model.state_dict())
    workload.model.load_state_dict(values)  # in place
    step(*workload.batch).backward()
    if how == "assign":
        workload.model.load_state_dict(values, assign=True)
    elif how == "replace":
        workload.model.last.bias.data = workload.model.last.bias.data.clone()
    else:
        workload.model.norm.running_mean = workload.model.norm.running_mean.clone()
    name = {"assign": "first.weight", "replace": "last.bias", "buffer": "norm.running_mean"}[how]
    with pytest.raises(MismatchError, match=rf"{name} is not where it was in memory.*make another plan"):
        step(*workload.batch)


class Elsewhere(nn.Module):
    """Reads a tensor of another device."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = torch.zeros(4, device="meta")
        return self.inner(x).sum() + torch.zeros_like(shape, device="cpu").sum()


class Masked(nn.Module):
    """Writes where a mask says."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        y[x > 0] = torch.zeros((), device=x.device)
        return y.sum()


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (Elsewhere, r"op 'zeros' \(aten.zeros.default\) in model has a tensor on meta, not on cpu"),
        (Masked, r"op 'index_put.*waits for the device"),
    ],
)
def test_an_op_that_cannot_be_captured_is_named(model: Callable[[], nn.Module], said: str) -> None:
    with pytest.raises(TraceError, match=rf"{said}.*leave out cuda_graph=True"):
        prepare_for_recording(capture(model(), None, (torch.randn(3, 4),)))


def test_unrecordable_steps_raise() -> None:
    class Several(SingleProcess):
        is_alone = False

    workload = dropout_and_norm()
    with pytest.raises(
        PlannerError, match="model on the CPU: a CUDA graph needs a model on a CUDA device: leave out cuda_graph=True"
    ):
        planner.compile(*make("tied"), budget="8GB", cuda_graph=True)
    with pytest.raises(PlannerError, match="one for each size: leave out cuda_graph=True, or dynamic=True"):
        planner.compile(*workload, budget="8GB", cuda_graph=True, dynamic=True)
    with pytest.raises(PlannerError, match="a single process only: leave out cuda_graph=True"):
        Planning(
            Unwrapped(workload.model, Several()),
            workload.loss_fn,
            PlanSettings(cuda_graph=True),
        )


def test_in_a_trainers_loop_a_second_size_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = planner.compile
    monkeypatch.setattr(per_batch, "compile", lambda *args, cuda_graph, **options: compiled(*args, **options))
    model, loss_fn, (x, y) = dropout_and_norm()
    plans = BatchPlans(unwrap(model), Bytes(8 * 10**9), {"cuda_graph": True, "passes": 1})
    optimizer = torch.optim.AdamW(model.parameters())
    plans.step(loss_fn, (x, y), optimizer=optimizer, accumulate=False)
    plans.step(loss_fn, (x + 1, y), optimizer=optimizer, accumulate=False)
    with pytest.raises(PlannerError, match=r"a batch of \[64, 24\], \[64\] needs a plan of its own, and CUDA graphs hold"):
        plans.step(loss_fn, (x.tile(2, 1), y.tile(2)), optimizer=optimizer, accumulate=False)
