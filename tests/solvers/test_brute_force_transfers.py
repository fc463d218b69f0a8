"""The exact solver with transfers and other devices, against all schedules of small graphs."""

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from planner.capture.options import apply_options
from planner.graphs.clocks import find_results_elsewhere
from planner.graphs.ir import Graph, Phase
from planner.graphs.options import remove_options
from planner.graphs.options.gather import OVERLAP, Shard, Unit, insert_units
from planner.graphs.options.offload import OFFLOAD
from planner.graphs.options.surroundings import Link, Surroundings
from planner.graphs.options.transfers import OptionBuilder
from planner.graphs.pools import COLLECTIVES
from planner.graphs.schedule import keep_everything
from planner.graphs.simulate import simulate
from planner.graphs.synthetic.draft import Draft
from planner.graphs.synthetic.random_graphs import draw_graph, draw_options, draw_overwriting
from planner.solvers.bounds import bound_least_budget
from planner.solvers.clock import WallClock, WorkClock
from planner.solvers.highs import solve_program
from planner.solvers.highs.program import Answer, Outcome
from planner.solvers.pass_ends import add_pass_ends
from planner.solvers.problem import OBJECTIVE_SCALE, Problem, build_problem
from planner.solvers.request import Request
from planner.solvers.result import Status
from planner.solvers.tolerance import Tolerance
from planner.solvers.windows import solve
from planner.solvers.windows.relaxation.discretization import Discretization
from planner.solvers.windows.relaxation.models import build_relaxation
from tests.support.graphs.collective_costs import build_cost
from tests.support.graphs.options import check_by_both_judges, in_two_passes, random_placement
from tests.support.graphs.random_choices import BESIDE, any_schedule, around, found_in_a_step
from tests.support.marks import slow
from tests.support.solvers.answers import TOLERANCE, Case, ask, check_answers, check_models
from tests.support.solvers.brute_force_placement import fastest_overlapped
from tests.support.solvers.brute_force_transfers import fastest_with_transfers

RATES = (1.0, 2.0, 4.0)


def draw_units(draw: random.Random, ops: int) -> Graph:
    """Return a program of `ops` ops that read two units of parameters, one of which may have gradients, with collectives."""
    draft = Draft()
    units = [[draft.add_static(f"p{u}.{i}", draw.randint(1, 6)) for i in range(draw.choice((1, 1, 2)))] for u in range(2)]
    made: list[int] = []
    for i in range(ops):
        parameters = units[i % 2] if i < 2 else draw.choice(units)
        inputs = [*draw.sample(made[-3:], min(len(made), draw.choice((0, 1, 1, 2)))), *draw.sample(parameters, 1)]
        sizes = [draw.randint(1, 8) for _ in range(draw.choice((1, 1, 2)))]
        made += draft.add_op(
            f"op{i}",
            inputs,
            sizes,
            time_s=float(draw.randint(1, 9)),
            workspace_bytes=draw.choice((0, 0, 3)),
            phase=Phase.BACKWARD,
        )
    graph = draft.build_graph([])
    read = [[t for t in unit if graph.consumers[t]] for unit in units]

    def describe(u: int, gradients: tuple[int, ...]) -> Unit:
        cost = build_cost(float(draw.randint(1, 8)), draw.choice((0, 2, 4)))
        reduction = build_cost(float(draw.randint(1, 6)), draw.choice((0, 2))) if gradients else None
        return Unit(f"u{u}", tuple(Shard(t, 1, graph.tensors[t].size_bytes) for t in read[u]), cost, gradients, 2, reduction)

    last = graph.ops[-1].outputs[:1] if draw.random() < 0.7 else ()
    kept = [] if last else [made[-1]]
    whole = insert_units(graph, [describe(0, last), describe(1, ())], kept).graph
    return replace(whole, ops=tuple(replace(op, phase=Phase.FORWARD) for op in whole.ops))  # one pass: transfers end with it


def draw_link(draw: random.Random) -> Surroundings:
    host_bytes = draw.choice((None, None, draw.randint(3, 20)))
    return Surroundings(Link(draw.choice(RATES), draw.choice(RATES), draw.choice((0.0, 0.0, 0.5))), host_bytes)


def draw_copies(draw: random.Random) -> Graph:
    program = draw_graph(draw.randint(0, 10**6), draw.randint(3, 4))
    if draw.random() < 0.5:
        program = draw_overwriting(program, draw)
    return OFFLOAD.add_to(program, draw_link(draw))


def draw_copies_and_options(draw: random.Random) -> Graph:
    graph = draw_options(draw.randint(0, 10**6), draw.randint(2, 4), 2)
    if draw.random() < 0.5:
        graph = draw_overwriting(graph, draw)
    return OFFLOAD.add_to(graph, draw_link(draw))


def draw_collectives(draw: random.Random) -> Graph:
    return OVERLAP.add_to(draw_units(draw, draw.randint(2, 4)), Surroundings())


def draw_collectives_and_copies(draw: random.Random) -> Graph:
    graph = OVERLAP.add_to(draw_units(draw, draw.randint(2, 3)), Surroundings())
    return OFFLOAD.add_to(graph, Surroundings(Link.even(draw.choice(RATES))))


def draw_collectives_and_options(draw: random.Random) -> Graph:
    graph = draw_collectives(draw)
    replaced = draw.choice([op for op in graph.program if not op.is_transfer])
    time_s, workspace_bytes = replaced.time_s + draw.randint(-3, 3), draw.choice((0, 0, 2))
    instead = replace(replaced, name="instead", time_s=max(0.0, time_s), workspace_bytes=workspace_bytes)
    builder = OptionBuilder(graph)
    builder.add_op(replace(instead, optional=True, replaces=(replaced.id,)))
    return builder.build_graph()


# What is drawn, seeds, and the shares of feasible graphs that are solved as fast, and faster than without optional ops. Of copies
# alone only few are: something goes to the host and comes back at once, for only then may it be written over.
KINDS: tuple[tuple[Callable[[random.Random], Graph], range, float, float], ...] = (
    (draw_copies, range(50, 60), 0.8, 0.0),
    (draw_copies_and_options, range(10, 16), 0.8, 0.0),
    (draw_collectives, range(30), 0.9, 0.3),
    (draw_collectives_and_copies, range(8, 28), 0.9, 0.3),
    (draw_collectives_and_options, range(6), 0.9, 0.3),
)
SLOW = {
    draw_copies: [range(first, first + 50) for first in (*range(0, 150, 50), *range(1000, 4000, 50))],
    draw_copies_and_options: [range(first, first + 100) for first in range(1000, 3000, 100)],
    draw_collectives: [range(first, first + 50) for first in range(100, 600, 50)],
    draw_collectives_and_copies: [range(first, first + 50) for first in range(100, 250, 50)],
    draw_collectives_and_options: [range(first, first + 50) for first in range(100, 300, 50)],
}


def case(make: Callable[[random.Random], Graph], seed: int) -> Case | None:
    """None where a graph has too many schedules to try, or nothing to offload."""
    draw = random.Random(seed)
    graph = make(draw)
    if len(graph.pools) > 1 and not build_problem(graph, 1).round_trips:
        return None
    program = remove_options(graph)
    least = bound_least_budget(graph).budget_bytes
    peak = simulate(program, keep_everything(program)).peak_bytes
    room = max(0, (1.3 if COLLECTIVES in graph.streams else 1.0) * peak - least)
    budget = max(1, least - (draw.random() < 0.15) + round(room * draw.random() ** 2))
    try:
        return Case(seed, graph, budget, fastest_with_transfers(graph, budget, most=100_000))
    except TimeoutError:
        return None


@pytest.mark.parametrize(
    ("make", "seeds", "met_share", "gained_share"),
    [
        *KINDS,
        *slow(*((make, seeds, *rest) for make, _, *rest in KINDS for seeds in SLOW[make])),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_schedules_and_bounds_with_transfers_agree_with_brute_force(
    make: Callable[[random.Random], Graph], seeds: range, met_share: float, gained_share: float
) -> None:
    found = [one for seed in seeds if (one := case(make, seed)) is not None]
    assert len(found) > len(seeds) / 3
    feasible, met, gained = check_answers(found)
    assert met >= met_share * feasible
    assert gained > 0 and gained >= gained_share * feasible
    assert sum(check_models(one, may_fail=True) for one in found) >= 0.4 * len(found)


@pytest.mark.slow
def test_tensors_without_readers_are_not_offloaded() -> None:
    """A plain graph that is committed to may lack what reads a tensor that may go to the host."""
    one = case(draw_copies_and_options, 2166)
    result = solve(ask(one.graph, one.budget_bytes, tolerance=TOLERANCE, time_limit_s=2))
    assert result.schedule is not None and result.message == ""


def test_no_row_makes_the_main_device_wait_for_a_gradient_that_only_a_reduction_lacks() -> None:
    """Were the first gradient offloaded, it could come back beside the last op, and the reduction would run after that."""
    draft, cost = Draft(), build_cost(1.0, 0)
    p = draft.add_static("p", 1)
    (first,) = draft.add_op("first", [p], [4], time_s=9.0, phase=Phase.BACKWARD)
    draft.add_op("peek", [first], [1], time_s=6.0, phase=Phase.BACKWARD)
    (large,) = draft.add_op("large", [], [1], time_s=5.0, workspace_bytes=6, phase=Phase.BACKWARD)
    (second,) = draft.add_op("second", [large], [1], time_s=1.0, phase=Phase.BACKWARD)
    (last,) = draft.add_op("last", [large], [1], time_s=9.0, phase=Phase.BACKWARD)
    unit = Unit("u", (Shard(p, 1, 1),), cost, (first, second), 1, cost)
    program = OVERLAP.add_to(insert_units(draft.build_graph([]), [unit], [last]).graph, Surroundings())
    graph = OFFLOAD.add_to(program, Surroundings(Link.even(1.0)))
    for budget in (10, 12):
        check_models(Case(budget, graph, budget, fastest_with_transfers(graph, budget)))


CLOSE = 1e-6
SEEDS = [
    range(30),
    *slow(*(range(first, first + 100) for first in range(100, 1000, 100))),
]


def optimum(graph: Graph, budget_bytes: int) -> float | None:
    """The least makespan, None if nothing fits.

    Raises:
        TimeoutError: there are too many schedules.
    """
    return fastest_overlapped(graph, budget_bytes, most=20_000)


def relax(problem: Problem) -> Iterator[tuple[tuple[int, ...], Answer]]:
    """Solve the relaxation in one window, and in a window of each place."""
    last = problem.places.last
    for ends in ((problem.ops - 1,), tuple(sorted(set(last)))):
        program = build_relaxation(problem, Discretization(ends, places=last)).program
        yield ends, solve_program(program, clock=WallClock(30.0), absolute_gap=0.0)


def check_result(graph: Graph, budget: int, expected: float | None, seed: int, seen: Counter[str]) -> None:
    """Solve, and check schedule and bound beside the least makespan; count how it ended in `seen`."""
    result = solve(Request(graph, budget, Tolerance.of(CLOSE), WorkClock(0.5)))
    assert result.status is not Status.ERROR and not (result.message and result.schedule), seed
    if expected is None:
        assert result.schedule is None, seed
        seen[str(result.status)] += 1
        return
    assert result.status is not Status.INFEASIBLE, seed
    assert result.bound_s is not None and result.bound_s <= expected + CLOSE, seed
    if result.schedule is None or result.time_s is None:
        return
    check_by_both_judges(graph, result)
    assert result.time_s >= expected - CLOSE, seed
    if result.status is Status.OPTIMAL:
        assert result.time_s <= expected + 2 * CLOSE, seed
        seen["optimal"] += 1
    seen["placed"] += any(graph.ops[op].replaces for op in result.schedule.computed)


@pytest.mark.parametrize("seeds", SEEDS, ids=str)
def test_relaxations_in_one_window_and_in_all_are_no_higher_than_the_best_schedule(seeds: range) -> None:
    seen: Counter[str] = Counter()
    for seed in seeds:
        graph, budget = random_placement(seed, 2 + seed % 2)
        try:
            expected = optimum(graph, budget)
        except TimeoutError:
            continue
        problem = build_problem(add_pass_ends(graph).graph, budget)
        for ends, answer in relax(problem):
            if answer.outcome is Outcome.INFEASIBLE:
                assert expected is None, (seed, ends)
                seen["proved infeasible"] += 1
                continue
            if expected is not None:
                bound_s = problem.base_s * (1 + answer.bound / OBJECTIVE_SCALE)
                assert bound_s <= expected * (1 + CLOSE) + CLOSE, (seed, ends)
                seen["feasible"] += 1
                seen["exact"] += bound_s >= expected - CLOSE
    assert seen["proved infeasible"] >= 2 and 2 * seen["exact"] >= seen["feasible"] >= len(seeds), seen


@pytest.mark.parametrize("seeds", [range(1000, 1010), *slow(range(1000, 1030))], ids=str)
def test_solve_with_placement_agrees_with_brute_force(seeds: range) -> None:
    seen: Counter[str] = Counter()
    for seed in seeds:
        graph, budget = random_placement(seed, 3)
        try:
            expected = optimum(graph, budget)
        except TimeoutError:
            continue
        check_result(graph, budget, expected, seed, seen)
    assert seen["infeasible"] >= 1 and min(seen["optimal"], seen["placed"]) >= 0.4 * len(seeds), seen


@pytest.mark.slow
def test_results_of_the_forward_pass_come_before_the_backward_pass() -> None:
    """The judge lets the main device wait for them, as the program does: proved bounds are no higher than its times."""
    seen: Counter[str] = Counter()
    for seed in range(2000, 2040):
        graph, budget = random_placement(seed, 3)
        graph = in_two_passes(graph)
        early, _ = find_results_elsewhere(graph)
        if not early:
            continue
        try:
            expected = optimum(add_pass_ends(graph).graph, budget)
        except TimeoutError:
            continue
        check_result(graph, budget, expected, seed, seen)
    assert seen["optimal"] >= 8 and seen["placed"] >= 5, seen


def test_schedules_with_all_choices_at_once_are_none_that_a_bound_excludes() -> None:
    compared = 0
    for seed in range(6):
        step = found_in_a_step(seed, 3 + seed % 4)
        graph = apply_options(step, BESIDE, around(step, *(("second", "third") if seed % 3 == 0 else ("second",))))
        schedule = any_schedule(graph, seed)
        # Where several ops are stood for, it is in the place of the last that solvers have the op that does so.
        if any(len(graph.ops[op].replaces) > 1 for op in schedule.computed):
            continue
        judged = simulate(graph, schedule)
        problem = build_problem(add_pass_ends(graph).graph, judged.peak_bytes)
        for ends, answer in relax(problem):
            assert answer.outcome is not Outcome.INFEASIBLE, (seed, ends)
            assert answer.bound <= problem.convert_to_units(judged.time_s - problem.base_s) * (1 + 1e-5) + 1e-3, (seed, ends)
            compared += 1
    assert compared >= 8
