"""Prediction of the memory that CUDA graph pools keep for a schedule: whole segments, and their own workspaces."""

from graphs.allocators.caching import Block, CachingAllocator
from graphs.ir import Graph
from graphs.pools import DEVICE
from graphs.schedule import Compute, Schedule, boundary


def pool_bytes(graph: Graph, schedule: Schedule, workspace_bytes: int) -> int:
    """Return the bytes of the pool once both passes of `schedule`, which is valid on `graph`, are captured.

    A capture allocates as the passes do, in the order of the schedule, from private segments.

    Args:
        workspace_bytes: bytes of library workspaces in the pool for each capture (``planner.runtime.libraries``).
    """
    allocator = CachingAllocator()
    blocks: dict[int, Block] = {}
    cut, workspace = boundary(graph, schedule), None
    for place, step in enumerate(schedule.steps):
        if place in (0, cut) and workspace_bytes:
            if workspace is not None:
                allocator.free(workspace)
            workspace = allocator.alloc(workspace_bytes)
        if not isinstance(step, Compute):
            if step.tensor in blocks:
                allocator.free(blocks.pop(step.tensor))
            continue
        op = graph.ops[step.op]
        for t in op.outputs:
            tensor = graph.tensors[t]
            if tensor.pool == DEVICE and tensor.size_bytes and t not in blocks:
                blocks[t] = allocator.alloc(tensor.size_bytes)
        if op.workspace_bytes:
            allocator.free(allocator.alloc(op.workspace_bytes))
    return allocator.reserved.bytes
