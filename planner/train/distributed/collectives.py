"""The collectives of a unit of sharded parameters, with the bits of FSDP2.

A reduction has FSDP2's bits because it packs gradients as FSDP2 does: dimension 0 in chunks padded to the longest, of all
parameters in one buffer. One reduction for each parameter gives other bits on three processes. A gather has the same bits in any
packing.

On a CPU, gloo's ``all_gather`` and ``reduce_scatter`` allocate as much again as the larger side. A broadcast from each process
into its part of the buffer, and an ``all_reduce`` in place, give the same bits and allocate nothing. gloo's threads hold a buffer
for a while after ``wait`` has returned. It is not free until they let go of it, so each collective waits for that too.

A collective takes all its memory when it begins, divisors included. So what a step holds does not depend on when the rest of it
runs, which may be in another thread. gloo's AVG and a division by a Python number allocate where they run: a plan whose peak was
under a reduction in another thread measured 12 bytes less than it counted. Known weakness: a divisor that bfloat16 or float16
rounds (3.3) is still cast, two bytes, while the reduction runs.

With NCCL the buffers go through ``all_gather_into_tensor`` and ``reduce_scatter_tensor``. That has not been run.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from planner.graphs.requests import WORKSPACE, MemoryRequest
from planner.torch_private.core import foreach_copy_
from planner.torch_private.fsdp import count_storage_uses
from planner.train.distributed.failures import wait_for_others


@dataclass(frozen=True, slots=True)
class Packed:
    """A parameter in the buffer of its unit.

    Attributes:
        shape: of the whole parameter.
        rows: indices of dimension 0 in the part of each process, except for the last ones, which may have fewer or none.
        dtype: of the gathered parameter.
    """

    shape: tuple[int, ...]
    rows: int
    dtype: torch.dtype

    @property
    def elements(self) -> int:
        """Elements in the part of each process, padding included."""
        return self.rows * math.prod(self.shape[1:])

    def get_shape(self, rank: int) -> tuple[int, ...]:
        """Return the shape of the part of a process, without padding."""
        return (max(0, min(self.rows, self.shape[0] - rank * self.rows)), *self.shape[1:])


@dataclass(frozen=True, slots=True)
class Gather:
    """The gather of parameters, called with this process's shards of them.

    Attributes:
        group: the processes that have a part each.
    """

    packed: tuple[Packed, ...]
    group: dist.ProcessGroup

    def __call__(self, shards: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Return the whole parameters; the storage of each includes its padding."""
        whole, fill = self.begin(shards)
        fill()
        return whole

    def begin(self, shards: Sequence[torch.Tensor]) -> tuple[tuple[torch.Tensor, ...], Callable[[], None]]:
        """Return the memory of the whole parameters, and the function that fills it."""
        world, device = self.group.size(), shards[0].device
        whole = [torch.empty((p.rows * world, *p.shape[1:]), dtype=p.dtype, device=device) for p in self.packed]
        memory = torch.empty(self._buffer_bytes, dtype=torch.uint8, device=device)

        def fill() -> None:
            for places in self._list_buffers():
                packed = [self.packed[i] for i in places]
                buffer = memory[: world * sum(map(self._count_bytes, places))].view(packed[0].dtype)
                self._fill([shards[i] for i in places], [whole[i] for i in places], packed, buffer)

        return tuple(value[: p.shape[0]] for value, p in zip(whole, self.packed, strict=True)), fill

    def build_inputs(self, device: torch.device) -> list[torch.Tensor]:
        """Return tensors to call it with."""
        return [torch.zeros(p.get_shape(self.group.rank()), dtype=p.dtype, device=device) for p in self.packed]

    def list_requests(self, device: torch.device) -> tuple[MemoryRequest, ...]:
        """Return what ``begin`` asks for: the whole parameters, and the largest buffer."""
        del device
        return _build_requests(range(len(self.packed)), [self._buffer_bytes])

    @property
    def _buffer_bytes(self) -> int:
        """The largest buffer."""
        return max(self.group.size() * sum(map(self._count_bytes, places)) for places in self._list_buffers())

    def _list_buffers(self) -> list[list[int]]:
        """Return the positions of the parameters in each buffer: those of one dtype."""
        by_dtype: dict[torch.dtype, list[int]] = {}
        for i, packed in enumerate(self.packed):
            by_dtype.setdefault(packed.dtype, []).append(i)
        return list(by_dtype.values())

    def _count_bytes(self, place: int) -> int:
        packed = self.packed[place]
        return packed.elements * packed.dtype.itemsize

    def _fill(self, shards: list[torch.Tensor], whole: list[torch.Tensor], packed: list[Packed], buffer: torch.Tensor) -> None:
        world, sizes = self.group.size(), [p.elements for p in packed]
        parts = buffer.view(world, -1)
        own = parts[self.group.rank()].split(sizes)
        filled = [part[: shard.numel()].view(shard.shape) for part, shard in zip(own, shards, strict=True)]
        foreach_copy_(filled, shards)
        for part, shard in zip(own, shards, strict=True):
            if shard.numel() < part.numel():
                part[shard.numel() :].zero_()
        del own, filled, parts
        run_on_buffer(buffer, lambda view: _gather_parts(view, self.group))
        out = [value.view(world, -1) for value in whole]
        torch.split_with_sizes_copy(buffer.view(world, -1), sizes, dim=1, out=out)


@dataclass(frozen=True, slots=True)
class Reduction:
    """The reduction of gradients, called with the whole gradients.

    Attributes:
        group: the processes that have a part each.
        replicas: the processes that hold the same part; None if there are no others.
        divide_by: divisors before the reduction, after that in `group`, and at the end, None for none.
        ops: the operators of the reduction in `group`, and in `replicas`.
    """

    packed: tuple[Packed, ...]
    group: dist.ProcessGroup
    replicas: dist.ProcessGroup | None
    dtype: torch.dtype
    shard_dtype: torch.dtype
    divide_by: tuple[float | None, float | None, float | None]
    ops: tuple[dist.ReduceOp | dist.ReduceOp.RedOpType, dist.ReduceOp | dist.ReduceOp.RedOpType]

    def __call__(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return this process's parts of the reduced gradients, in one tensor."""
        shards, fill = self.begin(gradients)
        fill()
        return shards

    def begin(self, gradients: Sequence[torch.Tensor]) -> tuple[torch.Tensor, Callable[[], None]]:
        """Return the memory of this process's parts of the reduced gradients, and the function that fills it."""
        world, rank, elements, device = self.group.size(), self.group.rank(), self._elements, gradients[0].device
        shards = torch.empty(elements, dtype=self.shard_dtype, device=device)
        buffer = torch.empty(world * elements, dtype=self.dtype, device=device)
        before, between, after = map(self._make_divisor, self.divide_by)
        if device.type == "cpu":
            reduced = buffer[rank * elements : (rank + 1) * elements]
        else:
            reduced = shards if self.dtype == self.shard_dtype else torch.empty_like(shards, dtype=self.dtype)

        def fill() -> None:
            self._pack(gradients, buffer)
            _divide(buffer, before)
            run_on_buffer(buffer, lambda view: _reduce_parts(view, reduced, self.group, self.ops[0]))
            _divide(reduced, between)
            if (replicas := self.replicas) is not None:
                run_on_buffer(reduced, lambda view: [dist.all_reduce(view, self.ops[1], group=replicas, async_op=True)])
            _divide(reduced, after)
            if reduced is not shards:
                shards.copy_(reduced)

        return shards, fill

    def build_inputs(self, device: torch.device) -> list[torch.Tensor]:
        """Return tensors to call it with."""
        return [torch.zeros(p.shape, dtype=p.dtype, device=device) for p in self.packed]

    @property
    def _elements(self) -> int:
        return sum(p.elements for p in self.packed)

    @property
    def shard_bytes(self) -> int:
        """Bytes of what it returns."""
        return self._elements * self.shard_dtype.itemsize

    def list_requests(self, device: torch.device) -> tuple[MemoryRequest, ...]:
        """Return what ``begin`` asks for: the shards, and its buffers; on a CPU divisors too, and the cast of one by ``fill``."""
        part_bytes = self._elements * self.dtype.itemsize
        buffers = [part_bytes * self.group.size()]
        if device.type != "cpu":
            return _build_requests([0], buffers if self.dtype == self.shard_dtype else [*buffers, part_bytes])
        divisors = [divisor for divisor in map(self._make_divisor, self.divide_by) if divisor is not None]
        cast = [self.dtype.itemsize] if any(divisor.dtype != self.dtype for divisor in divisors) else []
        return _build_requests([0], [*buffers, *(divisor.nbytes for divisor in divisors), *cast])

    def split(self, rank: int) -> list[tuple[tuple[int, ...], tuple[int, ...], int]]:
        """Return shape, strides and offset of each shard of a process in what it returns."""
        found, offset = [], 0
        for packed in self.packed:
            shape = packed.get_shape(rank)
            strides = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
            found.append((shape, strides, offset))
            offset += packed.elements
        return found

    def _make_divisor(self, value: float | None) -> torch.Tensor | None:
        if value is None or value == 1:
            return None
        divisor = torch.tensor(value, dtype=self.dtype)
        return divisor if self.dtype == torch.float32 or divisor.item() == value else torch.tensor(value, dtype=torch.float32)

    def _pack(self, gradients: Sequence[torch.Tensor], buffer: torch.Tensor) -> None:
        """Copy gradients to where FSDP2 puts them: the same as ``torch._chunk_cat``, which allocates where sizes are uneven."""
        world = self.group.size()
        targets, sources = list[torch.Tensor](), list[torch.Tensor]()
        columns = buffer.view(world, -1).split([p.elements for p in self.packed], dim=1)
        for packed, gradient, column in zip(self.packed, gradients, columns, strict=True):
            chunks = column.unflatten(1, (packed.rows, *packed.shape[1:]))
            if packed.rows * world == packed.shape[0]:
                targets.append(chunks)
                sources.append(gradient.unflatten(0, (world, packed.rows)))
                continue
            for rank in range(world):
                rows = packed.get_shape(rank)[0]
                targets.append(chunks[rank, :rows])
                sources.append(gradient[rank * packed.rows : rank * packed.rows + rows])
                chunks[rank, rows:].zero_()
        foreach_copy_(targets, sources)


@dataclass(frozen=True, slots=True)
class Addition:
    """The addition of a gradient to the sum of those of earlier batches, called with the sum and the gradient.

    Attributes:
        packed: the parameter, in a tuple.
    """

    packed: tuple[Packed]
    dtype: torch.dtype

    def __call__(self, given: Sequence[torch.Tensor]) -> torch.Tensor:
        """Add the gradient to the sum; return a tensor without elements, which readers of the sum wait for."""
        total, gradient = given
        return total.add_(gradient).new_empty(0)

    def build_inputs(self, device: torch.device) -> list[torch.Tensor]:
        """Return tensors to call it with."""
        (packed,) = self.packed
        return [torch.zeros(packed.shape, dtype=dtype, device=device) for dtype in (self.dtype, packed.dtype)]

    @property
    def sum_bytes(self) -> int:
        """Bytes of the sum."""
        (packed,) = self.packed
        return math.prod(packed.shape) * self.dtype.itemsize

    def list_requests(self, device: torch.device) -> tuple[MemoryRequest, ...]:
        """Return what it asks for: on a CPU the gradient is cast before it is added."""
        (packed,) = self.packed
        return _build_requests([], [self.sum_bytes] if packed.dtype != self.dtype and device.type == "cpu" else [])


def _build_requests(outputs: Sequence[int], workspaces: Sequence[int]) -> tuple[MemoryRequest, ...]:
    """Return the requests for outputs at these positions, and for workspaces of these bytes that are in use to the end."""
    count = len(outputs) + len(workspaces)
    return (
        *map(MemoryRequest, outputs),
        *(MemoryRequest(WORKSPACE, size_bytes, count) for size_bytes in workspaces if size_bytes),
    )


def _divide(buffer: torch.Tensor, divisor: torch.Tensor | None) -> None:
    if divisor is not None:
        buffer.div_(divisor)


def _gather_parts(buffer: torch.Tensor, group: dist.ProcessGroup) -> Sequence[dist.Work | None]:
    """Begin to fill each part of `buffer` by that of its process."""
    parts = buffer.view(group.size(), -1)
    if buffer.device.type != "cpu":
        return [dist.all_gather_into_tensor(buffer, parts[group.rank()], group=group, async_op=True)]
    return [dist.broadcast(part, group_src=rank, group=group, async_op=True) for rank, part in enumerate(parts)]


def _reduce_parts(
    buffer: torch.Tensor, reduced: torch.Tensor, group: dist.ProcessGroup, op: dist.ReduceOp | dist.ReduceOp.RedOpType
) -> Sequence[dist.Work | None]:
    """Begin to reduce: on a CPU into `buffer`, elsewhere this process's part into `reduced`."""
    if buffer.device.type != "cpu":
        return [dist.reduce_scatter_tensor(reduced, buffer, op=op, group=group, async_op=True)]
    return [dist.all_reduce(buffer, op, group=group, async_op=True)]


def run_on_buffer(buffer: torch.Tensor, issue: Callable[[torch.Tensor], Sequence[dist.Work | None]]) -> None:
    """Wait for the collectives that `issue` begins on a view of `buffer`, until nothing else holds it.

    It is a view because the uses of a storage are counted: who holds `buffer` itself, as gloo's threads do, adds none.
    """
    before, on_cpu = count_storage_uses(buffer), buffer.device.type == "cpu"
    _wait(issue(buffer.view(-1)), on_cpu=on_cpu)
    while on_cpu and count_storage_uses(buffer) > before:
        time.sleep(0)


def _wait(works: Sequence[dist.Work | None], *, on_cpu: bool) -> None:
    """Wait for collectives, which hold their buffers until this function has let go of them."""
    for work in works:
        if work is not None and on_cpu:  # this process is part of the group
            wait_for_others(work)
        elif work is not None:
            work.wait()  # the stream of the computation waits
