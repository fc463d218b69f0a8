"""The allocator requests of a training loop, derived from a graph and a schedule, and the memory reserved to serve them.

Known weakness: three steps in a row are played, nothing between them. What an evaluation, a data loader or another model asks the
allocator for is not in the model.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, pairwise
from typing import Any, Protocol

from planner.graphs.addresses import Buffer, buffers_of, count_moments
from planner.graphs.allocators.caching import DEFAULT, CachingAllocator, DeviceFullError, Level, Rules
from planner.graphs.ir import Graph, Kind, Tensor
from planner.graphs.optimizers import MeasuredOptimizer, get_optimizer_memory
from planner.graphs.pools import DEVICE
from planner.graphs.schedule import Schedule, find_boundary

_STEPS = 3  # the first is cold, the second begins with the optimizer's state, the third shows the steady state
_GRAIN_BYTES = 2 * 2**20  # of what the driver gives
_FOR_ALL_PARAMETERS = (Kind.OPTIMIZER_STATE, Kind.ACCUMULATED_GRADIENT)  # one tensor of a graph for one of each parameter


@dataclass(frozen=True)
class Training:
    """The requests of a training loop: in order, as sizes in bytes.

    Attributes:
        static: memory before the first step: parameters, inputs, gradients that are accumulated.
        libraries: workspaces that libraries keep, allocated before the first step, as a planned step does. Where they lie
            matters: with 69 MB of them allocated within the first step, ResNet-50 was predicted to reserve 9% less.
        buffers: memory of each step (``buffers_of``). What stays at its end is freed after the optimizer has run.
        moments: a step of the schedule takes so much of the buffers' time.
        state: of the optimizer, allocated after the first step.
        temporaries: of the optimizer, held at the same time after each step.
    """

    static: tuple[int, ...]
    buffers: tuple[Buffer, ...]
    libraries: tuple[int, ...] = ()
    state: tuple[int, ...] = ()
    temporaries: tuple[int, ...] = ()
    moments: int = 1

    @cached_property
    def events(self) -> tuple[tuple[int, int, bool], ...]:
        """The frees and requests of a step in order, as time, index of the buffer, and whether it is requested.

        At one moment what ends goes first. What stays at the end has no free.
        """
        end = max((buffer.upper for buffer in self.buffers), default=0)
        passing = end - self.moments  # what begins later is a workspace of the last step, which it frees itself
        frees = ((b.upper, 0, i) for i, b in enumerate(self.buffers) if b.upper < end or b.lower >= passing)
        starts = ((b.lower, 1, i) for i, b in enumerate(self.buffers))
        return tuple((time, index, bool(kind)) for time, kind, index in sorted((*frees, *starts)))


def training_of(graph: Graph, schedule: Schedule, *, pool: str = DEVICE, library_bytes: Sequence[int] = ()) -> Training:
    """Return the requests of training by `schedule`, which is valid on `graph`, in memory `pool`.

    All streams allocate in the order of the stream that owns the pool, so that there is one sequence of requests. Memory that a
    graph holds as one tensor, for all parameters, is divided as they are: the optimizer's state, and accumulated gradients.

    Args:
        library_bytes: workspaces of libraries, one for each thread and stream that uses them.
    """
    held = [tensor for tensor in graph.tensors if tensor.static and tensor.pool == pool and tensor.size_bytes]
    parameters = [tensor.size_bytes for tensor in held if tensor.kind is Kind.PARAMETER]
    optimizer = get_optimizer_memory(graph.provenance.optimizer)
    measured = optimizer.state if isinstance(optimizer, MeasuredOptimizer) else None
    state = [tensor for tensor in held if tensor.kind is Kind.OPTIMIZER_STATE]
    moments = count_moments(graph)
    return Training(
        moments=moments,
        static=_list_sizes([tensor for tensor in held if tensor.kind is not Kind.OPTIMIZER_STATE], parameters),
        buffers=buffers_of(graph, schedule, pool=pool, moments=moments),
        libraries=tuple(library_bytes),
        state=measured or _list_sizes(state, parameters),
        temporaries=optimizer.list_temporary_sizes(parameters),
    )


def combine_passes(
    parts: Sequence[tuple[Graph, Schedule]], static: Sequence[int], *, library_bytes: Sequence[int] = ()
) -> Training:
    """Return the requests of training by several graphs: their forward passes in order, then their backward passes in reverse.

    What a graph keeps, results and gradients, stays to the end of the step, also where another graph is the last to read it.

    Args:
        parts: the graphs in the order of their forward passes, each with a schedule that is valid on it.
        static: bytes of each tensor that is in memory before the first step; the static memory of the graphs is not looked at.
    """
    moments = max(count_moments(graph) for graph, _ in parts)
    forward = [find_boundary(graph, schedule) for graph, schedule in parts]
    backward = [len(schedule.steps) - cut for (_, schedule), cut in zip(parts, forward, strict=True)]
    buffers: list[Buffer] = []
    for number, (graph, schedule) in enumerate(parts):
        cut, end = moments * forward[number], moments * len(schedule.steps)
        first, second = moments * sum(forward[:number]), moments * (sum(forward) + sum(backward[number + 1 :])) - cut
        last = moments * (sum(forward) + sum(backward))
        for buffer in buffers_of(graph, schedule, moments=moments):
            lower = buffer.lower + (first if buffer.lower < cut else second)
            upper = last if buffer.upper == end else buffer.upper + (first if buffer.upper <= cut else second)
            buffers.append(replace(buffer, id=f"{buffer.id} of graph {number}", lower=lower, upper=upper))
    return Training(moments=moments, static=tuple(static), buffers=tuple(buffers), libraries=tuple(library_bytes))


def _list_sizes(tensors: Iterable[Tensor], parameters: Sequence[int]) -> tuple[int, ...]:
    divided = (_divide(t.size_bytes, parameters) if t.kind in _FOR_ALL_PARAMETERS else [t.size_bytes] for t in tensors)
    return tuple(chain.from_iterable(divided))


def _divide(size_bytes: int, parts: Sequence[int]) -> list[int]:
    """Return `size_bytes` as copies of `parts`, with what is left over as one more; undivided if it is less than one copy."""
    copies, left_bytes = divmod(size_bytes, sum(parts)) if parts else (0, size_bytes)
    return [*(part for part in parts for _ in range(copies)), *([left_bytes] if left_bytes else [])]


@dataclass(frozen=True, slots=True)
class BlockPlace:
    """The position of a block: number of its segment, offset there, and size in bytes."""

    segment: int
    offset: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Usage:
    """The memory that an allocator uses and reserves for a training loop.

    Attributes:
        allocated_bytes: peak of the bytes in use, rounded to blocks.
        by_step: for each step of training, the bytes reserved after each of ``Training.events``.
        places: the position of each buffer in the last step.
        retries: number of times that all unused memory was returned to the driver because the device was full.
    """

    allocated_bytes: int
    reserved_bytes: int
    by_step: tuple[tuple[int, ...], ...]
    places: tuple[BlockPlace, ...]
    retries: int


class Allocator(Protocol):
    """The model of an allocator, from whose blocks places are known."""

    allocated: Level
    reserved: Level
    retries: int

    def allocate(self, size_bytes: int) -> Any:
        """Return a block of at least `size_bytes`."""
        ...

    def free(self, block: Any) -> None:
        """Free a block."""
        ...


def play(training: Training, allocator: Allocator) -> Usage:
    """Make the requests of `training` for three steps on `allocator`, which is empty.

    Raises:
        DeviceFullError: the device is too small.
    """
    for size_bytes in (*training.static, *training.libraries):
        allocator.allocate(size_bytes)
    places: dict[int, BlockPlace] = {}
    by_step = tuple(_play_step(training, allocator, places, first=not number) for number in range(_STEPS))
    return Usage(
        allocator.allocated.peak_bytes,
        allocator.reserved.peak_bytes,
        by_step,
        tuple(places[index] for index in range(len(training.buffers))),
        allocator.retries,
    )


def _play_step(training: Training, allocator: Allocator, places: dict[int, BlockPlace], *, first: bool) -> tuple[int, ...]:
    """Return the bytes reserved after each event; `places` gets the positions of the buffers."""
    blocks: dict[int, Any] = {}
    found = []
    for _, index, requested in training.events:
        if not requested:
            allocator.free(blocks.pop(index))
        else:
            block = blocks[index] = allocator.allocate(training.buffers[index].size)
            places[index] = BlockPlace(block.segment.number, block.offset, block.size_bytes)
        found.append(allocator.reserved.bytes)
    for size_bytes in training.state if first else ():
        allocator.allocate(size_bytes)
    for block in [allocator.allocate(size_bytes) for size_bytes in training.temporaries]:
        allocator.free(block)
    for block in blocks.values():
        allocator.free(block)
    return tuple(found)


def usage_of(training: Training, rules: Rules = DEFAULT) -> Usage:
    """Return the memory that PyTorch reserves for `training` on a CUDA device of unlimited capacity, by the allocator's model."""
    return play(training, CachingAllocator(rules=rules))


def compute_outside_pool_bytes(training: Training, rules: Rules = DEFAULT) -> int:
    """Return the bytes that PyTorch reserves outside a private pool that serves all requests of the steps."""
    return usage_of(replace(training, buffers=()), rules).reserved_bytes


def compute_reserved_in_arena_bytes(
    training: Training, pool_bytes: int, rules: Rules = DEFAULT, *, serves_optimizer: bool
) -> int:
    """Return the bytes that PyTorch reserves if all steps use a private pool of `pool_bytes`.

    State that an optimizer makes in its first step must not lie in a pool that serves it. So before this step the gradients are
    copied out of the pool, into one segment, and the pool is given back until the next step, before which unused memory is, too.
    """
    if not serves_optimizer:
        return compute_outside_pool_bytes(training, rules) + pool_bytes
    allocator = CachingAllocator(rules=rules)
    for size_bytes in (*training.static, *training.libraries):
        allocator.allocate(size_bytes)
    end = max((buffer.upper for buffer in training.buffers), default=0)
    copied_bytes = sum(rules.round_bytes(buffer.size) for buffer in training.buffers if buffer.upper == end)
    copies = allocator.allocate(rules.choose_segment_bytes(copied_bytes))
    copying_bytes = allocator.reserved.bytes + pool_bytes
    for size_bytes in training.state:
        allocator.allocate(size_bytes)
    for block in (*[allocator.allocate(size_bytes) for size_bytes in training.temporaries], copies):
        allocator.free(block)
    optimizing_bytes = allocator.reserved.bytes
    allocator.release_unused()
    return max(copying_bytes, optimizing_bytes, allocator.reserved.bytes + pool_bytes)


def find_growth_above(training: Training, usage: Usage, limit_bytes: int) -> dict[int, int]:
    """Return, by step of the schedule, the bytes by which the reserved memory grows above `limit_bytes` in that step.

    Growth between two steps of training is left out.
    """
    found: dict[int, int] = {}
    for reserved in usage.by_step:
        for (moment, *_), (before, after) in zip(training.events[1:], pairwise(reserved), strict=True):
            if after > max(before, limit_bytes):
                step = moment // training.moments
                found[step] = found.get(step, 0) + after - max(before, limit_bytes)
    return found


def least_capacity_bytes(training: Training, rules: Rules = DEFAULT) -> int:
    """Return a capacity of the device at which `training` runs, and does not with 2 MiB less; unused memory is returned there.

    It is found by bisection between the bytes in use at once and what is reserved without a limit. A step may fail at a capacity
    between others at which it runs.
    """
    usage = usage_of(training, rules)
    low, high = (usage.allocated_bytes - 1) // _GRAIN_BYTES, -(-usage.reserved_bytes // _GRAIN_BYTES)
    while high - low > 1:
        middle = (low + high) // 2
        try:
            play(training, CachingAllocator(middle * _GRAIN_BYTES, rules=rules))
        except DeviceFullError:
            low = middle
        else:
            high = middle
    return high * _GRAIN_BYTES
