"""Requests of ops in their order, and what PyTorch's allocator was recorded to do beside its model."""

import gzip
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.gpu.recorded import ActionKind, AllocatorAction, compare_with_model, format_lines
from planner.graphs.addresses import buffers_of, count_moments, live_bytes
from planner.graphs.allocators.caching import DEFAULT, EXPANDABLE, CachingAllocator, Rules
from planner.graphs.allocators.training import training_of, usage_of
from planner.graphs.errors import GraphError
from planner.graphs.io.graph_document import build_from_dict, convert_to_dict
from planner.graphs.requests import WORKSPACE, MemoryRequest
from planner.graphs.schedule import keep_everything
from planner.graphs.synthetic.draft import Draft

MIB = 2**20
RECORDED = Path(__file__).parent / "recorded"


def with_requests(*requests: MemoryRequest, workspace_bytes: int = 40 * MIB):
    """Return a graph whose op makes two outputs of 4 and 30 MiB between its workspaces."""
    draft = Draft()
    (x,) = draft.add_op("x", [], [MIB])
    draft.add_op("grad", [x], [4 * MIB, 30 * MIB], workspace_bytes=workspace_bytes)
    graph = draft.build_graph()
    return replace(graph, ops=(graph.ops[0], replace(graph.ops[1], requests=requests)))


IN_TURNS = (MemoryRequest(0), MemoryRequest(WORKSPACE, 30 * MIB, 2), MemoryRequest(1), MemoryRequest(WORKSPACE, 20 * MIB, 4))


def test_requests_in_turns_need_less_than_all_at_once() -> None:
    at_once, in_turns = with_requests(), with_requests(*IN_TURNS)
    assert usage_of(training_of(at_once, keep_everything(at_once))).reserved_bytes > 90 * MIB
    # The second output has the memory of the first workspace.
    assert usage_of(training_of(in_turns, keep_everything(in_turns))).reserved_bytes < 78 * MIB


def test_buffers_in_turns_are_in_use_when_requests_say() -> None:
    graph = with_requests(*IN_TURNS)
    schedule = keep_everything(graph)
    moments = count_moments(graph)
    found = {buffer.id: buffer for buffer in buffers_of(graph, schedule, moments=moments)}
    first, second = (name for name in found if name.startswith("workspace"))
    assert found[first].upper == found["grad.1"].lower < found[second].lower
    assert live_bytes(tuple(found.values())) == (1 + 4 + 30 + 20) * MIB
    assert live_bytes(buffers_of(graph, schedule)) == (1 + 4 + 30 + 40) * MIB


def test_requests_are_in_the_file_of_a_graph() -> None:
    graph = with_requests(*IN_TURNS)
    read = build_from_dict(convert_to_dict(graph))
    assert read == graph and isinstance(read.ops[1].requests[0], MemoryRequest)


@pytest.mark.parametrize(
    "request_",
    [
        MemoryRequest(2),
        MemoryRequest(-2),
        MemoryRequest(WORKSPACE, 0, 1),
        MemoryRequest(WORKSPACE, 8, 0),
        MemoryRequest(WORKSPACE, 8, 2),
    ],
)
def test_invalid_recorded_requests_raise(request_: MemoryRequest) -> None:
    with pytest.raises(GraphError, match="request"):
        with_requests(request_)


def test_an_output_is_requested_once() -> None:
    with pytest.raises(GraphError, match="at most once"):
        with_requests(MemoryRequest(0), MemoryRequest(0))


def actions_in(lines: Iterable[str]) -> list[AllocatorAction]:
    """Return the actions of the lines of a CSV file."""
    rows = (line.strip().split(",") for line in list(lines)[1:])
    return [AllocatorAction(ActionKind(kind), int(address) * 512, int(size), int(stream)) for kind, address, size, stream in rows]


def recorded(sizes: list[int]) -> list[AllocatorAction]:
    """Return what the model does, as a recording of it: requests, of which each second one is freed at the end."""
    model, actions, held = CachingAllocator(), list[AllocatorAction](), []
    for size in sizes:
        before = model.reserved.bytes
        block = model.allocate(size)
        begin = block.segment.number << 40
        if (grown := model.reserved.bytes - before) > 0:
            actions.append(AllocatorAction(ActionKind.RESERVE, begin, grown, 0))
        actions.append(AllocatorAction(ActionKind.ALLOC, begin + block.offset, size, 0))
        held.append((block, begin + block.offset))
    for block, address in held[::2]:
        actions.append(AllocatorAction(ActionKind.FREE, address, block.requested_bytes, 0))
        model.free(block)
    return actions


def test_model_agrees_with_its_own_recording() -> None:
    actions = recorded([1000, 3 * MIB, 600, 5 * MIB, 40 * MIB, 12 * MIB])
    found = compare_with_model(actions)
    assert (found.requests, found.same_place, found.differences) == (6, 6, [])
    assert found.reserved_bytes == found.modelled_bytes
    assert compare_with_model(actions_in(format_lines(actions))) == found


def test_another_allocator_differs_from_the_model() -> None:
    actions = [replace(a, size_bytes=64 * MIB) if a.kind is ActionKind.RESERVE else a for a in recorded([3 * MIB, 40 * MIB])]
    assert len(compare_with_model(actions).differences) == 2


@pytest.mark.parametrize("run", ["eager", "plan"])
@pytest.mark.parametrize(("setting", "rules"), [("default", DEFAULT), ("expandable", EXPANDABLE)])
def test_model_reproduces_recorded_h100_allocations(run: str, setting: str, rules: Rules) -> None:
    """``python -m benchmarks gpu.allocator`` has recorded three steps of a small GPT-2, and the planning of them."""
    with gzip.open(RECORDED / f"h100-gpt2-{run}-{setting}.csv.gz", "rt") as file:
        found = compare_with_model(actions_in(file), rules)
    assert found.requests > 500
    assert (found.same_place, found.modelled_bytes, found.differences) == (found.requests, found.reserved_bytes, [])


def test_wrong_rules_do_not_reproduce_recorded_allocations() -> None:
    with gzip.open(RECORDED / "h100-gpt2-plan-expandable.csv.gz", "rt") as file:
        actions = actions_in(file)
    found = compare_with_model(actions, DEFAULT)
    assert found.differences and found.same_place < found.requests
