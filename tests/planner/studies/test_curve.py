"""Curves: monotone, judged, and the same however they are computed."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, strategies as st

import planner
from planner.cli import argument_types
from planner.graphs.errors import BudgetError, PlannerError, UsageError
from planner.graphs.ir import Graph
from planner.graphs.options.surroundings import OtherDevice
from planner.graphs.reordering import keep_program_order
from planner.graphs.schedule import Schedule, keep_everything
from planner.graphs.simulate import simulate
from planner.graphs.synthetic.random_graphs import draw_graph, draw_training_step
from planner.graphs.synthetic.small import make_training_chain
from planner.memory.reserved import predict_counted_bytes, predict_eager_bytes, predict_reserved_at
from planner.settings.counted_memory import CountedMemory
from planner.settings.option_settings import build_option_settings
from planner.settings.other_devices import DEVICES_KEY, encode_devices
from planner.solvers.clock import WorkClock
from planner.solvers.request import Request, Start
from planner.solvers.result import Ending, Result, SolveSettings, Status
from planner.studies.budget_analysis import advise_graph
from planner.studies.curve import Curve, solve_curve
from planner.studies.curve_table import build_curve_data
from planner.studies.frontier import Frontier, Turn, Turns, divide_evenly, order_outside_in
from planner.studies.settings import StudySettings
from tests.support.cli import chain_of_six
from tests.support.solvers.answers import script_solver


def judged(graph: Graph, found: Curve) -> None:
    """Every row keeps its promises, and from one to the next neither time nor bound rises."""
    for point in found.points:
        if point.schedule is not None:
            simulation = simulate(graph, point.schedule)
            assert (simulation.time_s, simulation.peak_bytes) == (point.time_s, point.peak_bytes)
            assert simulation.peak_bytes <= point.budget_bytes
            assert point.bound_s <= simulation.time_s * (1 + 1e-9)
    for smaller, larger in zip(found.points, found.points[1:], strict=False):
        assert smaller.budget_bytes < larger.budget_bytes
        if smaller.time_s is not None:
            assert larger.time_s <= smaller.time_s
        if smaller.bound_s is not None:
            assert larger.bound_s <= smaller.bound_s


def test_a_curve_of_known_optima_runs_from_the_least_budget_to_the_peak() -> None:
    graph = chain_of_six()
    found = solve_curve(graph, 5)
    judged(graph, found)
    assert found.complete
    assert found.least.exact
    # 12 ops; with 3 kB 10 executions more, with 6 kB 1 more, from 7 kB on none.
    assert [point.budget_bytes for point in found.points] == [3000, 4000, 5000, 6000, 7000]
    assert [point.status for point in found.points] == [Status.OPTIMAL] * 5
    assert (found.points[0].time_s, found.points[3].time_s, found.points[4].time_s) == (22, 13, 12)
    assert found.points[4].seconds is None
    assert found.overhead(found.points[3].time_s) == pytest.approx(1 / 12)


def test_the_least_budget_in_a_table_can_be_asked_for() -> None:
    chain = chain_of_six()
    graph = replace(chain, tensors=tuple(replace(tensor, size_bytes=1001) for tensor in chain.tensors))
    curve, advice = solve_curve(graph, 2), advise_graph(graph, available_bytes=None, device="a device", time_limit_s=1.0)
    for line in (str(curve).splitlines()[1], str(advice).split("\n\n")[1].splitlines()[-1]):
        assert planner.solve(graph, " ".join(line.split()[:2])).peak_bytes == 3003


def test_the_public_curve_is_a_table_and_a_figure() -> None:
    graph = chain_of_six()
    found = planner.curve(graph, ["3000 B", "6kB", 7000], time_limit_s=5)
    assert [(row.budget_bytes, row.overhead) for row in found.rows] == [
        (3000, pytest.approx(10 / 12)),
        (6000, pytest.approx(1 / 12)),
        (7000, 0.0),
    ]
    assert len(str(found).splitlines()) >= 4 and "83.33%" in str(found)
    (axes,) = found.plot().axes
    drawn = [list(line.get_ydata()) for line in axes.lines if line.get_label() == "remat-planner"]
    assert drawn == [pytest.approx([1000 / 12, 100 / 12, 0])]
    assert planner.curve(graph, 3, options=["offload"], link="1GB/s", host_budget="1MB").options == ("offload",)


def on_a_gpu() -> Graph:
    """The chain of six with tensors of 11 MiB, which are in segments of 12 MiB, beside a context of 5 MB."""
    chain = chain_of_six()
    tensors = tuple(replace(t, size_bytes=11 * 2**20) for t in chain.tensors)
    return replace(chain, tensors=tensors, provenance={"device": "h200", "context_bytes": 5_000_000})


@pytest.mark.parametrize("memory", list(CountedMemory))
def test_cuda_percentages_refer_to_and_are_met_in_counted_memory(memory: CountedMemory) -> None:
    graph = on_a_gpu()
    found = solve_curve(graph, ["100%", "80%"], StudySettings(memory=memory, time_limit_s=5.0))
    assert [row.budget_bytes for row in found.rows] == [predict_eager_bytes(graph, memory) * share // 100 for share in (80, 100)]
    assert [row.budget_share for row in found.rows] == pytest.approx([0.8, 1.0])
    for point in found.points:
        assert predict_counted_bytes(graph, point.schedule, memory) <= point.budget_bytes
        assert point.bound_s <= point.time_s
        assert point.reserved_bytes == predict_reserved_at(graph, point.schedule, memory, point.budget_bytes)
    assert {row.memory for row in found.rows} == {str(memory)}
    text = str(found)
    assert memory.taken in text.splitlines()[0].split() and f"budgets count {memory.said}, of which eager PyTorch takes" in text


def test_counted_memory_defaults_by_device() -> None:
    here, there = solve_curve(chain_of_six(), ["100%"]), solve_curve(on_a_gpu(), ["100%"])
    assert (here.memory, there.memory) == (CountedMemory.ALLOCATED, CountedMemory.RESERVED)
    assert "reserved" not in str(here) and "budgets count" not in str(here)
    with pytest.raises(UsageError, match="a model on the CPU"):
        solve_curve(chain_of_six(), ["100%"], StudySettings(memory=CountedMemory.RESERVED))


def test_the_grid_reaches_from_the_least_to_eager_pytorch_in_reserved_memory() -> None:
    graph = on_a_gpu()
    found = solve_curve(graph, 3, StudySettings(time_limit_s=2.0))
    assert found.least.proved_bytes <= found.least.found_bytes == found.points[0].budget_bytes
    assert predict_counted_bytes(graph, found.least.schedule, CountedMemory.RESERVED) == found.least.found_bytes
    assert found.points[-1].budget_bytes == predict_eager_bytes(graph, CountedMemory.RESERVED) == 7 * 12 * 2**20
    assert all(point.schedule is not None for point in found.points)


@pytest.mark.slow
def test_curve_of_two_processes_equals_that_of_one() -> None:
    graph = chain_of_six()
    here, there = solve_curve(graph, 5), solve_curve(graph, 5, StudySettings(jobs=2))
    judged(graph, there)
    assert [(p.budget_bytes, p.status) for p in there.points] == [(p.budget_bytes, p.status) for p in here.points]
    for one, other in zip(here.points, there.points, strict=True):
        assert one.time_s == pytest.approx(other.time_s, rel=2e-3)


@pytest.mark.slow
@given(seed=st.integers(0, 10**6), ops=st.integers(3, 14))
def test_curves_of_random_graphs_keep_their_promises(seed: int, ops: int) -> None:
    graph = draw_graph(seed, ops)
    peak_bytes = simulate(graph, keep_everything(graph)).peak_bytes
    judged(
        graph,
        solve_curve(
            graph, sorted({max(1, peak_bytes * share // 100) for share in (50, 70, 80, 90, 100)}), StudySettings(time_limit_s=5.0)
        ),
    )


@pytest.mark.slow
def test_with_options_there_is_the_curve_without_beside() -> None:
    graph = draw_training_step(5, 30)
    options = build_option_settings(["offload"], link=10e9, host_budget=10**12)
    found = solve_curve(graph, 3, StudySettings(options=options, tolerance=0.02, time_limit_s=1.5))
    assert found.options == ("offload",) and found.without.without is None
    judged(options.apply(graph), found)
    judged(graph, found.without)
    assert found.least.found_bytes < found.without.least.found_bytes
    assert found.without.least.proved_bytes > found.points[0].budget_bytes or found.without.points[0].schedule is None
    for without, point in zip(found.without.points, found.points, strict=True):
        assert without.budget_bytes == point.budget_bytes
        assert without.time_s is None or (point.time_s is not None and point.time_s <= without.time_s)
    assert found.points[1].time_s is not None and found.without.points[1].time_s is not None
    assert build_curve_data(found)["without_options"] == build_curve_data(found.without)
    assert [row.options for row in found.all_rows] == [""] * 3 + ["offload"] * 3
    text = str(found)
    assert text.startswith("recomputing only\n") and "\nwith offload\n" in text
    assert text.count("least feasible budget") == 2
    with pytest.raises(PlannerError, match="the solver 'dtr' recomputes only"):
        solve_curve(graph, 3, StudySettings(options=options), solver="dtr")


def test_curve_supports_schedules_faster_than_the_program() -> None:
    chain = make_training_chain(3)
    faster = OtherDevice("cpu:1", tuple(op.time_s / 4 for op in chain.ops), 8.0)
    graph = replace(chain, provenance={**chain.provenance, DEVICES_KEY: encode_devices([faster])})
    options = build_option_settings(["placement"])
    found = solve_curve(graph, ["80%", "100%"], StudySettings(options=options, time_limit_s=1.0))
    judged(options.apply(graph), found)
    assert found.points[1].time_s < graph.time_s
    assert found.without.points[1].time_s == graph.time_s


def scripted(monkeypatch: pytest.MonkeyPatch, answers: Callable[[Graph, int], Result]) -> list[int]:
    """A solver called "scripted"; returns the budgets it is asked for."""
    asked: list[int] = []

    def solve(request: Request) -> Result:
        asked.append(request.budget_bytes)
        return answers(request.graph, request.budget_bytes)

    script_solver(monkeypatch, "scripted", solve)
    return asked


def test_results_at_one_budget_settle_other_budgets(monkeypatch: pytest.MonkeyPatch) -> None:
    def answers(graph: Graph, budget_bytes: int) -> Result:
        if budget_bytes == 4:
            return Result(graph, 4, Status.INFEASIBLE, None, None, "scripted", 1.0, message="said to be too small")
        return Result(graph, budget_bytes, Status.LIMIT, None, 12.5, "scripted", 1.0, message="no time")

    asked = scripted(monkeypatch, answers)
    found = solve_curve(make_training_chain(6), ["2B", 3, 4, 6, "100%"], solver="scripted")
    # Keeping everything settles the peak of 7 before anything is solved; that 4 is too small settles 3.
    assert asked == [2, 4, 6]
    assert found.complete
    limit, infeasible, optimal = Status.LIMIT, Status.INFEASIBLE, Status.OPTIMAL
    assert [point.status for point in found.points] == [infeasible, infeasible, infeasible, limit, optimal]
    assert [point.bound_s for point in found.points] == [None, None, None, 12.5, 12.0]
    assert [point.time_s for point in found.points] == [None, None, None, None, 12.0]


def test_a_schedule_for_less_serves_more(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = make_training_chain(6)
    five = solve_curve(graph, [5]).points[0]

    def answers(graph: Graph, budget_bytes: int) -> Result:
        if budget_bytes == 5:
            return Result(graph, 5, Status.FEASIBLE, five.schedule, 12.0, "scripted", 1.0)
        return Result(graph, budget_bytes, Status.LIMIT, None, 13.0, "scripted", 1.0, message="no time")

    scripted(monkeypatch, answers)
    found = solve_curve(graph, [5, 6], solver="scripted")
    judged(graph, found)
    assert [point.time_s for point in found.points] == [five.time_s, five.time_s]
    assert [point.bound_s for point in found.points] == [13.0, 13.0]


def test_a_solver_that_fails_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = make_training_chain(6)
    scripted(monkeypatch, lambda g, b: Result(g, b, Status.ERROR, None, None, "scripted", 1.0, message="out of luck"))
    with pytest.raises(PlannerError, match="the solver scripted failed: out of luck"):
        solve_curve(graph, [5], solver="scripted")


def test_stopped_curve_keeps_known_points(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = make_training_chain(6)
    asked = scripted(monkeypatch, lambda g, b: Result(g, b, Status.LIMIT, None, 12.0, "scripted", 1.0, message="no time"))
    found = solve_curve(graph, [4, 5, 6, 7], solver="scripted", should_stop=lambda: bool(asked))
    assert len(asked) == 1
    assert not found.complete
    assert found.points[-1].status is Status.OPTIMAL
    assert [point.status for point in found.points[:-1]] == [Status.LIMIT] * 3


def test_budgets_are_spread_evenly_and_solved_from_the_ends() -> None:
    assert divide_evenly(3, 9, 4) == (3, 5, 7, 9)
    assert divide_evenly(3, 9, 1) == (3,)
    assert divide_evenly(5, 5, 10) == (5,)
    assert divide_evenly(5, 7, 10) == (5, 6, 7)
    for count in range(12):
        assert sorted(order_outside_in(count)) == list(range(count))
    assert list(order_outside_in(5)) == [4, 0, 2, 3, 1]


def turns(budgets: tuple[int, ...], limit: float) -> tuple[Turns, WorkClock]:
    clock = WorkClock(limit)
    graph = make_training_chain(6)
    return Turns(Frontier(keep_program_order(graph), 0.0), budgets, clock=clock, time_limit_s=60.0), clock


def unsolved(budget_bytes: int, bound_s: float, seconds: float) -> Result:
    graph = make_training_chain(6)
    return Result(graph, budget_bytes, Status.LIMIT, None, bound_s, "scripted", seconds, message="no time")


def with_a_gap(schedule: Schedule, ended: Ending | None, seconds: float = 1.0) -> Result:
    """A result for 5 bytes."""
    settings = SolveSettings(windows=[3, 11])
    return Result(make_training_chain(6), 5, Status.FEASIBLE, schedule, 12.0, "scripted", seconds, settings, ended=ended)


def test_every_budget_has_a_short_turn_before_one_has_a_long_one() -> None:
    plan, clock = turns((4, 5, 6), 30.0)
    taken = []
    while (turn := plan.take()) is not None:
        taken.append((turn.budget_bytes, turn.time_limit_s))
        clock.spend(turn.time_limit_s)
        plan.learn(unsolved(turn.budget_bytes, 12.5, turn.time_limit_s))
    assert [budget for budget, _ in taken[:3]] == [6, 4, 5]
    assert taken[0] == (6, 5.0)
    assert sum(limit for _, limit in taken) == pytest.approx(30.0)
    assert all(limit > dict(taken[:3])[budget] for budget, limit in taken[3:]) and len(taken) > 3
    assert plan.finished


@pytest.mark.parametrize("budgets", [(5,), (4, 5), (3, 4, 5)])
def test_all_of_the_time_is_used_while_a_gap_is_left(budgets: tuple[int, ...]) -> None:
    schedule = solve_curve(make_training_chain(6), [5]).points[0].schedule
    plan, clock = turns(budgets, 30.0)
    while (turn := plan.take()) is not None:
        took = turn.time_limit_s if turn.budget_bytes == 5 else 0.1
        clock.spend(took)
        if turn.budget_bytes == 5:
            plan.learn(with_a_gap(schedule, Ending.LIMIT, took))
        else:
            plan.learn(Result(make_training_chain(6), turn.budget_bytes, Status.INFEASIBLE, None, None, "scripted", 0.1))
    assert clock.now == pytest.approx(30.0)
    assert plan.get_point(5).ended is Ending.LIMIT


@pytest.mark.parametrize("ended", [Ending.LIMIT, Ending.EXHAUSTED, Ending.MEMORY, None])
def test_a_turn_goes_on_from_the_last_where_more_time_may_help(ended: Ending | None) -> None:
    schedule = solve_curve(make_training_chain(6), [5]).points[0].schedule
    plan, _ = turns((5,), 30.0)
    assert plan.take().start is None
    plan.learn(with_a_gap(schedule, ended))
    again = plan.take()
    assert (None if again is None else again.start) == (Start(schedule, (3, 11)) if ended is Ending.LIMIT else None)
    assert plan.get_point(5).ended is ended


def test_a_budget_that_settles_soon_leaves_its_time_to_the_others() -> None:
    plan, clock = turns((4, 5), 30.0)
    first = plan.take()
    assert first.budget_bytes == 5
    clock.spend(1.0)
    plan.learn(Result(make_training_chain(6), 5, Status.INFEASIBLE, None, None, "scripted", 1.0, message="too small"))
    assert plan.take() is None  # 4 is infeasible too
    assert plan.finished


def test_without_a_limit_for_all_every_budget_has_one_turn() -> None:
    plan, _ = turns((4, 5, 6), math.inf)
    for budget in (6, 4, 5):
        assert plan.take() == Turn(budget, 60.0)
        plan.learn(unsolved(budget, 12.5, 60.0))
    assert plan.take() is None


@pytest.mark.parametrize(("ended", "said"), [(Ending.EXHAUSTED, "nothing was left"), (Ending.LIMIT, "the limit was reached")])
def test_budgets_with_a_gap_have_a_reason(ended: Ending, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = solve_curve(make_training_chain(6), [5]).points[0].schedule
    scripted(monkeypatch, lambda *_: with_a_gap(schedule, ended, 60.0))
    found = solve_curve(make_training_chain(6), [5, 7], solver="scripted")
    assert f"not proved optimal: 5 B: {said}" in str(found) and "took" in str(found).splitlines()[-1]
    assert ("--total-time-limit" in str(found)) == (ended is Ending.LIMIT)
    assert [row.ended for row in found.rows] == [str(ended), ""]
    assert build_curve_data(found)["seconds"] == found.seconds > 0


def test_budgets_with_a_gap_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = make_training_chain(6)
    five = solve_curve(graph, [5]).points[0]
    scripted(monkeypatch, lambda g, b: Result(g, b, Status.FEASIBLE, five.schedule, 12.0, "scripted", 1.0))
    said: list[str] = []
    text = str(solve_curve(graph, [5, 7], solver="scripted", on_activity=said.append))
    assert "not proved optimal: 5 B\n" in text and "--total-time-limit" in text
    assert any(line.startswith("solving 5 B, for up to 60 s") for line in said)
    assert "not proved" not in str(solve_curve(graph, [5, 7]))


@pytest.mark.parametrize(("budgets", "error"), [([], BudgetError), (0, BudgetError), (["8"], BudgetError), ([0], BudgetError)])
def test_invalid_budgets_raise(budgets: Any, error: type[PlannerError]) -> None:
    with pytest.raises(error, match="budget"):
        solve_curve(make_training_chain(4), budgets)


def test_the_option_is_a_number_or_a_list() -> None:
    assert argument_types.parse_budgets("10") == 10
    assert argument_types.parse_budgets("90%, 8GB") == ("90%", "8GB")
