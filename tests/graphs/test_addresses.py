"""The judge of addresses against all pairs, and the buffers of a step against its peak."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from planner.graphs.addresses import AddressError, Buffer, Offsets, buffers_of, check_offsets, count_moments, live_bytes
from planner.graphs.ir import Graph
from planner.graphs.requests import WORKSPACE, MemoryRequest
from planner.graphs.schedule import Compute, Schedule, keep_everything
from planner.graphs.simulate import simulate
from planner.graphs.synthetic.random_graphs import draw_overwriting
from planner.graphs.synthetic.small import make_training_chain
from tests.support.graphs.buffers import random_buffers
from tests.support.graphs.event_judge import runs
from tests.support.graphs.random_choices import graph_with_choices, schedule_with_choices
from tests.support.graphs.small_graphs import random_overwriting


def overlaps(buffers: Sequence[Buffer], offsets: Sequence[int]) -> bool:
    """Whether two of them are at one address at one time, by looking at every byte."""
    used = set()
    for buffer, offset in zip(buffers, offsets, strict=True):
        for time in range(buffer.lower, buffer.upper):
            for byte in range(offset, offset + buffer.size):
                if (time, byte) in used:
                    return True
                used.add((time, byte))
    return False


_BUFFERS = st.lists(st.tuples(st.integers(0, 6), st.integers(1, 4), st.integers(1, 5), st.integers(0, 12)), max_size=8)


@given(_BUFFERS)
def test_the_judge_finds_every_overlap_and_no_other(drawn: list[tuple[int, int, int, int]]) -> None:
    buffers = [Buffer(str(i), low, low + length, size) for i, (low, length, size, _) in enumerate(drawn)]
    offsets = [offset for *_, offset in drawn]
    if overlaps(buffers, offsets):
        with pytest.raises(AddressError, match="in use at the same time"):
            check_offsets(buffers, offsets)
    else:
        check_offsets(buffers, offsets)


@given(_BUFFERS, st.randoms(use_true_random=False))
def test_the_order_of_buffers_does_not_matter(drawn: list[tuple[int, int, int, int]], draw: random.Random) -> None:
    entries = [(Buffer(str(i), low, low + length, size), at) for i, (low, length, size, at) in enumerate(drawn)]
    shuffled = draw.sample(entries, len(entries))
    found = []
    for order in (entries, shuffled):
        try:
            found.append(Offsets(tuple(b for b, _ in order), tuple(at for _, at in order)).height_bytes)
        except AddressError:
            found.append(None)
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("offsets", "said"),
    [((-1, 8), "'a' is at -1"), ((0, 6), "multiple of 4"), ((0,), "1 offsets for 2"), ((2, 0), "'b' at 0 and 'a' at 2")],
)
def test_addresses_that_cannot_be_are_named(offsets: tuple[int, ...], said: str) -> None:
    with pytest.raises(AddressError, match=said):
        Offsets((Buffer("a", 0, 2, 3), Buffer("b", 1, 3, 4, alignment=4)), offsets)


def test_pools_share_no_address_at_any_time() -> None:
    with pytest.raises(AddressError, match="pools 'one' and 'two' share addresses"):
        Offsets((Buffer("a", 0, 1, 4, pool="one"), Buffer("b", 1, 2, 4, pool="two")), (0, 0))


@pytest.mark.parametrize(
    ("arguments", "said"), [((2, 2, 1), "lower must be below upper"), ((0, 1, 0), "size"), ((0, 1, 1, 0), "alignment")]
)
def test_buffers_that_cannot_be_raise(arguments: tuple[int, ...], said: str) -> None:
    with pytest.raises(AddressError, match=said):
        Buffer("a", *arguments)


def test_live_bytes_are_the_most_at_any_time() -> None:
    draw = random.Random(0)
    for _ in range(100):
        buffers = random_buffers(draw, 6)
        assert live_bytes(buffers) == max(sum(b.size for b in buffers if b.lower <= time < b.upper) for time in range(6))


def _case(seed: int) -> tuple[Graph, Schedule]:
    draw = random.Random(seed)
    if draw.random() < 0.4:
        graph = random_overwriting(draw.randrange(2**32), draw.randint(3, 6))
    else:
        graph = graph_with_choices(draw)
        graph = draw_overwriting(graph, draw) if draw.random() < 0.5 else graph
    return graph, schedule_with_choices(draw, graph)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2**32))
def test_the_buffers_of_a_step_are_its_peak_in_every_pool(seed: int) -> None:
    graph, schedule = _case(seed)
    if not runs(graph, schedule.steps):
        return
    peaks = simulate(graph, schedule).pool_peaks_bytes
    for pool, peak_bytes in zip(graph.pools, peaks, strict=True):
        buffers = buffers_of(graph, schedule, pool=pool.name)
        assert live_bytes(buffers) == peak_bytes - graph.static_bytes_by_pool[pool.name]
        assert len({buffer.id for buffer in buffers}) == len(buffers)


@pytest.mark.parametrize("requests", [(), (MemoryRequest(0), MemoryRequest(WORKSPACE, 3, 2))])
def test_a_workspace_is_freed_within_its_step_if_requests_have_moments(requests: tuple[MemoryRequest, ...]) -> None:
    graph = make_training_chain(2)
    ops = [replace(op, workspace_bytes=3, requests=requests) for op in graph.ops]
    graph = replace(graph, ops=ops)
    moments = count_moments(graph)
    found = buffers_of(graph, keep_everything(graph), moments=moments)
    workspaces = [buffer for buffer in found if buffer.id.startswith("workspace")]
    assert len(workspaces) == len(ops)
    for buffer in workspaces:
        step = buffer.lower // moments
        assert (buffer.lower, buffer.upper) == (step * moments + 1, step * moments + 2) and buffer.upper < (step + 1) * moments


def test_kept_tensors_stay_to_the_end_and_recomputed_ones_have_two_buffers() -> None:
    graph = make_training_chain(3)
    schedule = schedule_with_choices(random.Random(1), graph)
    buffers = {buffer.id: buffer for buffer in buffers_of(graph, schedule, alignment=64)}
    for t in graph.kept:
        assert buffers[graph.tensors[t].name].upper == len(schedule.steps)
    executed = [step.op for step in schedule.steps if isinstance(step, Compute)]
    assert len(buffers) >= len(executed)
    assert {buffer.alignment for buffer in buffers.values()} == {64}
