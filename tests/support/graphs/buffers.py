"""Buffers for tests of addresses: small ones and their smallest arena by brute force, and packings without any slack."""

import random
from collections.abc import Sequence

from planner.graphs.addresses import Buffer


def random_buffers(
    draw: random.Random, count: int, *, horizon: int = 6, most: int = 6, alignments: Sequence[int] = (1,)
) -> list[Buffer]:
    buffers = []
    for number in range(count):
        lower = draw.randrange(horizon)
        upper = draw.randint(lower + 1, horizon)
        buffers.append(Buffer(f"b{number}", lower, upper, draw.randint(1, most), draw.choice(alignments)))
    return buffers


def smallest_arena(buffers: Sequence[Buffer]) -> int:
    """Of every order in which buffers may lie on top of each other."""
    best = sum(buffer.size + buffer.alignment for buffer in buffers)

    def place(placed: list[tuple[Buffer, int]], rest: Sequence[Buffer], height: int) -> None:
        nonlocal best
        if height >= best:
            return
        if not rest:
            best = height
            return
        for index, buffer in enumerate(rest):
            below = [offset + other.size for other, offset in placed if other.lower < buffer.upper and buffer.lower < other.upper]
            offset = max(below, default=0)
            offset += -offset % buffer.alignment
            others = [*rest[:index], *rest[index + 1 :]]
            place([*placed, (buffer, offset)], others, max(height, offset + buffer.size))

    place([], buffers, 0)
    return best


def packed_buffers(
    count: int, *, horizon: int, height: int, seed: int, pinwheels: float = 0.3, removed: float = 0.0
) -> list[Buffer]:
    """A rectangle of `horizon` by `height`, cut at random into buffers; the smallest arena has the height of the rectangle.

    A part of `removed` of the buffers is left out, but none in use at the first moment, so that the height stays needed.
    """
    draw = random.Random(seed)
    parts = [(0, horizon, 0, height)]
    while len(parts) < count:
        candidates = draw.sample(range(len(parts)), min(4, len(parts)))
        begin, end, low, high = parts.pop(
            max(candidates, key=lambda i: (parts[i][1] - parts[i][0]) * (parts[i][3] - parts[i][2]))
        )
        if end - begin >= 3 and high - low >= 3 and draw.random() < pinwheels:
            first, second = sorted(draw.sample(range(begin + 1, end), 2))
            under, over = sorted(draw.sample(range(low + 1, high), 2))
            parts += [(begin, second, low, under), (second, end, low, over), (first, end, over, high)]
            parts += [(begin, first, under, high), (first, second, under, over)]
        elif end - begin > 1 and (high - low == 1 or draw.random() * height * (end - begin) < horizon * (high - low) / 2):
            cut = draw.randint(begin + 1, end - 1)
            parts += [(begin, cut, low, high), (cut, end, low, high)]
        elif high - low > 1:
            cut = draw.randint(low + 1, high - 1)
            parts += [(begin, end, low, cut), (begin, end, cut, high)]
        else:
            parts.append((begin, end, low, high))
    kept = [part for part in parts if part[0] == 0 or draw.random() >= removed]
    draw.shuffle(kept)
    return [Buffer(f"b{number}", begin, end, high - low) for number, (begin, end, low, high) in enumerate(kept)]
