"""The exact solver with optional ops, worked out by hand: a head in chunks, a packed tensor, other devices."""

from dataclasses import replace

import pytest

from planner.capture.options import apply_options
from planner.graphs.errors import GraphError
from planner.graphs.ir import Graph, Op, Phase
from planner.graphs.options import remove_options
from planner.graphs.options.passes import order_by_passes
from planner.graphs.options.surroundings import Link, OtherDevice, Surroundings
from planner.graphs.schedule import keep_everything
from planner.graphs.simulate import simulate
from planner.graphs.synthetic.draft import Draft
from planner.graphs.synthetic.random_graphs import draw_options
from planner.graphs.synthetic.small import make_training_chain
from planner.solvers.bounds import bound_least_budget
from planner.solvers.clock import WorkClock
from planner.solvers.least import bracket_least_budget, find_least_known
from planner.solvers.order.reorder import find_order
from planner.solvers.places import find_places, may_replace
from planner.solvers.problem import build_problem
from planner.solvers.registry import SOLVERS, get_solver
from planner.solvers.request import Request
from planner.solvers.result import Result, Status
from planner.solvers.tolerance import Tolerance
from planner.solvers.windows import solve
from planner.solvers.windows.search import Search
from planner.solvers.windows.strategies.placement import Placements, Placing
from tests.support.graphs.options import check_by_both_judges, names, on_devices, random_placement, two_branches
from tests.support.solvers.answers import ask

HIDDEN, MASK, LOGITS, LOSS, LOGITS_GRADIENT, GRADIENT, LAST = range(7)


def with_op(graph: Graph, op: Op) -> Graph:
    """`graph` with another optional op, which makes tensors that are there."""
    tensors = tuple(replace(t, producers=(*t.producers, op.id)) if t.id in op.outputs else t for t in graph.tensors)
    return Graph((*graph.ops, op), tensors, graph.kept)


def head() -> Graph:
    """layer -> logits -> loss -> head_backward -> layer_backward, seconds 1, 2, 1, 4, 2.

    The layer makes 2 bytes and a mask of 8, logits and their gradient are 10, the gradient of the hidden 2; the loss (1) and the
    last gradient (1) are kept. At the loss all of 2 + 8 + 10 + 1 + 10 = 31 are there.
    """
    draft = Draft()
    hidden, mask = draft.add_op("layer", [], [2, 8])
    (logits,) = draft.add_op("logits", [hidden], [10], time_s=2)
    loss, logits_gradient = draft.add_op("loss", [logits], [1, 10])
    (gradient,) = draft.add_op("head_backward", [hidden, logits_gradient], [2], time_s=4)
    (last,) = draft.add_op("layer_backward", [mask, gradient], [1], time_s=2)
    return draft.build_graph([loss, last])


def in_chunks(graph: Graph, chunks: int, time_s: float) -> Graph:
    """With a stand-in for the three ops of the head that has `chunks`th parts of logits and gradient at once."""
    group = tuple(op.id for op in graph.program if LOGITS in (*op.inputs, *op.outputs) or LOGITS_GRADIENT in op.inputs)
    op = Op(len(graph.ops), f"chunks{chunks}", "f", (HIDDEN,), (LOSS, GRADIENT), time_s, 20 // chunks, optional=True)
    return with_op(graph, replace(op, replaces=group))


def with_packed_mask(graph: Graph) -> Graph:
    """With a mask of 1 byte, packed and unpacked in half a second each."""
    draft = [*graph.tensors, replace(graph.tensors[MASK], id=len(graph.tensors), name="packed", size_bytes=1, producers=())]
    packed, pack = len(graph.tensors), len(graph.ops)
    graph = replace(graph, tensors=tuple(draft))
    graph = with_op(graph, Op(pack, "pack", "f", (MASK,), (packed,), 0.5, optional=True))
    return with_op(graph, Op(pack + 1, "unpack", "f", (packed,), (MASK,), 0.5, optional=True))


def solved(graph: Graph, budget_bytes: int) -> Result:
    get = get_solver("windows")(ask(graph, budget_bytes, tolerance=0.0, time_limit_s=20))
    if get.schedule is not None:
        assert simulate(graph, get.schedule).time_s == get.time_s
    return get


@pytest.mark.parametrize(
    ("budget_bytes", "time_s", "used"),
    [
        (31, 10, set()),  # all is kept
        (30, 10.75, {"chunks2"}),  # 2 + 8 + 1 + 2 + 10 = 23
        (23, 10.75, {"chunks2"}),
        (22, 11.5, {"chunks4"}),  # 5 bytes of workspace less
        (18, 11.5, {"chunks4"}),
        (17, 11.75, {"chunks2", "pack", "unpack"}),  # 2 + 1 + 1 + 2 + 10 = 16
        (16, 11.75, {"chunks2", "pack", "unpack"}),
        (15, 12.5, {"chunks4", "pack", "unpack"}),  # layer_backward: 8 + 2 + 1 + 1 = 12; pack: 2 + 8 + 1 = 11
        (12, 12.5, {"chunks4", "pack", "unpack"}),
    ],
)
def test_the_head_in_chunks_and_a_packed_mask(budget_bytes: int, time_s: float, used: set[str]) -> None:
    # The layer must not be executed again, so what it makes stays, or is packed.
    program = head()
    program = replace(program, ops=(replace(program.ops[0], recomputable=False), *program.ops[1:]))
    graph = with_packed_mask(in_chunks(in_chunks(program, 2, 7.75), 4, 8.5))
    result = solved(graph, budget_bytes)
    assert result.status is Status.OPTIMAL
    assert result.time_s == pytest.approx(time_s) and result.bound_s == pytest.approx(time_s)
    assert {graph.ops[op].name for op in result.schedule.computed if op >= len(program.ops)} == used


def test_least_budget_with_options_matches_the_known_value() -> None:
    graph = with_packed_mask(in_chunks(in_chunks(head(), 2, 7.75), 4, 8.5))
    assert solved(graph, 12).schedule is not None
    result = solved(graph, 11)
    assert result.status is Status.INFEASIBLE and result.message
    bracket = bracket_least_budget(graph, precision=0.0)
    assert bracket.found_bytes == 12 and bracket.proved_bytes > 8
    assert simulate(graph, bracket.schedule).peak_bytes == 12
    # The program alone has 10 + 1 + 10 at the loss, and makes the hidden and the mask again.
    assert bracket_least_budget(head(), precision=0.0).found_bytes == 21


def test_the_bound_may_be_below_the_step_of_the_program() -> None:
    graph = in_chunks(head(), 2, 5.0)
    for budget_bytes in (31, 25):
        result = solved(graph, budget_bytes)
        assert result.status is Status.OPTIMAL
        assert (result.time_s, result.bound_s) == (8, 8)
    assert build_problem(graph, 31).least_s == 8


def test_places_of_optional_ops_are_known() -> None:
    places = find_places(with_packed_mask(in_chunks(in_chunks(head(), 2, 7.75), 4, 8.5)))
    # layer; pack and unpack can be executed from the next place on; what stands for the head comes in the place of its last op.
    assert places.ids == (0, 7, 8, 1, 2, 3, 5, 6, 4)
    assert places.last == (0, 3, 3, 3, 4, 7, 7, 7, 8)
    assert places.replaced_by[3] == places.replaced_by[4] == places.replaced_by[5] == (6, 7)
    assert [i for i, sure in enumerate(places.sure) if sure] == [0, 8]
    assert places.list_executed({6}) == [0, 6, 8] and places.list_executed(()) == [0, 3, 4, 5, 8]


def test_optional_ops_that_cannot_replace_their_ops_are_rejected() -> None:
    graph = in_chunks(head(), 2, 5.0)
    op = graph.ops[-1]
    assert may_replace(graph, op)
    assert not may_replace(graph, replace(op, outputs=(GRADIENT,)))  # without the loss, which is kept
    drawing = tuple(replace(p, random=p.id in (1, 2)) for p in graph.program)
    both = replace(op, replaces=(1, 3), outputs=(GRADIENT,))
    assert may_replace(graph, both)
    assert not may_replace(replace(graph, ops=(*drawing, replace(op, random=True))), both)  # the loss would draw first


def test_options_that_cannot_be_used_make_no_difference() -> None:
    op = Op(5, "lossless", "f", (HIDDEN,), (GRADIENT,), 1.0, optional=True, replaces=(1, 2, 3))
    graph = with_op(head(), op)
    for offered in (graph, apply_options(graph, ("offload",), Surroundings(Link.even(0.1)))):
        assert build_problem(offered, 31).graph.plain
        for budget_bytes in (31, 22, 21):
            assert solved(offered, budget_bytes).time_s == solved(head(), budget_bytes).time_s


def test_other_solvers_refuse_optional_ops() -> None:
    graph = in_chunks(head(), 2, 5.0)
    copied = apply_options(graph, ("offload",), Surroundings(Link.even(1.0)))
    for name in SOLVERS:
        if name != "windows":
            with pytest.raises(GraphError, match=r"without optional ops|only graphs with placement and no other option"):
                get_solver(name)(ask(copied, 31))


def test_the_program_is_put_into_another_order_with_its_options() -> None:
    seen = 0
    for seed in range(60):
        graph = draw_options(seed, 6)
        found = find_order(graph).graph
        assert sorted(op.name for op in found.ops) == sorted(op.name for op in graph.ops)
        standing = {op.name for op in graph.ops if may_replace(graph, op)}
        assert standing <= {op.name for op in found.ops if may_replace(found, op)}
        seen += found != graph and bool(standing)
    assert seen


def test_counted_work_finds_the_same_schedule() -> None:
    for seed in (3, 11, 20):
        graph = apply_options(draw_options(seed, 6), ("offload",), Surroundings(Link.even(2.0)))
        program = remove_options(graph)
        budget = max(bound_least_budget(graph).budget_bytes, simulate(program, keep_everything(program)).peak_bytes * 7 // 10)
        found = [get_solver("windows")(Request(graph, budget, Tolerance.of(1e-3), WorkClock(0.5))) for _ in range(2)]
        assert found[0].schedule == found[1].schedule
        assert found[0].bound_s == found[1].bound_s


CLOSE = 1e-6


def placed(graph: Graph, budget_bytes: int, work: float = 1.0) -> Result:
    return solve(Request(graph, budget_bytes, Tolerance.of(CLOSE), WorkClock(work)))


def test_devices_work_side_by_side() -> None:
    graph = two_branches()
    result = placed(graph, 100)
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
    times = {capacity: placed(two_branches(capacity), 100).time_s for capacity in (1, 2, 100)}
    assert times == {1: 9.0, 2: 5.5, 100: 5.5}


def test_the_other_memory_is_of_use_to_a_budget() -> None:
    draft = Draft()
    (a,) = draft.add_op("a", [], [4], time_s=8.0)
    (b,) = draft.add_op("b", [], [1], time_s=4.0, workspace_bytes=4)
    (c,) = draft.add_op("c", [a, b], [1], time_s=2.0)
    graph = on_devices(draft.build_graph([c]), OtherDevice("second", (None, None, 9.0), 4.0))
    # What a has made goes to the other memory while b works, and comes back: 1 s each way, of which b hides neither.
    result = placed(graph, 6)
    assert result.time_s == 16.0 and result.bound_s <= 16.0
    check_by_both_judges(graph, result)


@pytest.mark.slow
def test_windows_is_never_slower_than_xengine() -> None:
    compared = 0
    for seed in range(100, 108):
        graph, budget = random_placement(seed, 3)
        reference = get_solver("xengine-overlapped")(ask(graph, budget, tolerance=CLOSE, time_limit_s=60.0))
        result = placed(graph, budget)
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
        result = placed(graph, budget)
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
    result = placed(graph, 12)
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
            result = placed(graph, budget, work=0.3)
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
