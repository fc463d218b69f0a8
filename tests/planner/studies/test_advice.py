"""Advice on budgets: what it says of a graph, which budget it recommends, and that it ends in time."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import planner
from planner.capture.options import list_options_to_try
from planner.graphs.errors import PlannerError, UsageError
from planner.graphs.ir import Graph
from planner.graphs.reordering import Reordering
from planner.graphs.synthetic.random_graphs import draw_graph
from planner.graphs.synthetic.small import make_training_chain
from planner.graphs.synthetic.transformer import TransformerSize, transformer
from planner.graphs.units import format_bytes
from planner.memory.least_budget import LeastBudget, find_least_budget
from planner.memory.reserved import predict_eager_bytes
from planner.plans.summary import summarize
from planner.progress import Progress, Stage
from planner.settings.counted_memory import CountedMemory
from planner.solvers.clock import Clock, WorkClock
from planner.solvers.result import Reason, Result, Status
from planner.studies import budget_analysis, frontier
from planner.studies.advice import Advice
from planner.studies.budget_analysis import BETWEEN, advise_graph
from planner.studies.solves import solve_in_order
from tests.support.marks import slow_except

LINK = {"link": "1000GB/s", "host_budget": "1GB"}


@pytest.fixture(scope="module")
def graph() -> Graph:
    return transformer(TransformerSize(layers=2))


@pytest.fixture(scope="module")
def advice(graph: Graph) -> Advice:
    return advised(graph)


def advised(graph: Graph, available_bytes: int | None = None, options: tuple[str, ...] = ("offload",)) -> Advice:
    return advise_graph(graph, available_bytes=available_bytes, device="a device", time_limit_s=8.0, options=options, **LINK)


def test_advice_brackets_the_least_and_prices_budgets_between(graph: Graph, advice: Advice) -> None:
    assert advice.eager_peak_bytes == summarize(graph).keep_everything_peak_bytes
    assert advice.least_proved_bytes <= advice.least.budget_bytes < advice.eager_peak_bytes
    budgets = [price.budget_bytes for price in advice.between]
    assert len(budgets) == BETWEEN and budgets == sorted(budgets)
    assert advice.least.budget_bytes < budgets[0] and budgets[-1] < advice.eager_peak_bytes
    overheads = [price.overhead for price in (advice.least, *advice.between)]
    assert None not in overheads and overheads == sorted(overheads, reverse=True)
    for price in advice.between:
        assert price.overhead == pytest.approx(planner.solve(graph, price.budget_bytes, tolerance=0.005).overhead, abs=0.02)
        assert price.bound <= price.overhead + 1e-9


def test_advice_is_drawn(advice: Advice) -> None:
    (axes,) = advice.plot().axes
    lines = {line.get_label(): line for line in axes.lines}
    assert lines["recomputation alone"].get_ydata()[-1] == 0.0 and len(lines["recomputation alone"].get_xdata()) == BETWEEN + 2
    assert "with offload" in lines


def test_an_option_never_costs_more_than_recomputation_alone(advice: Advice) -> None:
    (offload,) = advice.options
    middle = advice.between[BETWEEN // 2]
    assert offload.name == "offload" and offload.ops and offload.exact
    assert offload.price.budget_bytes == middle.budget_bytes
    assert offload.price.overhead < middle.overhead
    assert offload.least_found_bytes <= advice.least.budget_bytes


def test_where_eager_fits_no_plan_is_recommended(graph: Graph) -> None:
    recommended = advised(graph, summarize(graph).keep_everything_peak_bytes, ()).recommended
    assert recommended.budget_bytes is None and recommended.overhead == 0.0
    assert "no plan, for eager PyTorch fits" in recommended.reason


def test_where_eager_does_not_fit_all_that_is_available_is_recommended(graph: Graph) -> None:
    available = int(0.75 * summarize(graph).keep_everything_peak_bytes)
    advice = advised(graph, available, ())
    assert advice.recommended.budget_bytes == available and not advice.recommended.options
    assert advice.recommended.overhead == pytest.approx(planner.solve(graph, available, tolerance=0.005).overhead, abs=0.02)


def test_an_option_is_recommended_where_recomputation_does_not_fit() -> None:
    graph = draw_graph(5, ops=20)
    found = advised(graph)
    available = found.options[0].least_found_bytes
    assert available < found.least.budget_bytes
    advice = advised(graph, available)
    assert (advice.recommended.budget_bytes, advice.recommended.options) == (available, ("offload",))
    assert str(advice).splitlines()[-1].startswith(f"recommended: {available} B with offload: recomputation alone needs")


@pytest.mark.slow
def test_where_nothing_fits_a_smaller_batch_is_recommended(graph: Graph) -> None:
    recommended = advised(graph, 1).recommended
    assert recommended.budget_bytes is None and recommended.overhead is None
    assert "a smaller batch: 1 B are available" in recommended.reason


def test_without_a_device_a_cheap_budget_is_recommended(advice: Advice) -> None:
    recommended = advice.recommended
    assert recommended.budget_bytes is not None and recommended.overhead <= 0.1


def test_the_text_has_every_budget_and_option(advice: Advice) -> None:
    text = str(advice)
    assert "eager PyTorch needs" in text and "recomputation alone" in text and "offload" in text
    assert sum(line.split()[-1].endswith("%") for line in text.splitlines() if line) >= BETWEEN


def test_other_options_raise(graph: Graph) -> None:
    with pytest.raises(PlannerError, match="runs ops on other devices"):
        advise_graph(graph, options=["placement"])
    with pytest.raises(UsageError, match="traced without the option 'chunks'"):
        advise_graph(graph, options=["chunks"], time_limit_s=1.0)


@pytest.mark.slow
def test_advice_on_a_large_graph_ends_in_time() -> None:
    graph = transformer(TransformerSize(layers=24))
    began = time.monotonic()
    advice = advise_graph(graph, time_limit_s=6.0, **LINK)
    assert len(graph.ops) > 300
    assert time.monotonic() - began < 20  # rules of eviction end a few seconds late on a busy machine
    assert advice.least.budget_bytes < advice.eager_peak_bytes


def test_advice_on_a_model_tries_all_options_of_its_step() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.ReLU())))
    batch = torch.randn(256, 64), torch.randn(256, 64)
    seen: list[Progress] = []
    advice = planner.advise(model, F.mse_loss, batch, passes=1, time_limit_s=20, on_progress=seen.append)
    assert advice.available_bytes is not None and "no plan, for eager PyTorch fits" in advice.recommended.reason
    assert {option.name for option in advice.options} == {"offload", "chunks", "pack", "kernels", "in-place"}
    assert seen[0].stage is Stage.CAPTURE and "trying offload" in [progress.activity for progress in seen]
    assert all(parameter.grad is None for parameter in model.parameters())
    longer = replace(advice, graph=replace(advice.graph, step_s=2 * advice.graph.time_s))
    assert "host-bound" in str(longer) and "host-bound" not in str(advice)


def test_advice_on_a_modelled_device_allocates_nothing() -> None:
    with torch.device("meta"):
        shapes = nn.Linear(30_000, 30_000), torch.empty(8, 30_000)
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        model = nn.Sequential(*(nn.Linear(*shapes[0].weight.shape) for _ in range(3)))
        batch = torch.empty(shapes[1].shape), torch.empty(shapes[1].shape)
    advice = planner.advise(model, F.mse_loss, batch, roofline="l4", options=["offload"], time_limit_s=20, optimizer="adamw")
    assert advice.device == "l4 (modelled)"
    assert 21 * 10**9 < advice.available_bytes < 24 * 10**9
    assert advice.graph.static_bytes > advice.available_bytes
    assert "a smaller batch" in advice.recommended.reason


def test_options_to_try_default_to_offload_for_plain_graphs(graph: Graph) -> None:
    assert list_options_to_try(graph) == ("offload",)


QUICK = (CountedMemory.RESERVED, CountedMemory.DEVICE)


@pytest.mark.parametrize("memory", [None, *slow_except(CountedMemory, *QUICK)])
def test_cuda_advice_counts_and_reports_reserved_memory(memory: CountedMemory | None) -> None:
    chain = make_training_chain(8)
    tensors = tuple(replace(t, size_bytes=11 * 2**20) for t in chain.tensors)  # in segments of 12 MiB
    graph = replace(chain, tensors=tensors, provenance={"device": "h200", "context_bytes": 5_000_000})
    counted = memory or CountedMemory.RESERVED
    found = advise_graph(graph, available_bytes=80 * 10**6, memory=memory, time_limit_s=4.0, options=())
    assert (found.memory, found.eager_bytes) == (counted, predict_eager_bytes(graph, counted))
    assert found.least_proved_bytes <= found.least.budget_bytes < found.eager_bytes
    assert found.available_bytes == 80 * 10**6 + (5_000_000 if counted.counts_context else 0)
    assert (found.recommended.budget_bytes, found.recommended.options) == (found.available_bytes, ())
    for price in (found.least, *found.between, found.recommended):
        assert price.reserved_bytes is not None and price.budget_bytes is not None
        assert counted is CountedMemory.ALLOCATED or price.reserved_bytes <= price.budget_bytes
    text = str(found)
    assert f"budgets count        {counted.said}, of which eager PyTorch takes" in text
    takes = "PyTorch's allocator and CUDA's context take" if counted.counts_context else "PyTorch's allocator reserves"
    assert f"{takes} {format_bytes(found.recommended.reserved_bytes or 0)} for it" in text


def test_advice_uses_the_time_that_it_was_given(graph: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = WorkClock(30.0)

    def take_long(order: Reordering, budget_bytes: int, memory: CountedMemory, given: Clock, **settings: Any) -> Result:
        clock.spend(given.limit)
        found = Status.LIMIT, None, graph.time_s, "windows", given.limit
        return Result(graph, budget_bytes, *found, message="no time", reason=Reason.TIME)

    monkeypatch.setattr(budget_analysis, "WallClock", lambda _: clock)
    monkeypatch.setattr(frontier, "solve_in_order", take_long)
    advice = advise_graph(graph, time_limit_s=30.0, options=("offload",), **LINK)
    assert clock.now == pytest.approx(30.0)
    assert "analysed in" in str(advice) and all("bound" in line for line in str(advice).splitlines() if "of eager" in line)


def test_a_slow_search_for_the_least_budget_leaves_time_to_solve_for_it(graph: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    solved: dict[int, float] = {}  # time limits by budget

    def search_slowly(graph: Graph, memory: CountedMemory, *, should_stop: Callable[[], bool]) -> LeastBudget:
        began = time.monotonic()
        while not should_stop():
            assert time.monotonic() - began < 10.0, "the search was not stopped"
            time.sleep(0.01)
        return replace(find_least_budget(graph, memory), stopped=True)

    def noted(order: Reordering, budget_bytes: int, memory: CountedMemory, clock: Clock, **settings: Any) -> Result:
        solved[budget_bytes] = clock.limit
        return solve_in_order(order, budget_bytes, memory, clock, **settings)

    monkeypatch.setattr(budget_analysis, "find_least_budget", search_slowly)
    monkeypatch.setattr(frontier, "solve_in_order", noted)
    advice = advised(graph, options=("offload",))
    assert "its search was cut short" in str(advice) and "at most" in str(advice)
    assert "cut short" not in str(replace(advice, least_stopped=False))
    assert advice.least.budget_bytes in solved and min(solved.values()) > 0.1
