"""Shared parts of the zoo models: precision and device, losses, batches."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from planner.capture.workload.models import Workload
from planner.graphs.errors import UsageError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@contextmanager
def create_tensors_in(dtype: str, device: str) -> Iterator[None]:
    """Create floating-point tensors in `dtype`, all tensors on `device`; raise UsageError if one is unknown here."""
    choose("dtype", dtype, DTYPES)
    try:
        place = torch.device(device)
    except RuntimeError:
        raise UsageError(f"device {device!r} is not one that torch knows: write cpu, cuda or cuda:0") from None
    if place.type == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"device {device!r} is not on this machine: build on cpu, and model the device by its roofline")
    before = torch.get_default_dtype()
    torch.set_default_dtype(DTYPES[dtype])
    try:
        with place:
            yield
    finally:
        torch.set_default_dtype(before)


def choose(option: str, value: str, choices: "dict[str, torch.dtype] | tuple[str, ...]") -> None:
    """Raise a UsageError unless `value` is one of `choices`."""
    if value not in choices:
        raise UsageError(f"option {option} is {value!r}: choose from {', '.join(choices)}")


def refuse_if(condition: object, message: str) -> None:
    """Raise a UsageError with `message` if `condition` holds."""
    if condition:
        raise UsageError(message)


def compute_class_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Return the cross-entropy of ``(batch, classes, ...)`` logits, in float32 as in mixed-precision training."""
    return F.cross_entropy(logits.float(), target)


def compute_token_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Return the cross-entropy of ``(batch, seq, vocab)`` logits against ``(batch, seq)`` tokens, in float32."""
    return F.cross_entropy(logits.float().flatten(0, 1), target.flatten())


def draw_images(batch: int, size: int) -> Tensor:
    """Return random square images of `size` pixels a side."""
    return torch.randn(batch, 3, size, size)


def train_on_images(model: nn.Module, batch: int, size: int, classes: int) -> Workload:
    """Initialize a convolutional `model`, and return its training on random images and classes."""
    init_convolutions(model)
    return Workload(model, compute_class_loss, (draw_images(batch, size), torch.randint(classes, (batch,))))


def init_convolutions(model: nn.Module) -> None:
    """Initialize convolutions by He's method and linear layers by small normal numbers, as usual for image models."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.01)
            nn.init.zeros_(module.bias)
