"""Buffers of one pool as small numbers: sections in place of time, units in place of bytes.

Time is cut into *sections*, the maximal sets of buffers that are in use at once: a smaller set adds nothing. Sizes are
padded to the common divisor of all alignments, as any offset is a multiple of it, and divided by what divides them all.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from planner.graphs.addresses import Buffer


@dataclass(frozen=True)
class Instance:
    """Buffers that must be planned together: no moment cuts their lifetimes in two groups.

    Attributes:
        index: of each buffer, in what was given to ``split_into_instances``.
        size: of each buffer in units, padded.
        lower, upper: its sections [lower, upper).
        alignment: of its offset, in units.
        pad_bytes: by which its size is less than that of its units.
        unit: bytes.
    """

    index: tuple[int, ...]
    size: tuple[int, ...]
    lower: tuple[int, ...]
    upper: tuple[int, ...]
    alignment: tuple[int, ...]
    pad_bytes: tuple[int, ...]
    unit: int

    @cached_property
    def sections(self) -> tuple[tuple[int, ...], ...]:
        """The buffers that are in use in each section."""
        found: list[list[int]] = [[] for _ in range(max(self.upper))]
        for u, (low, high) in enumerate(zip(self.lower, self.upper, strict=True)):
            for s in range(low, high):
                found[s].append(u)
        return tuple(map(tuple, found))

    @cached_property
    def live(self) -> tuple[int, ...]:
        """Units in use in each section."""
        return tuple(sum(self.size[u] for u in section) for section in self.sections)

    @cached_property
    def bound_bytes(self) -> int:
        """Lower bound on the size of the arena: peak of the bytes in use, with padding except that of the buffer on top."""
        return max(
            live * self.unit - max(self.pad_bytes[u] for u in section)
            for live, section in zip(self.live, self.sections, strict=True)
        )

    def find_tight_buffers(self, share: float) -> list[int]:
        """Return the buffers of the sections in which at least `share` of the most units are in use at once."""
        least = share * max(self.live)
        return sorted({u for live, section in zip(self.live, self.sections, strict=True) if live >= least for u in section})

    def compute_height_bytes(self, offsets: Sequence[int]) -> int:
        """Bytes of the arena with these offsets, which are in units."""
        tops = zip(offsets, self.size, self.pad_bytes, strict=True)
        return max((offset + size) * self.unit - pad for offset, size, pad in tops)


def split_into_instances(buffers: Sequence[Buffer]) -> list[Instance]:
    """Return the instances that `buffers`, all of one pool, fall into."""
    if not buffers:
        return []
    grid = math.gcd(*(buffer.alignment for buffer in buffers))
    padded = [-(-buffer.size // grid) * grid for buffer in buffers]
    unit = math.gcd(*padded)
    if any(unit % buffer.alignment for buffer in buffers):
        unit = math.gcd(unit, *(buffer.alignment for buffer in buffers))
    lower, upper = _compute_sections(buffers)
    order = sorted(range(len(buffers)), key=lambda i: (lower[i], upper[i], -padded[i]))
    groups: list[list[int]] = []
    end = 0
    for i in order:
        if lower[i] >= end:
            groups.append([])
        groups[-1].append(i)
        end = max(end, upper[i])
    return [
        Instance(
            index=tuple(group),
            size=tuple(padded[i] // unit for i in group),
            lower=tuple(lower[i] - lower[group[0]] for i in group),
            upper=tuple(upper[i] - lower[group[0]] for i in group),
            alignment=tuple(max(1, buffers[i].alignment // math.gcd(unit, buffers[i].alignment)) for i in group),
            pad_bytes=tuple(padded[i] - buffers[i].size for i in group),
            unit=unit,
        )
        for group in groups
    ]


def _compute_sections(buffers: Sequence[Buffer]) -> tuple[list[int], list[int]]:
    """Return the first section of each buffer and the one behind its last: a new one begins where a start follows an end."""
    events = [(buffer.upper, 0, i) for i, buffer in enumerate(buffers)]
    events += [(buffer.lower, 1, i) for i, buffer in enumerate(buffers)]
    lower, upper = [0] * len(buffers), [0] * len(buffers)
    section, ended = -1, True
    for _, starts, i in sorted(events):
        if starts:
            section += ended
            lower[i] = section
        else:
            upper[i] = section + 1
        ended = not starts
    return lower, upper
