"""What ``torch`` and ``torch.cuda`` are while the stand-in is installed."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial, partialmethod
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from planner.capture.workload.models import Workload
from planner.graphs.allocators.caching import CachingAllocator, PoolId
from planner.measure import profile
from planner.runtime import libraries
from tests.support.cuda_device import graphs, tensors
from tests.support.cuda_device.autograd import DeviceThread, engine
from tests.support.cuda_device.machine import Machine
from tests.support.cuda_device.ops import launch
from tests.support.cuda_device.pools import MemPool, raw_alloc, raw_delete, use_mem_pool
from tests.support.cuda_device.streams import Event, Order, Stream, Work
from tests.support.cuda_device.tensors import OnDevice
from tests.support.cuda_device.tracing import traced_on_the_cpu

NAME = "NVIDIA H100 80GB HBM3"


@contextmanager
def cuda_device(
    *, devices: int = 1, order: Order = Order.ALL_LATE, seed: int = 0, capacity_bytes: int | None = None
) -> Iterator[Machine]:
    """Inside, there are CUDA devices, whose work is done in `order`.

    Args:
        seed: of the order, where it is random.
        capacity_bytes: of the memory of each device.

    Raises:
        AssertionError: something was done inside that is undefined on CUDA.
    """
    _forget_devices()
    machine = Machine(devices, order, seed, capacity_bytes)
    thread = DeviceThread(machine)
    with pytest.MonkeyPatch.context() as patch, torch.library._scoped_library("aten", "IMPL") as library:
        patch.setattr(OnDevice, "machine", machine, raising=False)
        patch.setattr(OnDevice, "launch", staticmethod(launch), raising=False)
        patch.setattr(graphs.CUDAGraph, "machine", machine, raising=False)
        for name, value in _torch_cuda(machine).items():
            patch.setattr(torch.cuda, name, value)
        for owner, name, value in _torch(machine, thread):
            patch.setattr(owner, name, value, raising=False)
        library.impl("empty.memory_format", partial(_empty, machine), "CUDA")
        library.impl("empty_strided", partial(_empty_strided, machine), "CUDA")
        try:
            yield machine
        finally:
            _forget_devices()
            gc.collect()
            machine.capturing = False
            machine.synchronize()
            thread.end()
            for memory in machine.memories:
                memory.workspaces.clear()
    assert not machine.wrong, machine.wrong


def _forget_devices() -> None:
    """Forget what the planner knows of devices for as long as the process runs: these are others."""
    libraries._of_a_pass.clear()
    libraries._of_both.clear()
    for key in [key for key in profile._COSTS if any(isinstance(part, torch.device) and part.type == "cuda" for part in key)]:
        del profile._COSTS[key]


def on_device(workload: Workload, place: str = "cuda:0") -> Workload:
    """`workload`, its model and its batch moved to a device."""
    model = workload.model
    moved: dict[int, torch.Tensor] = {}

    def there(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in moved:
            value = tensor.detach().to(place)
            moved[id(tensor)] = nn.Parameter(value, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value
        return moved[id(tensor)]

    for module in model.modules():
        for values in (module._parameters, module._buffers):
            values.update({name: there(value) for name, value in values.items() if value is not None})
    batch = workload.batch
    if isinstance(batch, dict):
        return Workload(model, workload.loss_fn, {name: value.to(place) for name, value in batch.items()})
    return Workload(model, workload.loss_fn, tuple(value.to(place) for value in batch))


def _torch(machine: Machine, thread: DeviceThread) -> Iterator[tuple[object, str, object]]:
    to, empty, engine_of = torch.Tensor.to, torch.empty, torch.autograd._engine_run_backward

    def named(place: Any) -> Any:
        is_name = isinstance(place, str | torch.device) and torch.device(place) == torch.device("cuda")
        return torch.device("cuda", machine.device) if is_name else place

    def moved(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return to(self, *map(named, args), **{name: named(value) for name, value in kwargs.items()})

    def to_cuda(self: torch.Tensor, device: Any = None, non_blocking: bool = False, **_: Any) -> torch.Tensor:
        index = machine.device if device is None else _index(machine, device)
        if self.is_cuda and self.get_device() == index:
            return self
        return self.to(torch.device("cuda", index), non_blocking=non_blocking)

    def made(*size: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        tensor = empty(*size, **kwargs)
        return machine.pinned_like(tensor) if pin_memory else tensor

    yield torch.Tensor, "to", moved
    yield torch.Tensor, "cuda", to_cuda
    yield torch, "empty", made
    yield torch.autograd, "_engine_run_backward", engine(engine_of, thread)
    yield torch._C, "_cuda_cudaCachingAllocator_raw_alloc", partial(raw_alloc, machine)
    yield torch._C, "_cuda_cudaCachingAllocator_raw_delete", partial(raw_delete, machine)
    yield torch._C, "_cuda_isHistoryEnabled", lambda: True  # there is none to ask for
    yield torch._C, "_cuda_clearCublasWorkspaces", lambda: [memory.workspaces.clear() for memory in machine.memories]
    yield from traced_on_the_cpu()


def _torch_cuda(machine: Machine) -> dict[str, Any]:
    index = partial(_index, machine)

    def memory(device: Any = None) -> Any:
        found = machine.memories[index(device)]
        with machine.lock:
            found.settle()
        return found

    def synchronize(device: Any = None) -> None:
        machine.check_may_wait()
        machine.synchronize(index(device))

    def empty_cache() -> None:
        for found in machine.memories:
            found.release_unused()

    def set_seeds(seed: int) -> None:
        for generator in machine.generators:
            generator.manual_seed(seed)

    def check_error(result: int) -> None:
        assert result == 0

    @contextmanager
    def device(device: Any) -> Iterator[None]:
        before, machine.device = machine.device, index(device)
        try:
            yield
        finally:
            machine.device = before

    def set_state(state: torch.Tensor, device: Any = "cuda") -> None:
        machine.generators[index(device)].set_state(state)

    runtime = SimpleNamespace(
        cudaHostRegister=lambda address, size, flags: machine.lock_memory(address, size) or 0,
        cudaHostUnregister=lambda address: machine.unlock_memory(address) or 0,
    )
    return {
        "Stream": lambda device=None, priority=0: Stream(machine, index(device)),
        "Event": Event,
        "stream": lambda stream: nullcontext() if stream is None else machine.made_current(stream),
        "current_stream": lambda device=None: machine.current(index(device)),
        "default_stream": lambda device=None: machine.defaults[index(device)],
        "set_stream": machine.make_current,
        "synchronize": synchronize,
        "_sleep": lambda cycles: machine.current(machine.device).launch(Work(lambda _: None, cycles / 1e9)),
        "device": device,
        "set_device": lambda device: setattr(machine, "device", index(device)),
        "current_device": lambda: machine.device,
        "device_count": lambda: len(machine.memories),
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_current_stream_capturing": lambda: machine.current(machine.device).recording is not None,
        "_lazy_init": lambda: None,
        "init": lambda: None,
        "get_device_name": lambda device=None: NAME,
        "get_device_properties": lambda device=None: SimpleNamespace(name=NAME, major=9, minor=0, multi_processor_count=132),
        "get_allocator_backend": lambda: "native",
        "get_rng_state": lambda device="cuda": machine.generators[index(device)].get_state(),
        "set_rng_state": set_state,
        "manual_seed": lambda seed: machine.generators[machine.device].manual_seed(seed),
        "manual_seed_all": set_seeds,
        "default_generators": tuple(machine.generators),
        "memory_allocated": lambda device=None: memory(device).allocator.allocated.bytes,
        "max_memory_allocated": lambda device=None: memory(device).allocator.allocated.peak_bytes,
        "memory_reserved": lambda device=None: memory(device).allocator.reserved.bytes,
        "max_memory_reserved": lambda device=None: memory(device).allocator.reserved.peak_bytes,
        "reset_peak_memory_stats": lambda device=None: memory(device).allocator.reset_peaks(),
        "memory_stats": lambda device=None: _stats(memory(device).allocator),
        "memory_snapshot": lambda mempool_id=None: _snapshot(machine, mempool_id),
        "MemPool": type("MemPool", (MemPool,), {"__init__": partialmethod(MemPool.__init__, machine)}),  # Dynamo asks for a class
        "use_mem_pool": partial(use_mem_pool, machine),
        "mem_get_info": lambda device=None: _free_and_total(memory(device)),
        "get_per_process_memory_fraction": lambda device=None: _fraction(memory(device)),
        "set_per_process_memory_fraction": lambda fraction, device=None: _limit(memory(device), fraction),
        "empty_cache": empty_cache,
        "cudart": lambda: runtime,
        "check_error": check_error,
        "graph": graphs.graph,
        "CUDAGraph": graphs.CUDAGraph,
        "graph_pool_handle": machine.new_pool,
    }


def _free_and_total(memory: Any) -> tuple[int, int]:
    return memory.capacity_bytes - memory.allocator.reserved.bytes, memory.capacity_bytes


def _fraction(memory: Any) -> float:
    return float(memory.allocator.capacity_bytes / memory.capacity_bytes)


def _limit(memory: Any, fraction: float) -> None:
    memory.allocator.capacity_bytes = int(fraction * memory.capacity_bytes)


def _stats(allocator: CachingAllocator) -> dict[str, int]:
    levels = {"allocated": allocator.allocated, "requested": allocator.requested, "reserved": allocator.reserved}
    peaks = {f"{name}_bytes.all.peak": level.peak_bytes for name, level in levels.items()}
    return peaks | {f"{name}_bytes.all.current": level.bytes for name, level in levels.items()}


def _snapshot(machine: Machine, pool: PoolId | None) -> list[dict[str, Any]]:
    return [
        {
            "device": memory.index,
            "segment_pool_id": segment.pool,
            "total_size": segment.size_bytes,
            "allocated_size": segment.size_bytes - memory.allocator.free_bytes(segment),
        }
        for memory in machine.memories
        for segment in memory.allocator
        if pool in (None, segment.pool)
    ]


def _index(machine: Machine, device: Any = None) -> int:
    if isinstance(device, int):
        return device
    place = None if device is None else torch.device(device)
    if place is not None and place.type != "cuda":
        raise ValueError(f"Expected a cuda device, but got: {place}")
    return machine.device if place is None or place.index is None else place.index


def _empty(machine: Machine, size: Any, **kwargs: Any) -> OnDevice:
    form = torch.empty(size, dtype=kwargs.get("dtype"), memory_format=kwargs.get("memory_format"), device="meta")
    return _like(machine, form, kwargs)


def _empty_strided(machine: Machine, size: Any, stride: Any, **kwargs: Any) -> OnDevice:
    return _like(machine, torch.empty_strided(size, stride, dtype=kwargs.get("dtype"), device="meta"), kwargs)


def _like(machine: Machine, form: torch.Tensor, kwargs: dict[str, Any]) -> OnDevice:
    index = _index(machine, kwargs.get("device"))
    return tensors.new(machine, index, form.size(), form.stride(), form.dtype, form.untyped_storage().nbytes())
