"""Calls of a step that only record what it computes: they are made after its forward pass, on tensors that it returns for them.

A planned step runs kernels and no Python. What a step appends to a list (``self.outputs.append(loss.detach())``), adds up
(``self.total += loss.item()``), prints or logs changes Python objects at each step all the same. If no op and no branch needs it,
``later_values`` captures these calls, and they are made here.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from planner.capture.guards.names import Scope
from planner.torch_private.core import pytree


@dataclass(frozen=True, slots=True)
class ReturnedTensor:
    """A tensor that the graph returns, by its position, as an argument of a call."""

    index: int


@dataclass(frozen=True, slots=True)
class Result:
    """The result of an earlier call, by its position."""

    index: int


@dataclass(frozen=True, slots=True)
class Place:
    """An object that exists before the step: a function of the local and the global scope that returns it."""

    find: Callable[[Scope, Scope], Any]


@dataclass(frozen=True, slots=True)
class LaterCall:
    """A call that is made after the forward pass.

    Attributes:
        args, kwargs: nested arguments, with stand-ins for tensors, for results of earlier calls, and for objects.
    """

    function: Callable[..., Any]
    args: tuple[object, ...]
    kwargs: dict[str, object]


def make_calls(calls: Sequence[LaterCall], tensors: Sequence[torch.Tensor], local: Scope, scope: Scope) -> None:
    """Make `calls` with the `tensors` that the graph has returned for them."""
    results: list[object] = []
    for call in calls:
        args, kwargs = pytree.tree_map(partial(_fill, tensors, results, local, scope), (call.args, call.kwargs))
        results.append(call.function(*args, **kwargs))


def _fill(tensors: Sequence[torch.Tensor], results: Sequence[object], local: Scope, scope: Scope, leaf: object) -> object:
    match leaf:
        case ReturnedTensor(index):
            return tensors[index]
        case Result(index):
            return results[index]
        case Place(find):
            return find(local, scope)
    return leaf


class Scratch:
    """Base class of objects that a front end lets a step fill and reads after it: what the step sets there is no effect."""


class Collector(Scratch):
    """Base class of objects of front ends that take values which are known after the step.

    Attributes:
        taken: the calls that were taken: method, arguments and options.
    """

    def __init__(self) -> None:
        self.taken: list[tuple[str, tuple[object, ...], dict[str, object]]] = []

    def is_known(self, value: object) -> bool:
        """Return True; False while a step is captured, if the value is known after the step."""
        del value
        return True

    def take_later(self, method: str, *args: object, **kwargs: object) -> None:
        """Take a call that depends on such values; a captured step takes it after its forward pass."""
        self.taken.append((method, args, kwargs))


def is_metric(value: object) -> bool:
    """Return True if `value` is a metric of torchmetrics, or a collection of them."""
    if not isinstance(value, nn.Module):  # Dynamo takes a fifth of a second to read the names of all modules
        return False
    library = sys.modules.get("torchmetrics")
    return library is not None and isinstance(value, library.Metric | library.MetricCollection)
