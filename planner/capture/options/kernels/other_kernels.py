"""The calls of alternative kernels, whose results get the program's layout."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from planner.capture.options.kernels.alternative import Alternative, MadeTensor
from planner.capture.rewrites.outputs import same_layout


@dataclass(frozen=True, slots=True)
class OtherKernels:
    """The computation of tensors of the program by other kernels.

    Attributes:
        alternative: the alternative.
        bundle: name shared by ops that are useful only together.
    """

    alternative: Alternative
    bundle: str

    def rounds(self, equal: Sequence[bool]) -> list[bool]:
        """Return which results of the program may be rounded differently; see ``Comparable``."""
        of_program = (isinstance(made, MadeTensor) for made in self.alternative.makes)
        return [of and not (same and self.alternative.repeatable) for of, same in zip(of_program, equal, strict=True)]

    def __call__(self, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the results."""
        return tuple(
            _as_laid_out(value, made.value)
            for value, made in zip(self.alternative.compute(*given), self.alternative.makes, strict=True)
        )


def _as_laid_out(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return `value` with the strides of `like`, in a storage of the same size."""
    if value.untyped_storage().nbytes() != like.untyped_storage().nbytes() or not same_layout(value, like):
        return value.new_empty_strided(like.shape, like.stride()).copy_(value)
    # The stride of a dimension with one element is arbitrary, but it influences the choice of kernels.
    return value if value.stride() == like.stride() else value.as_strided(like.shape, like.stride())
