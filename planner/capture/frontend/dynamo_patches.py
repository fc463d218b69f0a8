"""Patches for statements that Dynamo refuses, though a capture can leave them out or run them beforehand."""

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.distributions import Distribution

from planner.torch_private.capture import SETATTR


@contextmanager
def ignore_requires_grad_writes() -> Iterator[None]:
    """Leave out ``hidden.requires_grad = True`` on intermediate tensors: nobody reads that gradient."""
    owner_of, method = SETATTR
    set_attribute = getattr(owner_of, method)

    def set_or_leave(function: Any, translator: Any, owner: Any, name: Any, value: Any) -> Any:
        named = name.is_python_constant() and name.as_python_constant() == "requires_grad"
        if named and owner.is_tensor() and value.is_python_constant() and value.as_python_constant() is True:
            made = owner.as_proxy().node
            if made.op not in ("placeholder", "get_attr"):
                return value
        return set_attribute(function, translator, owner, name, value)

    with patch.object(owner_of, method, set_or_leave):
        yield


@contextmanager
def ignore_cudnn_flags(device: torch.device) -> Iterator[None]:
    """Leave out ``with torch.backends.cudnn.flags(...)`` on the CPU, where it has no effect."""

    def flags(*_: object, **__: object) -> AbstractContextManager[None]:
        return nullcontext()

    with patch.object(torch.backends.cudnn, "flags", flags) if device.type == "cpu" else nullcontext():
        yield


@contextmanager
def skip_distribution_checks() -> Iterator[None]:
    """Keep ``torch.distributions`` from checking values, which no graph can do, unless they are asked to.

    ``torch.compile`` disables the checks for the whole process.
    """
    with patch.object(Distribution, "_validate_args", False):
        yield


def install_hooks(step: nn.Module) -> None:
    """Install the hooks of Transformers' models that record hidden states, as their first forward pass would."""
    library = sys.modules.get("transformers.utils.output_capturing")
    if library is None:
        return
    for module in list(step.modules()):
        if library._CAN_RECORD_REGISTRY.get(module):
            library.maybe_install_capturing_hooks(module)
