"""Recognition of the optimizers whose memory is known."""

from collections.abc import Mapping
from typing import Any

import torch

from graphs.errors import PlannerError
from graphs.optimizers import OPTIMIZERS


def optimizer_kind(optimizer: torch.optim.Optimizer) -> str:
    """Return the name of an optimizer in ``planner.compile``.

    Args:
        optimizer: an optimizer of ``torch.optim``, or a wrapper with one as ``optimizer``, such as Accelerate's.

    Raises:
        PlannerError: its memory is unknown.
    """
    inner = getattr(optimizer, "optimizer", None)
    if isinstance(inner, torch.optim.Optimizer):
        return optimizer_kind(inner)
    found = {_kind_of_group(type(optimizer), group) for group in optimizer.param_groups}
    if len(found) != 1 or None in found:
        raise PlannerError(
            f"what memory {type(optimizer).__name__} takes is not known: name the optimizer that keeps as many copies of the "
            f"parameters, optimizer= one of {', '.join(f'{name!r} ({known.copies})' for name, known in OPTIMIZERS.items())}"
        )
    return str(found.pop())


def _kind_of_group(optimizer: type[torch.optim.Optimizer], group: Mapping[str, Any]) -> str | None:
    name = optimizer.__name__
    if getattr(torch.optim, name, None) is not optimizer:
        return None
    return next((kind for kind, known in OPTIMIZERS.items() if known.describes(name, group)), None)
