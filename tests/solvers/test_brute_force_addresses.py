"""Schedules and addresses together against all schedules of small graphs with all addresses."""

import heapq
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, assume, given, settings, strategies as st

from planner.graphs.addresses import Buffer, buffers_of, live_bytes
from planner.graphs.ir import Graph
from planner.graphs.schedule import keep_everything, schedule_of
from planner.graphs.simulate import simulate
from planner.graphs.synthetic.random_graphs import draw_graph
from planner.solvers.addresses.solve import solve as find_addresses
from planner.solvers.arena.needs import ArenaRules, Needs
from planner.solvers.arena.solve import solve_in_arena
from planner.solvers.bounds import bound_least_budget
from planner.solvers.clock import WorkClock
from planner.solvers.request import Request
from planner.solvers.result import Result, SolveProgress, Status
from planner.solvers.windows import solve
from tests.support.marks import slow
from tests.support.solvers.answers import SLACK, TOLERANCE, ask
from tests.support.solvers.brute_force import may_repeat

FEW = settings(max_examples=15, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
MANY = settings(FEW, max_examples=2000)
SEEDS = [5, 8, 9, 23, 29, *slow(0, 3, 12, 15, 19)]
CASES = {
    "seed": st.integers(0, 10**6),
    "ops": st.integers(2, 6),
    "tightness": st.floats(0, 1),
    "alignment": st.sampled_from((1, 1, 2)),
}


def fastest_in_arena(graph: Graph, capacity_bytes: int, alignment: int = 1, most: int = 20_000) -> float | None:
    """Time of the fastest of all schedules with first executions in program order and all addresses; None if none fits.

    With the shortest lifetimes, as nothing is written over an input. An op is not executed again before what it has made is read.

    Raises:
        TimeoutError: more than `most` orders of executions.
    """
    produced = [not t.static for t in graph.tensors]
    queue: list[tuple[float, int, tuple[int, ...]]] = [(0.0, 0, ())]
    tried = 0
    while queue:
        time_s, _, computed = heapq.heappop(queue)
        tried += 1
        if tried > most:
            raise TimeoutError
        buffers = buffers_of(graph, schedule_of(graph, computed), alignment=alignment)
        if live_bytes(buffers) > capacity_bytes or not fit(buffers, capacity_bytes):
            continue
        done = len(set(computed))
        if done == len(graph.ops):
            return time_s
        for op in graph.ops[: done + 1]:
            if op.id < done and not (may_repeat(graph, op.id, done) and _is_read(graph, computed, op.id)):
                continue
            if all(not produced[t] or graph.tensors[t].producers[0] < done for t in op.inputs):
                heapq.heappush(queue, (time_s + op.time_s, -len(computed), (*computed, op.id)))
    return None


def _is_read(graph: Graph, computed: Sequence[int], op: int) -> bool:
    """Whether an output of `op` has been read since it was last executed again."""
    last = max(index for index, other in enumerate(computed) if other == op)
    return op not in computed[:last] or any(
        set(graph.ops[op].outputs) & set(graph.ops[other].inputs) for other in computed[last:]
    )


def fit(buffers: Sequence[Buffer], capacity: int) -> bool:
    """Whether there are addresses for `buffers`, by the exact search, which has tests of its own."""
    result = find_addresses(buffers, capacity, work_limit=20.0)
    assert result.status is not Status.LIMIT
    return result.offsets is not None


def case(seed: int, ops: int, tightness: float) -> tuple[Graph, int]:
    """A graph of few sizes and a budget between the least of any op and keeping everything; tight ones leave gaps."""
    whole = draw_graph(seed, ops)
    tensors = tuple(replace(t, size_bytes=(t.size_bytes + 2) // 3) for t in whole.tensors)
    small = tuple(replace(op, workspace_bytes=(op.workspace_bytes + 2) // 3) for op in whole.ops)
    graph = replace(whole, tensors=tensors, ops=small)
    least = bound_least_budget(graph).budget_bytes
    peak = simulate(graph, keep_everything(graph)).peak_bytes
    return graph, least + round((peak - least) * tightness**2)


def optimum_of(graph: Graph, budget: int, alignment: int) -> float | None:
    try:
        return fastest_in_arena(graph, budget - graph.static_bytes, alignment, most=800)
    except TimeoutError:
        assume(False)
    raise AssertionError


def check_against_brute_force(seed: int, ops: int, tightness: float, alignment: int) -> None:
    graph, budget = case(seed, ops, tightness)
    optimum = optimum_of(graph, budget, alignment)
    rules = ArenaRules(alignment)
    result = solve_in_arena(solve, ask(graph, budget, tolerance=TOLERANCE, time_limit_s=60), rules)
    if optimum is None:
        assert result.status in (Status.INFEASIBLE, Status.LIMIT) and result.schedule is None
        return
    assert result.bound_s <= optimum * (1 + SLACK)
    if result.schedule is None:  # margins do not find every schedule
        assert result.status is Status.LIMIT
        return
    assert result.time_s >= optimum * (1 - SLACK)
    if result.status is Status.OPTIMAL:
        assert result.time_s <= optimum * (1 + TOLERANCE) + SLACK
    needs = Needs.of(graph, result.schedule, rules, budget)
    offsets = needs.find_addresses(WorkClock(20.0)).offsets
    assert offsets.height_bytes <= budget - graph.static_bytes


@FEW
@given(**CASES)
def test_agrees_with_brute_force(seed: int, ops: int, tightness: float, alignment: int) -> None:
    check_against_brute_force(seed, ops, tightness, alignment)


@pytest.mark.slow
@MANY
@given(**CASES)
def test_agrees_with_brute_force_on_many_graphs(seed: int, ops: int, tightness: float, alignment: int) -> None:
    check_against_brute_force(seed, ops, tightness, alignment)


@pytest.mark.parametrize("seed", SEEDS)
def test_margins_find_the_optimum(seed: int) -> None:
    graph, budget = case(seed, 5, 0.9)
    optimum = fastest_in_arena(graph, budget - graph.static_bytes, 2)
    result = solve_in_arena(solve, ask(graph, budget, time_limit_s=20), ArenaRules(2))
    assert result.time_s is not None
    assert result.bound_s <= optimum * (1 + SLACK)
    assert result.time_s == pytest.approx(optimum, rel=SLACK)
    assert result.settings["arena_solves"] > 2
    assert result.settings["arena_bytes"] <= budget - graph.static_bytes


def test_finding_nothing_after_a_fit_is_no_defect() -> None:
    graph, budget = case(3, 5, 0.9)
    solves = 0

    def idle_after_a_fit(request: Request) -> Result:
        nonlocal solves
        solves += 1
        result = solve(request)
        if solves <= 4:  # the third and the fourth fit
            return result
        return replace(result, graph=request.graph, schedule=None, status=Status.LIMIT, message="nothing was found in time")

    result = solve_in_arena(idle_after_a_fit, ask(graph, budget, time_limit_s=20), ArenaRules(2))
    assert result.schedule is not None and result.settings["arena_solves"] > 4
    assert not result.message


def test_the_caller_may_end_a_solve_once_a_schedule_has_addresses() -> None:
    graph, _ = case(3, 5, 0.9)
    everything = keep_everything(graph)
    told: list[SolveProgress] = []

    def unending(request: Request) -> Result:
        assert not request.is_interrupted()
        request.on_schedule(everything, 0.0)
        request.tell("searching", graph.time_s, 0.0)
        assert request.is_interrupted()
        return solve(request)

    budget = 2 * simulate(graph, everything).peak_bytes
    asked = replace(
        ask(graph, budget, time_limit_s=20),
        on_progress=told.append,
        should_stop=lambda: told[-1].best_s is not None,
    )
    result = solve_in_arena(unending, asked, ArenaRules(2))
    assert result.schedule is not None and result.time_s == graph.time_s == told[-1].best_s


def test_a_stopped_solve_places_no_schedule_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, budget = case(3, 5, 0.9)  # its first schedules do not fit
    placed: list[Needs] = []
    find = Needs.find_addresses
    monkeypatch.setattr(Needs, "find_addresses", lambda needs, clock: placed.append(needs) or find(needs, clock))
    result = solve_in_arena(solve, replace(ask(graph, budget), should_stop=lambda: bool(placed)), ArenaRules(2))
    assert result.status is Status.LIMIT and result.schedule is None
    assert len({needs.inside for needs in placed}) == len(placed) > 0
