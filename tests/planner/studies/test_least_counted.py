"""The least budget of reserved memory: a schedule that reserves less than the one that needs the fewest allocated bytes."""

from dataclasses import replace

import pytest

from graphs.ir import Graph
from graphs.simulate import simulate
from graphs.synthetic.random_graphs import random_training_step
from planner.memory import CountedMemory
from planner.reserved import counted_bytes
from planner.studies.frontier import Frontier
from planner.studies.least_counted import least_counted
from solvers.clock import WorkClock
from solvers.least import LeastBudgetBracket, least_budget
from solvers.order.reorder import in_program_order
from solvers.result import Status

PRECISION = 0.01


def on_a_gpu(seed: int) -> Graph:
    return replace(random_training_step(seed, 8), provenance={"device": "h200"})


def bracket_of(graph: Graph, memory: CountedMemory) -> tuple[Frontier, LeastBudgetBracket]:
    known = Frontier(in_program_order(graph), 0.01, memory)
    return known, least_counted(known, WorkClock(6.0), precision=PRECISION)


@pytest.mark.parametrize(
    "memory", [CountedMemory.RESERVED, pytest.param(CountedMemory.DEVICE_EXPANDABLE, marks=pytest.mark.slow)]
)
def test_least_budget_bracket_is_in_counted_memory(memory: CountedMemory) -> None:
    graph = on_a_gpu(1)
    known, found = bracket_of(graph, memory)
    assert found.proved_bytes <= counted_bytes(graph, found.schedule, memory) == found.found_bytes
    assert found.proved_bytes >= least_budget(graph, clock=WorkClock(2.0)).proved_bytes
    assert known.point(found.found_bytes, None).schedule == found.schedule
    assert known.point(found.proved_bytes - 1, None).status is Status.INFEASIBLE


def test_another_schedule_than_that_of_least_peak_reserves_less() -> None:
    graph = on_a_gpu(25)
    _, found = bracket_of(graph, CountedMemory.RESERVED)
    least = least_budget(graph, clock=WorkClock(6.0), precision=PRECISION)
    peaks = [simulate(graph, schedule).peak_bytes for schedule in (found.schedule, least.schedule)]
    assert found.found_bytes < 0.9 * counted_bytes(graph, least.schedule, CountedMemory.RESERVED) and peaks[0] > peaks[1]
    assert bracket_of(graph, CountedMemory.RESERVED)[1] == found


def test_least_counted_of_allocated_memory_equals_the_least_budget() -> None:
    graph = on_a_gpu(2)
    _, found = bracket_of(graph, CountedMemory.ALLOCATED)
    assert found == least_budget(graph, clock=WorkClock(6.0), precision=PRECISION)


def test_stopped_search_returns_a_valid_bracket() -> None:
    graph = on_a_gpu(25)
    known = Frontier(in_program_order(graph), 0.01, CountedMemory.RESERVED)
    found = least_counted(known, WorkClock(6.0), precision=PRECISION, should_stop=lambda: True)
    assert counted_bytes(graph, found.schedule, CountedMemory.RESERVED) == found.found_bytes >= found.proved_bytes
