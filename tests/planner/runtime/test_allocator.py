"""The recorded events of the allocator are those of the measured function alone."""

import gc

import pytest
import torch

from planner.runtime.allocator import measure_cuda_context_bytes, record_cpu_allocations


def test_earlier_garbage_is_not_recorded() -> None:
    def leave() -> None:
        cycle: list[object] = [torch.ones(1000)]  # what no profiler has seen come is not seen to go
        cycle.append(cycle)

    record_cpu_allocations(leave)

    def run() -> None:
        if gc.isenabled():
            gc.collect()  # as it may at any moment
        torch.ones(10)

    assert [event.size_bytes for event in record_cpu_allocations(run)] == [40, -40]
    assert gc.isenabled()


def test_context_is_used_memory_beyond_reserved_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (70, 100))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 22)
    assert measure_cuda_context_bytes(torch.device("cuda")) == 8
