"""Code that models are written with besides layers: each is trained by a plan that recomputes, with eager PyTorch's bits."""

import gc
import io
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.optimize import linear_sum_assignment
from torch import distributions, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributions import kl
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import planner
from planner.graphs.errors import MismatchError, TraceError
from planner.graphs.ir import Kind
from tests.support.marks import slow, slow_among, slow_except
from tests.support.models.as_eager import check_trains_as_eager
from tests.support.processes import run_apart

_INPUTS, _TARGETS = torch.randn(2, 4, 96, 32, generator=torch.Generator().manual_seed(1)).unbind()


def batch_of(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    return _INPUTS[number], _TARGETS[number]


class Between(nn.Module):
    """Two perceptrons, and whatever is called between them; its further attributes are set by keyword."""

    def __init__(self, call: Callable[[Any, torch.Tensor], torch.Tensor], **attributes: Any) -> None:
        super().__init__()
        self.before = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32), nn.Tanh())
        self.after = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
        self.call = call
        for name, value in attributes.items():
            if isinstance(value, torch.Tensor):
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(self.call(self, self.before(x)))


SAMPLED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "normal": lambda x: distributions.Normal(x, F.softplus(x)).rsample(),
    "independent": lambda x: distributions.Independent(distributions.Laplace(x, 1.0), 1).rsample(),
    "gumbel": lambda x: distributions.Gumbel(x, 1.0).rsample(),
    "gamma": lambda x: distributions.Gamma(F.softplus(x) + 0.1, 1.0).rsample(),
    "multivariate": lambda x: distributions.MultivariateNormal(x, scale_tril=0.3 * torch.eye(32)).rsample(),
    "categorical": lambda x: x * distributions.Categorical(logits=x).sample().unsqueeze(1),
    "divergence": lambda x: x + distributions.kl_divergence(distributions.Normal(x, x.exp()), distributions.Normal(0.0, 1.0)),
    "divergence of several": lambda x: (
        x
        + distributions.kl_divergence(
            distributions.MultivariateNormal(x, scale_tril=0.3 * torch.eye(32)),
            distributions.MultivariateNormal(torch.zeros(32), torch.eye(32)),
        ).unsqueeze(1)
    ),
}


def in_turn(functions: dict[str, Callable[..., torch.Tensor]], names: tuple[str, ...]) -> Between:
    """One step with several functions."""

    def call(_: Any, x: torch.Tensor) -> torch.Tensor:
        for name in names:
            x = torch.tanh(functions[name](x))
        return x

    return Between(call)


def some_and_each(functions: dict[str, Any], *names: str) -> list[Any]:
    """Several names for one step; the weekly run has a step for each of all."""
    return [names, *slow(*(((name,),) for name in functions))]


@pytest.mark.parametrize("names", some_and_each(SAMPLED, "normal", "categorical", "divergence"))
def test_distributions_are_sampled_as_in_eager_mode(names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributions.Distribution, "_validate_args", True)  # torch.compile, in another test, turns it off
    kl._KL_MEMOIZE.clear()  # which the first call fills, by code that Dynamo cannot follow
    check_trains_as_eager(lambda: in_turn(SAMPLED, names), F.mse_loss, batch_of)
    assert distributions.Distribution._validate_args


def test_a_plan_outlives_a_switch_of_the_validation_of_distributions() -> None:
    model = Between(lambda _, x: SAMPLED["normal"](x))
    step = planner.compile(model, F.mse_loss, batch_of(0), budget="100%", passes=1, compare_eager=False)
    try:
        distributions.Distribution.set_default_validate_args(value=False)  # as torch.compile does
        step(*batch_of(0)).backward()
    finally:
        distributions.Distribution.set_default_validate_args(value=True)


TABLE = np.linspace(0, 1, 32, dtype=np.float32)
ARRAYS: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "global": lambda _, x: x * torch.from_numpy(TABLE) + torch.tensor(TABLE),
    "attribute": lambda module, x: x * torch.as_tensor(module.table),
    "made in the step": lambda _, x: x * torch.from_numpy(np.arange(32, dtype=np.float32)) + np.pi,
    "scalar": lambda module, x: x * module.scalar,
}


@pytest.mark.parametrize("name", slow_except(ARRAYS, "global", "scalar"))
def test_arrays_of_numpy_are_constants(name: str) -> None:
    check_trains_as_eager(lambda: Between(ARRAYS[name], table=TABLE.copy(), scalar=np.float64(0.3)), F.mse_loss, batch_of)


def test_an_array_that_is_changed_in_place_is_read_anew_and_another_is_refused() -> None:
    model = Between(ARRAYS["attribute"], table=TABLE.copy())
    step = planner.compile(model, F.mse_loss, batch_of(0), budget="100%", passes=1, compare_eager=False)
    model.table[...] *= 0.5
    inputs, targets = batch_of(0)
    assert torch.equal(step(inputs, targets), F.mse_loss(model(inputs), targets))
    model.table = TABLE.copy()
    with pytest.raises(
        MismatchError, match=r"model.table is another array than .*: change that one in place \(model.table\[\.\.\.\] ="
    ):
        step(inputs, targets)


@dataclass
class Held:
    """An input that torch does not take apart."""

    x: torch.Tensor


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (lambda: TABLE, r"input 0 is a numpy.ndarray, .*: pass a tensor \(torch.as_tensor\)"),
        (
            lambda: Held(batch_of(0)[0]),
            r"input 0 is a Held, .*, register the class .* \(torch.export.register_dataclass\(Held\)",
        ),
        (lambda: adjacency(torch.sparse_coo), "input 0 is a sparse tensor, .*: give a matrix that does not change to the model"),
    ],
)
def test_inputs_that_no_step_takes_are_refused_with_a_way_out(given: Callable[[], object], said: str) -> None:
    with pytest.raises(TraceError, match=said):
        planner.trace(Between(lambda _, x: x), F.mse_loss, (given(), batch_of(0)[1]))


def halves() -> dict[str, torch.Tensor]:
    low, high = torch.rand(2, 32).unbind()
    return {"low": low, "high": high}


def shift_halves(module: Any, x: torch.Tensor) -> torch.Tensor:
    shifted = module.low.sin() * x + module.high
    with torch.no_grad():
        module.low.mul_(0.9).add_(x.mean(0), alpha=0.1)
        module.high += 1
    return shifted + module.high.cos()


@pytest.mark.slow
def test_buffers_that_share_a_storage_are_read_and_written_apart() -> None:
    model = Between(shift_halves, **halves())
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    planner.trace(model, F.mse_loss, batch_of(0), passes=1)
    assert [name for name, value in before.items() if not torch.equal(value, model.get_buffer(name))] == []
    check_trains_as_eager(lambda: Between(shift_halves, **halves()), F.mse_loss, batch_of)


def test_overlapping_buffers_that_are_written_have_a_way_out() -> None:
    def shift(module: Any, x: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            module.both.mul_(0.9)
        return x * module.both[0] + second

    def overlapping() -> nn.Module:
        both = torch.rand(2, 32)
        return Between(lambda module, x: shift(module, x, module.second), both=both, second=both[1])

    with pytest.raises(TraceError, match=r"both and second overlap in memory.*: keep one tensor of them all"):
        planner.trace(overlapping(), F.mse_loss, batch_of(0))
    check_trains_as_eager(
        lambda: Between(lambda module, x: shift(module, x, module.both[1]), both=torch.rand(2, 32)), F.mse_loss, batch_of
    )


def definite(x: torch.Tensor) -> torch.Tensor:
    return x.t() @ x + 3 * torch.eye(x.shape[1])


CHECKED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "cholesky": lambda x: x + torch.linalg.cholesky(definite(x))[:1],
    "solve": lambda x: torch.linalg.solve(definite(x), x.t()).t(),
    "inv": lambda x: x + torch.linalg.inv(definite(x))[:1],
    "slogdet": lambda x: x + torch.linalg.slogdet(definite(x)).logabsdet,
}


@pytest.mark.parametrize("names", some_and_each(CHECKED, "cholesky", "slogdet"))
def test_linear_algebra_that_checks_its_results_trains_as_in_eager_mode(names: tuple[str, ...]) -> None:
    check_trains_as_eager(lambda: in_turn(CHECKED, names), F.mse_loss, batch_of)


def test_a_check_of_linear_algebra_raises_as_in_eager_mode_and_the_model_is_as_before() -> None:
    def shifted(module: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            module.calls += 1
        return x + torch.linalg.cholesky(x.t() @ x - module.shift * torch.eye(32))[:1]

    model = Between(shifted, calls=torch.zeros(()), shift=torch.tensor(-3.0))
    step = planner.compile(model, F.mse_loss, batch_of(0), budget="100%", passes=1, compare_eager=False)
    step(*batch_of(0)).backward()
    model.zero_grad()
    model.shift.fill_(1e6)
    for run in (step, lambda x, y: F.mse_loss(model(x), y)):
        with pytest.raises(torch.linalg.LinAlgError, match="the input is not positive-definite"):
            run(*batch_of(0))
        assert model.calls == (1 if run is step else 2)


@torch.library.custom_op("supported_code::sine_into", mutates_args={"out"})
def sine_into(x: torch.Tensor, out: torch.Tensor) -> None:
    torch.sin(x, out=out)


@torch.library.custom_op("supported_code::sine_and_cosine", mutates_args={"sine"})
def sine_and_cosine(x: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    torch.sin(x, out=sine)
    return x.cos()


@sine_and_cosine.register_fake
def _(x: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


class Sine(torch.autograd.Function):
    """By operators that write to what they are given."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        sine = torch.empty_like(x)
        sine_into(x, sine)
        return sine

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return gradient * sine_and_cosine(x, torch.empty_like(x))


def sine_of_buffer(module: Any, x: torch.Tensor) -> torch.Tensor:
    sine_into(x.detach(), module.sine[1])
    return x + module.sine.sum(0)


def test_operators_that_write_to_their_arguments_train_as_in_eager_mode() -> None:
    def call(module: Any, x: torch.Tensor) -> torch.Tensor:
        return sine_of_buffer(module, Sine.apply(x))

    check_trains_as_eager(lambda: Between(call, sine=torch.ones(2, 96, 32)), F.mse_loss, batch_of)


class Contrast(nn.Module):
    """Contrasts queries with a queue of earlier keys, to which ``enqueue`` adds new ones."""

    def __init__(self, enqueue: Callable[[Any, torch.Tensor], None]) -> None:
        super().__init__()
        self.queries = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 16))
        self.keys = nn.Linear(32, 16).requires_grad_(requires_grad=False)
        self.register_buffer("queue", torch.randn(240, 16))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.int64))
        self.enqueue = enqueue

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        queries, keys = F.normalize(self.queries(x), dim=1), F.normalize(self.keys(x), dim=1)
        logits = torch.cat([(queries * keys).sum(1, keepdim=True), queries @ self.queue.clone().t()], 1)
        with torch.no_grad():
            self.enqueue(self, keys)
        return logits


def by_number(module: Any, keys: torch.Tensor) -> None:
    start = int(module.pointer)
    module.queue[start : start + len(keys)] = keys[: len(module.queue) - start]
    module.pointer[0] = (start + len(keys)) % len(module.queue)


def by_tensor(module: Any, keys: torch.Tensor) -> None:
    module.queue.index_copy_(0, (module.pointer + torch.arange(len(keys))) % len(module.queue), keys)
    module.pointer.add_(len(keys))


def first_of_all(logits: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits / 0.07, torch.zeros(len(logits), dtype=torch.int64))


def test_queue_pointer_trains_as_tensor_and_raises_as_number() -> None:
    with pytest.raises(TraceError, match=r"test_supported_code.py:\d+ .* takes a number out of pointer, .* queue.index_copy_"):
        planner.trace(Contrast(by_number), first_of_all, batch_of(0))
    check_trains_as_eager(lambda: Contrast(by_tensor), first_of_all, batch_of)


def test_a_slice_by_a_number_of_a_buffer_is_written() -> None:
    def write(module: Any, x: torch.Tensor) -> torch.Tensor:
        start = int(module.start)
        with torch.no_grad():
            module.history[start : start + 96] = x
        return x + module.history.mean(0)

    def make() -> nn.Module:
        return Between(write, history=torch.zeros(200, 32), start=torch.tensor(50))

    step = check_trains_as_eager(make, F.mse_loss, batch_of)
    assert step.plan.eager is not None


def drawing_masks(module: Any, x: torch.Tensor) -> torch.Tensor:
    mask = torch.empty_like(x).bernoulli_(0.7, generator=module.generator)
    noise = torch.randn(x.shape, generator=GENERATOR) + torch.rand(x.shape, generator=module.generator)
    return F.dropout(x * mask + 0.1 * noise, 0.2) + torch.bernoulli(torch.sigmoid(x), generator=module.generator)


GENERATOR = torch.Generator()


def test_a_generator_of_the_users_own_draws_as_in_eager_mode() -> None:
    states = []

    def make() -> nn.Module:
        GENERATOR.manual_seed(3)
        return Between(drawing_masks, generator=torch.Generator().manual_seed(2))

    def loss_fn(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(y, target)

    def batch_and_state(number: int) -> tuple[torch.Tensor, torch.Tensor]:
        if number == 0:
            GENERATOR.manual_seed(4)
        states.append(GENERATOR.get_state())
        return batch_of(number)

    check_trains_as_eager(make, loss_fn, batch_and_state)
    assert all(map(torch.equal, states[1:5], states[5:]))


def test_planning_and_failed_steps_restore_generators_and_replaced_ones_raise() -> None:
    def failing(module: Any, x: torch.Tensor) -> torch.Tensor:
        drawn = drawing_masks(module, x)
        return drawn + torch.linalg.cholesky(module.matrix)[0, 0]

    model = Between(failing, generator=torch.Generator().manual_seed(2), matrix=torch.eye(4))
    before = model.generator.get_state(), GENERATOR.get_state()
    step = planner.compile(model, F.mse_loss, batch_of(0), budget="100%", passes=1)
    model.matrix.neg_()
    with pytest.raises(torch.linalg.LinAlgError):
        step(*batch_of(0))
    assert torch.equal(model.generator.get_state(), before[0]) and torch.equal(GENERATOR.get_state(), before[1])
    model.generator = torch.Generator()
    with pytest.raises(MismatchError, match=r"model.generator is another generator than .*: change that one in place"):
        step(*batch_of(0))


def test_a_generator_does_not_go_with_kernels_of_inductor() -> None:
    model = Between(drawing_masks, generator=torch.Generator())
    with pytest.raises(
        TraceError,
        match=r"test_supported_code.py:\d+ .* passes a generator to an op, .*: leave out the generator, or kernels='ind",
    ):
        planner.compile(model, F.mse_loss, batch_of(0), budget="100%", kernels="inductor")


def adjacency(layout: torch.layout) -> torch.Tensor:
    weights = torch.rand(96, 96, generator=torch.Generator().manual_seed(2))
    return (weights * (weights < 0.1)).to_sparse(layout=layout)


class Convolutions(nn.Module):
    """Graph convolutions: `product` multiplies by the adjacency, a buffer."""

    def __init__(self, layout: torch.layout, product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.register_buffer("adjacency", adjacency(layout))
        self.first, self.second, self.product = nn.Linear(32, 64), nn.Linear(64, 32), product

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.gelu(self.product(self.adjacency, self.first(x)))
        return self.product(self.adjacency, self.second(F.dropout(hidden, 0.2)))


PRODUCTS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sparse.mm": torch.sparse.mm,
    "mm": torch.mm,
    "@": lambda a, x: a @ x,
    "both": lambda a, x: a @ torch.sparse.mm(a, x),
}


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("layout", [torch.sparse_coo, *slow(torch.sparse_csr)])
@pytest.mark.parametrize("name", slow_except(PRODUCTS, "both"))
def test_products_of_a_sparse_buffer_train_as_in_eager_mode(layout: torch.layout, name: str) -> None:
    step = check_trains_as_eager(lambda: Convolutions(layout, PRODUCTS[name]), F.mse_loss, batch_of)
    matrix = adjacency(layout)
    coo = layout is torch.sparse_coo
    parts = (matrix.indices(), matrix.values()) if coo else (matrix.crow_indices(), matrix.col_indices(), matrix.values())
    counted_bytes = sum(t.size_bytes for t in step.measured.tensors if t.kind is Kind.CONSTANT)
    assert counted_bytes == sum(part.untyped_storage().nbytes() for part in parts)


@pytest.mark.filterwarnings("ignore:Sparse")
def test_values_of_a_sparse_buffer_are_read_anew_and_another_matrix_is_refused() -> None:
    model = Convolutions(torch.sparse_coo, torch.sparse.mm)
    step = planner.compile(model, F.mse_loss, batch_of(0), budget="100%", passes=1, compare_eager=False)
    model.adjacency.values().mul_(0.5)
    inputs, targets = batch_of(0)
    torch.manual_seed(1)
    loss = step(inputs, targets)
    torch.manual_seed(1)
    assert torch.equal(loss, F.mse_loss(model(inputs), targets))
    model.load_state_dict({**model.state_dict(), "adjacency": adjacency(torch.sparse_coo)})  # puts other parts there
    with pytest.raises(MismatchError, match=r"model.adjacency is another sparse matrix than .* \(model.adjacency.values"):
        step(inputs, targets)


class ChangedEntries(nn.Module):
    """Trains some entries of a frozen weight, of which two may be the same, as PEFT's SHiRA does."""

    def __init__(self, change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first, self.frozen = nn.Linear(32, 64), nn.Linear(64, 32).requires_grad_(False)
        self.values, self.change = nn.Parameter(torch.linspace(-1, 1, 20)), change
        self.indices = torch.stack([torch.arange(20), torch.arange(20) * 3])
        self.indices[:, 1] = self.indices[:, 0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.gelu(self.first(x))
        entries = torch.sparse_coo_tensor(self.indices, self.values * 0.5, (32, 64))
        return F.linear(hidden, self.change(self.frozen.weight.clone(), entries), self.frozen.bias)


def add_in_place(weight: torch.Tensor, entries: torch.Tensor) -> torch.Tensor:
    kept = weight
    weight += entries
    return kept


CHANGES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "+=": add_in_place,
    "+": lambda weight, entries: weight + entries,
    "to_dense": lambda weight, entries: weight * entries.to_dense(),
}


@pytest.mark.parametrize("name", slow_among(CHANGES, "+"))
def test_entries_that_are_added_to_a_weight_train_as_in_eager_mode(name: str) -> None:
    check_trains_as_eager(lambda: ChangedEntries(CHANGES[name]), F.mse_loss, batch_of)


@pytest.mark.parametrize("change", [lambda w, entries: torch.sparse.mm(entries, w.t()) @ w, lambda w, entries: w.add(entries)])
def test_other_uses_of_sparse_tensors_are_refused_with_a_way_out(
    change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    with pytest.raises(TraceError, match=r"uses a sparse tensor, .*, as in weight \+ entries: hold it as a dense tensor"):
        planner.trace(ChangedEntries(change), F.mse_loss, batch_of(0))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_torch_compile_and_planning_take_sparse_matrices_in_turn() -> None:
    torch._dynamo.reset()
    for _ in range(2):
        model = Convolutions(torch.sparse_coo, torch.mm)
        compiled = torch.compile(model, backend="eager")
        step = planner.compile(model, F.mse_loss, batch_of(0), budget="100%", passes=1, compare_eager=False)
        inputs, targets = batch_of(0)
        losses = []
        for run in (model, compiled):
            torch.manual_seed(5)
            losses.append(F.mse_loss(run(inputs), targets))
        torch.manual_seed(5)
        losses.append(step(inputs, targets))
        assert torch.equal(losses[0], losses[1]) and torch.equal(losses[0], losses[2])


def multiply(weights: torch.Tensor, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
    return torch.sparse.mm(edges, (x @ weights).tanh()).square().mean()


def plan_around_a_sparse_input_after_a_capture() -> None:
    torch.compile(torch.sin, backend="eager")(torch.ones(2))
    weights, x = torch.randn(32, 32, requires_grad=True), torch.randn(96, 32)
    compiled = torch.compile(multiply, backend="planner", options={"budget": "100%", "wait": 0})
    compiled(weights, x, adjacency(torch.sparse_coo)).backward()
    assert sys.modules["planner.train.backend.backend"].BUDGETS, "nothing was planned"


def test_a_sparse_input_is_carried_where_something_was_captured_before_the_backend_is_imported() -> None:
    run_apart(plan_around_a_sparse_input_after_a_capture)


class Doubled(torch.autograd.Function):
    """Reads what it saves twice."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return 2 * x @ weight

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        (x, _), (_, weight) = ctx.saved_tensors, ctx.saved_tensors
        return 2 * gradient @ weight.t(), 2 * x.t() @ gradient


class Doubling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(32, 32) / 8 for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = Doubled.apply(x, weight).tanh()
        return x


def test_a_capture_leaves_no_tensors_of_custom_functions() -> None:
    check_trains_as_eager(Doubling, F.mse_loss, lambda number: (batch_of(number % 2)[0], batch_of(number % 2)[0]))
    gc.collect()
    tensors = [value for value in gc.get_objects() if type(value) is torch.Tensor]
    assert not any(map(torch._is_functional_tensor, tensors))


class Matcher(nn.Module):
    """Matches predictions with targets, as DETR and Mask2Former do; each step makes one."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Buffer(torch.linspace(0.5, 1.5, 32), persistent=False)

    @torch.no_grad()
    def forward(self, found: torch.Tensor, targets: torch.Tensor) -> list[torch.Tensor]:
        return [torch.as_tensor(i) for i in linear_sum_assignment(torch.cdist(found * self.weights, targets).cpu())]


def compute_matched_loss(found: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    rows, columns = Matcher()(found, targets[:9])
    return (found[rows] - targets[columns]).abs().sum() / torch.clamp(torch.as_tensor([9.0]), min=1).item()


def test_predictions_are_matched_with_targets_by_scipy_as_in_eager_mode() -> None:
    check_trains_as_eager(lambda: Between(lambda _, x: x), compute_matched_loss, lambda number: batch_of(number % 2))


def scale_by_kind(model: Any, x: torch.Tensor) -> torch.Tensor:
    spans = groupby(enumerate(model.kinds.tolist()), lambda pair: pair[1])
    return torch.cat([model.middle(x[[place for place, _ in span]]) * (kind + 1) for kind, span in spans])


def test_items_are_grouped_by_a_key_that_is_given_by_place() -> None:
    kinds = torch.tensor([0, 0, 1, 2] * 24)
    check_trains_as_eager(lambda: Between(scale_by_kind, middle=nn.Linear(32, 32), kinds=kinds), F.mse_loss, batch_of)


class AsIs(TorchFunctionMode):
    """Calls each function as it is, as the mode in which Transformers builds the masks of several kinds of tokens."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def square_in_a_mode(_: Any, x: torch.Tensor) -> torch.Tensor:
    with AsIs():
        return x.square()


def shift_on_a_device(_: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.device(x.device), torch.device("meta"):
        shape = torch.empty(32)
        with x.device:
            return (x + torch.arange(32) + shape.numel()).square()


@pytest.mark.parametrize("call", [square_in_a_mode, shift_on_a_device])
def test_a_mode_is_entered_in_the_step(call: Callable[..., torch.Tensor]) -> None:
    check_trains_as_eager(lambda: Between(call), F.mse_loss, batch_of)


def keep_elsewhere(model: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.save_on_cpu(), set_checkpoint_early_stop(False):
        return checkpoint(model.middle, x, use_reentrant=False)


def test_a_plan_decides_where_saved_tensors_are_kept() -> None:
    check_trains_as_eager(lambda: Between(keep_elsewhere, middle=nn.Linear(32, 32)), F.mse_loss, batch_of)


class Halved(saved_tensors_hooks):
    def __init__(self) -> None:
        super().__init__(lambda saved: saved.half() if saved.dim() > 2 else saved, lambda saved: saved.float())


def pack_to_file(saved: torch.Tensor) -> io.BytesIO:
    torch.save(saved, file := io.BytesIO())
    file.seek(0)
    return file


def count_and_halve(saved: torch.Tensor) -> torch.Tensor:
    COUNTED.append(saved.numel())
    return saved.half()


COUNTED: list[int] = []
PACKED: dict[str, Callable[[], saved_tensors_hooks]] = {
    "counted": lambda: saved_tensors_hooks(count_and_halve, lambda saved: saved.float()),
    "to half precision": Halved,
    "to a file": lambda: saved_tensors_hooks(pack_to_file, torch.load),
    "by NumPy": lambda: saved_tensors_hooks(lambda saved: saved.detach().numpy().astype(np.float16), torch.from_numpy),
}


def keep_packed(model: Any, x: torch.Tensor) -> torch.Tensor:
    with PACKED[model.packed]():
        return torch.tanh(model.middle(x).exp())


@pytest.mark.parametrize("name", ["to half precision", *slow("to a file")])
def test_hooks_on_saved_tensors_compute_as_in_eager_mode(name: str) -> None:
    with pytest.warns(UserWarning, match="what they compute is part of the plan"):
        check_trains_as_eager(lambda: Between(keep_packed, middle=nn.Linear(32, 32), packed=name), F.mse_loss, batch_of)


@pytest.mark.parametrize("name", ["by NumPy", "counted"])
def test_hooks_on_saved_tensors_that_no_graph_has_are_refused(name: str) -> None:
    model = Between(keep_packed, middle=nn.Linear(32, 32), packed=name)
    refused = pytest.raises(TraceError, match=r"sets hooks on saved tensors that change them.*leave them out")
    with refused, pytest.warns(UserWarning, match="sets hooks"):
        planner.compile(model, F.mse_loss, batch_of(0), budget="90%")
    assert model(batch_of(0)[0]).grad_fn is not None  # none is left in place


def write_between_uses(model: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = model.middle(x)
        with torch.no_grad():
            model.middle.weight.mul_(0.9)
        return model.middle(hidden.tanh()).float()


def test_a_weight_that_is_written_under_autocast_keeps_its_cast() -> None:
    check_trains_as_eager(lambda: Between(write_between_uses, middle=nn.Linear(32, 32)), F.mse_loss, batch_of)


class Averaging(nn.BatchNorm1d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + 1


def make_averaging() -> nn.Module:
    first, second = nn.BatchNorm1d(32, momentum=None), Averaging(32, momentum=None, affine=False)
    return Between(lambda model, x: model.second(model.first(x)), first=first, second=second)


def test_batch_norms_average_over_all_batches_as_in_eager_mode() -> None:
    check_trains_as_eager(make_averaging, F.mse_loss, batch_of)
