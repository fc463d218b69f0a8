"""The recorded events of the allocator are those of the measured function alone."""

import gc

import torch

from planner.profiling.allocator import cpu_allocations


def test_earlier_garbage_is_not_recorded() -> None:
    def leave(_: object) -> None:
        cycle: list[object] = [torch.ones(1000)]  # what no profiler has seen come is not seen to go
        cycle.append(cycle)

    cpu_allocations(leave)

    def run(_: object) -> None:
        if gc.isenabled():
            gc.collect()  # as it may at any moment
        torch.ones(10)

    assert [event.size_bytes for event in cpu_allocations(run)] == [40, -40]
    assert gc.isenabled()
