"""Simulation of the memory that PyTorch's caching allocator reserves for a plan on a CUDA device."""

from graphs.allocators.caching import Block, CachingAllocator
from graphs.pools import DEVICE
from graphs.schedule import Compute
from planner.facts.timeline import Timeline


def reserved_bytes(timeline: Timeline) -> tuple[int, ...]:
    """Return the bytes reserved after each step of the schedule, in a first step from an empty device.

    Static tensors are allocated first. The result is empty on a CPU, and if other streams or in-place writes change the order of
    allocations.
    """
    graph = timeline.graph
    device = str(graph.provenance.get("device", "cpu"))
    if device.startswith("cpu") or len(graph.streams) > 1 or graph.writes_over_inputs:
        return ()
    allocator = CachingAllocator()
    for tensor in graph.tensors:
        if tensor.static and tensor.pool == DEVICE and tensor.size_bytes:
            allocator.alloc(tensor.size_bytes)
    blocks: dict[int, Block] = {}
    found = []
    for step in timeline.plan.schedule.steps:
        if isinstance(step, Compute):
            op = graph.ops[step.op]
            sizes = {t: graph.tensors[t].size_bytes for t in op.outputs}
            made = {t: allocator.alloc(size_bytes) for t, size_bytes in sizes.items() if size_bytes}
            if op.workspace_bytes:
                allocator.free(allocator.alloc(op.workspace_bytes))
            for t, block in made.items():
                if t in blocks:
                    allocator.free(block)
                else:
                    blocks[t] = block
        elif step.tensor in blocks:
            allocator.free(blocks.pop(step.tensor))
        found.append(allocator.reserved.bytes)
    return tuple(found)
