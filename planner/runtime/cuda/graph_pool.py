"""Prediction of the memory that CUDA graph pools keep for a schedule: whole segments, and their own workspaces."""

from collections.abc import Sequence

from planner.graphs.allocators.caching import DEFAULT, Block, CachingAllocator, Rules
from planner.graphs.allocators.training import training_of
from planner.graphs.ir import Graph
from planner.graphs.schedule import Schedule, find_boundary


def compute_pool_bytes(graph: Graph, schedule: Schedule, libraries: Sequence[int], rules: Rules = DEFAULT) -> int:
    """Return the bytes of the pool once both passes of `schedule`, which is valid on `graph`, are captured.

    A capture allocates as the passes do, in the order of the schedule, from private segments.
    """
    allocator, training = CachingAllocator(rules=rules), training_of(graph, schedule)
    captures = [0, find_boundary(graph, schedule) * training.moments] if libraries else []
    blocks: dict[int, Block] = {}
    workspaces: list[Block] = []
    for time, index, requested in training.events:
        if captures and time >= captures[0]:
            captures.pop(0)
            for workspace in workspaces:
                allocator.free(workspace)
            workspaces = [allocator.allocate(size_bytes) for size_bytes in libraries]
        if requested:
            blocks[index] = allocator.allocate(training.buffers[index].size)
        else:
            allocator.free(blocks.pop(index))
    return allocator.reserved.bytes
