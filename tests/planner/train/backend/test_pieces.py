"""Whatever graph Dynamo hands over between two graph breaks is planned, with the bits of eager PyTorch."""

import copy
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import planner
from benchmarks.models.parts import FunctionModule
from planner.graphs.errors import TraceError
from planner.train.backend.planned_graph import PlannedGraph
from planner.train.backend.shared_budget import SharedBudget
from planner.train.backend.step_memory import PassStorages
from tests.support.marks import slow, slow_except
from tests.support.models.outcomes import assert_equal_steps
from tests.support.models.random_pieces import OPERATIONS, SIZE, Call, Pieces, random_pieces

pytestmark = [pytest.mark.usefixtures("fresh_compiler"), pytest.mark.filterwarnings("ignore::UserWarning")]

QUICK: dict[str, Any] = {"budget": "100%", "wait": 0.1, "time_limit_s": 10.0}


def checkpointed(model: nn.Module) -> Callable[..., Any]:
    return planner.checkpoint(model, **QUICK)


def compiled(model: nn.Module) -> Callable[..., Any]:
    return torch.compile(model, backend="planner", options=QUICK)


# The same code plans for both: each test tries one, and the weekly run the other.
EITHER = [compiled, *slow(checkpointed)]


def with_kernels(model: nn.Module) -> Callable[..., Any]:
    return torch.compile(model, backend="planner", options={**QUICK, "kernels": "inductor"})


def op_by_op(model: nn.Module) -> Callable[..., Any]:
    return torch.compile(model, backend="aot_eager")


def train(model: Pieces, wrap: Callable[[nn.Module], Callable[..., Any]] = lambda model: model) -> list[Tensor]:
    """Return the outputs, gradients, called hooks and buffers of two steps; the first needs no gradient of some outputs."""
    torch.manual_seed(1)
    called, left = wrap(model), []
    hooked = dict.fromkeys(model.parameters(), 0)

    def count(parameter: Tensor) -> None:
        hooked[parameter] += 1

    for p in hooked:
        p.register_post_accumulate_grad_hook(count)
    for step in range(2):
        outputs = called(torch.randn(SIZE, SIZE))
        wanted = [o for i, o in enumerate(outputs) if o.requires_grad and (step or i % 2 == 0)]
        left += [o.detach().clone() for o in outputs] + [torch.tensor([o.requires_grad for o in outputs])]
        if wanted:
            torch.stack([(o * (i + 1.0)).square().sum().float() for i, o in enumerate(wanted)]).sum().backward()
        left += [torch.empty(0) if p.grad is None else p.grad.clone() for p in model.parameters()]
        left.append(torch.tensor(list(hooked.values())))
    return [*left, *(b.clone() for b in model.buffers())]


def assert_exact(pieces: Sequence[Sequence[Call]], wrap: Callable[[nn.Module], Callable[..., Any]]) -> None:
    torch.manual_seed(0)
    model = Pieces(pieces)
    wanted, found = train(copy.deepcopy(model)), train(copy.deepcopy(model), wrap)
    differing = [i for i, (a, b) in enumerate(zip(wanted, found, strict=True)) if not torch.equal(a, b)]
    if differing:  # AOTAutograd adds the gradients of a tensor that several pieces read in the order of the pieces
        torch._dynamo.reset()
        same_order = train(copy.deepcopy(model), op_by_op)
        assert all(torch.equal(same_order[i], found[i]) and torch.allclose(wanted[i], found[i], rtol=1e-5) for i in differing)


@pytest.mark.parametrize("seed", [*range(3), *slow(*range(3, 120))])
def test_random_pieces_train_as_eager(seed: int) -> None:
    assert_exact(random_pieces(seed), checkpointed if seed % 2 else compiled)


ALONE = ("add a number", "unbind", "same", "detached beside", "transposed and detached", "written and detached")


@pytest.mark.parametrize("name", slow_except(sorted(OPERATIONS), *ALONE))
def test_a_piece_of_one_operation_trains_as_eager(name: str) -> None:
    before = [Call("linear", (0,), kept=True), Call("multiply", (0,), kept=False)]
    assert_exact([before, [Call(name, (0, 1), kept=False)], [Call("linear", (1,), kept=True)]], compiled)


def test_a_detached_alias_of_a_result_gets_no_gradient() -> None:
    both = [Call("detached beside", (0,), kept=False), Call("tanh", (0,), kept=True), Call("nothing", (1,), kept=False)]
    assert_exact([both, [Call("add", (1, 2), kept=True)], [Call("multiply two", (1, 2), kept=True)]], compiled)


class Inverting(nn.Module):
    """Functions of torch.linalg that check their results; the first checks a matrix that no gradient reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)
        self.register_buffer("matrix", torch.eye(SIZE))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.inner(x) + torch.linalg.cholesky(self.matrix)[0]
        square = hidden.t() @ hidden + torch.eye(SIZE)
        return self.outer(torch.linalg.solve(square, torch.linalg.inv(square)).tanh())


@pytest.mark.parametrize("wrap", EITHER)
def test_checks_of_linear_algebra_run_once_and_are_planned(wrap: Callable[[nn.Module], Callable[..., Any]]) -> None:
    torch.manual_seed(0)
    model = Inverting()
    plain, x = copy.deepcopy(model), torch.randn(SIZE, SIZE)
    planned = wrap(model)
    assert_equal_steps(planned, model, plain, x, steps=2)
    model.matrix.neg_()
    with pytest.raises(torch.linalg.LinAlgError, match="not positive-definite"):
        planned(x)


class Branching(nn.Module):
    """Three graphs, of which no plan can hold the second; the third reads what it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.middle, self.outer = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)
        self.rows = nn.Embedding(4, SIZE, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.inner(x).tanh()
        torch._dynamo.graph_break()
        hidden = self.in_branches(hidden).sin()
        torch._dynamo.graph_break()
        return self.outer(hidden).tanh()

    def in_branches(self, hidden: Tensor) -> Tensor:
        hidden = self.middle(hidden).relu()
        return torch.cond(hidden.sum() > 0, lambda h: h.sin(), lambda h: h.cos(), (hidden,))


class WithSparseGradients(Branching):
    def in_branches(self, hidden: Tensor) -> Tensor:
        return self.middle(hidden) + self.rows(torch.arange(SIZE) % 4)


class WithSumsOfSparseGradients(WithSparseGradients):
    def in_branches(self, hidden: Tensor) -> Tensor:
        return super().in_branches(hidden) * self.rows(torch.arange(SIZE) % 2)


def check_beside_planned_graphs(
    made: type[Branching], wrap: Callable[[nn.Module], Callable[..., Any]], equal: Callable[[Tensor, Tensor], bool]
) -> list[str]:
    """Compare gradients with eager PyTorch's where a graph has no plan; return the warnings."""
    torch.manual_seed(0)
    model = made()
    plain, x = copy.deepcopy(model), torch.randn(SIZE, SIZE)
    planned = wrap(model)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(3):
            planned(x).square().sum().backward()
            plain(x).square().sum().backward()
    for given, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        assert (given.grad is None) == (wanted.grad is None)
        assert given.grad is None or equal(given.grad.to_dense(), wanted.grad.to_dense())
    return [str(each.message) for each in said]


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (Branching, "the model uses 'true_graph_0'"),
        (WithSparseGradients, "the gradient of an input is sparse"),
        (WithSumsOfSparseGradients, "the result of aten._sparse_coo_tensor_with_dims_and_tensors.default is sparse"),
    ],
)
@pytest.mark.parametrize("wrap", EITHER)
def test_a_graph_that_no_plan_can_hold_runs_as_eager_beside_planned_ones(
    wrap: Callable[[nn.Module], Callable[..., Any]], made: type[Branching], why: str, graphs: list[PlannedGraph]
) -> None:
    said = check_beside_planned_graphs(made, wrap, torch.equal)
    assert [message.count(why) for message in said if "runs without a plan" in message] == [1]
    assert len(graphs) == 2


@pytest.mark.parametrize("made", [Branching, *slow(WithSparseGradients)])
def test_with_kernels_a_graph_that_no_plan_can_hold_runs_as_compiled(made: type[Branching], graphs: list[PlannedGraph]) -> None:
    said = check_beside_planned_graphs(made, with_kernels, partial(torch.allclose, rtol=1e-4, atol=1e-5))
    assert sum("keeps what torch.compile keeps" in message for message in said) == 1
    assert len(graphs) == 2


def test_what_an_unplanned_graph_keeps_counts_for_the_graphs_that_follow(graphs: list[PlannedGraph]) -> None:
    model, held = Branching(), list[int]()
    begin = SharedBudget._begin

    def noted(budget: SharedBudget, graph: PlannedGraph, args: Sequence[object]) -> Any:
        held.append(sum(PassStorages.of(args).held.values()))
        return begin(budget, graph, args)

    with patch.object(SharedBudget, "_begin", noted):
        compiled(model)(torch.randn(SIZE, SIZE)).sum().backward()
    activation_bytes = SIZE * SIZE * 4
    assert held[0] == 0
    assert held[1] >= 2 * activation_bytes


class Counted(nn.Module):
    """Checks classes that it finds in activations or in its input, by an op that raises an error."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)
        self.register_buffer("codes", torch.randn(SIZE, SIZE))
        self.register_buffer("ready", torch.ones((), dtype=torch.bool))

    def forward(self, x: Tensor, classes: Tensor) -> Tensor:
        hidden = self.inner(x).tanh()
        found = torch.cdist(hidden, self.codes).argmin(1)
        torch._assert_async((found < SIZE).all())
        chosen = F.one_hot(found, SIZE) + F.one_hot(classes, SIZE)
        return self.outer(hidden + chosen.to(x.dtype) @ self.codes).square().mean()


class CountedOnceReady(Counted):
    """The same, behind a branch on data."""

    def forward(self, x: Tensor, classes: Tensor) -> Tensor:
        return super().forward(x, classes) if self.ready else x.mean()


def planned_whole(model: nn.Module) -> Callable[..., Any]:
    return planner.compile(model, None, (torch.randn(SIZE, SIZE), torch.zeros(SIZE, dtype=torch.long)), budget="100%", wait=0.1)


@pytest.mark.parametrize("made", [Counted, CountedOnceReady])
@pytest.mark.parametrize("wrap", [planned_whole, *EITHER])
def test_assertions_are_planned_and_raise_as_in_eager_mode(
    wrap: Callable[[nn.Module], Callable[..., Any]], made: type[Counted]
) -> None:
    torch.manual_seed(0)
    model = made()
    plain, (x, classes) = copy.deepcopy(model), (torch.randn(SIZE, SIZE), torch.randint(SIZE, (SIZE,)))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*without a plan")
        planned = wrap(model)
        assert_equal_steps(planned, model, plain, x, classes)
    with pytest.raises(RuntimeError, match="Class values must be non-negative"):
        planned(x, classes - SIZE)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["add a number", "unbind"])
def test_a_piece_without_kernels_in_a_pass_runs_beside_those_with(name: str) -> None:
    torch.manual_seed(0)
    around = [Call("linear", (0,), kept=True)]
    model = Pieces([around, [Call(name, (0,), kept=False)], around])
    wanted, found = train(copy.deepcopy(model)), train(copy.deepcopy(model), with_kernels)
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(wanted, found, strict=True))


def test_a_step_whose_backward_pass_computes_nothing() -> None:
    model, x = FunctionModule(lambda m, x: m.shift + x.sum(), shift=nn.Parameter(torch.zeros(()))), torch.ones(3)
    loss = planner.compile(model, None, (x,), budget="100%", wait=0.1)(x)
    loss.backward()
    assert loss == 3.0
    assert model.shift.grad == 1.0


class Counting(nn.Module):
    """Autograd has a loss of it, and no gradient; `beside` adds a parameter that has one."""

    def __init__(self, count: Callable[[Tensor], Tensor], beside: bool) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(SIZE, SIZE), nn.Parameter(torch.ones(SIZE, SIZE))
        self.count, self.beside = count, beside

    def forward(self, x: Tensor) -> Tensor:
        counted = self.count(self.layer(x))
        return counted + (self.scale * x).sum() if self.beside else counted


class Stopped(torch.autograd.Function):
    """Gives no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> None:
        return None


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("count", [lambda x: torch.norm(x, 0), Stopped.apply, lambda x: torch.dist(x, x.detach(), 0)])
@pytest.mark.parametrize("wrap", EITHER)
def test_a_loss_without_a_gradient_requires_one_as_in_eager_mode(
    wrap: Callable[[nn.Module], Callable[..., Any]], count: Callable[[Tensor], Tensor], beside: bool
) -> None:
    torch.manual_seed(0)
    model, x = Counting(count, beside), torch.randn(SIZE, SIZE)
    plain = copy.deepcopy(model)
    losses = [wrap(model)(x), plain(x)]
    for loss in losses:
        assert loss.requires_grad
        loss.backward()
    assert torch.equal(*losses)
    assert model.layer.weight.grad is plain.layer.weight.grad is None
    assert torch.equal(model.scale.grad, plain.scale.grad) if beside else model.scale.grad is None


class Aside(nn.Module):
    """Returns several results in a dict, of which a loss may leave some unread."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.main, self.aside = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)
        self.register_buffer("mean", torch.zeros(SIZE))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = self.inner(x).tanh()
        with torch.no_grad():
            self.mean.lerp_(hidden.mean(0), 0.1)
        return {"main": self.main(hidden), "aside": self.aside(hidden), "hidden": hidden[:2]}


@pytest.mark.parametrize("broken", [False, True])
@pytest.mark.parametrize("wrap", EITHER)
def test_parameters_of_results_that_the_loss_does_not_read_get_no_gradient(
    wrap: Callable[[nn.Module], Callable[..., Any]],
    broken: bool,
) -> None:
    def train(wrap: Callable[[nn.Module], Callable[..., Any]]) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(SIZE, SIZE), Cut(), Aside()) if broken else Aside()
        called, optimizer = wrap(model), torch.optim.AdamW(model.parameters(), 0.1, weight_decay=0.5)
        for read in (("main",), ("main", "aside"), ("hidden",), ("aside",), ("main", "hidden")):
            outputs = called(torch.randn(SIZE, SIZE))
            torch.stack([outputs[name].square().sum() for name in read]).sum().backward()
            missing.append([name for name, p in model.named_parameters() if p.grad is None])
            optimizer.step()
            optimizer.zero_grad()
        return [*model.parameters(), *model.buffers()]

    missing: list[list[str]] = []
    assert all(map(torch.equal, train(lambda model: model), train(wrap)))
    assert missing[:5] == missing[5:]
    assert missing[0]


class Cut(nn.Module):
    """A graph break."""

    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return x


@pytest.mark.parametrize("wrap", EITHER)
def test_a_check_in_the_backward_pass_is_planned(wrap: Callable[[nn.Module], Callable[..., Any]]) -> None:
    torch.manual_seed(0)
    matrix, x = nn.Parameter(torch.randn(SIZE, SIZE)), torch.randn(SIZE, SIZE)
    model = FunctionModule(lambda m, x: (torch.linalg.eigvals(m.matrix).abs() * x).sum(), matrix=matrix)
    plain = copy.deepcopy(model)
    assert_equal_steps(wrap(model), model, plain, x)


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
@pytest.mark.parametrize("wrap", EITHER)
def test_the_parts_around_products_with_a_sparse_input_are_planned(
    wrap: Callable[[nn.Module], Callable[..., Any]], layout: torch.layout, graphs: list[PlannedGraph]
) -> None:
    def forward(m: Any, x: Tensor, edges: Tensor) -> Tensor:
        hidden = torch.sparse.mm(edges, m.inner(x).tanh() * edges.shape[0]).relu()
        return m.outer(torch.sparse.mm(edges.to(x.dtype), hidden) + hidden).square().mean()

    torch.manual_seed(0)
    model = FunctionModule(forward, inner=nn.Linear(SIZE, SIZE), outer=nn.Linear(SIZE, SIZE))
    plain, planned = copy.deepcopy(model), wrap(model)
    for rows in (SIZE, SIZE, SIZE + 2):
        edges = torch.randn(rows, rows).relu().to_sparse(layout=layout)
        assert_equal_steps(planned, model, plain, torch.randn(rows, SIZE), edges)
    assert len(graphs) > 2


class Looping(nn.Module):
    """A loop that ends when the data says so; in each iteration `again` uses of one layer."""

    def __init__(self, again: int) -> None:
        super().__init__()
        self.layers, self.shared, self.again = (
            nn.ModuleList(nn.Linear(SIZE, SIZE) for _ in range(4)),
            nn.Linear(SIZE, SIZE),
            again,
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) + x
            for _ in range(self.again):
                x = torch.tanh(self.shared(x))
            if x.abs().max() > 100:
                break
        return x


def train_loop(called: Callable[..., Any], model: nn.Module) -> list[Tensor | None]:
    for step in range(3):
        called(torch.full((SIZE, SIZE), 0.1 * step)).square().sum().backward()
    return [parameter.grad for parameter in model.parameters()]


def test_a_loop_that_the_data_ends_is_planned_in_pieces(graphs: list[PlannedGraph]) -> None:
    model = Looping(again=1)
    twin = copy.deepcopy(model)
    found, wanted = train_loop(compiled(model), model), train_loop(twin, twin)
    assert all(a is not None and b is not None and torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert len(graphs) >= len(model.layers)


def test_gradients_that_are_added_up_in_another_order_are_said() -> None:
    model = Looping(again=2)
    with pytest.warns(UserWarning, match="used several times in a graph and outside of it too: its gradients are added up"):
        train_loop(compiled(model), model)


class Residual(nn.Module):
    """Adds its input to what it computes of it by `combine`, after a graph break."""

    def __init__(self, combine: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.combine = nn.Linear(SIZE, SIZE), combine

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        torch._dynamo.graph_break()
        combined = self.combine(hidden)
        torch._dynamo.graph_break()
        return combined + hidden


def normalize(x: Tensor) -> Tensor:
    read = x.to(torch.float32)  # the tensor itself, read twice
    return read * torch.rsqrt(read.square().mean(-1, keepdim=True) + 1)


@pytest.mark.parametrize("combine", [normalize, lambda x: x * x], ids=["as the tensor itself", "in one op"])
def test_each_read_of_an_activation_counts(combine: Callable[[Tensor], Tensor]) -> None:
    model = Residual(combine)
    with pytest.warns(UserWarning, match="used several times in a graph and outside of it too: its gradients are added up"):
        train_loop(compiled(model), model)


class Nesting(nn.Module):
    """Computes with a nested tensor of rows, and returns it or a mean over each of its sequences."""

    def __init__(self, *, is_mean: bool) -> None:
        super().__init__()
        self.inner, self.is_mean = nn.Linear(SIZE, SIZE), is_mean

    def forward(self, rows: Tensor) -> Tensor:
        sequences = torch.nested.nested_tensor_from_jagged(rows, torch.tensor([0, 3, SIZE]))
        hidden = torch.tanh(self.inner(sequences))
        return hidden.mean(dim=1) if self.is_mean else hidden


def test_a_graph_that_returns_a_nested_tensor_runs_without_a_plan_and_says_so() -> None:
    model, rows = Nesting(is_mean=False), torch.randn(SIZE, SIZE)
    with pytest.warns(UserWarning, match=r"runs without a plan.*returns a nested tensor.*return its values\(\)"):
        compiled(model)(rows).values().square().sum().backward()
    given = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    model(rows).values().square().sum().backward()
    assert all(torch.equal(a, b.grad) for a, b in zip(given, model.parameters(), strict=True) if a is not None)


def test_ops_that_no_graph_of_nested_tensors_has_are_refused_with_a_way_out() -> None:
    model, rows = Nesting(is_mean=True), torch.randn(SIZE, SIZE)
    with pytest.raises(TraceError, match=r"ragged size.*planner.rematerialize"):
        planner.compile(FunctionModule(lambda m, x: m.inner(x).sum(), inner=model), None, (rows,), **QUICK)
    with pytest.raises(TraceError, match=r"ragged size.*planner.rematerialize"):
        checkpointed(model)(rows)
