"""Batches of varying sizes: exact, within the budget from the first one on, and few plans kept."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

import planner
from graphs.capture.step import TrainingStep
from graphs.cost.scaling import Fit, sample_sizes
from graphs.errors import GraphError, InfeasibleError, MismatchError, PlannerError
from graphs.synthetic.small import training_chain
from graphs.zoo import Workload, build
from planner.runtime.measure import measure_memory, outcome
from planner.training.dynamic import DynamicStep
from planner.training.predicted_sizes import rounded_up
from planner.training.shapes import Varying, shapes_of
from tests.support.budgets import HALF_WAY

pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning"), pytest.mark.usefixtures("half_way")]

Tokens = tuple[torch.Tensor, torch.Tensor]


def gpt2() -> Workload:
    torch.manual_seed(0)
    return build("gpt2", layers=1, width=32, heads=2, vocab=61, seq=400, batch=4)


def tokens(batch: int, length: int) -> Tokens:
    return torch.randint(61, (batch, length)), torch.randint(61, (batch, length))


def planned(workload: Workload, first: Tokens, **options: int) -> DynamicStep:
    step = planner.compile(
        workload.model,
        workload.loss_fn,
        first,
        budget=HALF_WAY,
        dynamic=True,
        passes=1,
        tolerance=0.1,
        time_limit_s=60.0,
        **options,
    )
    assert isinstance(step, DynamicStep)
    return step


def check(step: DynamicStep, workload: Workload, batch: Tokens) -> None:
    """As eager to the last bit, and within the budget the first time and after."""
    found = outcome(step, workload.model, batch, seed=1)
    assert outcome(TrainingStep(workload.model, workload.loss_fn), workload.model, batch, seed=1).differences(found) == ()
    sized = step.plans[-1]
    assert sized.shapes == shapes_of(batch)
    assert sized.plan == step.plan
    assert sized.plan.measured_peak_bytes <= step.plan.budget_bytes
    assert abs(sized.peak_error) < 0.01
    for parameter in workload.model.parameters():
        parameter.grad = None
    tangent = 4
    again = measure_memory(step, batch, static_bytes=sized.plan.graph.static_bytes - tangent, device=torch.device("cpu"))
    assert again.peak_bytes <= step.plan.budget_bytes


def test_lengths_vary() -> None:
    workload = gpt2()
    step = planned(workload, tokens(4, 48), max_plans=3)
    budget = step.plan.budget_bytes
    solved_for = []
    for length in (48, 33, 40, 49, 53, 33):
        check(step, workload, tokens(4, length))
        assert step.plan.budget_bytes == budget
        assert len(step.plans) <= 3
        solved_for.append(step.plans[-1].solved_for)
    assert solved_for == [(), (36,), (40,), (52,), (56,), (36,)]
    assert step.plans[-2].plan.graph.store_all_peak_bytes > budget
    assert [sized.shapes[0] for sized in step.plans] == [(4, 49), (4, 53), (4, 33)]
    assert "int64[4, 33], int64[4, 33]: peak" in str(step.plans[-1])

    with pytest.raises(InfeasibleError, match=r"for a batch of int64\[4, 400\], .*least any schedule"):
        step(*tokens(4, 400))
    check(step, workload, tokens(4, 53))


def test_batch_and_length_vary_apart() -> None:
    torch.manual_seed(0)
    layers = (nn.Linear(8, 32), nn.GELU(), nn.LayerNorm(32), nn.Dropout(0.1), nn.Linear(32, 8))
    workload = Workload(nn.Sequential(*layers), nn.functional.mse_loss, (torch.randn(4, 16, 8), torch.randn(4, 16, 8)))
    step = planned(workload, workload.batch)
    for batch, length in ((5, 12), (3, 20), (4, 17)):
        check(step, workload, (torch.randn(batch, length, 8), torch.randn(batch, length, 8)))
    assert [sized.solved_for for sized in step.plans] == [(), (5, 12), (3, 20), (4, 18)]


class Branches(nn.Module):
    """Its ops depend on the length."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.linear(x)
        return (hidden.tanh() if len(x) > 20 else hidden).sum()


def test_a_step_whose_ops_change_with_the_size_is_refused() -> None:
    step = planner.compile(Branches(), None, (torch.randn(16, 8),), budget="1MB", dynamic=True, passes=1)
    step(torch.randn(12, 8))
    with pytest.raises(MismatchError, match=r"of float32\[24, 8\] makes other ops than one of float32\[16, 8\]"):
        step(torch.randn(24, 8))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x[:3, :5, :7], r"batches differ in 3 sizes, which are 4, 6, 8 in the first: 2 at most"),
        (lambda x: x[0], "only sizes may vary"),
        (lambda x: x.double()[:3], r"float64\[3, 6, 8\] makes other ops"),
    ],
)
def test_batches_that_cannot_be_predicted_are_refused(change: Callable[[torch.Tensor], torch.Tensor], message: str) -> None:
    x = torch.randn(4, 6, 8)

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * self.weight).sum()

    step = planner.compile(Sum(), None, (x,), budget="1MB", dynamic=True, passes=1)
    with pytest.raises(MismatchError, match=message):
        step(change(x))
    step(x).backward()


def test_options_that_mean_nothing_are_refused(tmp_path: object) -> None:
    batch = (torch.randn(4, 8),)
    with pytest.raises(PlannerError, match="leave out cache=, or dynamic=True"):
        planner.compile(Branches(), None, batch, budget="1MB", dynamic=True, cache=str(tmp_path))
    with pytest.raises(PlannerError, match="max_plans is 0"):
        planner.compile(Branches(), None, batch, budget="1MB", dynamic=True, max_plans=0)


def test_sizes_are_told_apart_as_they_vary() -> None:
    varying = Varying.of(((8, 8), (8,), ()))
    assert varying.sizes(varying.shapes) == ()
    both = varying.seen(((6, 6), (8,), ()))
    assert both.sizes(((6, 6), (8,), ())) == (6,)
    apart = both.seen(((6, 5), (8,), ()))
    assert apart.sizes(varying.shapes) == (8, 8)
    assert apart.seen(((8, 8), (8,), ())) == apart
    x = torch.arange(64.0).view(8, 8)
    cut = apart.cut((x, x[0], "word"), (2, 3))
    assert torch.equal(cut[0], x[:2, :3]) and cut[0].is_contiguous() and cut[1:] != () and cut[2] == "word"


def test_few_sizes_are_solved_for() -> None:
    assert [rounded_up(size) for size in (1, 15, 16, 17, 33, 1000, 1024)] == [1, 15, 16, 18, 36, 1024, 1024]
    assert all(size <= rounded_up(size) <= 1.125 * size for size in range(1, 5000))


def test_a_fit_goes_through_what_is_a_polynomial() -> None:
    graph = training_chain(4)

    def at(batch: int, length: int) -> object:
        size = 7 * batch * length**2 + 10**9 * batch + 5
        ops = tuple(replace(op, time_s=1e-6 * size, workspace_bytes=size) for op in graph.ops)
        return replace(graph, ops=ops, tensors=tuple(replace(t, size_bytes=size * (t.id + 1)) for t in graph.tensors))

    fit = Fit({(b, n): at(b, n) for b in sample_sizes(16) for n in sample_sizes(100)})
    for sizes in ((16, 100), (3, 7), (40, 333)):
        found, wanted = fit.graph(sizes), at(*sizes)
        assert [t.size_bytes for t in found.tensors] == [t.size_bytes for t in wanted.tensors]
        assert found.time_s == pytest.approx(wanted.time_s, rel=1e-6)
        assert [op.workspace_bytes for op in found.ops] == pytest.approx([op.workspace_bytes for op in wanted.ops], rel=1e-6)


def test_graphs_that_make_no_fit_are_refused() -> None:
    with pytest.raises(GraphError, match="a size that varies is 3"):
        sample_sizes(3)
    with pytest.raises(GraphError, match="make no grid"):
        Fit({(4,): training_chain(4)})
    with pytest.raises(GraphError, match=r"other ops at sizes \(2,\)"):
        Fit({(4,): training_chain(4), (3,): training_chain(4), (2,): training_chain(5)})
