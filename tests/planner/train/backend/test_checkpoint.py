"""``planner.checkpoint``: loops that call the model themselves train within a budget, with eager PyTorch's bits."""

import copy
import pickle
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.flop_counter import FlopCounterMode

import planner
from benchmarks.models.parts import FunctionModule
from planner.graphs.errors import BudgetError, InfeasibleError, PlannerError
from planner.train.backend import checkpoint
from tests.support.distributed import on_processes
from tests.support.logs import lines_of
from tests.support.models.backend import Broken, measured_bytes, stack, step_of
from tests.support.raised_warnings import raise_warnings

pytestmark = [pytest.mark.usefixtures("fresh_compiler"), pytest.mark.filterwarnings("ignore::UserWarning:torch.*")]

QUICK: dict[str, Any] = {"time_limit_s": 10.0, "tolerance": 0.05}


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Dropout(0.5), nn.Linear(64, 3))


def train(
    model: nn.Module, sizes: Sequence[int], wrap: Callable[[nn.Module], nn.Module] = lambda model: model
) -> list[torch.Tensor]:
    """All that a loop leaves behind: losses, evaluations, and parameters."""
    torch.manual_seed(1)
    called, optimizer, left = wrap(model), torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for size in sizes:
        x, y = torch.randn(size, 8), torch.randint(3, (size,))
        loss = F.cross_entropy(called(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            left += [loss.detach(), called(x[:1])]
        model.train()
    return [*left, *(p.detach() for p in model.parameters())]


def assert_trains_as_eager(model: nn.Module, sizes: Sequence[int] = (32, 32)) -> None:
    twin = copy.deepcopy(model)
    assert twin._compiled_call_impl is None
    assert all(map(torch.equal, train(model, sizes), train(twin, sizes)))


def test_each_graph_is_logged(capfd: pytest.CaptureFixture[str]) -> None:
    model = planner.checkpoint(stack(2), budget="100%", **QUICK)
    with lines_of("planner") as lines:
        for rows in (4, 4, 6, 6):
            model(torch.randn(rows, 32)).sum().backward()
    solving = ["solve: looking for a schedule", "solve: done"]
    heads = ["measure: measuring ops", "measure: done", *solving, *solving, "planned: "] * 2
    assert len(lines) == len(heads)
    assert all(line.startswith(head) for line, head in zip(lines, heads, strict=True))
    assert capfd.readouterr() == ("", "")


def test_a_loop_with_evaluation_and_a_smaller_last_batch(solves: list[int]) -> None:
    model = small()
    names = list(model.state_dict())
    assert planner.checkpoint(model, budget="90%", **QUICK) is model
    assert_trains_as_eager(model, (32, 32, 5, 32, 31, 1, 30, 31, 30))
    assert list(model.state_dict()) == names
    assert len(solves) == 3  # 5 rows and 1 fit with everything kept
    assert len(set(solves)) == 1  # a share of the largest batch: what is smaller does not get less


def test_a_step_stays_within_the_budget() -> None:
    torch.manual_seed(0)
    model, batch = stack(8), (torch.randn(512, 32),)
    eager_bytes = measured_bytes(model, batch, step_of(model, batch))
    budget = int(0.6 * eager_bytes)
    step = step_of(planner.checkpoint(model, budget=budget, **QUICK), batch)
    step()
    assert measured_bytes(model, batch, step) <= budget


@pytest.mark.slow
def test_a_language_model_of_hugging_face(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=97, n_positions=32, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    model = transformers.GPT2LMHeadModel(config)
    twin = copy.deepcopy(model)
    planner.checkpoint(model, budget="90%", **QUICK)
    ids = [torch.randint(97, (rows, 16)) for rows in (4, 4, 2)]
    ends = []
    for trained in (model, twin):
        optimizer, losses = torch.optim.AdamW(trained.parameters(), lr=1e-2), []
        for i, batch in enumerate(ids):
            torch.manual_seed(i)
            outputs = trained(input_ids=batch, labels=batch)
            assert outputs.logits.shape == (*batch.shape, 97)
            outputs.loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(outputs.loss.detach())
        ends.append([*losses, *trained.parameters()])
    assert all(map(torch.equal, *ends))


def by_backend(model: nn.Module, **options: Any) -> Any:
    return torch.compile(model, backend="planner", dynamic=False, options=options)


@pytest.mark.parametrize("plan", [planner.checkpoint, by_backend])
def test_hooks_that_come_later_are_called(plan: Callable[..., nn.Module]) -> None:
    torch.manual_seed(0)
    eager = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    twin, x = copy.deepcopy(eager), torch.randn(4, 8)
    planned = plan(twin, budget="100%", **QUICK)
    assert torch.equal(planned(x), eager(x))
    for model in (twin, eager):
        model[1].register_forward_hook(lambda _module, _inputs, output: 0.5 * output)
    assert torch.equal(planned(x), eager(x))


def test_evaluation_is_not_planned(solves: list[int]) -> None:
    model = planner.checkpoint(small(), budget="1GB").eval()
    with torch.no_grad():
        assert torch.equal(model(torch.ones(2, 8)), copy.deepcopy(model)(torch.ones(2, 8)))
    assert solves == []


def test_second_checkpoint_call_replaces_the_budget_and_none_removes_it(solves: list[int]) -> None:
    model = small()
    for budget in ("1MB", "2MB"):
        assert_trains_as_eager(planner.checkpoint(model, budget=budget, **QUICK))
    assert solves == [10**6, 2 * 10**6]
    planner.checkpoint(model, budget=None)
    train(model, (16,))
    assert len(solves) == 2
    planner.checkpoint(model, budget="1MB")
    assert pickle.loads(pickle.dumps(model))._compiled_call_impl is None


@pytest.mark.slow
def test_each_of_many_models_has_its_budget(solves: list[int]) -> None:
    models = [planner.checkpoint(small(), budget=10**6 + i, **QUICK) for i in range(12)]  # Dynamo's limit for one code is 8
    for model in models:
        assert_trains_as_eager(model)
    assert solves == [10**6 + i for i in range(12)]


def test_graph_breaks_share_the_budget(solves: list[int]) -> None:
    torch.manual_seed(0)
    parts = small(), nn.Sequential(nn.Linear(3, 16), nn.GELU(), nn.Linear(16, 3))
    model = planner.checkpoint(Broken(*parts), budget="1MB", **QUICK)
    with pytest.warns(UserWarning, match="several graphs: the second one gets"):
        assert_trains_as_eager(model)
    unseen_bytes = sum(p.nbytes for p in model.second.parameters())
    assert solves[0] == 10**6 - 2 * unseen_bytes  # the second graph's parameters are seen before it, and their gradients


def test_checkpointed_submodule_trains_inside_a_planned_model(solves: list[int]) -> None:
    model = planner.checkpoint(small(), budget="1MB")
    whole = nn.Sequential(model, nn.Linear(3, 3))
    assert_trains_as_eager(planner.checkpoint(whole, budget="2MB", **QUICK))
    assert solves == [2 * 10**6]
    step = planner.compile(model, F.cross_entropy, (torch.randn(4, 8), torch.randint(3, (4,))), budget="3MB", passes=1)
    assert step.plan.eager.identical


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_models_prepared_by_accelerate_train_exactly(precision: str) -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(True)
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision=precision)
    model = small()
    twin, model = accelerator.prepare(copy.deepcopy(model)), accelerator.prepare(model)
    planner.checkpoint(model, budget="1MB", **QUICK)
    x = torch.randn(16, 8)
    for trained in (model, twin):
        torch.manual_seed(2)
        output = trained(x)
        assert output.dtype is torch.float32
        accelerator.backward(output.square().sum())
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


def test_wrong_calls_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BudgetError, match="budget '10' has no unit"):
        planner.checkpoint(small(), budget="10")
    with pytest.raises(PlannerError, match="wrapped in DataParallel: call it with the model itself, before you wrap it"):
        planner.checkpoint(nn.DataParallel(small()), budget="1GB")
    compiled = small()
    compiled.compile(backend="eager")
    with pytest.raises(PlannerError, match=r"the model is already compiled: leave out model\.compile\(\)"):
        planner.checkpoint(compiled, budget="1GB")
    with pytest.raises(InfeasibleError, match="the least any schedule of this graph needs"):
        planner.checkpoint(small(), budget="10 B")(torch.randn(3, 8))


class Counting(nn.Linear):
    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x) * self.calls


@pytest.mark.parametrize(
    ("make", "rows", "said"),
    [
        (small, 1, "inputs of more than 2 sizes, and each needs its own plan: pad inputs"),
        (
            lambda: Counting(8, 8),
            0,
            r"captured 2 times.*: values that its code reads differ between calls \(`model.calls == 1` held",
        ),
    ],
)
def test_no_call_runs_without_a_plan(
    make: Callable[[], nn.Module], rows: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "_MOST_SIZES", 2)
    model = planner.checkpoint(make(), budget="1MB", **QUICK)
    for i in range(2):
        model(torch.randn(3 + i * rows, 8))
    with pytest.raises(PlannerError, match=said):
        model(torch.randn(3 + 2 * rows, 8))


def check_ddp(rank: int) -> None:
    ends = []
    for budget in ("1MB", None):
        model = planner.checkpoint(small(), budget=budget, **QUICK)
        with raise_warnings(UserWarning):  # of several graphs, say
            ends.append(train(model, (32, 32, 5), lambda model: DistributedDataParallel(model, bucket_cap_mb=1)))
    assert all(map(torch.equal, *ends))
    dist.barrier()


@pytest.mark.slow
def test_ddp_around_a_checkpointed_model(tmp_path: Path) -> None:
    on_processes(2, (check_ddp,), tmp_path)


class BreaksInALoop(nn.Module):
    """Dynamo captures nothing of it."""

    def __init__(self, layers: int = 2, width: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (self.layers[i] for i in range(len(self.layers))):  # a generator that reads what the loop may change
            x = torch.tanh(layer(x))
            torch._dynamo.graph_break()
        return x


def count_positive(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return (x.square() > 1).sum()


class CountsInALoop(BreaksInALoop):
    """Dynamo captures only a function that no gradient flows through, as the matching of boxes is."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (self.layers[i] for i in range(len(self.layers))):  # a generator that reads what the loop may change
            x = torch.tanh(layer(x)) * (count_positive(x).item() > 0)
            torch._dynamo.graph_break()
        return x


@pytest.mark.parametrize("kind", [BreaksInALoop, CountsInALoop])
@pytest.mark.parametrize("plan", [planner.checkpoint, by_backend])
def test_a_model_without_a_graph_says_once_that_it_has_no_plan(plan: Callable[..., Any], kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    x, model = torch.randn(4, 8), plan(kind(), budget="60%")
    with torch.no_grad():
        model(x)
    causes = r".*torch\.compiler\.disable.*a with or try block.*a generator, map\(\) or filter\(\)"
    with pytest.warns(UserWarning, match=f"no graph was found in {kind.__name__}, which runs without a plan{causes}"):
        model(x).sum().backward()
    model(x).sum().backward()


class Recomputed(torch.autograd.Function):
    """A handwritten checkpoint: its backward pass runs the forward pass again, and the backward pass of that."""

    @staticmethod
    def forward(ctx: Any, run: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        ctx.run = run
        ctx.save_for_backward(x)
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            returned = ctx.run(x)
        torch.autograd.backward(returned, gradients)
        return None, x.grad


def recomputed(last: nn.Module) -> nn.Module:
    return FunctionModule(lambda m, x: Recomputed.apply(m.last, x), last=last)


@pytest.mark.parametrize("make_last", [lambda: BreaksInALoop(8, 32), lambda: recomputed(stack(6))])
@pytest.mark.parametrize("plan", [planner.checkpoint, by_backend])
def test_planned_graphs_leave_room_for_code_that_is_left_out(
    plan: Callable[..., Any], make_last: Callable[[], nn.Module]
) -> None:
    torch.manual_seed(0)
    tensor_bytes, model = 4 * 512 * 32, FunctionModule(lambda m, x: m.last(m.first(x)), first=stack(4), last=make_last())
    batch = (torch.randn(512, 32),)
    eager_bytes = measured_bytes(model, batch, step_of(model, batch))
    for budget, is_enough in ((eager_bytes - tensor_bytes, True), (8 * tensor_bytes, False)):
        twin = copy.deepcopy(model)
        step = step_of(plan(twin, budget=budget, **QUICK), batch)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for _ in range(3):
                step()
        assert [str(w.message).count("that Dynamo leaves out takes about") for w in said].count(1) == (not is_enough)
        assert not is_enough or measured_bytes(twin, batch, step) <= budget


@pytest.mark.parametrize("plan", [planner.checkpoint, by_backend])
def test_what_is_held_before_a_planned_block_does_not_count(plan: Callable[..., Any], solves: list[int]) -> None:
    model = nn.Sequential(stack(3), plan(stack(2), budget="1MB", **QUICK))
    for _ in range(2):
        model(torch.randn(64, 32)).sum().backward()
    assert solves == [10**6]


def test_a_part_of_a_planned_model_has_a_plan_there() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), planner.checkpoint(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), budget="100%"))
    x, y = torch.randn(4, 8), torch.randn(4, 8)
    step = planner.compile(model, nn.functional.mse_loss, (x, y), budget="100%")
    step(x, y).backward()


@pytest.mark.parametrize("watching", [lambda: FlopCounterMode(display=False), lambda: torch._dynamo.config.patch(disable=True)])
def test_a_model_that_first_runs_where_nothing_is_captured_is_planned_later(
    watching: Callable[[], AbstractContextManager[object]], solves: list[int]
) -> None:
    torch.manual_seed(0)
    plain = stack(2)
    model = planner.checkpoint(copy.deepcopy(plain), budget="100%", **QUICK)

    def gradients(called: nn.Module, size: int) -> list[torch.Tensor | None]:
        called.zero_grad()
        called(torch.ones(size, 32)).sum().backward()
        return [p.grad for p in called.parameters()]

    with raise_warnings():
        watched = ((4, True, 0), (4, False, 0), (4, False, 1), (4, True, 1), (6, True, 1))
        for size, is_watched, planned in (*watched, (6, False, 1), (6, False, 2), (4, False, 2)):
            with watching() if is_watched else nullcontext():
                found = gradients(model, size)
            assert all(map(torch.equal, found, gradients(plain, size)))
            assert len(solves) == planned
    assert torch._dynamo.eval_frame._stance.stance == "default"
