"""Truth values as bits: eight per byte, packed by integer products, part by part.

Eight truth values lie in a 64-bit word, one in the lowest bit of each byte. Multiplied by ``_SPREAD``, whose bits are nine
positions apart, the word has them side by side in its highest byte; a byte multiplied by it has each of its bits at the top of
another byte. No two terms of these products overlap, so nothing is carried.
"""

from collections.abc import Callable, Iterator, Sequence

import torch

_SPREAD = 0x8040201008040201 - 2**64  # as a signed number
_LOWEST = 0x0101010101010101
_WORD = 8

# An eighth of the elements are processed at a time; on a CPU at most as many as fit into its cache.
_PARTS = 8
_IN_CACHE = 2**18

# Called with an output of truth values, and their range: the first, and the end.
Write = Callable[[torch.Tensor, int, int], object]


def count_bytes(count: int) -> int:
    """Return the bytes of `count` bits."""
    return -(-count // _WORD)


def choose_part_size(count: int, device: str) -> int:
    """Return the number of elements, of `count`, to process at a time on `device`, ``cpu`` or ``cuda``: a multiple of eight."""
    size = -(-count // _PARTS)
    return max(1, count_bytes(min(size, _IN_CACHE) if device == "cpu" else size)) * _WORD


def iterate_parts(count: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield the begin and end of each part of `size` of `count` elements; the last may be smaller."""
    for begin in range(0, count, size):
        yield begin, min(begin + size, count)


def flatten_in_order(value: torch.Tensor, dimensions: Sequence[int]) -> torch.Tensor:
    """Return the elements of `value` in one dimension, `dimensions` from the outermost; a view if they have no gaps."""
    return value.permute(tuple(dimensions)).reshape(-1)


def order_of(value: torch.Tensor) -> tuple[int, ...]:
    """Return the dimensions of `value` from the outermost in memory to the innermost."""
    strides = value.stride()
    return tuple(sorted(range(value.dim()), key=lambda dimension: (-strides[dimension], dimension)))


def pack(write: Write, count: int, size: int, like: torch.Tensor) -> torch.Tensor:
    """Return `count` truth values as bits, on the device of `like`.

    Args:
        write: writes a part of the truth values.
        size: number of values in a part, a multiple of eight.
    """
    packed = like.new_empty(count_bytes(count), dtype=torch.uint8)
    room = like.new_empty(size, dtype=torch.uint8)
    for begin, end in iterate_parts(count, size):
        write(room[: end - begin].view(torch.bool), begin, end)
        used = count_bytes(end - begin) * _WORD
        room[end - begin : used].zero_()
        room[:used].view(torch.int64).mul_(_SPREAD)
        packed[begin // _WORD : count_bytes(end)].copy_(room[_WORD - 1 : used : _WORD])
    return packed


def write_truth_values(packed: torch.Tensor, words: torch.Tensor) -> None:
    """Write the bits `packed` as truth values to `words` of int64, eight in each."""
    words.copy_(packed).mul_(_SPREAD).bitwise_right_shift_(_WORD - 1).bitwise_and_(_LOWEST)


def iterate_unpacked(packed: torch.Tensor, count: int, size: int) -> Iterator[tuple[torch.Tensor, int, int]]:
    """Yield `count` truth values in parts of `size`, in a reused buffer, with the begin and end of each part."""
    room = packed.new_empty(size)
    for begin, end in iterate_parts(count, size):
        used = count_bytes(end - begin)
        write_truth_values(packed[begin // _WORD : begin // _WORD + used], room[: used * _WORD].view(torch.int64))
        yield room[: end - begin].view(torch.bool), begin, end
