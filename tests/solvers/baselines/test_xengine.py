"""XEngine's program against all schedules of its class, with its serial sum and with clocks; results of the forward pass."""

from collections import Counter
from dataclasses import replace

import pytest

from planner.graphs.errors import GraphError, ScheduleError
from planner.graphs.ir import Graph, Phase
from planner.graphs.options.passes import order_by_passes, split_into_passes
from planner.graphs.options.placement import get_placement
from planner.graphs.options.surroundings import OtherDevice
from planner.graphs.schedule import Compute, keep_everything, schedule_of
from planner.graphs.simulate import simulate
from planner.graphs.synthetic.draft import Draft
from planner.graphs.synthetic.random_graphs import draw_training_step
from planner.graphs.synthetic.small import make_training_chain
from planner.solvers import highs
from planner.solvers.baselines.xengine import ScheduleClass, XEngineParams, XEngineProgram, add_clocks, build_lazy_schedule
from planner.solvers.clock import WallClock, WorkClock
from planner.solvers.registry import estimate_program_time_s, get_solver
from planner.solvers.request import Request
from planner.solvers.result import Reason, Result, Status
from tests.support.graphs.options import check_by_both_judges, names, on_devices, random_placement, two_branches, with_trips
from tests.support.graphs.small_graphs import diamond
from tests.support.marks import slow
from tests.support.solvers.answers import ask
from tests.support.solvers.brute_force_placement import fastest_overlapped, fastest_serial

CLOSE = 1e-6


def solved(graph: Graph, budget_bytes: int, *, stay: bool = False) -> Result:
    return get_solver("xengine")(ask(graph, budget_bytes, tolerance=CLOSE, params=XEngineParams(stay=stay)))


def overlapped(graph: Graph, budget_bytes: int, time_limit_s: float = 60.0) -> Result:
    return get_solver("xengine-overlapped")(ask(graph, budget_bytes, tolerance=CLOSE, time_limit_s=time_limit_s))


def sum_of(result: Result) -> float | None:
    """The serial sum, None where nothing was found."""
    return None if result.schedule is None else float(result.settings["serial_s"])


@pytest.mark.parametrize("stay", [False, *slow(True)], ids=["published", "stay"])
def test_its_optimum_is_that_of_its_class(stay: bool) -> None:
    seen: Counter[str] = Counter()
    for seed in range(40):
        graph, budget = random_placement(seed, 2 + seed % 2)
        expected = fastest_serial(graph, budget, stay=stay)
        result = solved(graph, budget, stay=stay)
        assert sum_of(result) == (None if expected is None else pytest.approx(expected, abs=CLOSE)), seed
        if result.schedule is None:
            assert (result.status, result.reason) == (Status.LIMIT, Reason.MEMORY)
            seen["infeasible"] += 1
            continue
        check_by_both_judges(graph, result)
        times = [graph.ops[op].time_s for op in result.schedule.computed]
        assert sum(times) == pytest.approx(expected, abs=CLOSE) and result.settings["serial_bound_s"] <= sum(times) + CLOSE
        assert result.time_s <= sum(times) + CLOSE
        seen["placed"] += any(graph.ops[op].replaces for op in result.schedule.computed)
        seen["three devices"] += len(graph.pools) == 3
        seen["recomputed"] += len(set(result.schedule.computed)) < len(result.schedule.computed)
    assert min(seen[what] for what in ("infeasible", "placed", "three devices", "recomputed")) >= 4, seen


def test_the_makespan_is_no_more_than_the_serial_one_and_that_of_all_schedules() -> None:
    better = equal = 0
    for seed in range(14):
        graph, budget = random_placement(100 + seed, 3)
        try:
            expected = fastest_overlapped(graph, budget, most=20_000)
        except TimeoutError:
            continue
        serial, result = solved(graph, budget), overlapped(graph, budget)
        if result.schedule is None:
            continue
        check_by_both_judges(graph, result)
        assert expected - CLOSE <= result.time_s <= serial.time_s + CLOSE, seed
        assert result.status is Status.OPTIMAL and result.time_s <= result.bound_s + CLOSE
        better += result.time_s < (sum_of(serial) or 0.0) - CLOSE
        equal += result.time_s == pytest.approx(expected, abs=CLOSE)
    assert better >= 5 and equal >= 8


def test_the_clocks_of_the_program_are_those_of_the_judge() -> None:
    compared = 0
    for seed in range(12):
        graph, budget = random_placement(300 + seed, 3)
        program = XEngineProgram(get_placement(graph), budget, ScheduleClass(stay=True, ahead=True), whole_frees=True)
        assert program.build()
        add_clocks(program, 100.0)
        answer = highs.solve_program(program.build_milp(), clock=WallClock(60.0))
        if answer.values is None or answer.objective is None:
            continue
        simulation = simulate(graph, build_lazy_schedule(program, answer.values))
        assert simulation.peak_bytes <= budget
        assert simulation.time_s == pytest.approx(answer.objective * program.unit_s, rel=1e-5), seed
        compared += 1
    assert compared >= 8


def test_where_each_op_runs_once_only_its_device_is_chosen() -> None:
    compared = 0
    for seed in range(8):
        graph, budget = random_placement(200 + seed, 4)
        params = XEngineParams(again=False)
        once = get_solver("xengine-overlapped")(ask(graph, budget, tolerance=CLOSE, params=params))
        serial = get_solver("xengine")(ask(graph, budget, tolerance=CLOSE, params=params))
        if once.schedule is None or once.time_s is None:
            continue
        check_by_both_judges(graph, once)
        done = [p for op in once.schedule.computed for p in (graph.ops[op].replaces or (op,)) if p < len(graph.program)]
        assert sorted(done) == list(range(len(graph.program)))
        assert once.status is Status.OPTIMAL and once.settings["executed"] == "once"
        assert serial.time_s is None or once.time_s <= serial.time_s + CLOSE
        published = sum_of(solved(graph, budget))
        assert serial.schedule is None or (published is not None and published <= (sum_of(serial) or 0.0) + CLOSE)
        compared += 1
    assert compared >= 5


def test_faster_device_runs_all_ops_and_kept_outputs_return() -> None:
    draft = Draft()
    weight = draft.add_static("weight", 4)
    (a,) = draft.add_op("a", [weight], [4], time_s=10.0)
    (b,) = draft.add_op("b", [a, weight], [4], time_s=10.0)
    graph = on_devices(draft.build_graph([b]), OtherDevice("second", (1.0, 1.0), 4.0))
    published, stay = solved(graph, 100), solved(graph, 100, stay=True)
    # Published, the weight is copied for each of the two stages.
    assert (sum_of(published), sum_of(stay)) == (5.0, 4.0)
    assert names(graph, stay) == ["copy_weight_device_to_second", "a@second", "b@second", "copy_b_second_to_device"]
    # The weight, its copy and two tensors do not fit both memories any other way.
    assert stay.peak_bytes == 8


@pytest.mark.parametrize("graph", [diamond(), make_training_chain(4), draw_training_step(3, 3)], ids=["diamond", "chain", "step"])
def test_xengine_with_a_useless_device_equals_checkmate(graph: Graph) -> None:
    peak = simulate(graph, keep_everything(graph)).peak_bytes
    for budget in (peak, int(0.8 * peak), int(0.6 * peak)):
        offered = on_devices(graph, OtherDevice("slow", tuple(1e3 * (op.time_s + 1) for op in graph.ops), 1e12))
        alone = get_solver("checkmate")(ask(graph, budget, tolerance=0.0))
        # Its memory is of use: what is copied there need not be computed again. Without any, it is nothing.
        without = on_devices(graph, OtherDevice("slow", tuple(1e3 * (op.time_s + 1) for op in graph.ops), 1e12, 0))
        assert sum_of(solved(without, budget)) == (None if alone.time_s is None else pytest.approx(alone.time_s))
        copied = sum_of(solved(offered, budget))
        assert alone.time_s is None or (copied is not None and copied <= alone.time_s + CLOSE)


def test_unsupported_graphs_are_refused_with_a_reason() -> None:
    alone = solved(make_training_chain(4), 100)
    assert (alone.status, alone.reason) == (Status.LIMIT, Reason.INAPPLICABLE) and "checkmate" in alone.message
    with pytest.raises(GraphError, match="only graphs with placement and no other option"):
        solved(with_trips(make_training_chain(4)), 100)
    large = make_training_chain(60)
    offered = on_devices(large, OtherDevice("second", tuple(op.time_s for op in large.ops), 1.0))
    result = solved(offered, 1000)
    assert result.reason is Reason.SIZE and "more than 24,000" in result.message
    tight = solved(two_branches(), 1)
    assert (tight.status, tight.reason) == (Status.LIMIT, Reason.MEMORY) and "raise the budget" in tight.message


@pytest.mark.parametrize("name", ["xengine", "xengine-overlapped"])
def test_without_time_nothing_is_found(name: str) -> None:
    result = get_solver(name)(ask(two_branches(), 100, time_limit_s=1e-9))
    assert (result.status, result.reason) == (Status.LIMIT, Reason.TIME) and "time limit" in result.message


def on_two_devices(graph: Graph) -> tuple[Graph, int]:
    """`graph` with a slower device whose memory is tight, and a tight budget."""
    budget_bytes = simulate(graph, keep_everything(graph)).peak_bytes // 2
    other = OtherDevice("second", tuple(2 * op.time_s for op in graph.program), budget_bytes / graph.time_s, budget_bytes)
    return on_devices(graph, other), budget_bytes


@pytest.mark.parametrize("schedules", [ScheduleClass(), ScheduleClass(again=False), ScheduleClass(stay=True)])
def test_variables_are_counted_without_a_program(schedules: ScheduleClass) -> None:
    for seed in range(20):
        graph, budget_bytes = random_placement(seed, 2 + seed % 2)
        program = XEngineProgram(get_placement(graph), budget_bytes, schedules)
        counted = program.size.count
        assert program.build() and counted == len(program.R) + len(program.S), seed


@pytest.mark.parametrize("name", ["xengine", "xengine-overlapped"])
def test_a_limit_in_which_there_is_no_solution_is_refused_at_once(name: str) -> None:
    graph, budget_bytes = on_two_devices(make_training_chain(20))
    least_s = estimate_program_time_s(name, graph, budget_bytes)
    refused = get_solver(name)(ask(graph, budget_bytes, time_limit_s=0.9 * least_s))
    assert (refused.status, refused.reason) == (Status.LIMIT, Reason.TIME)
    assert "to write it and solve its relaxation once takes about" in refused.message
    assert estimate_program_time_s(name, make_training_chain(20), budget_bytes) == 0.0  # on one device


def test_hundreds_of_ops_are_refused_before_a_program_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, budget_bytes = on_two_devices(make_training_chain(150))
    monkeypatch.setattr(XEngineProgram, "build", None)
    for name in ("xengine", "xengine-overlapped"):
        refused = get_solver(name)(ask(graph, budget_bytes, time_limit_s=1e9))
        assert refused.reason is Reason.SIZE and "more than 24,000, the most that this solver supports" in refused.message
        assert estimate_program_time_s(name, graph, budget_bytes) == 0.0


def step() -> Graph:
    """A loss of 4 bytes, which another device computes sooner, and two kept gradients behind it."""
    draft = Draft()
    (a,) = draft.add_op("a", [], [4], time_s=9.0)
    (loss,) = draft.add_op("loss", [a], [4], time_s=9.0)
    (b,) = draft.add_op("b", [a], [2], time_s=9.0)
    (c,) = draft.add_op("c", [b], [2], time_s=9.0)
    graph = draft.build_graph([loss, b, c])
    return replace(graph, ops=tuple(replace(op, phase=Phase.FORWARD if op.id < 2 else Phase.BACKWARD) for op in graph.ops))


@pytest.mark.parametrize("solver", ["xengine", "xengine-overlapped", "windows"])
@pytest.mark.parametrize("budget", [8, 12, 100])
def test_a_loss_that_is_made_elsewhere_comes_with_the_forward_pass(solver: str, budget: int) -> None:
    graph = on_devices(step(), OtherDevice("second", (1.0,) * 4, 4.0, 20))
    result = get_solver(solver)(Request(graph, budget, clock=WorkClock(0.5)))
    assert any(graph.ops[op].replaces for op in result.schedule.computed)
    forward, _ = split_into_passes(graph, result.schedule)
    loss = next(t.id for t in graph.tensors if t.producers and graph.ops[t.producers[0]].name == "loss")
    assert any(isinstance(s, Compute) and loss in graph.ops[s.op].outputs for s in forward)
    # It is there in what the program counts: nothing is held longer where the schedule is run.
    again = simulate(graph, order_by_passes(graph, result.schedule))
    assert again.peak_bytes == result.peak_bytes <= budget


def test_a_loss_that_is_computed_here_again_comes_with_the_forward_pass() -> None:
    graph = on_devices(step(), OtherDevice("second", (1.0,) * 4, 4.0))
    ids = {op.name: op.id for op in graph.ops}
    names = ["a", "copy_a_device_to_second", "loss@second", "loss", "b", "c"]
    schedule = schedule_of(graph, [ids[name] for name in names])
    forward, backward = split_into_passes(graph, schedule)
    computed = [[graph.ops[s.op].name for s in steps if isinstance(s, Compute)] for steps in (forward, backward)]
    assert computed == [names[:4], names[4:]]
    assert order_by_passes(graph, schedule) == schedule
    late = schedule_of(graph, [ids[name] for name in ("a", "copy_a_device_to_second", "loss@second", "b", "loss", "c")])
    with pytest.raises(ScheduleError, match="'loss', which the step returns, is not in memory"):
        split_into_passes(graph, late)
