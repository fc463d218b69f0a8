"""Buffers placed one after the other, each where it fits among those before it, and orders that are improved.

No order is best on all plans, so all four are tried, by best and by first fit. ``improve`` is a random walk over orders: what
ends above the target goes earlier, everything else moves a little.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from planner.solvers.addresses.instance import Instance
from planner.solvers.clock import Clock, measure_rest

_WORK = 1.5e-5  # of placing one buffer, and as much again for each thousand that are there

# By which the largest goes first: size, lifetime, both; and by start.
ORDERS: dict[str, Callable[[Instance, int], tuple[int, ...]]] = {
    "size": lambda instance, u: (-instance.size[u], instance.lower[u]),
    "lifetime": lambda instance, u: (instance.lower[u] - instance.upper[u], -instance.size[u]),
    "area": lambda instance, u: (instance.size[u] * (instance.lower[u] - instance.upper[u]), instance.lower[u]),
    "start": lambda instance, u: (instance.lower[u], -instance.size[u]),
}


def place(
    instance: Instance,
    order: Sequence[int],
    clock: Clock,
    *,
    best_fit: bool = True,
    fixed: Mapping[int, int] = MappingProxyType({}),
) -> tuple[int, ...]:
    """Return offsets in units where each buffer, in this order, takes the tightest gap that holds it, or the lowest.

    Args:
        fixed: offsets of the buffers that are not in `order`.
    """
    n = len(instance.size)
    begins, ends, lower, upper = (np.zeros(n, dtype=np.int64) for _ in range(4))  # of those that are placed, by offset
    offsets = [0] * n
    for at, u in enumerate(sorted(fixed, key=lambda u: fixed[u])):
        offsets[u] = begins[at] = fixed[u]
        ends[at], lower[at], upper[at] = fixed[u] + instance.size[u], instance.lower[u], instance.upper[u]
    for count, u in enumerate(order, len(fixed)):
        size, alignment = instance.size[u], instance.alignment[u]
        met = (lower[:count] < instance.upper[u]) & (upper[:count] > instance.lower[u])
        offset = _find_gap(begins[:count][met], ends[:count][met], size, alignment, best_fit=best_fit)
        offsets[u] = offset
        at = int(np.searchsorted(begins[:count], offset))
        for column, value in ((begins, offset), (ends, offset + size), (lower, instance.lower[u]), (upper, instance.upper[u])):
            column[at + 1 : count + 1] = column[at:count]
            column[at] = value
        clock.spend(_WORK * (1 + count / 1000))
    return tuple(offsets)


def _find_gap(begins: NDArray[np.int64], ends: NDArray[np.int64], size: int, alignment: int, *, best_fit: bool) -> int:
    """Return the lowest offset in the tightest gap of at least `size` between occupied ranges, or in the lowest such gap."""
    if not len(begins):
        return 0
    tops = np.maximum.accumulate(ends)
    starts = np.concatenate(([0], tops))
    if alignment > 1:
        starts += -starts % alignment
    room = np.concatenate((begins, [np.iinfo(np.int64).max])) - starts
    fits = np.flatnonzero(room >= size)
    return int(starts[fits[np.argmin(room[fits])] if best_fit else fits[0]])


def construct_offsets(
    instance: Instance,
    clock: Clock,
    *,
    fits: Sequence[bool] = (True, False),
    fixed: Mapping[int, int] = MappingProxyType({}),
) -> Iterator[tuple[int, ...]]:
    """Yield offsets by best fit and by first fit, in each order.

    Args:
        fits: True for best fit, False for first fit, in the order in which they are tried.
        fixed: offsets of buffers around which the others are placed.
    """
    others = [u for u in range(len(instance.size)) if u not in fixed]
    for best_fit in fits:
        for key in ORDERS.values():
            order = sorted(others, key=lambda u, key=key: key(instance, u))  # type: ignore[misc]
            yield place(instance, order, clock, best_fit=best_fit, fixed=fixed)
            if measure_rest(clock) <= 0:
                return


def improve(
    instance: Instance,
    offsets: tuple[int, ...],
    target_bytes: int,
    clock: Clock,
    *,
    seed: int = 0,
    patience: int | None = None,
) -> tuple[int, ...]:
    """Improve `offsets`: repeatedly place buffers that reach above `target_bytes` earlier, and keep the smallest arena.

    Ends at the target, at the limit of the clock, or after `patience` orders without a gain.
    """
    draw = random.Random(seed)
    best, best_bytes = offsets, instance.compute_height_bytes(offsets)
    order = sorted(range(len(offsets)), key=lambda u: (offsets[u], u))
    current, without_gain = best, 0
    while best_bytes > target_bytes and measure_rest(clock) > 0 and without_gain != patience:
        tops = [(current[u] + instance.size[u]) * instance.unit - instance.pad_bytes[u] for u in range(len(current))]
        above = {u for u, top in enumerate(tops) if top > target_bytes}
        position = {u: p for p, u in enumerate(order)}
        order.sort(key=lambda u: position[u] * (draw.uniform(0.2, 0.8) if u in above else draw.uniform(0.95, 1.05)))
        current = place(instance, order, clock, best_fit=draw.random() < 0.5)
        height_bytes = instance.compute_height_bytes(current)
        without_gain += 1
        if height_bytes < best_bytes:
            best, best_bytes, without_gain = current, height_bytes, 0
    return best
