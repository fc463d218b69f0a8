"""The memory of optimizers is measured from the optimizers themselves."""

import copy
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim

import planner
from planner.capture.trace import capture
from planner.graphs.allocators.training import training_of
from planner.graphs.errors import PlannerError, UsageError
from planner.graphs.ir import Kind
from planner.graphs.optimizers import MeasuredOptimizer
from planner.graphs.schedule import keep_everything
from planner.measure.optimizers import measure_optimizer
from planner.show.report.describe import list_provenance

_TAKE_OTHERS = {"Optimizer", "SparseAdam", "LBFGS", "Muon"}  # sparse gradients, a closure, matrices only
OF_TORCH = sorted(name for name, value in vars(optim).items() if isinstance(value, type) and name not in _TAKE_OTHERS)
Make = Callable[[list[nn.Parameter]], optim.Optimizer]
MORE: dict[str, Make] = {
    "momentum": partial(optim.SGD, lr=0.1, momentum=0.9),
    "amsgrad": partial(optim.AdamW, amsgrad=True),
    "foreach": partial(optim.AdamW, foreach=True),
    "fused": partial(optim.AdamW, fused=True),
    "tensor lr": lambda parameters: optim.Adam(parameters, lr=torch.tensor(0.1)),
    "centered": partial(optim.RMSprop, centered=True, momentum=0.9),
    "two groups": lambda p: optim.SGD([{"params": p[:1], "momentum": 0.9}, {"params": p[1:]}], lr=0.1),
    "matrices": lambda p: optim.Muon([q for q in p if q.dim() == 2]),
}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4))


def backward(model: nn.Module) -> torch.Tensor:
    model.zero_grad()
    loss: torch.Tensor = model(torch.ones(3, 6)).square().sum()
    loss.backward()
    return loss


def real_sizes(optimizer: optim.Optimizer) -> list[int]:
    values = [value for state in optimizer.state.values() for value in state.values()]
    flat = [x for value in values for x in (value if isinstance(value, list) else [value])]
    return sorted(x.nbytes for x in flat if isinstance(x, torch.Tensor))


@pytest.mark.parametrize("make", [*(getattr(optim, name) for name in OF_TORCH), *MORE.values()], ids=[*OF_TORCH, *MORE])
def test_the_state_is_that_of_a_real_step(make: Make) -> None:
    model = network()
    optimizer = make(list(model.parameters()))
    before = copy.deepcopy((optimizer.state_dict(), model.state_dict(), torch.get_rng_state()))
    measured = measure_optimizer(optimizer, model.parameters())
    for old, new in zip(before, (optimizer.state_dict(), model.state_dict(), torch.get_rng_state()), strict=True):
        torch.testing.assert_close(old, new, rtol=0, atol=0)
    assert all(p.grad is None for p in model.parameters())
    backward(model)
    optimizer.step()
    assert sorted(measured.state) == real_sizes(optimizer)
    assert sorted(measure_optimizer(optimizer, model.parameters()).state) == real_sizes(optimizer)


def test_a_history_counts_when_it_is_full() -> None:
    model = network()
    optimizer = optim.LBFGS(model.parameters(), lr=0.01, history_size=3)
    measured = measure_optimizer(optimizer, model.parameters())
    for _ in range(3):
        optimizer.step(lambda: backward(model))
    assert sum(measured.state) == sum(real_sizes(optimizer))


def test_temporaries_are_those_of_the_kernels() -> None:
    model = network()
    sizes = sorted(p.nbytes for p in model.parameters())
    for options, expected in (({"foreach": True}, sizes), ({"fused": True}, [])):
        measured = measure_optimizer(optim.AdamW(model.parameters(), **options), model.parameters())
        assert sorted(measured.temporaries) == expected


class Quantized(torch.Tensor):
    """A tensor made of codes and a scale."""

    codes: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor) -> "Quantized":
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype, device=codes.device)

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor) -> None:
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None

    @staticmethod
    def __tensor_unflatten__(parts: dict[str, torch.Tensor], context: Any, size: Any, stride: Any) -> "Quantized":
        return Quantized(**parts)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(func)


class Sign(optim.Optimizer):
    """Keeps 8-bit state for large tensors and full state for small ones; its constructor takes what no other does."""

    def __init__(self, model: nn.Module, *, bits: int) -> None:
        self.seen: dict[str, torch.Tensor] = {}
        super().__init__(list(model.parameters()), {"bits": bits})

    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            if not self.state[p]:
                small, self.seen["last"] = p.numel() < 20, p.grad
                codes = torch.zeros_like(p, dtype=torch.uint8)
                self.state[p] = {"moment": torch.zeros_like(p) if small else Quantized(codes, torch.ones(1))}
            if p.grad.norm() > 1e9:
                raise OverflowError
            p.data.add_(p.grad.sign(), alpha=-0.01)


def test_state_of_subclasses_of_tensors_counts_their_parts() -> None:
    model = network()
    optimizer = Sign(model, bits=8)
    optim.lr_scheduler.LambdaLR(optim.SGD(model.parameters(), lr=0.1), lambda _: 1.0)
    measured = measure_optimizer(optimizer, model.parameters())
    assert sorted(measured.state) == sorted([96, 4, 16 * 4, 64, 4, 4 * 4])
    assert not optimizer.seen


def test_schedulers_and_hooks_do_not_notice() -> None:
    model, steps = network(), []
    optimizer = optim.AdamW(model.parameters())
    scheduler = optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    optimizer.register_step_pre_hook(lambda *_: steps.append(1))
    assert measure_optimizer(optimizer, model.parameters()).state
    assert not steps
    with pytest.warns(UserWarning, match="before `optimizer.step"):
        scheduler.step()


def test_other_parameters_do_not_count() -> None:
    model, other = network(), nn.Linear(3, 3)
    optimizer = optim.Adam([*model[0].parameters(), *other.parameters()])
    model[0].bias.requires_grad_(False)
    assert sorted(measure_optimizer(optimizer, model.parameters()).state) == [4, 384, 384]


def test_an_optimizer_of_another_model_raises() -> None:
    batch = torch.randn(3, 6), torch.randn(3, 4)
    model = network()
    optimizer = optim.AdamW(copy.deepcopy(model).parameters())
    with pytest.raises(PlannerError, match=r"optimizer \(AdamW\) has no parameter of this model"):
        planner.compile(model, F.mse_loss, batch, budget="100%", optimizer=optimizer, passes=1)


def test_a_graph_counts_the_state_of_the_optimizer_itself() -> None:
    batch = torch.randn(3, 6), torch.randn(3, 4)
    model = network()
    optimizer = optim.Adam(model.parameters(), amsgrad=True)
    graph = planner.trace(model, F.mse_loss, batch, optimizer=optimizer, passes=1)
    measured = measure_optimizer(optimizer, model.parameters())
    assert graph.provenance["optimizer"] == measured.recorded
    plain = planner.trace(model, F.mse_loss, batch, passes=1)
    assert graph.static_bytes - plain.static_bytes == sum(measured.state)
    assert planner.solve(graph, "100%").graph.static_bytes == graph.static_bytes
    advice = planner.advise(model, F.mse_loss, batch, optimizer=optimizer, passes=1, options=[], time_limit_s=20)
    assert advice.eager_peak_bytes == planner.solve(graph, "100%").graph.keep_everything_peak_bytes


@torch.library.custom_op("planner_tests::scaled", mutates_args=())
def scaled(x: torch.Tensor, by: float) -> torch.Tensor:
    return x * by


@scaled.register_fake
def _(x: torch.Tensor, by: float) -> torch.Tensor:
    del by
    return torch.empty_like(x)


class OfNorms(optim.Optimizer):
    """Passes tensors to an operator that takes numbers, and needs a closure."""

    @torch.no_grad()
    def step(self, closure: Any) -> None:
        closure()
        for p in self.param_groups[0]["params"]:
            self.state[p]["moment"] = torch.ops.planner_tests.scaled(p.grad, torch.linalg.vector_norm(p))


class Averaged:
    """A wrapper of an optimizer that is none itself, and keeps an average beside its state."""

    def __init__(self, base: optim.Optimizer) -> None:
        self.base = base

    @property
    def param_groups(self) -> Any:
        return self.base.param_groups

    @property
    def state(self) -> Any:
        return self.base.state

    def step(self) -> None:
        self.base.step()
        for p in self.param_groups[0]["params"]:
            self.state[p]["average"] = p.detach().clone()


class Ahead(Averaged):
    """A wrapper with modes whose state is there before that of its optimizer, and changes places with the parameters."""

    training = False

    def train(self) -> "Ahead":
        self.training = True
        return self

    @torch.no_grad()
    def step(self) -> None:
        assert self.training
        parameters = self.param_groups[0]["params"]
        for p in parameters:
            self.state[p].setdefault("ahead", p.clone())
            self._exchange(p)
        self.base.step()
        for p in parameters:
            self._exchange(p)

    def _exchange(self, p: torch.Tensor) -> None:
        one, other = p.view(torch.uint8), self.state[p]["ahead"].view(torch.uint8)
        for written, read in ((one, other), (other, one), (one, other)):
            written.bitwise_xor_(read)


class Beside(optim.Optimizer):
    """An optimizer with another one, each with state of its own."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})
        self.inner = optim.Adam(self.param_groups)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        del closure
        self.inner.step()
        for p in self.param_groups[0]["params"]:
            self.state[p]["old"] = p.clone()


@pytest.mark.parametrize(
    ("make", "copies"),
    [
        (lambda p: OfNorms(p, {}), 1),
        (lambda p: Averaged(optim.Adam(p)), 3),
        (lambda p: Ahead(optim.SGD(p, lr=0.1, momentum=0.9)).train(), 2),
        (Beside, 3),
    ],
)
def test_optimizers_of_other_libraries_are_measured(make: Any, copies: int) -> None:
    model = network()
    optimizer = make(model.parameters())
    measured = measure_optimizer(optimizer, model.parameters())
    counters = 4 * len([*model.parameters()]) * (copies == 3)
    assert sum(measured.state) == copies * sum(p.nbytes for p in model.parameters()) + counters
    for _ in range(2):
        backward(model)
        optimizer.step(*[lambda: None] * isinstance(optimizer, OfNorms))
    assert sorted(measure_optimizer(optimizer, model.parameters()).state) == sorted(measured.state)  # what is there by now


def test_what_is_no_optimizer_is_refused() -> None:
    batch = torch.randn(3, 6), torch.randn(3, 4)
    wrapper = SimpleNamespace(param_groups=optim.AdamW(network().parameters()).param_groups)
    for wrong in (optim.AdamW, 3, None, wrapper, []):
        for call in (planner.trace, planner.advise, partial(planner.compile, budget="100%")):
            with pytest.raises(UsageError, match="must be the optimizer itself, made from the model's parameters, or one of"):
                call(network(), F.mse_loss, batch, optimizer=wrong)


class OfNumPy(optim.Optimizer):
    """Leaves PyTorch."""

    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            p.grad.numpy()
            self.state[p]["moment"] = torch.zeros_like(p)


def test_steps_that_cannot_be_measured_say_what_to_do() -> None:
    model = network()
    optimizer = OfNumPy(model.parameters(), {})
    with pytest.raises(PlannerError, match=r"memory of OfNumPy cannot be measured.*call its step\(\) before .*'adamw' \(2\)"):
        measure_optimizer(optimizer, model.parameters())
    backward(model)
    optimizer.step()
    assert sum(measure_optimizer(optimizer, model.parameters()).state) == sum(p.nbytes for p in model.parameters())


@pytest.mark.parametrize("wrapped", [False, True])
def test_the_state_is_static_memory_of_the_plan(*, wrapped: bool) -> None:
    model, batch = network(), (torch.randn(3, 6), torch.randn(3, 4))
    given = optimizer = optim.Adafactor(model.parameters())
    if wrapped:
        accelerate = pytest.importorskip("accelerate")
        accelerate.Accelerator(cpu=True)
        given = accelerate.optimizer.AcceleratedOptimizer(optimizer)
    step = planner.compile(model, F.mse_loss, batch, budget="100%", optimizer=given, passes=1)
    for _ in range(2):
        step(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    without = capture(model, F.mse_loss, batch).graph.static_bytes
    assert step.plan.graph.static_bytes - without == sum(real_sizes(optimizer))


def test_several_optimizers_of_a_model_are_given_as_a_list() -> None:
    model, batch = network(), (torch.randn(3, 6), torch.randn(3, 4))
    matrices, rest = ([p for p in model.parameters() if (p.dim() == 2) is is_matrix] for is_matrix in (True, False))
    several = [optim.Muon(matrices), optim.AdamW(rest)]
    step = planner.compile(model, F.mse_loss, batch, budget="100%", optimizer=several, passes=1)
    for _ in range(2):
        step(*batch).backward()
        for optimizer in several:
            optimizer.step()
            optimizer.zero_grad()
    without = capture(model, F.mse_loss, batch).graph.static_bytes
    assert step.plan.graph.static_bytes - without == sum(size for optimizer in several for size in real_sizes(optimizer))


def test_a_graph_keeps_the_measured_memory() -> None:
    model, batch = network(), (torch.randn(3, 6), torch.randn(3, 4))
    measured = MeasuredOptimizer("Own", (100, 7), (30,))
    graph = capture(model, F.mse_loss, batch, optimizer=measured).graph
    assert graph.static_bytes_by_kind[Kind.OPTIMIZER_STATE] == 107
    training = training_of(graph, keep_everything(graph))
    assert (training.state, training.temporaries) == ((100, 7), (30,))
    assert graph.provenance.optimizer == measured
    assert ("optimizer", "Own") in list_provenance(graph.provenance)
