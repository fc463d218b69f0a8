"""Convolutions whose algorithm cuDNN chooses by timing (``torch.backends.cudnn.benchmark``).

What it has found is known to one thread (ATen/native/cudnn/Conv_v8.cpp), and the backward pass runs in another one. A convolution
that is recomputed there may therefore get another algorithm, which rounds otherwise.
"""

import warnings

import torch

_TARGETS = {"aten.convolution.default", "extern_kernels.convolution"}  # the second in Inductor's code
_DEVICE_TYPE = "cuda"


def chosen_by_timing(target: str, device: torch.device) -> bool:
    """Return True if an op that calls `target` may get another algorithm where it is recomputed on `device`."""
    return target in _TARGETS and device.type == _DEVICE_TYPE and torch.backends.cudnn.enabled and torch.backends.cudnn.benchmark


def warn_not_recomputed(count: int) -> None:
    """Say that so many convolutions are not recomputed, and why."""
    warnings.warn(
        f"torch.backends.cudnn.benchmark is True: cuDNN times its algorithms in each thread, so that a convolution recomputed in "
        f"the backward pass may round otherwise. {count} convolutions are not recomputed. Set it to False for plans that "
        "recompute them and need less memory",
        stacklevel=2,
    )
