"""Detection of writes that autograd does not see between the passes: through ``.data``, NumPy or DLPack.

Eager PyTorch would read the new values; a plan does too, and may also recompute activations from them.
"""

from collections.abc import Iterable

import torch

from planner.capture.checksum import compute_checksum
from planner.graphs.errors import PlannerError


class UnseenWrites:
    """Checksums of tensors that a backward pass reads, taken at the end of the forward pass."""

    def __init__(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Compute the checksums of `tensors`, each with a name for messages."""
        self._known = [(name, get_version(tensor), compute_checksum(tensor)) for name, tensor in tensors]

    def check(self, tensors: Iterable[torch.Tensor]) -> None:
        """Raise PlannerError if one of the same `tensors` has changed in a way that autograd does not see."""
        for (name, version, before), tensor in zip(self._known, tensors, strict=True):
            if version == get_version(tensor) and not torch.equal(before, compute_checksum(tensor)):
                raise PlannerError(
                    f"{name} was written between the step and its backward pass in a way that autograd does not see (.data, "
                    "NumPy, DLPack), and the backward pass reads it: gradients would not be those of the loss. Write after "
                    "backward(), or before the step"
                )


def get_version(tensor: torch.Tensor) -> int:
    """Return the number of writes to `tensor` that autograd has seen; 0 for inference tensors, which count none."""
    return 0 if tensor.is_inference() else tensor._version
