"""The three entry points compute what eager PyTorch computes, to the last bit, where AOTAutograd alone does not."""

import copy
import random
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import planner
from benchmarks.models.parts import FunctionModule
from tests.support.marks import slow
from tests.support.models.outcomes import assert_same, train_by
from tests.support.raised_warnings import raise_warnings

pytestmark = [pytest.mark.usefixtures("fresh_compiler"), pytest.mark.filterwarnings("ignore::UserWarning:torch.*")]

QUICK: dict[str, Any] = {"budget": "100%", "wait": 0.1}
Step = Callable[[Tensor], Tensor]
Entry = Callable[[nn.Module, Tensor], Step]


def eager(model: nn.Module, _: Tensor) -> Step:
    """The model with its loss."""
    return FunctionModule(lambda m, x: m.model(x).float().square().mean(), model=model)


def compiled(model: nn.Module, x: Tensor) -> Step:
    return planner.compile(eager(model, x), None, (x,), **QUICK)


def checkpointed(model: nn.Module, x: Tensor) -> Step:
    return eager(planner.checkpoint(model, **QUICK), x)


def as_backend(model: nn.Module, x: Tensor) -> Step:
    return eager(torch.compile(model, backend="planner", options=QUICK), x)


def assert_exact(model: nn.Module, x: Tensor, entry: Entry) -> None:
    twin = copy.deepcopy(model)
    assert_same(train_by(entry(model, x), model, [(x,)] * 2), train_by(eager(twin, x), twin, [(x,)] * 2))


@pytest.mark.parametrize("entry", [compiled, as_backend, *slow(checkpointed)])
@pytest.mark.parametrize(
    ("dtype", "p"),
    [(torch.float32, 0.15), (torch.float32, 0.45), (torch.bfloat16, 0.1), (torch.bfloat16, 1.0), *slow((torch.float16, 0.1))],
)
def test_dropout_rounds_as_in_eager_mode(dtype: torch.dtype, p: float, entry: Entry) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Dropout(p), nn.Linear(64, 1)).to(dtype)
    assert_exact(model, torch.randn(32, 16, dtype=dtype), entry)


@pytest.mark.parametrize("entry", [compiled, as_backend, *slow(checkpointed)])
def test_random_ops_whose_results_are_not_used(entry: Entry) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.layer(x)
        F.dropout(h, 0.5)
        torch.rand(3)
        torch.bernoulli(torch.full((5,), 0.5))
        return F.dropout(h, 0.5)

    torch.manual_seed(0)
    assert_exact(FunctionModule(forward, layer=nn.Linear(8, 8)), torch.randn(4, 8), entry)


@pytest.mark.parametrize("entry", [compiled, as_backend, *slow(checkpointed)])
def test_a_gradient_that_is_always_zero(entry: Entry) -> None:
    signs, scale = (nn.Parameter(torch.randn(8)) for _ in range(2))
    model = FunctionModule(lambda m, x: torch.sgn(m.signs) + x * m.scale, signs=signs, scale=scale)
    assert_exact(model, torch.randn(4, 8), entry)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("entry", [compiled, checkpointed])
def test_dropout_of_joined_tensors(dtype: torch.dtype, entry: Entry) -> None:
    torch.manual_seed(0)
    # The gradient of the dropout is taken apart by views.
    model = FunctionModule(
        lambda m, x: m.last(F.dropout(torch.cat([m.first(x), m.second(x)], 1), 0.3)),
        first=nn.Linear(8, 16),
        second=nn.Linear(8, 16),
        last=nn.Linear(32, 4),
    ).to(dtype)
    assert_exact(model, torch.randn(32, 8, dtype=dtype), entry)


class Checkpointed(nn.Module):
    """Blocks under checkpoints that clear a cache, as PEFT's DoRA does, and set an attribute that is read outside of them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.cache: dict[str, Tensor] = {}

    def run(self, block: nn.Module, x: Tensor) -> Tensor:
        self.cache.clear()
        x = x + block(x).tanh()
        self.cost = x.square().mean()
        return x

    def forward(self, x: Tensor) -> Tensor:
        costs = []
        for block in self.blocks:
            x = checkpoint(self.run, block, x, use_reentrant=False)
            costs.append(self.cost)
        return x + torch.stack(costs).sum()


@pytest.mark.filterwarnings("ignore:model.*is set by the step")
@pytest.mark.parametrize("entry", [compiled, as_backend, *slow(checkpointed)])
def test_checkpoints_that_change_objects(entry: Entry) -> None:
    torch.manual_seed(0)
    assert_exact(Checkpointed(), torch.randn(8, 16), entry)


class Counting(Checkpointed):
    """Counts and records what runs under checkpoints, and sets what is the same each time."""

    def __init__(self, changes: str) -> None:
        super().__init__()
        self.changes, self.calls, self.rows = changes, 0, 0
        self.seen: list[Tensor] = []

    def run(self, block: nn.Module, x: Tensor) -> Tensor:
        if self.changes == "calls":
            self.calls += 1
        if self.changes == "seen":
            self.seen.append(x.detach().mean())
        self.rows = len(x)
        return super().run(block, x)


@pytest.mark.parametrize("entry", [checkpointed, *slow(as_backend)])
@pytest.mark.parametrize("changes", ["calls", "seen", "rows"])
def test_checkpoints_that_count_warn_once(changes: str, entry: Entry) -> None:
    x = torch.randn(8, 16)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        entry(Counting(changes), x)(x)
    said = [str(warning.message) for warning in warned if "in a checkpoint" in str(warning.message)]
    assert len(said) == (changes != "rows") and all(f".{changes} changes in a checkpoint (" in each for each in said)


@pytest.mark.parametrize("entry", [checkpointed, *slow(as_backend, compiled)])
def test_a_default_device(entry: Entry) -> None:
    torch.set_default_device("cpu")
    try:
        with raise_warnings():  # that no graph was found
            assert_exact(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), torch.randn(4, 8), entry)
    finally:
        torch.set_default_device(None)


class Drawing(nn.Module):
    """Scales what it computes by numbers that Python draws: from its own object, and in NumPy."""

    def __init__(self, draw: Callable[[random.Random], object]) -> None:
        super().__init__()
        self.layer, self.own, self.draw = nn.Linear(8, 8), random.Random(3), draw

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).tanh() * torch.as_tensor(self.draw(self.own), dtype=torch.float32)


DRAWS: dict[str, Callable[[random.Random], object]] = {
    "rand": lambda _: np.random.rand(1).item(),  # noqa: NPY002
    "normal": lambda _: np.random.normal(size=8),  # noqa: NPY002
    "own": lambda own: own.random(),
    "own uniform": lambda own: own.uniform(1, 2),
}


@pytest.mark.filterwarnings("ignore:.*Dynamo does not know how to trace", "ignore:the model is captured as several graphs")
@pytest.mark.parametrize("entry", [checkpointed, *slow(as_backend)])
@pytest.mark.parametrize("name", DRAWS)
def test_numbers_that_python_draws_are_those_of_eager_mode(name: str, entry: Entry) -> None:
    torch.manual_seed(0)
    model, x = Drawing(DRAWS[name]), torch.randn(4, 8)
    results = []
    for one in (eager, entry):
        torch._dynamo.reset()
        np.random.seed(1)  # noqa: NPY002
        twin = copy.deepcopy(model)
        results.append(train_by(one(twin, x), twin, [(x,)] * 2) | {"drawn next": torch.tensor(np.random.rand())})  # noqa: NPY002
    assert_same(*results)


def test_hooks_on_saved_tensors_around_a_step_copy_what_the_plan_recomputes_from() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(*(part() for _ in range(4) for part in (lambda: nn.Linear(64, 64), nn.GELU))), torch.randn(512, 64)
    results = []
    for budget in (None, "75%"):
        twin = planner.checkpoint(copy.deepcopy(model), budget=budget, wait=0.1)
        with saved_tensors_hooks(torch.clone, lambda saved: saved):
            results.append(train_by(eager(twin, x), twin, [(x,)] * 3))
    assert_same(*results)


def keep_rounded(model: Any, x: Tensor) -> Tensor:
    with saved_tensors_hooks(lambda saved: model.round(saved), lambda saved: saved.float()):
        return torch.tanh(model.middle(x).exp())


@pytest.mark.parametrize("entry", [as_backend, checkpointed])
def test_hooks_on_saved_tensors_compute_as_in_eager_mode(entry: Entry) -> None:
    model = FunctionModule(keep_rounded, middle=nn.Linear(16, 16))
    model.round = torch.Tensor.half
    with pytest.warns(UserWarning, match="what they compute is part of the plan"):
        assert_exact(model, torch.randn(32, 16), entry)


NUMPY: dict[str, Callable[[Tensor], Any]] = {
    "exp": lambda x: np.exp(x.detach().numpy()),
    "mean": lambda x: x.detach().numpy().mean(0),
    "linspace": lambda _: np.linspace(0, 1, 16, dtype=np.float32),
    "pow": lambda x: np.abs(x.detach().numpy()) ** 1.5,
}


@pytest.mark.parametrize("name", NUMPY)
def test_functions_of_numpy_that_round_otherwise_are_named(name: str) -> None:
    model = FunctionModule(lambda m, x: m.last(x * torch.from_numpy(NUMPY[name](x))), last=nn.Linear(16, 16))
    said = rf"{name} \(.*\) of NumPy runs as PyTorch's .* by a few times 1e-07 of them"
    with pytest.warns(UserWarning, match=said):
        checkpointed(model, torch.randn(32, 16))(torch.randn(32, 16)).backward()


@pytest.mark.parametrize("entry", [compiled, as_backend, *slow(checkpointed)])
def test_batch_norm_of_a_transposed_tensor(entry: Entry) -> None:
    torch.manual_seed(0)
    parts = {"first": nn.Linear(12, 12), "norm": nn.BatchNorm1d(12), "last": nn.Linear(64, 7)}
    model = FunctionModule(lambda m, x: m.last(m.norm(m.first(x).transpose(1, 2))), **parts).bfloat16()
    assert_exact(model, torch.randn(8, 64, 12, dtype=torch.bfloat16), entry)


ELEMENTWISE: dict[str, Callable[[Tensor], Tensor]] = {
    "copysign": lambda y: torch.copysign(y.t(), torch.tensor(1.5)) * y.t(),
    "floor": lambda y: torch.div(y.t(), torch.tensor(1.5), rounding_mode="floor") + y.t(),
    "pow": lambda y: (2.0 ** y.t()).t(),
    "logsigmoid": lambda y: F.logsigmoid(y.t()).t(),
}


@pytest.mark.parametrize("is_captured_before", [False, True])
@pytest.mark.parametrize("name", ELEMENTWISE)
@pytest.mark.parametrize("entry", [as_backend, *slow(compiled, checkpointed)])
def test_elementwise_ops_of_a_transposed_tensor(name: str, entry: Entry, is_captured_before: bool) -> None:
    torch.manual_seed(0)

    def forward(m: Any, x: Tensor) -> Tensor:
        y = ELEMENTWISE[name](m.first(x))
        return m.last(y.contiguous().sum(y.shape.index(50)))

    model = FunctionModule(forward, first=nn.Linear(16, 50), last=nn.Linear(37, 8))
    x = torch.randn(37, 16)
    if is_captured_before:  # with other layouts, which PyTorch keeps for later captures
        torch.compile(copy.deepcopy(model), backend="aot_eager")(x).sum().backward()
        torch.compiler.reset()
    assert_exact(model, x, entry)


class _Heads(nn.Module):
    """Two results of a transposed tensor, whose biases get sums over gradients; `is_broken` in two graphs."""

    def __init__(self, is_broken: bool) -> None:
        super().__init__()
        self.first, self.second, self.is_broken = nn.Linear(16, 12), nn.Linear(12, 6), is_broken

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.first(x.transpose(0, 1)) * 2
        if self.is_broken:
            torch._dynamo.graph_break()
        return y, self.second(y.tanh().transpose(0, 1))


def _sum_losses(model: nn.Module, x: Tensor) -> Tensor:
    y, z = model(x)
    return y.sum() + F.cross_entropy(z.transpose(1, 2), torch.arange(50).remainder(6).expand(len(z), -1))


def _build_losses(*models: nn.Module) -> list[nn.Module]:
    return [FunctionModule(lambda m, x: _sum_losses(m.model, x), model=model) for model in models]


@pytest.mark.filterwarnings("ignore:the model is captured as several graphs")
@pytest.mark.parametrize(("budget", "is_broken"), [("130%", False), ("1MB", True)])
def test_sums_over_gradients_that_are_laid_out_otherwise_than_results(budget: str, is_broken: bool) -> None:
    torch.manual_seed(0)
    model, x = _Heads(is_broken), torch.randn(4, 50, 16)
    twin = copy.deepcopy(model)
    step, eager_step = _build_losses(planner.checkpoint(model, **{**QUICK, "budget": budget}), twin)
    assert_same(train_by(step, model, [(x,)] * 3), train_by(eager_step, twin, [(x,)] * 3))


def test_gradients_that_are_laid_out_otherwise_than_results_without_room() -> None:
    torch.manual_seed(0)
    model, x = _Heads(is_broken=False), torch.randn(4, 50, 16)
    twin = copy.deepcopy(model)
    step, eager_step = _build_losses(planner.checkpoint(model, **QUICK), twin)
    for _ in range(2):
        results = model(x)
        torch.autograd.backward(results, [torch.randn_like(y) for y in results])
    model.zero_grad()
    with pytest.warns(UserWarning, match=r"the gradient of what .*test_as_eager.py:\d+ .* returns is laid out otherwise"):
        step(x).backward()
    model.zero_grad()
    step(x).backward()
    eager_step(x).backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), twin.parameters(), strict=True))  # type: ignore[arg-type]


def keep_in_half(model: Any, x: Tensor) -> Tensor:
    with saved_tensors_hooks(lambda saved: saved.half() if model.halves else saved, lambda saved: saved.float()):
        return torch.tanh(model.middle(x).exp())


@pytest.mark.parametrize("entry", [compiled, as_backend, *slow(checkpointed)])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_hooks_on_saved_tensors_read_is_guarded(entry: Entry) -> None:
    model, x = FunctionModule(keep_in_half, middle=nn.Linear(16, 16), halves=True), torch.randn(32, 16)
    twin = copy.deepcopy(model)
    step, wanted = entry(model, x), eager(twin, x)
    for halves in (True, False):
        model.halves = twin.halves = halves
        for called in (step, wanted):
            called(x).backward()
        for own, other in zip(model.parameters(), twin.parameters(), strict=True):
            assert own.grad is not None and other.grad is not None and torch.equal(own.grad, other.grad)
            own.grad = other.grad = None


def test_a_result_that_the_loss_does_not_read_does_not_change_the_layout_of_its_gradient() -> None:
    torch.manual_seed(0)
    head, x = nn.Linear(16, 6), torch.randn(50, 4, 16)
    twin = copy.deepcopy(head)

    def compute_loss(own: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = own.head(x.transpose(0, 1))
        return F.cross_entropy(logits.transpose(1, 2), torch.arange(50).remainder(6).expand(4, -1)), logits

    planned = planner.checkpoint(FunctionModule(compute_loss, head=head), **QUICK | {"budget": "1MB"})
    for model in (planned, FunctionModule(compute_loss, head=twin)):
        model(x)[0].backward()
    assert torch.equal(head.bias.grad, twin.bias.grad)


@pytest.mark.filterwarnings("ignore:the gradient of what")
@pytest.mark.parametrize("arena", [False, True])
@pytest.mark.parametrize(
    ("layers", "shape"),
    [
        ([nn.Linear(16, 12), nn.LayerNorm(12), nn.Tanh(), nn.Linear(12, 6)], (6, 50, 4)),
        ([nn.Conv1d(50, 6, 1), nn.BatchNorm1d(6)], (16, 6, 4)),
        ([nn.Conv1d(50, 6, 1), nn.GroupNorm(2, 6)], (16, 6, 4)),
    ],
)
def test_gradients_of_results_whose_layouts_change_from_step_to_step(
    layers: list[nn.Module], shape: tuple[int, ...], arena: bool
) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(*copy.deepcopy(layers)), torch.randn(4, 50, 16)
    twin = copy.deepcopy(model)
    planned = torch.compile(model, backend="planner", options={**QUICK, "budget": "1MB", "arena": arena})
    weights = torch.randn(shape)
    losses: list[Step] = [torch.mean, lambda y: y.square().sum(), lambda y: (y.transpose(0, 2) * weights).sum(), torch.sum]
    for i, compute_loss in enumerate((*losses, *losses, *losses)):
        for each in (planned, twin):
            each.zero_grad()
            compute_loss(each(x)).backward()
        is_first = arena and i < len(losses)  # addresses have no room for copies yet, which a warning says
        assert is_first or all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), twin.parameters(), strict=True))  # type: ignore[arg-type]


def test_more_layouts_of_a_gradient_than_plans_follow_are_said_once() -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(16, 6), torch.randn(4, 50, 16)
    twin = copy.deepcopy(model)
    planned = planner.checkpoint(model, **QUICK | {"budget": "1MB"})
    said = []
    for width in range(6, 18):
        gradient = torch.randn(4, 50, width)[..., :6]
        with warnings.catch_warnings(record=True) as raised:
            warnings.simplefilter("always")
            planned(x).backward(gradient)
        twin(x).backward(gradient)
        said.append(sum("plans follow 8 layouts" in str(each.message) for each in raised))
        assert all(torch.allclose(p.grad, q.grad) for p, q in zip(model.parameters(), twin.parameters(), strict=True))  # type: ignore[arg-type]
    assert said == [width == 14 for width in range(6, 18)]


def test_ops_that_an_option_changes_and_that_read_such_gradients_are_said() -> None:
    torch.manual_seed(0)
    model, x = FunctionModule(lambda m, x: m.layer(x).sigmoid() * 2, layer=nn.Linear(16, 12)), torch.randn(8, 50, 16)
    planned = planner.checkpoint(model, **QUICK | {"budget": "1MB", "options": ["in-place"]})
    with pytest.warns(UserWarning, match=r"sigmoid_backward.*by at most 6e-08 of it in float32"):
        planned(x).backward(torch.randn(50, 8, 12).transpose(0, 1))


def _view(y: Tensor) -> Sequence[Tensor]:
    y = (y.t() * 2).t()
    return y, y.t(), y[:, 1:], y[:, None].expand(-1, 3, -1)


def _view_a_view(y: Tensor) -> Sequence[Tensor]:
    z = (y.t() * 2).t()
    return z[:, ::2], z, z.view(11, 3, 24).transpose(0, 1), z.detach()


def _view_beside_a_product(y: Tensor) -> Sequence[Tensor]:
    return y @ y.new_ones(24, 24), y.t()


def _view_an_input(y: Tensor) -> Sequence[Tensor]:
    torch._dynamo.graph_break()
    z = y.t()
    return y[:, 1:], z[1:], z[:, 1:], y.sigmoid(), y[:, None].expand(-1, 3, -1)


@pytest.mark.filterwarnings("ignore:the gradient of what", "ignore:the model is captured as several graphs")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("view", [_view, _view_a_view, _view_beside_a_product, _view_an_input])
def test_results_that_are_views_of_one_tensor(view: Callable[[Tensor], Sequence[Tensor]], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(24, 24), nn.BatchNorm1d(24)).to(dtype)
    model, x = FunctionModule(lambda m, x: view(m.layer(x)), layer=layer), torch.randn(33, 24, dtype=dtype)
    twin = copy.deepcopy(model)
    planned = torch.compile(model, backend="planner", options={**QUICK, "budget": "1MB"})
    losses: list[Step] = [
        lambda y: y.float().norm(),
        lambda y: y.float().exp().mean(),
        lambda y: y.t().contiguous().float().tanh().sum(),
        lambda y: y.float().sum() * 1e-2,
    ]
    for i in range(12):
        for each in (planned, twin):
            each.zero_grad()
            results = [y for j, y in enumerate(each(x)) if y.requires_grad and j != i // 4]
            sum(losses[(i + j) % 4](y if y.dim() == 2 else y.flatten(1)) for j, y in enumerate(results)).backward()  # type: ignore[union-attr]
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), twin.parameters(), strict=True))  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:the model is captured as several graphs")
@pytest.mark.parametrize("is_made", [True, False])
def test_views_whose_gradients_are_added_up_in_another_order_are_said(is_made: bool) -> None:
    def view(y: Tensor) -> Sequence[Tensor]:
        if is_made:
            y = y.tanh()
        else:
            torch._dynamo.graph_break()
        return y.exp(), y[:, 1:], y.t(), y.sigmoid()

    said = r"several views of y .*and reads it behind them" if is_made else "y is used several times in a graph and outside"
    model = FunctionModule(lambda m, x: view(m.layer(x)), layer=nn.Linear(24, 24))
    with pytest.warns(UserWarning, match=said + r".*by at most 6e-08 of it in float32"):
        sum(y.norm() for y in planner.checkpoint(model, **QUICK | {"budget": "1MB"})(torch.randn(33, 24))).backward()  # type: ignore[union-attr]
