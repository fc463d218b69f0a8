"""The arena that the steps of a plan run in, as it is planned. Never imports torch.

Known weakness: addresses on a device are planned at most ``_SEARCHES`` times. Requests that miss theirs even then lie outside of
the slab, which costs segments, not correctness.
"""

from collections.abc import Container, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.graphs.addresses import Buffer, Offsets, live_bytes
from planner.graphs.allocators.caching import BLOCK_BYTES
from planner.graphs.allocators.steering import LEAST_GRAIN_BYTES, Hole, Steering, compute_least_hole_bytes, is_placed, steer
from planner.graphs.allocators.training import Training
from planner.graphs.ir import Graph, Kind
from planner.solvers.addresses.solve import solve
from planner.solvers.arena.needs import ArenaRules

ALIGNMENT = 64  # that of PyTorch's CPU allocator, by which kernels choose how they compute
LEAST_BYTES = 1024  # smaller requests stay with the C library: they are many, and would leave gaps between large ones
_SEARCH_WORK = 1.0  # of each search for addresses on a device, in work: the same addresses wherever they are planned
_SEARCHES = 4


def build_arena_rules(graph: Graph) -> ArenaRules:
    """Return the rules for the arena of `graph` on the CPU: all buffers but small ones and results returned to the caller."""
    results = frozenset(t for t in graph.kept if graph.tensors[t].kind is not Kind.GRADIENT)
    return ArenaRules(ALIGNMENT, LEAST_BYTES, results)


@lru_cache(maxsize=8)
def plan_device_arena(training: Training) -> Steering:
    """Return the arena of a step on a CUDA device: a pool of PyTorch's allocator, steered to planned addresses.

    Those asked for last are remembered: a plan, its report and the executor of its step ask for the same one.

    To the allocator, holes side by side that one op asks for are one, and those of one size are alike. Where requests miss their
    addresses for that reason, addresses are planned again with holes of these ops that are apart and differ.
    """
    found: list[Steering] = []
    told_apart: set[int] = set()  # steps of the schedule
    grain_bytes = _find_best_grain_bytes(training)
    while not found or (found[-1].missed and len(found) < _SEARCHES):
        slots = _find_slots(training, told_apart, grain_bytes)
        buffers = _build_slot_buffers(training, slots, told_apart, grain_bytes)
        offsets = solve(buffers, work_limit=_SEARCH_WORK).offsets if buffers else Offsets((), ())
        assert offsets is not None  # any arena will do
        at = {int(buffer.id): offset for buffer, offset in zip(offsets.buffers, offsets.offsets, strict=True)}
        holes = {index: Hole(at[number], slot.size_bytes) for number, slot in enumerate(slots) for index in slot.buffers}
        found.append(steer(training, holes, offsets.height_bytes))
        told_apart |= {_step(training, index) for index in found[-1].missed}
    return min(found, key=lambda steering: steering.pool_bytes)


def bound_slab_bytes(training: Training) -> int:
    """Return a size below which no slab has room for the holes of a step, without looking for addresses."""
    grain_bytes = _find_best_grain_bytes(training)
    return live_bytes(_build_slot_buffers(training, _find_slots(training, (), grain_bytes), (), grain_bytes))


@lru_cache(maxsize=8)
def _find_best_grain_bytes(training: Training) -> int:
    """Return the grain with which the slots of a step take the fewest bytes at once, of those that divide a request.

    Requests of one model are mostly small multiples of each other: with the least grain, those of a ResNet-50 take 1.5% more.
    """
    slots = _find_slots(training, (), LEAST_GRAIN_BYTES)
    requests = np.array([max(training.buffers[index].size for index in slot.buffers) for slot in slots])
    buffers = _build_slot_buffers(training, slots, (), LEAST_GRAIN_BYTES)
    lower, upper = (np.array([getattr(buffer, end) for buffer in buffers], dtype=int) for end in ("lower", "upper"))
    grains = {LEAST_GRAIN_BYTES}
    for size in {int(size) for size in requests}:
        counts = range(-(-size // (2 * LEAST_GRAIN_BYTES)), size // LEAST_GRAIN_BYTES + 1)
        grains |= {-(-size // (count * BLOCK_BYTES)) * BLOCK_BYTES for count in counts}
    count = partial(_count_most_bytes, requests, lower, upper)
    return min(sorted(grains), key=count) if slots else LEAST_GRAIN_BYTES


def _count_most_bytes(requests: NDArray[Any], lower: NDArray[Any], upper: NDArray[Any], grain_bytes: int) -> int:
    changes = np.zeros(max(upper, default=0) + 1, dtype=int)
    sizes = -(-requests // grain_bytes) * grain_bytes
    np.add.at(changes, lower, sizes)
    np.add.at(changes, upper, -sizes)
    return int(changes.cumsum().max())


@dataclass(slots=True, eq=False)
class _Slot:
    """A hole as it is planned: its bytes, and the buffers that have it one after the other, of one step of the schedule."""

    size_bytes: int
    buffers: list[int]


def _build_slot_buffers(training: Training, slots: Sequence[_Slot], told_apart: Container[int], grain_bytes: int) -> list[Buffer]:
    """Return slots as buffers, in use throughout their ops, with gaps behind those of the steps `told_apart`."""
    return [
        Buffer(
            str(number),
            step := _step(training, slot.buffers[0]),
            -(-max(training.buffers[index].upper for index in slot.buffers) // training.moments),
            slot.size_bytes + (grain_bytes if step in told_apart else 0),
            grain_bytes,
        )
        for number, slot in enumerate(slots)
    ]


def _find_slots(training: Training, told_apart: Container[int], grain_bytes: int) -> list[_Slot]:
    """Return the slots of the buffers that are placed; in the steps `told_apart` such that best fit does not confuse them.

    Workspaces that an op has one after the other share a slot.
    """
    slots: list[_Slot] = []
    of_step: dict[int, list[_Slot]] = {}
    placed = [index for index, buffer in enumerate(training.buffers) if is_placed(buffer.size)]
    for index in sorted(placed, key=lambda index: training.buffers[index].lower):
        step, buffer = _step(training, index), training.buffers[index]
        others = of_step.setdefault(step, [])
        again = [slot for slot in others if all(training.buffers[i].upper <= buffer.lower for i in slot.buffers)]
        if again and buffer.upper <= (step + 1) * training.moments:
            slot = max(again, key=lambda slot: slot.size_bytes)
            slot.size_bytes = max(slot.size_bytes, compute_least_hole_bytes(buffer.size, grain_bytes))
        elif step in told_apart:
            slot = _tell_apart(training, index, others, again, grain_bytes)
        else:
            slot = _Slot(compute_least_hole_bytes(buffer.size, grain_bytes), [])
        if not slot.buffers:
            slots.append(slot)
            others.append(slot)
        slot.buffers.append(index)
    return slots


def _tell_apart(training: Training, index: int, others: Sequence[_Slot], again: Sequence[_Slot], grain_bytes: int) -> _Slot:
    """Return the slot of a buffer beside those of earlier requests of its op: a new one, or one of those that are free `again`.

    Best fit gives the earlier requests their slots if this one is too small for them, or larger than theirs. It gives this one
    the smallest that is free.
    """
    buffer, size_bytes = training.buffers[index], compute_least_hole_bytes(training.buffers[index].size, grain_bytes)
    least_bytes = [min(training.buffers[i].size for i in other.buffers) for other in others]
    while confused := [slot for least, slot in zip(least_bytes, others, strict=True) if least <= size_bytes <= slot.size_bytes]:
        if (other := confused[0]) in again:
            break
        size_bytes = other.size_bytes + grain_bytes
    fitting = [slot for slot in again if buffer.size <= slot.size_bytes <= size_bytes]
    return min(fitting, key=lambda slot: slot.size_bytes, default=_Slot(size_bytes, []))


def _step(training: Training, index: int) -> int:
    """Return the step of the schedule in which a buffer is requested."""
    return training.buffers[index].lower // training.moments
