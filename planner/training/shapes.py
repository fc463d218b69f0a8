"""Which sizes of a batch vary: found from the batches that come."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from graphs.capture.signature import Batch, leaves
from graphs.errors import MismatchError
from graphs.torch_private.core import pytree

Shapes = tuple[tuple[int, ...], ...]


def shapes_of(batch: Batch) -> Shapes:
    """The shape of each leaf of `batch`; of what is no tensor, ()."""
    return tuple(tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else () for leaf in leaves(batch))


@dataclass(frozen=True, slots=True)
class Axis:
    """One dimension of one leaf of a batch."""

    leaf: int
    dim: int


@dataclass(frozen=True, slots=True)
class Varying:
    """Axes that have been of one size in every batch so far, in groups; some groups have varied.

    Attributes:
        shapes: of the first batch.
        groups: of all its axes, in order of appearance.
        varied: for each group whether it was of another size since.
    """

    shapes: Shapes
    groups: tuple[tuple[Axis, ...], ...]
    varied: tuple[bool, ...]

    @staticmethod
    def of(shapes: Shapes) -> "Varying":
        """Nothing has varied yet."""
        groups = _split([Axis(i, d) for i, shape in enumerate(shapes) for d in range(len(shape))], shapes)
        return Varying(shapes, groups, (False,) * len(groups))

    def seen(self, shapes: Shapes) -> "Varying":
        """After a batch of `shapes`: what was of one size by chance is taken apart.

        Raises:
            MismatchError: a leaf has another number of dimensions.
        """
        if list(map(len, shapes)) != list(map(len, self.shapes)):
            raise MismatchError(f"the batch has shapes {shapes}, but the step was planned for {self.shapes}: only sizes may vary")
        groups, varied = [], []
        for group, before in zip(self.groups, self.varied, strict=True):
            for part in _split(group, shapes):
                groups.append(part)
                varied.append(before or _size(part, shapes) != _size(part, self.shapes))
        return Varying(self.shapes, tuple(groups), tuple(varied))

    def sizes(self, shapes: Shapes) -> tuple[int, ...]:
        """Those that vary, of a batch of `shapes`."""
        return tuple(_size(group, shapes) for group in self._varying)

    def cut(self, batch: Batch, sizes: Sequence[int]) -> Batch:
        """A copy of `batch`, which has the shapes of the first one, cut to `sizes`."""
        flat, spec = pytree.tree_flatten(batch)
        for group, size in zip(self._varying, sizes, strict=True):
            for axis in group:
                flat[axis.leaf] = flat[axis.leaf].narrow(axis.dim, 0, size)
        return pytree.tree_unflatten([_copy(leaf) for leaf in flat], spec)  # type: ignore[no-any-return]

    @property
    def _varying(self) -> list[tuple[Axis, ...]]:
        return [group for group, varied in zip(self.groups, self.varied, strict=True) if varied]


def _split(axes: Sequence[Axis], shapes: Shapes) -> tuple[tuple[Axis, ...], ...]:
    parts: dict[int, list[Axis]] = {}
    for axis in axes:
        parts.setdefault(shapes[axis.leaf][axis.dim], []).append(axis)
    return tuple(map(tuple, parts.values()))


def _size(group: Sequence[Axis], shapes: Shapes) -> int:
    return shapes[group[0].leaf][group[0].dim]


def _copy(leaf: object) -> object:
    """A tensor of its own, laid out as a batch of this size would be."""
    return leaf.detach().clone().requires_grad_(leaf.requires_grad) if isinstance(leaf, torch.Tensor) else leaf
