"""Indices of max-pooling as positions within their windows, one byte each."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx

from graphs.ir import Phase
from planner.capture.options.pack.finder import PackFinder, allocate_like
from planner.capture.options.pack.shapes import OfShape, build_of_shape
from planner.capture.rewrites.outputs import get_fake, is_dense

aten = torch.ops.aten

_PARTS = 8  # of a batch, processed one after another
_VALUES = 256  # of one byte


@dataclass(frozen=True, slots=True)
class Windows:
    """The positions of the windows of a pooling.

    An index counts the elements of a plane of width `width`. It is the index of the window's first element (padding included),
    plus `width` times `down` for each row below that, plus columns.

    Attributes:
        width: width of a plane.
        stride, padding: distance of windows, and padding before the plane.
        down: distance of the rows of a window.
        columns: columns of the plane that a window spans; at most `width` times `down`.
        rows: rows of a window.
    """

    width: int
    stride: tuple[int, int]
    padding: tuple[int, int]
    down: int
    columns: int
    rows: int

    @classmethod
    def of(cls, width: int, kernel: Any, stride: Any, padding: Any, dilation: Any) -> "Windows | None":
        """Return the windows; None if the positions of a window exceed a byte, or overlap."""
        (rows, wide), (down, right) = _make_pair(kernel), _make_pair(dilation)
        found = cls(width, _make_pair(stride or kernel), _make_pair(padding), down, (wide - 1) * right + 1, rows)
        return found if found.columns <= width * down and found.rows * found.columns <= _VALUES else None

    def compute_first(self, like: torch.Tensor) -> torch.Tensor:
        """Return for each element of a plane of results the index at which its window begins, on the device of `like`.

        For a window that begins in the padding, this is an index inside the plane, so that position 0 is always an element, also
        for synthetic positions.
        """
        high, wide = (torch.arange(size, device=like.device) for size in like.shape[-2:])
        top, left = high * self.stride[0] - self.padding[0], wide * self.stride[1] - self.padding[1]
        top = torch.where(top < 0, top % self.down, top)
        return top[:, None] * self.width + left.clamp_(min=0)

    def encode(self, indices: torch.Tensor, first: torch.Tensor, places: torch.Tensor) -> None:
        """Write to `places` the position of each of `indices` in its window."""
        place = indices - first
        row = place.div(self.width * self.down, rounding_mode="floor")
        places.copy_(place.sub_(row, alpha=self.width * self.down - self.columns))

    def decode(self, places: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
        """Return the indices."""
        row = places.div(self.columns, rounding_mode="floor")
        return torch.add(first, places).add_(row, alpha=self.width * self.down - self.columns)


def _make_pair(value: Any) -> tuple[int, int]:
    values = (value, value) if isinstance(value, int) else tuple(value)
    return (values[0], values[-1])


def pack_places(indices: torch.Tensor, *, like: torch.Tensor, windows: Windows) -> tuple[torch.Tensor]:
    """Return the positions of `indices` in their windows, laid out like the fake `like`."""
    places, first = allocate_like(like, indices), windows.compute_first(indices)
    for part, room in zip(_split_parts(indices), _split_parts(places), strict=True):
        windows.encode(part, first, room)
    return (places,)


def unpack_places(gradient: torch.Tensor, places: torch.Tensor, *, whole: OfShape, windows: Windows) -> tuple[torch.Tensor]:
    """Return the gradient of max-pooling by the program's kernel, on one part of the batch after another.

    Args:
        whole: the kernel on the whole batch.
    """
    result, first = allocate_like(whole.result, gradient), windows.compute_first(places)
    for room, came, place in zip(_split_parts(result), _split_parts(gradient), _split_parts(places), strict=True):
        whole.write(room, came, windows.decode(place, first))
    return (result,)


def _split_parts(value: torch.Tensor) -> tuple[torch.Tensor, ...]:
    parts: tuple[torch.Tensor, ...] = value.split(-(-value.shape[0] // _PARTS) or 1)
    return parts


def offer(finder: PackFinder) -> None:
    """Add two ops for each max-pooling whose indices only its gradient reads: to bytes, and the gradient from them."""
    for op, node in finder.iterate_calls([aten.max_pool2d_with_indices_backward.default], Phase.BACKWARD):
        gradient, x, kernel, stride, padding, dilation, _, indices = node.args
        assert isinstance(gradient, fx.Node) and isinstance(x, fx.Node) and isinstance(indices, fx.Node)
        value = get_fake(indices)
        windows = Windows.of(get_fake(x).shape[-1], kernel, stride, padding, dilation)
        alone = finder.find_readers(finder.get_tensor(indices)) == {op.id}
        if windows is None or not alone or not finder.is_worth(finder.get_tensor(indices)) or not is_dense(value):
            continue
        places = value.new_empty_strided(value.shape, value.stride(), dtype=torch.uint8)
        made = finder.additions.add_tensor(f"{op.name}@places", places)
        called = partial(pack_places, like=places, windows=windows)
        finder.add(called, [indices], like=op, of=op.name, does="to_places", makes=made)
        called = partial(unpack_places, whole=build_of_shape(node), windows=windows)
        finder.add(called, [gradient, made], like=op, of=op.name, does="from_places", makes=op.outputs[0], alternative=True)
