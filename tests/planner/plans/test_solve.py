"""From a graph and a budget to a plan: what is passed on and refused, why a solve ended, and how long all of it took."""

import itertools
import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import planner
from planner.graphs.addresses import buffers_of
from planner.graphs.errors import BudgetError, GraphError, InfeasibleError, LimitError, MismatchError, PlannerError, UsageError
from planner.graphs.io.formats import read_graph, write_graph
from planner.graphs.ir import Graph, Kind
from planner.graphs.options.surroundings import OtherDevice
from planner.graphs.reordering import Reordering
from planner.graphs.schedule import keep_everything
from planner.graphs.simulate import simulate
from planner.graphs.synthetic.random_graphs import draw_graph, draw_training_step
from planner.graphs.synthetic.small import make_training_chain
from planner.memory.least_budget import LeastBudget, find_least_budget
from planner.memory.reserved import DeviceTraining
from planner.plans.document import plan_to_dict
from planner.plans.plan import plan_from_dict
from planner.plans.plan_check import check_plan
from planner.plans.solve import solve
from planner.plans.summary import summarize
from planner.progress import Event, Progress
from planner.settings.counted_memory import CountedMemory
from planner.show.report.describe import plan_data, plan_text
from planner.solvers import clock
from planner.solvers.addresses.solve import solve as solve_addresses
from planner.solvers.clock import Clock, WallClock, measure_rest
from planner.solvers.order.reorder import find_order
from planner.solvers.registry import get_solver
from planner.solvers.request import Request
from planner.solvers.result import Ending, Result, Status
from planner.solvers.tolerance import WIDENING, Tolerance
from planner.solvers.windows import driver
from planner.solvers.windows.strategies.first_schedules import EvictionRules, KeepEverything
from tests.support.budgets import budget_at
from tests.support.graphs.options import on_devices
from tests.support.solvers.answers import script_solver


@pytest.fixture
def graph() -> Graph:
    return make_training_chain(6)


def test_plan_records_its_graph_budget_peak_and_gap(graph: Graph) -> None:
    plan = planner.solve(graph, "80%")
    peak_bytes = simulate(graph, keep_everything(graph)).peak_bytes
    assert plan.graph == summarize(graph)
    assert plan.graph.keep_everything_peak_bytes == peak_bytes
    assert plan.budget_bytes == int(0.8 * peak_bytes)
    assert simulate(graph, plan.schedule).peak_bytes == plan.peak_bytes <= plan.budget_bytes
    assert plan.status == "optimal"
    assert plan.solver == "windows"
    assert plan.overhead > 0
    assert plan.gap <= 1e-3


def test_a_budget_is_bytes_or_text(graph: Graph) -> None:
    peak_bytes = summarize(graph).keep_everything_peak_bytes
    for budget in (peak_bytes, f"{peak_bytes}B", "100%"):
        assert planner.solve(graph, budget, solver="keep-everything").budget_bytes == peak_bytes


@pytest.mark.parametrize("budget", [0, -1, True, 8.5, None, "8", ""])
def test_invalid_budget_raises(budget: Any, graph: Graph) -> None:
    with pytest.raises(BudgetError, match="budget"):
        planner.solve(graph, budget)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"solver": "magic"}, "there is no solver 'magic': `planner solvers` lists them all"),
        ({"tolerance": -1.0}, "tolerance is -1.0: must be"),
        ({"tolerance": float("nan")}, "tolerance is nan: must be"),
        ({"time_limit_s": 0.0}, "time limit is 0.0: must be"),
        ({"time_limit_s": float("inf")}, "time limit is inf: must be"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], said: str, graph: Graph) -> None:
    with pytest.raises(PlannerError, match=said):
        planner.solve(graph, "80%", **options)


def test_a_budget_that_nothing_meets_is_an_error(graph: Graph) -> None:
    with pytest.raises(InfeasibleError, match=r"is below ") as refused:
        planner.solve(graph, 1)
    said = re.search(r" A schedule is known for (\d+) B\.", str(refused.value))
    known_bytes = int(said[1])
    assert planner.solve(graph, known_bytes).peak_bytes <= known_bytes
    with pytest.raises(LimitError, match="keeping everything needs"):
        planner.solve(graph, "80%", solver="keep-everything")


@pytest.mark.parametrize("unit_bytes", [1_234_567, 1_233_333, 1_011])
def test_a_budget_that_an_error_names_suffices(unit_bytes: int, graph: Graph) -> None:
    scaled = replace(graph, tensors=tuple(replace(t, size_bytes=t.size_bytes * unit_bytes) for t in graph.tensors))
    with pytest.raises(InfeasibleError) as refused:
        planner.solve(scaled, unit_bytes)
    named = re.search(r"A schedule is known for ([\d.]+ .?B)", str(refused.value))
    plan = planner.solve(scaled, named[1])
    assert plan.peak_bytes <= plan.budget_bytes < 1.01 * plan.peak_bytes


@pytest.mark.parametrize("budget", [2**63 - 1, 2**63, 10**39, "1e30GB", "1e30%"])
@pytest.mark.parametrize("solver", ["windows", "checkmate", "dtr"])
def test_a_budget_of_any_size_is_one(budget: str | int, solver: str, graph: Graph) -> None:
    plan = planner.solve(graph, budget, solver=solver)
    assert (plan.budget_bytes, plan.status, plan.time_s) == (2**63 - 1, "optimal", graph.time_s)
    assert plan_from_dict(plan_to_dict(plan)) == plan


def test_a_graph_that_cannot_be_added_up_is_refused(graph: Graph) -> None:
    large = Graph(graph.ops, tuple(replace(t, size_bytes=2**61) for t in graph.tensors), graph.kept)
    with pytest.raises(GraphError, match=rf"sum to {2**61 * len(graph.tensors)} bytes: must be below 2\^63"):
        planner.solve(large, "80%")
    slow = Graph(tuple(replace(op, time_s=1e308) for op in graph.ops), graph.tensors, graph.kept)
    with pytest.raises(GraphError, match="the times of its ops sum to inf s"):
        planner.solve(slow, "80%")


def test_time_limit_bounds_the_search_for_a_feasible_budget(graph: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped: list[bool] = []

    def least(graph: Graph, memory: CountedMemory, *, should_stop: Callable[[], bool], **settings: Any) -> LeastBudget:
        began = time.monotonic()
        while not (ended := should_stop()) and time.monotonic() < began + 0.5:
            time.sleep(0.01)
        stopped.append(ended)
        return find_least_budget(graph, memory, **settings)

    monkeypatch.setattr("planner.memory.known_budgets.find_least_budget", least)
    for limit_s in (0.25, 3600.0):
        with pytest.raises(InfeasibleError, match="A schedule is known for"):
            planner.solve(graph, 1, time_limit_s=limit_s)
    assert stopped == [True, True, False, False]  # without and with offloading


def test_the_time_limit_holds_for_the_order_and_for_the_solves_together(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, budget_bytes = draw_graph(350, 12), 27  # which fits in program order only
    given: list[tuple[str, float]] = []

    def order(graph: Graph, clock: Clock, should_stop: object = None) -> Reordering:
        given.append(("order", measure_rest(clock)))
        found = find_order(graph)
        clock.spend(10.0)
        return found

    def solve(request: Request) -> Result:
        given.append(("solve", measure_rest(request.clock)))
        found = get_solver("windows")(replace(request, clock=WallClock()))
        request.clock.spend(12.0)
        return replace(found, graph=request.graph)

    monkeypatch.setattr("planner.solvers.order.solve.find_order", order)
    monkeypatch.setattr("planner.memory.allocated_budget.get_solver", lambda _: solve)
    plan = planner.solve(graph, budget_bytes, work_limit=60.0, reorder=True)
    assert given == [("order", 15.0), ("solve", 50.0), ("solve", 38.0)]
    assert plan.settings["reordered"] is False
    given.clear()
    planner.solve(graph, budget_bytes, work_limit=11.0, reorder=True)
    assert given == [("order", 2.75), ("solve", 1.0), ("solve", -11.0)]


def test_where_time_is_up_nothing_is_said_of_other_budgets(graph: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    def solve(request: Request) -> Result:
        request.clock.spend(100.0)
        return get_solver("windows")(request)

    monkeypatch.setattr("planner.memory.allocated_budget.get_solver", lambda _: solve)
    monkeypatch.setattr("planner.memory.known_budgets.find_least_budget", None)
    with pytest.raises(InfeasibleError, match=r"is below .*lower the batch size\.$"):
        planner.solve(graph, 1, work_limit=20.0)


def test_options_and_callbacks_reach_the_solver(graph: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []

    def solve(request: Request) -> Result:
        seen.extend((request.budget_bytes, request.is_interrupted(), request.settings))
        request.tell("failing", None, None)
        return Result(request.graph, request.budget_bytes, Status.ERROR, None, None, "failing", 1.0, message="out of luck")

    script_solver(monkeypatch, "failing", solve)
    with pytest.raises(PlannerError, match="the solver failing failed: out of luck"):
        planner.solve(
            graph, 99, solver="failing", tolerance=0.5, time_limit_s=7, on_progress=seen.append, should_stop=lambda: True
        )
    assert [told.event for told in seen if isinstance(told, Progress)] == [Event.BEGIN, Event.ADVANCE, Event.FAILED]
    assert [given for given in seen if not isinstance(given, Progress)] == [99, True, {"tolerance": 0.5, "time_limit_s": 7}]


@pytest.mark.parametrize(
    ("options", "passed"), [({}, WIDENING), ({"tolerance": 0.3}, Tolerance(((0.0, 0.3),))), ({"tolerance": WIDENING}, WIDENING)]
)
def test_the_tolerance_reaches_the_solver(
    options: dict[str, Any], passed: object, graph: Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[object] = []

    def solve(request: Request) -> Result:
        seen.append(request.tolerance)
        return Result(request.graph, request.budget_bytes, Status.LIMIT, None, None, "seeing", 1.0)

    script_solver(monkeypatch, "seeing", solve)
    with pytest.raises(LimitError):
        planner.solve(graph, 99, solver="seeing", **options)
    assert seen == [passed]


def test_the_bound_is_said_to_be_of_the_class_that_was_searched(graph: Graph) -> None:
    exact = plan_text(planner.solve(graph, "80%"))
    reference = plan_text(planner.solve(graph, "80%", solver="checkmate"))
    assert "takes each op first in program order, is faster" in exact
    assert "takes each op at most once per stage, in program order, is faster" in reference


def test_a_plan_that_promises_peaks_of_pools_that_are_not_there(graph: Graph) -> None:
    plan = planner.solve(graph, "80%")
    check_plan(graph, plan)
    with pytest.raises(MismatchError, match=r"the plan says peaks of \{'host': 1\} in other pools than the device's"):
        check_plan(graph, replace(plan, pool_peaks_bytes={"host": 1}))


def test_graph_with_placement_is_solved_by_windows_and_xengine(tmp_path: Path) -> None:
    graph = make_training_chain(3)
    write_graph(on_devices(graph, OtherDevice("second", tuple(op.time_s / 4 for op in graph.ops), 8.0)), tmp_path / "graph.json")
    offered = read_graph(tmp_path / "graph.json")
    plan = planner.solve(offered, "100%", solver="xengine-overlapped", time_limit_s=10)
    assert plan.graph.ops == len(graph.ops) and plan.time_s < graph.time_s
    assert plan.pool_peaks_bytes["second"] > 0
    assert plan.recomputed == 0 < plan.copied
    assert f"0 ops recomputed, {plan.copied} copies and ops on other devices" in plan_text(plan)
    assert isinstance(plan.settings["serial_s"], float) and plan.time_s <= plan.settings["serial_s"]
    best = planner.solve(offered, "100%", work_limit=1.0)
    assert best.solver == "windows" and best.time_s <= plan.time_s * (1 + 1e-3) and best.pool_peaks_bytes["second"] > 0


def with_gradients(graph: Graph) -> Graph:
    """The graph with its kept tensors but the loss as gradients."""
    loss = min(graph.kept)
    kinds = {t: Kind.GRADIENT for t in graph.kept if t != loss}
    return replace(graph, tensors=tuple(replace(t, kind=kinds.get(t.id, t.kind)) for t in graph.tensors))


@pytest.mark.parametrize("budget", ["90%", "70%", "60%"])
def test_step_in_an_arena_is_within_its_budget(budget: str) -> None:
    graph = with_gradients(draw_training_step(3, 12))
    plan = solve(graph, budget, arena=True, work_limit=20.0)
    assert plan.predicted_bytes == graph.static_bytes + plan.arena_bytes + plan.outside_arena_bytes
    assert plan.predicted_bytes <= plan.budget_bytes
    assert plan.outside_arena_bytes == graph.tensors[min(graph.kept)].size_bytes  # the loss
    inside = [b for b in buffers_of(graph, plan.schedule, alignment=64) if b.size >= 1024]
    assert solve_addresses(inside, plan.arena_bytes, work_limit=20.0).offsets is not None


def test_arena_is_never_faster_than_the_same_budget_without() -> None:
    graph = with_gradients(draw_training_step(5, 10))
    within, beyond = (solve(graph, "60%", arena=flag, work_limit=20.0) for flag in (True, False))
    assert within.time_s >= beyond.time_s * (1 - 1e-3)
    assert beyond.arena_bytes is None


def test_max_overhead_with_arena_raises() -> None:
    graph = draw_training_step(1, 4)
    with pytest.raises(UsageError, match="max_overhead"):
        solve(graph, max_overhead=0.1, arena=True)


# Takes minutes to be solved to the last bit.
GRAPH = draw_training_step(2, 80)
BUDGET = budget_at(GRAPH, 0.25)


def test_a_gap_within_a_wide_tolerance_is_not_called_optimal() -> None:
    plan = planner.solve(GRAPH, BUDGET, tolerance=5.0, work_limit=5.0, reorder=False)
    assert 1e-3 < plan.gap <= 5.0
    assert plan.status is Status.WITHIN
    said = f"{plan}\n{plan_text(plan)}"
    assert "optimal" not in said and "the gap is within the tolerance" in said and "tolerance 500%" in said
    assert planner.solve(GRAPH, "100%", tolerance=5.0, reorder=False).status is Status.OPTIMAL  # nothing is recomputed


def test_the_status_follows_from_gap_and_tolerance() -> None:
    plan = planner.solve(GRAPH, BUDGET, tolerance=5.0, work_limit=5.0, reorder=False)
    close = replace(plan, bound_s=plan.time_s / 1.0005)
    assert close.status is Status.OPTIMAL
    assert replace(close, settings=replace(close.settings, tolerance=1e-4)).status is Status.FEASIBLE
    assert replace(close, bound_s=plan.time_s / 7).status is Status.FEASIBLE
    assert replace(close, bound_s=None).status is Status.FEASIBLE
    written = plan_to_dict(plan)
    assert written["status"] == "within tolerance" and plan_from_dict(written).status is Status.WITHIN
    with pytest.raises(MismatchError, match=r"says that it is within tolerance, but its gap of .* is over the tolerance"):
        plan_from_dict({**written, "bound_s": plan.time_s / 7})


def test_a_solve_that_reaches_its_limit_says_so() -> None:
    plan = planner.solve(GRAPH, BUDGET, tolerance=0.0, work_limit=0.5, reorder=False)
    assert (plan.status, plan.ended) == (Status.FEASIBLE, Ending.LIMIT)
    assert "the limit was reached: a longer one may lower the gap" in plan_text(plan)
    assert plan_from_dict(plan_to_dict(plan)) == plan
    assert plan_data(plan)["ended"] == "limit"


def test_a_solve_that_is_stopped_says_so() -> None:
    found: list[object] = []
    plan = planner.solve(
        GRAPH, BUDGET, tolerance=0.0, work_limit=100.0, reorder=False, on_plan=found.append, should_stop=lambda: bool(found)
    )
    assert (plan.status, plan.ended) == (Status.FEASIBLE, Ending.STOPPED)
    assert "it was stopped early" in str(plan)


def test_a_solve_with_nothing_left_to_try_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    few = tuple(stage for stage in driver.STAGES if stage.strategy in (KeepEverything, EvictionRules))
    monkeypatch.setattr(driver, "STAGES", few)
    plan = planner.solve(GRAPH, BUDGET, tolerance=0.0, work_limit=100.0, reorder=False)
    assert (plan.status, plan.ended) == (Status.FEASIBLE, Ending.EXHAUSTED)
    assert "nothing was left to try: more time is of no use" in plan_text(plan)


@pytest.mark.parametrize(
    ("device", "asked"),
    [
        ("cpu", {"max_overhead": 0.2, "reorder": False}),  # several solves
        ("h200", {"budget": "90%"}),  # what is reserved for the schedule comes after them
    ],
)
def test_the_seconds_are_those_of_the_whole_call(device: str, asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    graph = replace(draw_training_step(9, 30), provenance={"device": device})
    ticks = itertools.count()
    monkeypatch.setattr(clock.time, "monotonic", lambda: float(next(ticks)))
    predict = DeviceTraining.predict
    monkeypatch.setattr(DeviceTraining, "predict", lambda *a, **k: [next(ticks) for _ in range(9)] and predict(*a, **k))
    began = next(ticks)
    plan = planner.solve(graph, tolerance=0.5, work_limit=2.0, **asked)
    assert next(ticks) - began - 3 <= plan.seconds < next(ticks) - began
