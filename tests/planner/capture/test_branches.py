"""Branches on data: taken as on the given batch, guarded, or refused with the line that branches."""

import copy
import random
import re
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from types import CellType, FunctionType
from typing import Any, Union, cast

import numpy as np
import pytest
import scipy.optimize
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import planner
from benchmarks.models.parts import FunctionModule
from planner.capture.signature import call
from planner.capture.trace import capture
from planner.graphs.errors import MismatchError, TraceError
from planner.torch_private import capture as private
from tests.support.budgets import between
from tests.support.marks import slow
from tests.support.models.outcomes import check_three_steps, executor

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


class Step(nn.Module):
    """A layer behind a function that branches."""

    def __init__(self, before: Callable[..., torch.Tensor], after: Callable[..., torch.Tensor] | None = None) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.before, self.after = before, after

    def forward(self, x: torch.Tensor, *more: Any) -> torch.Tensor:
        self.calls += 1
        hidden = F.dropout(self.layer(self.before(x, *more)), 0.2, self.training)
        return (hidden if self.after is None else self.after(hidden, *more)).square().sum()


def if_all(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    if mask.all():
        return x * 2
    return x - 1


def number_compared(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    count = mask.sum().item()
    return x * 3 if count > 5 else x


def asserted(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    assert mask.any(), "all is masked"
    return x


def two_equal(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return x + 1 if torch.equal(mask, mask.t()) else x * 2


def counted(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    width = int(mask.sum(1).max())
    return F.pad(x[:, :width], (0, x.shape[1] - width))


def either(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return x * (mask.all() or mask.float().mean())


def listed(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return x * 2 if max(mask.sum(1).tolist()) >= 3 else x


def found(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    start = int(mask[0].sum()) - 1
    return x * 2 if torch.equal(mask[0, start - 1 : start + 1], mask[1, :2]) else x


def places_counted(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return x * (1 + len(mask[0].nonzero()))


def kinds_counted(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return x * mask.sum(1).unique().numel()


def rows_counted(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return x * x[mask[2]].shape[0]


def selected(hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return hidden[mask]


MASK = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 0, 1]]) > 0
ALL, NONE = torch.ones(4, 4) > 0, torch.zeros(4, 4) > 0


@pytest.mark.parametrize(
    ("before", "after", "other", "text"),
    [
        (if_all, None, ALL, r"if mask.all\(\):\) gives True for this batch, but gave False for the one"),
        (number_compared, None, NONE, r"count > 5 else x\) gives False \(of 0\) for this batch, but gave True \(of 9\)"),
        (asserted, None, NONE, r"assert mask.any\(\)"),
        (two_equal, None, ALL, r"torch.equal\(mask, mask.t\(\)\)"),
        (counted, None, ALL, r"width = int\(mask.sum\(1\).max\(\)\)\) gives 4 for this batch, but gave 3"),
        (found, None, NONE, r"start = int\(mask\[0\].sum\(\)\)|start - 1 : start \+ 1"),
        (places_counted, None, NONE, r"nonzero\(\)\)\)\) gives \(\(0, 1\),\) for this batch, but gave \(\(2, 1\),\)"),
        (lambda x, mask: x, selected, ALL, r"return hidden\[mask\]\) gives \(16,\) for this batch, but gave \(9,\)"),
        *slow(
            (either, None, ALL, r"mask.all\(\) or mask"),
            (listed, None, NONE, r"tolist\(\)"),
            (kinds_counted, None, ALL, r"unique\(\)"),
            (rows_counted, None, ALL, r"x\[mask\[2\]\].shape\[0\]\) gives \(4,\) .*, but gave \(1,\)"),
        ),
    ],
    ids=["if", "number", "assertion", "equal", "size", "slice", "places", "selection", "or", "list", "kinds", "rows"],
)
def test_branch_is_taken_as_in_eager_and_guarded(before: Any, after: Any, other: torch.Tensor, text: str) -> None:
    torch.manual_seed(0)
    model, x = Step(before, after), torch.randn(4, 4)
    step = check_three_steps(model, (x, MASK))
    state = torch.get_rng_state()
    with pytest.raises(MismatchError, match=rf"test_branches.py:\d+ .*{text}") as caught:
        step(x, other)
    assert "make another plan" in str(caught.value)
    # Nothing has run.
    assert model.calls.item() == 0
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in model.parameters())
    step(x, MASK)
    assert model.calls.item() == 1


def test_guards_cover_exactly_the_operands_of_the_condition() -> None:
    model, x = Step(number_compared), torch.randn(4, 4)
    step = executor(model, (x, MASK))
    for mask in (ALL, MASK.t().contiguous()):  # 16, 9 > 5
        torch.manual_seed(3)
        planned = step(torch.ones(4, 4), mask)
        torch.manual_seed(3)
        assert torch.equal(planned, model(torch.ones(4, 4), mask))


def test_changed_buffer_is_read_before_the_step() -> None:
    class WarmUp(Step):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return (self.layer(x) if self.calls > 2 else self.layer(x) * 0.5).sum()

    model, x = WarmUp(lambda x: x), torch.randn(4, 4)
    step = executor(model, (x,))
    assert [step(x).item() for _ in range(2)] == [0.5 * model.layer(x).sum().item()] * 2
    with pytest.raises(MismatchError, match=r"if self.calls > 2 else .* gives True for this batch, but gave False"):
        step(x)
    assert model.calls.item() == 2


def make_library(name: str, function: Callable[[], object]) -> FunctionType:
    """Return a function of a module `name` that calls `function`."""
    return FunctionType((lambda: function()).__code__, {**globals(), "__name__": name}, closure=(CellType(function),))


ask_library = make_library("first_library", make_library("second_library", torch.compiler.is_compiling))


def need_many(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Ask a library that asks for a compiler, and use four numbers, three branches and an assignment of the batch."""
    ask_library()
    rows, columns = scipy.optimize.linear_sum_assignment(mask.float())
    for share in (mask.float().mean().item(), float(mask.sum()) + 1.0, rows.size + 0.5, columns.size + 0.25):
        x = x * share
    return if_all(number_compared(either(x, mask), mask), mask)


def test_all_that_needs_values_is_found_in_the_second_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    captures, fullgraph_capture = [], private.fullgraph_capture

    def count(*args: Any, **kwargs: Any) -> Any:
        captures.append(args)
        return fullgraph_capture(*args, **kwargs)

    monkeypatch.setattr(private, "fullgraph_capture", count)
    captured = capture(Step(lambda x, mask: x, need_many), None, (torch.randn(4, 4), MASK))
    assert len(captures) == 2
    assert captured.conditions is not None


def test_earlier_guard_fails_if_a_later_one_cannot_be_computed() -> None:
    def picked(x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        assert ids.max() < 4
        return x * 2 if torch.arange(4)[ids].sum() > 3 else x

    model, x = Step(picked), torch.randn(4, 4)
    step = executor(model, (x, torch.tensor([1, 3])))
    with pytest.raises(MismatchError, match=r"assert ids.max\(\) < 4"):
        step(x, torch.tensor([1, 9]))


def test_models_without_branches_have_no_guards() -> None:
    assert capture(nn.Linear(4, 4), lambda y, x: (y - x).sum(), (torch.randn(2, 4), torch.randn(2, 4))).conditions is None


def counted_positions(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    positions = torch.arange(len(x)).expand(2, -1)
    return x * 2 if not mask.requires_grad and (positions.diff(dim=1) == 1).all() else x


def written_positions(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    positions = torch.arange(len(x))
    positions[0] = mask.sum()
    return x * 2 if positions[0] > 5 else x


@pytest.mark.parametrize(("before", "is_guarded"), [(counted_positions, False), (written_positions, True)])
def test_branches_on_what_the_code_alone_makes_have_no_guards(before: Any, is_guarded: bool) -> None:
    model, batch = Step(before), (torch.randn(4, 4), MASK)
    check_three_steps(model, batch)
    assert (capture(model, None, batch).conditions is not None) is is_guarded


def of_activations(hidden: torch.Tensor) -> torch.Tensor:
    if hidden.min() < -1e3:
        return hidden * 0
    return hidden


def of_chance(hidden: torch.Tensor) -> torch.Tensor:
    return hidden if torch.rand(()) < 0.5 else hidden * 2


def of_sizes(hidden: torch.Tensor) -> torch.Tensor:
    return hidden[hidden > 0]


def of_items(hidden: torch.Tensor) -> torch.Tensor:
    return hidden * hidden.max().item()


@pytest.mark.parametrize(
    ("after", "text", "reason"),
    [
        (of_activations, "if hidden.min() < -1e3:", "parameters or activations"),
        (of_chance, "torch.rand(()) < 0.5", "random numbers"),
        (of_sizes, "return hidden[hidden > 0]", "parameters or activations"),
        (of_items, "hidden.max().item()", "parameters or activations"),
    ],
    ids=["activations", "chance", "sizes", "items"],
)
def test_conditions_that_vary_between_steps_raise_with_their_line(after: Any, text: str, reason: str) -> None:
    with pytest.raises(TraceError) as caught:
        capture(Step(lambda x: x, after).eval(), None, (torch.randn(4, 4),))
    message = str(caught.value)
    assert re.search(r"test_branches.py:\d+ \(", message)
    for part in (text, reason, "planner.checkpoint(model, budget=...)", "torch.where"):
        assert part in message
    assert "\n" not in message


Counts = dict[str, int]


class OfParameters(nn.Module):
    """Refuses weights that are not finite, scales the rows that are not zero, and branches on the sign of a number."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.rows = nn.Linear(4, 4), nn.Embedding(4, 4)
        with torch.no_grad():
            self.layer.bias.zero_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.layer.weight[0].isinf().any():
            raise RuntimeError("the first row is not finite")
        rows = self.rows.weight.detach().clone()
        large = rows.norm(dim=1) > 0
        if torch.any(large):
            rows[large] *= 0.9
        hidden = self.layer(x) + rows
        return (hidden * 2 if self.layer.bias[0] >= 0 else hidden).square().sum()


def test_conditions_on_parameters_are_checked_before_each_step() -> None:
    torch.manual_seed(0)
    model, x = OfParameters(), torch.randn(4, 4)
    step = planner.compile(model, None, (x,), budget="1MB", wait=0.1, replan=False)
    assert step(x) == model(x)
    with torch.no_grad():
        model.layer.bias[0] = -1.0
    with pytest.raises(MismatchError, match=r"self\.layer\.bias\[0\] >= 0.* gives False .* but gave True"):
        step(x)
    with torch.no_grad():
        model.layer.bias[0] = 1.0
    assert step(x) == model(x)


def test_both_sides_of_a_branch_are_planned_when_they_are_first_taken() -> None:
    torch.manual_seed(0)
    model, x = OfParameters(), torch.randn(4, 4)
    step = planner.compile(model, None, (x,), budget="1MB", wait=0.1)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for value in (1.0, -1.0, 2.0, -2.0):
            with torch.no_grad():
                model.layer.bias[0] = value
            assert step(x) == model(x)
    (message,) = [str(each.message) for each in said]
    assert re.search(r"self\.layer\.bias\[0\] >= 0.* gives False", message) and len(step.history) <= 2


def test_generic_aliases_are_read() -> None:
    def counted_as(x: torch.Tensor) -> torch.Tensor:
        counts = cast(Union[list[Counts], list[int]], [1, 2])  # noqa: UP007  # read when the step runs
        return x * counts[1]

    check_three_steps(Step(counted_as), (torch.randn(4, 4),))


def test_unused_random_number_is_still_drawn() -> None:
    model = Step(lambda x: x, lambda hidden: hidden * 0 if torch.rand([]) < 0.0 else hidden)
    step = check_three_steps(model, (torch.randn(4, 4),))
    torch.manual_seed(0)
    step(torch.randn(4, 4))


@pytest.mark.parametrize(
    "draw",
    [
        lambda: random.random(),
        lambda: random.randint(1, 3),
        lambda: random.uniform(0.0, 1.0),
        lambda: random.Random(0).random(),
        lambda: float(np.random.rand()),  # noqa: NPY002
        lambda: int(np.random.randint(0, 5)),  # noqa: NPY002
        lambda: torch.from_numpy(np.random.rand(4)).float(),  # noqa: NPY002
    ],
    ids=["random", "randint", "uniform", "instance", "numpy", "numpy integers", "numpy array"],
)
def test_python_random_numbers_raise(draw: Callable[[], Any]) -> None:
    state = random.getstate()
    with pytest.raises(TraceError, match=r"test_branches.py:\d+ .* draws a random number outside PyTorch"):
        capture(Step(lambda x: x, lambda hidden: hidden * draw()), None, (torch.randn(4, 4),))
    assert random.getstate() == state


def encoded(**options: Any) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    inner = nn.Transformer(16, 2, 1, 1, 32, batch_first=True)
    model = FunctionModule(lambda m, source, target, **masks: m.inner(source, target, **masks).square().mean(), inner=inner)
    return model, {"source": torch.randn(2, 5, 16), "target": torch.randn(2, 4, 16), **options}


CAUSAL = nn.Transformer.generate_square_subsequent_mask(4)
PADDED = torch.tensor([[0, 0, 0, 0, 1], [0, 0, 0, 0, 0]]) > 0


@pytest.mark.parametrize(
    "masks",
    [
        {"tgt_mask": CAUSAL < 0, "src_key_padding_mask": PADDED, "memory_key_padding_mask": PADDED},
        *slow({"tgt_mask": CAUSAL}, {"tgt_mask": torch.zeros(4, 4), "tgt_is_causal": False}),
    ],
    ids=["bool and padded", "causal", "open"],
)
def test_masked_transformers_train_as_in_eager(masks: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model, batch = encoded(**masks)
    step = check_three_steps(model, batch)
    if masks["tgt_mask"] is CAUSAL:
        with pytest.raises(MismatchError, match="gives False for this batch, but gave True"):
            call(step, batch | {"tgt_mask": torch.zeros(4, 4)})


@pytest.mark.slow
def test_masked_transformer_stays_within_its_budget() -> None:
    torch.manual_seed(0)
    model, batch = encoded(tgt_mask=CAUSAL)
    graph = planner.trace(model, None, batch, passes=1)
    budget = between(graph)
    step = planner.compile(model, None, batch, budget=budget, passes=1, tolerance=0.1, time_limit_s=20.0)
    assert (step.plan.measured_peak_bytes or 0) <= budget
    torch.manual_seed(1)
    planned = step(**batch)
    torch.manual_seed(1)
    assert torch.equal(planned, model(**batch))


@pytest.mark.slow
def test_sizes_may_vary_with_a_mask() -> None:
    torch.manual_seed(0)
    model, mask = Step(if_all), torch.ones(16, 4) > 0
    x = torch.randn(16, 4)
    step = planner.compile(model, None, (x, mask), budget="100%", passes=1, dynamic=True)
    for size in (16, 12):
        torch.manual_seed(1)
        planned = step(x[:size], mask[:size])
        torch.manual_seed(1)
        assert torch.equal(planned, model(x[:size], mask[:size]))
    with pytest.raises(MismatchError, match=r"if mask.all\(\):\) gives False"):
        step(x, ~mask)


def test_conditions_on_fake_batches_raise() -> None:
    with FakeTensorMode():
        model, batch = Step(if_all), (torch.randn(4, 4), torch.ones(4, 4) > 0)
    with pytest.raises(TraceError, match=r"if mask.all\(\):.* plan with real tensors"):
        capture(model, None, batch)


class LeavingOut(nn.Module):
    """A step that leaves its second layer out at random, as adapters of PEFT do."""

    def __init__(self, dropped: float, *, upwards: bool = True) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.dropped, self.upwards = dropped, upwards

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.first(x)) * torch.rand(())
        if self.upwards:
            hidden = self.second(hidden) if torch.rand(1) > self.dropped else hidden
        else:
            hidden = hidden if torch.rand([]) <= self.dropped else self.second(hidden)
        return F.dropout(hidden, 0.5).square().sum()


@pytest.mark.parametrize("upwards", [True, False])
def test_a_branch_that_all_draws_but_0_take_is_planned(upwards: bool) -> None:
    torch.manual_seed(0)
    model, x = LeavingOut(0.0, upwards=upwards), torch.randn(4, 8)
    plain = copy.deepcopy(model)
    step = planner.compile(model, None, (x,), budget="1MB", wait=0.1)

    def train(one: nn.Module, run: Callable[..., Any]) -> list[torch.Tensor]:
        loss = run(x)
        loss.backward()
        left = [*(p.grad.clone() for p in one.parameters() if p.grad is not None), *(b.clone() for b in one.buffers())]
        one.zero_grad()
        return [loss.detach(), *left, torch.get_rng_state()]

    for before_draw in (5, DRAWS_BEFORE_0, 7):  # that of the branch is 0 in the second step
        torch.manual_seed(3)
        torch.rand(before_draw)
        expected = train(plain, plain)
        torch.manual_seed(3)
        torch.rand(before_draw)
        with pytest.warns(UserWarning, match=r"ran by eager.*drew exactly 0") if before_draw > 7 else nullcontext():
            found = train(model, step)
        assert all(map(torch.equal, found, expected))


DRAWS_BEFORE_0 = 1532311 - 1  # of the generator with seed 3, and the step draws once before the branch


def clamp_by_all(hidden: torch.Tensor) -> torch.Tensor:
    if not torch.isfinite(hidden).all():
        hidden = hidden.nan_to_num(0.5)
    return hidden


def clamp_by_any(hidden: torch.Tensor) -> torch.Tensor:
    if hidden.isnan().any() or torch.isinf(hidden.sum()):
        hidden = hidden.nan_to_num(0.5)
    return hidden


@pytest.mark.parametrize("clamp", [clamp_by_all, clamp_by_any])
def test_a_branch_on_values_that_are_not_finite_is_planned(clamp: Callable[[torch.Tensor], torch.Tensor]) -> None:
    torch.manual_seed(0)
    model = FunctionModule(lambda m, x: clamp(m.layer(x)).square().sum(), layer=nn.Linear(8, 8))
    plain, batches = copy.deepcopy(model), [torch.randn(4, 8), torch.full((4, 8), torch.nan), torch.randn(4, 8)]
    step = planner.compile(model, None, (batches[0],), budget="1MB", wait=0.1)
    for i, x in enumerate(batches):
        with pytest.warns(UserWarning, match="ran by eager.*not finite") if i == 1 else nullcontext():
            loss = step(x)
        for one, found in ((model, loss), (plain, plain(x))):
            one.zero_grad()
            found.backward()
        assert torch.equal(loss, plain(x))
        assert torch.equal(model.layer.bias.grad, plain.layer.bias.grad)


def test_a_branch_that_draws_seldom_take_raises() -> None:
    with pytest.raises(TraceError, match="random numbers"):
        capture(LeavingOut(0.001), None, (torch.randn(4, 8),))
