"""The arena that the steps of a plan run in, as it is planned. Never imports torch."""

from collections import Counter
from collections.abc import Container, Mapping
from functools import lru_cache

from graphs.addresses import Buffer, Offsets, live_bytes
from graphs.allocators.steering import GRAIN_BYTES, Hole, Steering, is_placed, least_hole_bytes, steer
from graphs.allocators.training import Training
from graphs.ir import Graph, Kind
from solvers.addresses.solve import solve
from solvers.arena.needs import ArenaRules

ALIGNMENT = 64  # that of PyTorch's CPU allocator, by which kernels choose how they compute
LEAST_BYTES = 1024  # smaller requests stay with the C library: they are many, and would leave gaps between large ones
_SEARCH_WORK = 1.0  # of each search for addresses on a device, in work: the same addresses wherever they are planned
_SEARCHES = 4


def arena_rules(graph: Graph) -> ArenaRules:
    """Return which buffers of the step of `graph` are in its arena: all but small ones and the results that the caller gets."""
    results = frozenset(t for t in graph.kept if graph.tensors[t].kind is not Kind.GRADIENT)
    return ArenaRules(ALIGNMENT, LEAST_BYTES, results)


@lru_cache(maxsize=8)
def device_arena(training: Training) -> Steering:
    """Return the arena of a step on a CUDA device: a pool of PyTorch's allocator, steered to planned addresses.

    Those asked for last are remembered: a plan, its report and the executor of its step ask for the same one.

    To the allocator, holes side by side that one op asks for are one, and those of one size are alike. Where requests miss their
    addresses for that reason, addresses are planned again with holes of these ops that are apart and differ.
    """
    found: list[Steering] = []
    told_apart: set[int] = set()  # steps of the schedule
    while not found or (found[-1].missed and len(found) < _SEARCHES):
        sizes = _hole_sizes(training, told_apart)
        buffers = _hole_buffers(training, sizes, told_apart)
        offsets = solve(buffers, work_limit=_SEARCH_WORK).offsets if buffers else Offsets((), ())
        assert offsets is not None  # any arena will do
        at = {int(buffer.id): offset for buffer, offset in zip(offsets.buffers, offsets.offsets, strict=True)}
        holes = {index: Hole(at[index], size_bytes) for index, size_bytes in sizes.items()}
        found.append(steer(training, holes, offsets.height_bytes))
        told_apart |= {_step(training, index) for index in found[-1].missed}
    return min(found, key=lambda steering: steering.pool_bytes)


def least_slab_bytes(training: Training) -> int:
    """Return a size below which no slab has room for the holes of a step, without looking for addresses."""
    return live_bytes(_hole_buffers(training, _hole_sizes(training, ()), ()))


def _hole_buffers(training: Training, sizes: Mapping[int, int], told_apart: Container[int]) -> list[Buffer]:
    """Return holes as buffers, in use throughout their ops, with gaps behind those of the steps `told_apart`."""
    return [
        Buffer(
            str(index),
            _step(training, index),
            -(-training.buffers[index].upper // training.moments),
            size_bytes + (GRAIN_BYTES if _step(training, index) in told_apart else 0),
            GRAIN_BYTES,
        )
        for index, size_bytes in sizes.items()
    ]


def _hole_sizes(training: Training, told_apart: Container[int]) -> dict[int, int]:
    """Return the size of the hole of each buffer that is placed; in the steps `told_apart` later requests have larger ones."""
    sizes: dict[int, int] = {}
    equal: Counter[tuple[int, int]] = Counter()
    placed = [index for index, buffer in enumerate(training.buffers) if is_placed(buffer.size)]
    for index in sorted(placed, key=lambda index: training.buffers[index].lower):
        step, size_bytes = _step(training, index), least_hole_bytes(training.buffers[index].size)
        sizes[index] = size_bytes + (equal[step, size_bytes] * GRAIN_BYTES if step in told_apart else 0)
        equal[step, size_bytes] += 1
    return sizes


def _step(training: Training, index: int) -> int:
    """Return the step of the schedule in which a buffer is requested."""
    return training.buffers[index].lower // training.moments
