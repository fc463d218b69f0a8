"""Compression and restoration of a tensor: functions on real and on fake tensors, slice by slice.

Slice by slice, since the arithmetic is in float32 and needs several tensors of the size of its input: of the whole at once these
would be what the step has to hold. Known weakness: only tensors without gaps, all of them as wholes.
"""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator
from dataclasses import dataclass

import torch

from planner.capture.options.compress.forms import GROUP, Form, Noise, compute_seed
from planner.graphs.errors import TraceError

_LEAST_SLICE, _MOST_SLICES = 2**16, 8  # least elements of a slice, and most slices of a tensor


@dataclass(frozen=True, slots=True)
class DenseLayout:
    """A tensor whose elements fill its storage without gaps.

    Attributes:
        like: a fake tensor of the same layout.
        form: the compressed form in which it is kept.
    """

    like: torch.Tensor
    form: Form

    @property
    def groups(self) -> int:
        """The number of groups; the last may be incomplete."""
        return -(-self.like.numel() // GROUP)

    @property
    def code_bytes(self) -> int:
        """The bytes of the codes of all groups."""
        return self.groups * self.form.code_bytes

    @property
    def kept_bytes(self) -> int:
        """The bytes of the compressed tensor: codes, then limits in the tensor's dtype."""
        return self.code_bytes + self.groups * self.form.limits * self.like.element_size()

    def split_parts(self, kept: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return codes and limits of a compressed tensor, with a row for each group."""
        codes = kept[: self.code_bytes].view(self.groups, self.form.code_bytes)
        return codes, kept[self.code_bytes :].view(self.like.dtype).view(self.groups, self.form.limits)

    @property
    def fake(self) -> torch.Tensor:
        """The compressed tensor as a fake tensor."""
        return self.like.new_empty(self.kept_bytes, dtype=torch.uint8)

    @property
    def part(self) -> "DenseLayout":
        """The layout of the first slice."""
        _, elements = next(self.iterate_slices())
        return DenseLayout(self.like.new_empty(elements.stop), self.form)

    def iterate_slices(self) -> Iterator[tuple[slice, slice]]:
        """Yield the groups and the elements of each slice."""
        size = max(_LEAST_SLICE, self.like.numel() // _MOST_SLICES) // GROUP
        for begin in range(0, self.groups, size):
            end = min(begin + size, self.groups)
            yield slice(begin, end), slice(begin * GROUP, min(end * GROUP, self.like.numel()))


@dataclass(frozen=True, slots=True)
class _InSlices(ABC):
    """A function of a tensor, slice by slice (``Repeated``)."""

    layout: DenseLayout

    @property
    def count(self) -> int:
        """The number of slices."""
        return sum(1 for _ in self.layout.iterate_slices())

    @property
    def alike(self) -> Hashable:
        """A key that is equal for slices of the same size and form."""
        part = self.layout.part.like
        return type(self), self.layout.form, part.numel(), part.dtype

    @abstractmethod
    def __call__(self, value: torch.Tensor) -> tuple[torch.Tensor]:
        """Return the result."""


@dataclass(frozen=True, slots=True)
class Keep(_InSlices):
    """The compression of a tensor to bytes.

    Attributes:
        number: number of the op, which seeds the rounding.
    """

    number: int

    @property
    def part(self) -> tuple["Keep", tuple[torch.Tensor]]:
        """The compression of one slice, and the slice."""
        layout = self.layout.part
        return Keep(layout, self.number), (layout.like,)

    def __call__(self, value: torch.Tensor) -> tuple[torch.Tensor]:
        """Return `value`, compressed; raise TraceError if its layout differs from the captured one."""
        layout = self.layout
        if value.stride() != layout.like.stride() or value.storage_offset():
            raise TraceError(
                f"a tensor of shape {tuple(value.shape)} has strides {value.stride()}, but was captured with "
                f"{layout.like.stride()}: it cannot be kept compressed; leave out the option 'compress'"
            )
        flat = value.as_strided((value.numel(),), (1,))
        kept = torch.empty(layout.kept_bytes, dtype=torch.uint8, device=value.device)
        codes, limits = layout.split_parts(kept)
        seed = compute_seed(flat, self.number)
        for groups, elements in layout.iterate_slices():
            rows = flat[elements].to(torch.float32)
            if missing := -rows.numel() % GROUP:
                rows = torch.cat((rows, rows[-1:].expand(missing)))  # padding within the range of its group
            rows = rows.view(-1, GROUP)
            layout.form.pack(rows, Noise(seed, groups.start), codes[groups], limits[groups])
        return (kept,)


@dataclass(frozen=True, slots=True)
class Restore(_InSlices):
    """The restoration of a tensor from the result of ``Keep``, with its shape, strides and dtype."""

    @property
    def part(self) -> tuple["Restore", tuple[torch.Tensor]]:
        """The restoration of one slice, and the slice."""
        layout = self.layout.part
        return Restore(layout), (layout.fake,)

    def __call__(self, kept: torch.Tensor) -> tuple[torch.Tensor]:
        """Return the restored tensor."""
        layout = self.layout
        like = layout.like
        made = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=kept.device)
        flat = made.as_strided((made.numel(),), (1,))
        codes, limits = layout.split_parts(kept)
        for groups, elements in layout.iterate_slices():
            rows = layout.form.unpack(codes[groups], limits[groups]).view(-1)
            flat[elements].copy_(rows[: elements.stop - elements.start])
        return (made,)
