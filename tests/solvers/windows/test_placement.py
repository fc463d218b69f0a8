"""The exact solver on graphs that offer other devices."""

import pytest

from graphs.ir import Graph, Phase
from graphs.options import remove_options
from graphs.options.passes import order_by_passes
from graphs.options.surroundings import Link, OtherDevice, Surroundings
from graphs.schedule import keep_everything
from graphs.simulate import simulate
from graphs.synthetic.draft import Draft
from graphs.synthetic.random_graphs import draw_options
from graphs.synthetic.small import make_training_chain
from planner.capture.options import apply_options
from solvers.clock import WorkClock
from solvers.least import bracket_least_budget, find_least_known
from solvers.registry import get_solver
from solvers.request import Request
from solvers.result import Result, Status
from solvers.tolerance import Tolerance
from solvers.windows import solve
from solvers.windows.search import Search
from solvers.windows.strategies.placement import Placements, Placing
from tests.support.graphs.options import check_by_both_judges, names, on_devices, random_placement, two_branches
from tests.support.solvers.answers import ask

CLOSE = 1e-6


def solved(graph: Graph, budget_bytes: int, work: float = 1.0) -> Result:
    return solve(Request(graph, budget_bytes, Tolerance.of(CLOSE), WorkClock(work)))


def test_devices_work_side_by_side() -> None:
    graph = two_branches()
    result = solved(graph, 100)
    assert (result.time_s, result.status) == (5.5, Status.OPTIMAL)
    assert sum("copy" in name for name in names(graph, result)) == 1
    check_by_both_judges(graph, result)


def test_an_order_is_decoded_once() -> None:
    request = Request(two_branches(), 100, Tolerance.of(CLOSE), WorkClock(1.0))
    placements, spent = Placements(Search.of(request)), []
    a, b, c = sorted(v for v, device in placements.device_ops.runs if not device)
    for device, seconds in ((1, (5.5, 9.5)), (1, (5.5, 9.5)), (0, (9.0, 9.0))):
        begun = request.clock.now
        assert placements.compute_cost(Placing({a: 0, b: device, c: 0})) == (0, *seconds)
        spent.append(request.clock.now - begun)
    assert spent[1] < spent[0] / 2 and spent[1] < spent[2]


def test_a_memory_that_is_a_limit_is_kept() -> None:
    times = {capacity: solved(two_branches(capacity), 100).time_s for capacity in (1, 2, 100)}
    assert times == {1: 9.0, 2: 5.5, 100: 5.5}


def test_the_other_memory_is_of_use_to_a_budget() -> None:
    draft = Draft()
    (a,) = draft.add_op("a", [], [4], time_s=8.0)
    (b,) = draft.add_op("b", [], [1], time_s=4.0, workspace_bytes=4)
    (c,) = draft.add_op("c", [a, b], [1], time_s=2.0)
    graph = on_devices(draft.build_graph([c]), OtherDevice("second", (None, None, 9.0), 4.0))
    # What a has made goes to the other memory while b works, and comes back: 1 s each way, of which b hides neither.
    result = solved(graph, 6)
    assert result.time_s == 16.0 and result.bound_s <= 16.0
    check_by_both_judges(graph, result)


@pytest.mark.slow
def test_windows_is_never_slower_than_xengine() -> None:
    compared = 0
    for seed in range(100, 108):
        graph, budget = random_placement(seed, 3)
        reference = get_solver("xengine-overlapped")(ask(graph, budget, tolerance=CLOSE, time_limit_s=60.0))
        result = solved(graph, budget)
        if reference.time_s is None:
            continue
        assert result.time_s is not None and result.time_s <= reference.time_s + CLOSE, seed
        if result.status is Status.OPTIMAL and reference.bound_s is not None:
            # The reference has fewer schedules.
            assert result.bound_s is not None and result.bound_s <= reference.time_s + CLOSE, seed
        compared += 1
    assert compared >= 4


def long_chain(ops: int) -> Graph:
    """A chain of a training step that a device as fast as the main one stands beside."""
    chain = make_training_chain(ops)
    return on_devices(chain, OtherDevice("second", tuple(op.time_s for op in chain.ops), 50.0))


@pytest.mark.slow
def test_steps_too_large_for_the_reference_are_planned_within_their_budget() -> None:
    graph = long_chain(60)
    program = Graph(graph.program, make_training_chain(60).tensors, graph.kept)
    peak = simulate(program, keep_everything(program)).peak_bytes
    assert get_solver("xengine")(ask(graph, peak)).schedule is None
    for budget in (peak, int(0.6 * peak)):
        alone = solve(ask(program, budget))
        result = solved(graph, budget)
        assert result.time_s <= alone.time_s + CLOSE
        assert result.peak_bytes <= budget
        check_by_both_judges(graph, result)


def test_forward_results_are_on_the_device_at_the_end_of_the_pass() -> None:
    """So the passes of a step need no more memory than its plan."""
    draft = Draft()
    (a,) = draft.add_op("a", [], [4], time_s=9.0)
    (loss,) = draft.add_op("loss", [a], [3], time_s=9.0)
    (b,) = draft.add_op("b", [a], [4], time_s=9.0, phase=Phase.BACKWARD, workspace_bytes=2)
    graph = on_devices(draft.build_graph([loss, b]), OtherDevice("second", (1.0, 1.0, 1.0), 4.0))
    result = solved(graph, 12)
    assert result.schedule is not None and result.time_s < 9.0
    assert simulate(graph, order_by_passes(graph, result.schedule)).peak_bytes == result.peak_bytes


@pytest.mark.slow
def test_placement_combines_with_other_options() -> None:
    better = 0
    for seed in range(3):
        step = draw_options(seed, 5)
        around = Surroundings(Link.even(4.0), 1000, (OtherDevice("second", tuple(op.time_s for op in step.program), 4.0),))
        program = remove_options(step)
        budget = int(0.9 * simulate(program, keep_everything(program)).peak_bytes)
        times = {}
        for options in ((), ("offload",), ("placement",), ("placement", "offload")):
            graph = apply_options(step, options, around)
            result = solved(graph, budget, work=0.3)
            if result.schedule is not None:
                check_by_both_judges(graph, result)
            assert not (result.message and result.schedule), result.message
            assert result.time_s is None or result.bound_s is None or result.bound_s <= result.time_s + CLOSE
            times[options] = float("inf") if result.time_s is None else result.time_s
        assert times["placement", "offload"] <= min(times.values()) + CLOSE, seed
        better += times["placement", "offload"] < times[()] - CLOSE
    assert better >= 1


@pytest.mark.slow
def test_least_budgets_know_the_other_memory() -> None:
    draft = Draft()
    (a,) = draft.add_op("a", [], [8], time_s=1.0)
    (b,) = draft.add_op("b", [a], [8], time_s=1.0)
    (c,) = draft.add_op("c", [b], [1], time_s=1.0)
    graph = on_devices(draft.build_graph([c]), OtherDevice("second", (1.0, 1.0, 1.0), 4.0))
    bracket = bracket_least_budget(graph, clock=WorkClock(2.0))
    assert (bracket.proved_bytes, bracket.found_bytes) == (1, 1)
    # It is too small for what b reads and makes: b runs here.
    tight = on_devices(draft.build_graph(), OtherDevice("second", (1.0, 1.0, 1.0), 4.0, capacity_bytes=15))
    assert simulate(tight, find_least_known(tight, WorkClock(1.0))).peak_bytes == 16


def test_a_schedule_of_little_memory_is_known_without_solving() -> None:
    chain = make_training_chain(8)
    peak = simulate(chain, find_least_known(chain, WorkClock(1.0))).peak_bytes
    # What the last op reads, and what it makes, come to the main device; all else may stay on the other one.
    graph = on_devices(chain, OtherDevice("second", tuple(op.time_s for op in chain.ops), 4.0))
    known = find_least_known(graph, WorkClock(1.0))
    assert simulate(graph, known).peak_bytes < peak and any(graph.ops[op].replaces for op in known.computed)
