"""Schedules with all away that is not needed: the least budget that transfers make possible."""

import random

import pytest

from graphs.ir import Graph
from graphs.options.offload import remove_offload
from graphs.simulate import simulate
from graphs.synthetic.draft import Draft
from graphs.synthetic.random_graphs import draw_graph, draw_training_step
from solvers.bounds import bound_least_budget, need_at
from solvers.clock import WorkClock
from solvers.least import bracket_least_budget, find_least_known
from solvers.registry import get_solver
from solvers.result import Status
from solvers.windows.strategies.offloaded_orders import find_least_offloaded
from tests.support.graphs.options import with_trips
from tests.support.solvers.answers import ask
from tests.support.solvers.brute_force_transfers import fastest_with_transfers


def once_each(made: int = 4, size: int = 10) -> Graph:
    """Tensors that cannot be made again, all of them read at the end, the last first; an op of 25 bytes between."""
    draft = Draft()
    tensors = [draft.add_op(f"make{i}", [], [size], recomputable=False)[0] for i in range(made)]
    draft.add_op("between", [], [], workspace_bytes=25)
    for i, t in reversed(list(enumerate(tensors))):
        draft.add_op(f"read{i}", [t], [1])
    return draft.build_graph()


@pytest.mark.parametrize(("host_bytes", "least"), [(None, 25), (40, 25), (39, 26), (30, 35), (12, 53), (0, 65)])
def test_least_budget_depends_on_host_capacity(host_bytes: int | None, least: int) -> None:
    whole = with_trips(once_each(), host_bytes=host_bytes)
    program, offloads = remove_offload(whole)
    assert bound_least_budget(whole).budget_bytes == least
    assert need_at(program, None, offloads).held_bytes == least - 25
    assert bound_least_budget(program).budget_bytes == 65


@pytest.mark.parametrize(("host_bytes", "found"), [(None, 25), (40, 25), (39, 35), (30, 35), (12, 55), (0, 65)])
def test_a_schedule_takes_as_little_where_whole_tensors_can(host_bytes: int | None, found: int) -> None:
    graph = with_trips(once_each(), host_bytes=host_bytes)
    trial = find_least_offloaded(graph, WorkClock(1.0))
    simulation = simulate(graph, trial.schedule)
    assert simulation.peak_bytes == trial.peak_bytes == found
    assert simulation.pool_peaks_bytes[1] == 65 - found


def test_the_host_makes_less_possible_than_recomputing_alone() -> None:
    less = 0
    for seed in range(8):
        program = draw_training_step(seed, 24)
        without = simulate(program, find_least_known(program, WorkClock(0.5))).peak_bytes
        graph = with_trips(program, 1e9)
        simulation = simulate(graph, find_least_known(graph, WorkClock(0.5)))
        assert bound_least_budget(graph).budget_bytes <= simulation.peak_bytes <= without
        less += simulation.peak_bytes < without
    assert less > 0


@pytest.mark.slow
def test_least_offloaded_budget_is_bracketed() -> None:
    exact = 0
    for seed in range(30):
        draw = random.Random(seed)
        program = draw_graph(draw.randint(0, 10**6), draw.randint(3, 4))
        graph = with_trips(program, host_bytes=draw.choice((None, None, draw.randint(3, 20))))
        proved = bound_least_budget(graph).budget_bytes
        found = simulate(graph, find_least_known(graph, WorkClock(0.5))).peak_bytes
        assert proved <= found
        try:
            if proved > 1:
                assert fastest_with_transfers(graph, proved - 1, most=20_000) is None, seed
        except TimeoutError:
            continue
        exact += proved == found
    assert exact > 15


@pytest.mark.slow
def test_the_exact_solver_has_a_schedule_at_the_least_budget() -> None:
    graph = with_trips(draw_training_step(5, 40), 1e9)
    bracket = bracket_least_budget(graph, clock=WorkClock(4.0))
    assert bracket.proved_bytes <= bracket.found_bytes
    result = get_solver("windows")(ask(graph, bracket.found_bytes, time_limit_s=5))
    assert result.schedule is not None and result.peak_bytes <= bracket.found_bytes
    refused = get_solver("windows")(ask(graph, bound_least_budget(graph).budget_bytes - 1))
    assert refused.status is Status.INFEASIBLE
