"""Private pools of memory on the stand-in, and memory without tensors."""

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from planner.graphs.allocators.caching import PoolId
from tests.support.cuda_device.machine import Machine
from tests.support.cuda_device.memory import DeviceMemory


class MemPool:
    """Stands for ``torch.cuda.MemPool``: its memory is returned once this object and what is in use are gone.

    With `use_on_oom` its free memory serves requests for which the device has no other.
    """

    def __init__(self, machine: Machine, *, use_on_oom: bool = False) -> None:
        self.id: PoolId = machine.new_pool()
        for memory in machine.memories:
            memory.allocator.keep_pool(self.id)
            memory.shared_pools.add(self.id)
            weakref.finalize(self, memory.allocator.let_pool_go, self.id).atexit = False
            if use_on_oom:
                memory.last_pools.add(self.id)
                weakref.finalize(self, memory.last_pools.discard, self.id).atexit = False


@contextmanager
def use_mem_pool(machine: Machine, pool: MemPool, device: Any = None) -> Iterator[None]:
    """Stands for ``torch.cuda.use_mem_pool``: of this thread alone."""
    memory, thread = _memory(machine, device), threading.get_ident()
    assert thread not in memory.pools, "pools are not nested"
    memory.pools[thread] = pool.id
    try:
        yield
    finally:
        del memory.pools[thread]


def raw_alloc(machine: Machine, size_bytes: int, stream: int) -> int:
    """Stands for ``torch.cuda.caching_allocator_alloc``."""
    found = next(one for one in machine.streams if one.cuda_stream == stream)
    assert found.device.index == machine.device, "it allocates on the current device, whatever the stream's"
    return machine.memories[found.device.index].raw_alloc(size_bytes, found)


def raw_delete(machine: Machine, address: int) -> None:
    """Stands for ``torch.cuda.caching_allocator_delete``."""
    (memory,) = (one for one in machine.memories if address in one.raw)
    with machine.lock:
        del memory.raw[address]
        memory.settle()


def _memory(machine: Machine, device: Any) -> DeviceMemory:
    index = getattr(device, "index", device)
    return machine.memories[machine.device if index is None else index]
