"""The judge by hand: every step, all errors, streams, pools and host times; and a second judge on random graphs with options."""

import random
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given, settings, strategies as st

from planner.graphs.addresses import find_lifetimes
from planner.graphs.clocks import find_passages, run_clocks
from planner.graphs.errors import GraphError, ScheduleError
from planner.graphs.ir import Graph, Op, Tensor
from planner.graphs.pools import COMPUTE, DEVICE, Pool
from planner.graphs.schedule import Compute, Free, Schedule, Step, keep_everything, schedule_of
from planner.graphs.simulate import Simulation, simulate
from planner.graphs.synthetic.draft import Draft
from planner.graphs.synthetic.random_graphs import draw_graph, draw_overwriting
from planner.graphs.synthetic.small import make_chain, make_training_chain
from tests.support.graphs.event_judge import during, judged, live, runs
from tests.support.graphs.options import in_two_passes
from tests.support.graphs.random_choices import graph_with_choices, schedule_with_choices
from tests.support.graphs.small_graphs import random_overwriting


def run(graph: Graph, *steps: Step) -> None:
    simulate(graph, Schedule(steps))


def small() -> Graph:
    """Static w (100); a: w -> x (10), y (20), 2 s, workspace 5; b: x -> z (3, kept), 1 s, workspace 50."""
    draft = Draft()
    w = draft.add_static("w", 100)
    x, _ = draft.add_op("a", [w], [10, 20], time_s=2.0, workspace_bytes=5)
    (z,) = draft.add_op("b", [x], [3], time_s=1.0, workspace_bytes=50)
    return draft.build_graph([z])


W, X, Y, Z = range(4)


def test_memory_and_time_of_each_step() -> None:
    steps = (Compute(0), Free(Y), Compute(1), Compute(0), Free(Y), Free(X))
    result = simulate(small(), Schedule(steps))
    assert result.memory_bytes == (
        100 + 30 + 5,  # outputs and workspace
        100 + 10,
        100 + 10 + 3 + 50,
        100 + 10 + 3 + 30 + 5,  # x is there already, and made a second time
        100 + 10 + 3,
        100 + 3,
    )
    assert result.peak_bytes == 163
    assert result.peak_step == 2
    assert result.time_s == 5.0
    assert result.recomputed == 1


def test_peak_step_is_the_first_of_equal_peaks() -> None:
    draft = Draft()
    draft.add_op("a", [], [4])
    draft.add_op("b", [], [4])
    result = simulate(draft.build_graph(), Schedule((Compute(0), Free(0), Compute(1))))
    assert (result.peak_bytes, result.peak_step) == (4, 0)


def test_invalid_schedules_raise() -> None:
    graph = small()
    first = Compute(0)
    with pytest.raises(ScheduleError, match=r"step 0 computes op 7, but the graph has 2 ops"):
        run(graph, Compute(7))
    with pytest.raises(ScheduleError, match=r"step 0 computes op -1"):
        run(graph, Compute(-1))
    with pytest.raises(ScheduleError, match=r"step 1 frees tensor 4, but the graph has 4"):
        run(graph, first, Free(4))
    with pytest.raises(ScheduleError, match=r"step 0 computes 'b', but its input 'a' is not in memory"):
        run(graph, Compute(1))
    with pytest.raises(ScheduleError, match=r"step 2 computes 'b', but its input 'a' is not in memory"):
        run(graph, first, Free(X), Compute(1))
    with pytest.raises(ScheduleError, match=r"step 0 frees 'a', which is not in memory"):
        run(graph, Free(X))
    with pytest.raises(ScheduleError, match=r"step 2 frees 'a', which is not in memory"):
        run(graph, first, Free(X), Free(X))
    with pytest.raises(ScheduleError, match=r"step 1 frees 'w', which must stay"):
        run(graph, first, Free(W))
    with pytest.raises(ScheduleError, match=r"step 2 frees 'b', which must stay"):
        run(graph, first, Compute(1), Free(Z))
    with pytest.raises(ScheduleError, match=r"never computes 'b'"):
        run(graph, first)


def test_unknown_step_kind_raises() -> None:
    with pytest.raises(ScheduleError, match="is not a step of a schedule"):
        simulate(small(), Schedule((Compute(0), "offload")))


def test_schedules_of_a_graph_are_judged_once() -> None:
    graph, schedule = small(), Schedule((Compute(0), Free(Y), Compute(1), Free(X)))
    assert simulate(graph, schedule) is simulate(graph, Schedule(schedule.steps))
    assert simulate(replace(graph, tensors=graph.tensors), schedule) is not simulate(graph, schedule)


def test_tensors_are_freed_after_their_last_use() -> None:
    graph = make_training_chain(3)  # f1 f2 f3 g3(f2, f3) g2(f1, g3) g1(g2); tensor i is made by op i
    assert schedule_of(graph, range(6)).steps == (
        Compute(0), Compute(1), Compute(2),
        Compute(3), Free(1), Free(2),
        Compute(4), Free(0), Free(3),
        Compute(5), Free(4), Free(5),
    )  # fmt: skip


def test_tensor_is_freed_before_its_recomputation() -> None:
    steps = schedule_of(make_training_chain(3), (0, 1, 2, 3, 0, 4, 5)).steps
    assert steps[:3] == (Compute(0), Compute(1), Free(0))
    assert steps[6:10] == (Free(2), Compute(0), Compute(4), Free(0))


def test_kept_tensors_are_never_freed() -> None:
    draft = Draft()
    kept, passing = draft.add_op("a", [], [1, 2])
    draft.add_op("b", [kept, passing], [1])
    graph = draft.build_graph([kept])
    steps = schedule_of(graph, (0, 0, 1)).steps
    assert Free(kept) not in steps
    # The passing output goes before it is made again, the kept one is there twice while that happens.
    assert steps[:3] == (Compute(0), Free(passing), Compute(0))
    assert simulate(graph, Schedule(steps)).memory_bytes[2] == 1 + 1 + 2


def test_static_tensors_are_never_freed() -> None:
    draft = Draft()
    weight = draft.add_static("weight", 5)
    draft.add_op("a", [weight], [1])
    assert schedule_of(draft.build_graph(), [0]).steps == (Compute(0), Free(1))


@pytest.mark.parametrize("op", [-1, 6])
def test_unknown_op_raises(op: int) -> None:
    with pytest.raises(ScheduleError, match=rf"op {op}, but the graph has 6"):
        schedule_of(make_training_chain(3), [0, op])


def test_computed_includes_repeated_ops() -> None:
    assert schedule_of(make_training_chain(3), (0, 1, 2, 3, 0, 4, 5)).computed == (0, 1, 2, 3, 0, 4, 5)


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(seed=st.integers(0, 10**6), ops=st.integers(1, 8))
def test_no_lifetime_can_be_shortened(seed: int, ops: int) -> None:
    graph = draw_graph(seed, ops)
    steps = schedule_of(graph, range(ops)).steps
    simulate(graph, Schedule(steps))
    for index, step in enumerate(steps):
        # Freed one execution earlier, every tensor would be missing somewhere.
        if isinstance(step, Free):
            before = max(i for i in range(index) if isinstance(steps[i], Compute))
            earlier = [*steps[:before], step, *(s for s in steps[before:] if s != step)]
            with pytest.raises(ScheduleError):
                simulate(graph, Schedule(tuple(earlier)))


COPIES = "copies"
A, B, C, D, A_HOST = range(5)
MAKE_A, MAKE_B, MAKE_C, MAKE_D, OUT, IN = (Compute(op) for op in range(6))


def offloading(capacity_bytes: int | None = None) -> Graph:
    """a (4 bytes) -> b (3) -> c (2), then d (1, kept) from a and c: 1, 2, 3 and 4 seconds.

    On the stream `copies`, which owns the host: a goes out in 5 seconds and comes back in 6.
    """
    tensors = (
        Tensor(A, "a", 4, (0, 5)),
        Tensor(B, "b", 3, (1,)),
        Tensor(C, "c", 2, (2,)),
        Tensor(D, "d", 1, (3,)),
        Tensor(A_HOST, "a@host", 4, (4,), pool="host"),
    )
    ops = (
        Op(0, "a", "f", (), (A,), 1.0),
        Op(1, "b", "f", (A,), (B,), 2.0, workspace_bytes=1),
        Op(2, "c", "f", (B,), (C,), 3.0),
        Op(3, "d", "f", (A, C), (D,), 4.0),
        Op(4, "out", "copy", (A,), (A_HOST,), 5.0, stream=COPIES, optional=True),
        Op(5, "in", "copy", (A_HOST,), (A,), 6.0, stream=COPIES, optional=True),
    )
    return Graph(ops, tensors, frozenset({D}), {}, (Pool(DEVICE, COMPUTE), Pool("host", COPIES, capacity_bytes)))


def run_clocked(graph: Graph, *steps: Step) -> Simulation:
    return simulate(graph, Schedule(steps))


ROUND_TRIP = (MAKE_A, OUT, MAKE_B, Free(A), MAKE_C, Free(B), IN, Free(A_HOST), MAKE_D)


def test_tensor_is_offloaded_and_reloaded() -> None:
    graph = offloading()
    # compute: a 0-1, b 1-3, waits for the copy of a until 6 to free it, c 6-9, frees b at once, d when a is back.
    # copies: out 1-6 (a is ready at 1), in from 9 (its memory may be that of b, freed at 9) to 15; then a@host goes.
    # d 15-19.
    clocks = run_clocks(graph, Schedule(ROUND_TRIP))
    assert clocks.starts_s == (0, 1, 1, 3, 6, 9, 9, 15, 15)
    assert clocks.ends_s == (1, 6, 3, 6, 9, 9, 15, 15, 19)
    # As each stream passes the steps: copies in no time of compute, and compute's in none of copies.
    compute = ((0, 1), (1, 1), (1, 3), (3, 6), (6, 9), (9, 9), (9, 9), (9, 9), (15, 19))
    copies = ((0, 0), (1, 6), (6, 6), (6, 6), (6, 6), (6, 6), (9, 15), (15, 15), (15, 15))
    assert find_passages(graph, Schedule(ROUND_TRIP), clocks, COMPUTE) == compute
    assert find_passages(graph, Schedule(ROUND_TRIP), clocks, COPIES) == copies
    found = run_clocked(graph, *ROUND_TRIP)
    assert found.clocks_s == clocks.clocks_s == (19, 15)
    assert found.time_s == 19
    # Device: a; a; a, b and b's workspace; b; b, c; c; c, a; c, a; c, a, d.
    assert found.memory_bytes == (4, 4, 8, 3, 5, 2, 6, 6, 7)
    assert found.pool_peaks_bytes == (8, 4)
    assert found.peak_bytes == 8 and found.peak_step == 2
    assert found.recomputed == 0


def test_host_capacity_is_enforced() -> None:
    assert run_clocked(offloading(4), *ROUND_TRIP).pool_peaks_bytes == (8, 4)
    with pytest.raises(ScheduleError, match=r"step 1 computes 'out', which takes pool 'host' to 4 bytes: its capacity is 3"):
        run_clocked(offloading(3), *ROUND_TRIP)


def test_reload_of_a_resident_tensor_raises() -> None:
    with pytest.raises(ScheduleError, match=r"step 2 computes 'in' on the stream 'copies', but 'a' is in memory already"):
        run_clocked(offloading(), MAKE_A, OUT, IN)
    # On the stream that owns the memory it is there twice during the step: a, a and c, before d.
    found = run_clocked(offloading(), MAKE_A, MAKE_B, MAKE_C, Free(B), MAKE_A, MAKE_D)
    assert found.memory_bytes == (4, 8, 9, 6, 10, 7)
    assert found.time_s == 1 + 2 + 3 + 1 + 4


def test_optional_copies_do_not_replace_the_program() -> None:
    with pytest.raises(ScheduleError, match=r"the schedule never computes 'd'$"):
        run_clocked(offloading(), *ROUND_TRIP[:-1])


def test_schedule_frees_tensors_with_several_producers_early() -> None:
    graph = offloading()
    assert schedule_of(graph, (0, 4, 1, 2, 5, 3)).steps == (
        *(MAKE_A, OUT, MAKE_B, Free(A), MAKE_C, Free(B), IN, Free(A_HOST), MAKE_D, Free(A), Free(C)),
    )


def test_schedule_keeps_kept_tensors_with_several_producers() -> None:
    graph = replace(offloading(), kept=frozenset({A, D}))
    steps = schedule_of(graph, (0, 4, 1, 2, 5, 3)).steps
    assert Free(A) not in steps and Free(A_HOST) in steps


# One stream, an op that stands for others.


def loss_head() -> Graph:
    """x (1) -> logits (8) -> probabilities (8) -> loss (1, kept); chunked makes the loss of x with a workspace of 2."""
    tensors = (Tensor(0, "x", 1, (0,)), Tensor(1, "logits", 8, (1,)), Tensor(2, "p", 8, (2,)), Tensor(3, "loss", 1, (3, 4)))
    ops = (
        Op(0, "x", "f", (), (0,), 1.0, recomputable=False),
        Op(1, "logits", "f", (0,), (1,), 1.0),
        Op(2, "p", "f", (1,), (2,), 1.0, recomputable=False),
        Op(3, "loss", "f", (2,), (3,), 1.0),
        Op(4, "chunked", "f", (0,), (3,), 4.0, workspace_bytes=2, optional=True, replaces=(1, 2, 3)),
    )
    return Graph(ops, tensors, frozenset({3}))


def test_op_replacing_three_ops_satisfies_the_program() -> None:
    graph = loss_head()
    assert run_clocked(graph, *map(Compute, range(4))).memory_bytes == (1, 9, 17, 18)
    found = run_clocked(graph, Compute(0), Compute(4))
    assert found.memory_bytes == (1, 4)  # x; x, the loss and the workspace
    assert found.time_s == 5.0 and found.recomputed == 0


def test_op_that_replaces_an_unrepeatable_op() -> None:
    graph = loss_head()
    with pytest.raises(
        ScheduleError, match=r"step 4 computes 'chunked' in place of 'p' again, but it must be executed only once"
    ):
        run_clocked(graph, *map(Compute, (0, 1, 2, 3, 4)))
    with pytest.raises(ScheduleError, match=r"step 3 computes 'p' again, but it must be executed only once"):
        run_clocked(graph, *map(Compute, (0, 4, 1, 2)))
    run_clocked(graph, *map(Compute, (0, 4, 1)))  # logits may be made again


def test_missing_op_with_an_unused_replacement_raises() -> None:
    with pytest.raises(ScheduleError, match=r"the schedule never computes 'logits' or an op that replaces it"):
        run_clocked(loss_head(), Compute(0))


def drawing() -> Graph:
    """Two random ops and a write of a static tensor in between, with an op that stands for each of the three."""
    ops = (
        Op(0, "r0", "rand", (1,), (0,), 1.0, random=True),
        Op(1, "write", "f", (), (), 1.0, mutates=(1,), recomputable=False),
        Op(2, "r1", "rand", (1,), (2,), 1.0, random=True),
        Op(3, "other r0", "rand", (1,), (0,), 1.0, random=True, optional=True, replaces=(0,)),
        Op(4, "other write", "f", (), (), 1.0, mutates=(1,), optional=True, replaces=(1,)),
        Op(5, "other r1", "rand", (1,), (2,), 1.0, random=True, optional=True, replaces=(2,)),
    )
    return Graph(ops, (Tensor(0, "t0", 1, (0, 3)), Tensor(1, "state", 1, ()), Tensor(2, "t1", 1, (2, 5))), frozenset())


def test_replacement_keeps_the_place_of_the_op() -> None:
    graph = drawing()
    for steps in ((0, 1, 2), (3, 4, 5), (0, 4, 5), (3, 1, 2), (0, 3, 1, 5, 2)):
        run_clocked(graph, *map(Compute, steps))
    with pytest.raises(ScheduleError, match=r"step 0 computes 'other r1' before 'r0': random ops must keep their order"):
        run_clocked(graph, Compute(5))
    with pytest.raises(ScheduleError, match=r"step 2 computes 'other r0' after 'write' writes 'state'"):
        run_clocked(graph, *map(Compute, (0, 4, 3)))
    with pytest.raises(ScheduleError, match=r"step 1 computes 'other r1' before 'write' writes 'state'"):
        run_clocked(graph, *map(Compute, (0, 5)))
    with pytest.raises(ScheduleError, match=r"step 2 computes 'other write' in place of 'write' again"):
        run_clocked(graph, *map(Compute, (0, 1, 4)))


def sending() -> Graph:
    """Weight w (4 bytes) is gathered, a (3) is made, b (2) is made of both, and its gradient g (5, kept) is sent, each in 2 s.

    On a channel that owns no pool: the gather has a workspace of 8 bytes, what is sent one of 6.
    """
    tensors = (
        Tensor(0, "shard", 1, ()),
        Tensor(1, "w", 4, (0,)),
        Tensor(2, "a", 3, (1,)),
        Tensor(3, "b", 2, (2,)),
        Tensor(4, "g", 5, (3,)),
    )
    ops = (
        Op(0, "gather", "f", (0,), (1,), 2.0, workspace_bytes=8, stream="channel"),
        Op(1, "a", "f", (), (2,), 2.0),
        Op(2, "b", "f", (1, 2), (3,), 2.0),
        Op(3, "send", "f", (3,), (4,), 2.0, workspace_bytes=6, stream="channel"),
        Op(4, "last", "f", (2,), (), 2.0),
    )
    return Graph(ops, tensors, frozenset({4}), {})


def test_workspace_of_a_transfer_is_in_memory_until_the_computation_waits_for_it() -> None:
    graph, gather, a, b, send, last = sending(), *map(Compute, range(5))
    found = run_clocked(graph, gather, a, b, Free(1), send, last, Free(2), Free(3))
    # The shard; w and its workspace; a; b instead of the workspace; no w; g and a workspace; until b is freed.
    assert found.memory_bytes == (13, 16, 10, 6, 17, 17, 14, 6)
    assert found.time_s == 6  # gather and a, b, the last op and what is sent
    # A free waits too, of what is made or read.
    assert run_clocked(graph, gather, Free(1), gather, a, b, send, Free(3), last).memory_bytes == (13, 1, 13, 16, 10, 21, 13, 13)


def test_output_in_place_of_an_input_that_a_transfer_reads_takes_memory_of_its_own() -> None:
    graph = sending()
    tensors = (*graph.tensors, Tensor(5, "c", 2, (4,)))
    ops = (*graph.ops[:4], replace(graph.ops[4], inputs=(3,), outputs=(5,), overwrites=((5, 3),)))
    graph = Graph(ops, tensors, graph.kept, {})
    gather, a, b, send, last = map(Compute, range(5))
    assert run_clocked(graph, gather, a, b, send, last, Free(3)).memory_bytes[-2:] == (23, 15)


def with_times(graph: Graph, times_s: list[float], host_s: list[float]) -> Graph:
    ops = tuple(replace(op, time_s=t, host_s=h) for op, t, h in zip(graph.ops, times_s, host_s, strict=True))
    return replace(graph, ops=ops)


def issue_and_run(graph: Graph, schedule: Schedule) -> float:
    """Return the end of the last kernel on one stream, by the definition."""
    issued_s = free_s = 0.0
    for op_id in schedule.computed:
        op = graph.ops[op_id]
        issued_s += op.host_s
        free_s = max(issued_s, free_s) + op.time_s
    return free_s


seconds = st.floats(0.0, 1.0)


@given(st.lists(st.tuples(seconds, seconds), min_size=6, max_size=6))
def test_kernels_wait_for_the_host_and_for_their_stream(times: list[tuple[float, float]]) -> None:
    graph = make_chain(6)
    graph = with_times(graph, *(list(column) for column in zip(*times, strict=True)))
    schedule = keep_everything(graph)
    found = simulate(graph, schedule)
    plain = simulate(with_times(graph, [op.time_s for op in graph.ops], [0.0] * 6), schedule)
    assert found.step_s == pytest.approx(issue_and_run(graph, schedule))
    assert found.step_s >= found.time_s * (1 - 1e-12) and replace(found, step_s=plain.step_s) == plain
    assert found.step_s <= found.time_s + sum(op.host_s for op in graph.ops) + 1e-9


def test_a_slow_host_decides_and_a_fast_one_does_not() -> None:
    graph = make_chain(4)
    schedule = keep_everything(graph)
    judge = partial(with_times, graph, [2.0] * 4)
    assert simulate(judge([0.5] * 4), schedule).step_s == 0.5 + 4 * 2.0
    assert simulate(judge([3.0] * 4), schedule).step_s == 4 * 3.0 + 2.0
    late = simulate(judge([0.0, 0.0, 7.0, 0.0]), schedule)  # the first two kernels have ended before the third is issued
    assert (late.step_s, late.time_s) == (11.0, 8.0)


@given(st.integers(0, 2**32))
def test_host_times_of_nothing_change_nothing_and_others_only_delay(seed: int) -> None:
    """With several streams and pools too; the clock without host times is held to a second judge elsewhere."""
    draw = random.Random(seed)
    graph = graph_with_choices(draw)
    schedule = schedule_with_choices(draw, graph)
    if not runs(graph, schedule.steps):
        return
    plain = simulate(graph, schedule)
    assert plain.step_s == plain.time_s
    slow = replace(graph, ops=tuple(replace(op, host_s=draw.random()) for op in graph.ops))
    found = simulate(slow, schedule)
    issued_s = sum(slow.ops[op].host_s for op in schedule.computed)
    assert replace(found, step_s=plain.step_s) == plain
    assert max(plain.time_s, issued_s) <= found.step_s * (1 + 1e-9) and found.step_s <= (plain.time_s + issued_s) * (1 + 1e-9)


@pytest.mark.parametrize("wrong", [-1.0, float("nan"), float("inf")])
def test_invalid_host_times_raise(wrong: float) -> None:
    with pytest.raises(GraphError, match="host time"):
        with_times(make_chain(2), [1.0, 1.0], [0.0, wrong])


seeds = st.integers(0, 2**32)


def _graph(draw: random.Random) -> Graph:
    if draw.random() < 0.3:
        return random_overwriting(draw.randrange(2**32), draw.randint(3, 6))
    graph = graph_with_choices(draw)
    graph = in_two_passes(graph) if draw.random() < 0.5 else graph
    return draw_overwriting(graph, draw) if draw.random() < 0.5 else graph


@settings(max_examples=300)
@given(seeds)
def test_both_judges_agree_on_valid_schedules(seed: int) -> None:
    draw = random.Random(seed)
    graph = _graph(draw)
    schedule = schedule_with_choices(draw, graph)
    if not runs(graph, schedule.steps):
        with pytest.raises(ScheduleError):
            simulate(graph, schedule)
        return
    found, verdict = simulate(graph, schedule), judged(graph, schedule)
    assert found.pool_peaks_bytes == tuple(verdict.peaks_bytes[pool.name] for pool in graph.pools)
    assert found.pool_memory_bytes == tuple(
        tuple(during(graph, schedule.steps, k, pool.name) for k in range(len(schedule.steps))) for pool in graph.pools
    )
    assert found.clocks_s == tuple(verdict.done_s[stream] for stream in graph.streams)
    assert found.time_s == max(end_s for _, end_s in verdict.times_s)
    clocks = run_clocks(graph, schedule)
    computes = [isinstance(step, Compute) for step in schedule.steps]
    assert clocks.ends_s == tuple(end_s for _, end_s in verdict.times_s)
    assert [s for s, c in zip(clocks.starts_s, computes, strict=True) if c] == [
        start_s for (start_s, _), c in zip(verdict.times_s, computes, strict=True) if c
    ]
    # Whatever the timing: no more is in a pool at any moment than is counted in the order of steps.
    assert all(verdict.peaks_in_time_bytes[name] <= peak for name, peak in verdict.peaks_bytes.items())
    for t, stays in enumerate(find_lifetimes(graph, schedule)):
        there = {k for stay in stays for k in range(stay.first_step, stay.end_step)}
        after = [live(graph, schedule.steps[: k + 1]) for k in range(len(schedule.steps))]
        assert there == {k for k, now in enumerate(after) if t in now and graph.tensors[t].producers}
        for stay in stays:
            assert stay.start_s == verdict.times_s[stay.first_step][0]
            assert stay.end_s == (verdict.times_s[stay.end_step][1] if stay.end_step < len(after) else found.time_s)


@settings(max_examples=300)
@given(seeds)
def test_both_judges_refuse_the_same_schedules(seed: int) -> None:
    draw = random.Random(seed)
    graph = _graph(draw)
    steps: list[Step] = list(schedule_with_choices(draw, graph).steps) or [Compute(0)]
    place = draw.randrange(len(steps))
    match draw.randrange(3):
        case 0:
            del steps[place]
        case 1:
            steps.insert(place, draw.choice((Compute(draw.randrange(len(graph.ops))), Free(draw.randrange(len(graph.tensors))))))
        case _:
            steps[place:] = [*steps[place + 1 :], steps[place]]
    try:
        simulate(graph, Schedule(tuple(steps)))
    except ScheduleError:
        assert not runs(graph, steps)
    else:
        assert runs(graph, steps)


def test_most_random_schedules_are_valid() -> None:
    draws = [random.Random(seed) for seed in range(60)]
    graphs = [graph_with_choices(draw) for draw in draws]
    schedules = [schedule_with_choices(draw, graph) for draw, graph in zip(draws, graphs, strict=True)]
    accepted = [(g, s) for g, s in zip(graphs, schedules, strict=True) if runs(g, s.steps)]
    assert len(accepted) > 45
    assert sum(simulate(g, s).time_s < sum(g.ops[op].time_s for op in s.computed) for g, s in accepted) > 15
    assert sum(any(g.ops[op].optional for op in s.computed) for g, s in accepted) > 15
