"""The models of the benchmarks, written by hand: real-size by default, tiny on request.

A workload is one training step: ``loss = loss_fn(model(*inputs), target)`` with ``batch = (*inputs, target)``,
or ``loss = model(*batch)`` where there is no loss function. Listing the models does not import torch.
"""

import importlib
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

from planner.graphs.errors import UnknownOptionError, UsageError, suggest

if TYPE_CHECKING:
    from torch import nn

    from planner.capture.signature import Batch
    from planner.capture.step import LossFn


class Workload(NamedTuple):
    """A training step: a model, the loss of its output against the last item of the batch, and a batch."""

    model: "nn.Module"
    loss_fn: "LossFn | None"
    batch: "Batch"


@dataclass(frozen=True, slots=True)
class ZooEntry:
    """The module of this package whose function of the model's name builds it, and a description in one line."""

    module: str
    description: str


ZOO: dict[str, ZooEntry] = {
    "gpt2": ZooEntry("gpt2", "GPT-2 small (124M): decoder with dropout and tied embeddings"),
    "llama": ZooEntry("llama", "Llama 7B: decoder with RMSNorm, rotary positions, SwiGLU, grouped queries"),
    "vit": ZooEntry("vit", "ViT-B/16 (87M): image classification by a transformer encoder"),
    "resnet18": ZooEntry("resnet", "ResNet-18 (12M): basic residual blocks with BatchNorm"),
    "resnet50": ZooEntry("resnet", "ResNet-50 (26M): bottleneck residual blocks with BatchNorm"),
    "resnet152": ZooEntry("resnet", "ResNet-152 (60M): bottleneck residual blocks with BatchNorm"),
    "vgg16": ZooEntry("vgg", "VGG-16 (138M): plain convolutions, dropout in the classifier"),
    "vgg19": ZooEntry("vgg", "VGG-19 (144M): plain convolutions, dropout in the classifier"),
    "unet": ZooEntry("unet", "U-Net (31M): segmentation, long skip connections"),
    "mobilenet_v2": ZooEntry("mobilenet", "MobileNetV2 (3.5M): inverted residuals around depthwise filters"),
    "densenet121": ZooEntry("densenet", "DenseNet-121 (8M): every layer reads all layers before it"),
    "mlp": ZooEntry("mlp", "multilayer perceptron with dropout"),
}


def build(name: str, **options: Any) -> Workload:
    """Return the workload `name`, with its options at their defaults except those given.

    Random parameters and batches come from torch's global generator: seed it before. Under ``FakeTensorMode`` no memory is
    allocated.

    Raises:
        UnknownOptionError: it has no such option.
        UsageError: the name is unknown, or a value has the wrong type or is out of range.
    """
    function = get_factory(name)
    parameters = inspect.signature(function).parameters
    for option, value in options.items():
        if option not in parameters:
            raise UnknownOptionError(name, option, describe_options(parameters))
        _check_value(name, option, value, parameters[option].annotation)
    return function(**options)


def describe_options(parameters: Mapping[str, inspect.Parameter]) -> str:
    """Return the options of a function that builds a workload, with their defaults: ``its options are batch=8, seq=1024``."""
    if not parameters:
        return "it has none"
    texts = [name if p.default is p.empty else f"{name}={_format_default(p.default)}" for name, p in parameters.items()]
    return f"its options are {', '.join(texts)}"


def get_factory(name: str) -> Callable[..., Workload]:
    """Return the function that builds the workload `name`; raise UsageError if there is none."""
    entry = ZOO.get(name)
    if entry is None:
        raise UsageError(f"unknown zoo model {name!r}{suggest(name, ZOO)}: choose from {', '.join(ZOO)}")
    function: Callable[..., Workload] = getattr(importlib.import_module(f"{__name__}.{entry.module}"), name)
    return function


def _check_value(name: str, option: str, value: Any, annotation: Any) -> None:
    """Raise a UsageError unless `value` fits: integers are counts, ``dropout`` is a probability, other numbers are positive."""
    optional = type(None) in get_args(annotation)
    if value is None and optional:
        return
    fits: bool
    if annotation is bool:
        fits, wanted = isinstance(value, bool), "true or false"
    elif annotation is str:
        fits, wanted = isinstance(value, str), "a text"
    elif annotation is float:
        number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if option == "dropout":
            fits, wanted = number and 0 <= value < 1, "a probability, at least 0 and below 1"
        else:
            fits, wanted = number and value > 0, "a number above 0"
    elif annotation == tuple[int, ...]:
        fits = isinstance(value, tuple | list) and len(value) > 0 and all(_is_count(v) for v in value)
        wanted = "whole numbers, each at least 1"
    else:
        fits, wanted = _is_count(value), "a whole number, at least 1"
    if not fits:
        raise UsageError(f"option {option} of {name} is {value!r}: it must be {wanted}")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _format_default(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
