"""Convolutions whose algorithm cuDNN chooses by timing (``torch.backends.cudnn.benchmark``).

The choices are stored for each thread (ATen/native/cudnn/Conv_v8.cpp), and the backward pass runs in a thread of its own. A
convolution that is recomputed there may therefore get another algorithm, which rounds differently.
"""

import torch

from planner.graphs.short_tracebacks import warn_caller

_TARGETS = {"aten.convolution.default", "extern_kernels.convolution"}  # the second is in Inductor's code
_DEVICE_TYPE = "cuda"


def is_chosen_by_timing(target: str, device: torch.device) -> bool:
    """Return True if an op that calls `target` may get another algorithm where it is recomputed on `device`."""
    return target in _TARGETS and device.type == _DEVICE_TYPE and torch.backends.cudnn.enabled and torch.backends.cudnn.benchmark


def warn_not_recomputed(count: int) -> None:
    """Warn that `count` convolutions are not recomputed, and why."""
    warn_caller(
        f"torch.backends.cudnn.benchmark is True: cuDNN times its algorithms in each thread, so that a convolution recomputed in "
        f"the backward pass may round otherwise. {count} convolutions are not recomputed. Set it to False for plans that "
        "recompute them and need less memory",
    )
