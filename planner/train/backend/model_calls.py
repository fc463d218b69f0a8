"""Calls of a planned model, from its inputs to its outputs, which the graphs that Dynamo captures of it do not see.

What autograd holds behind the inputs of a call belongs to other models, or to the layers before a planned block. What it holds
between the inputs and the outputs, beside the graphs, is of code that Dynamo leaves out.
"""

from collections.abc import Callable, Collection, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from planner.torch_private.core import pytree

if TYPE_CHECKING:
    from planner.train.backend.shared_budget import SharedBudget


@dataclass(slots=True)
class ModelCall:
    """A call of a model.

    Attributes:
        outside: the nodes of autograd that made its inputs.
        budget: of its planned graphs; None until one has run.
    """

    outside: frozenset[Any]
    budget: "SharedBudget | None" = None


CALL: ContextVar[ModelCall | None] = ContextVar("CALL", default=None)  # the call that runs, if it is known


def get_outside() -> Collection[Any]:
    """Return the nodes of autograd that made the inputs of the model that is called; none if the call is not known."""
    call = CALL.get()
    return () if call is None else call.outside


def call_model(model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what `model` returns, and count what its code beside the graphs keeps for the backward pass."""
    call = ModelCall(frozenset(_iterate_nodes((args, kwargs))))
    token = CALL.set(call)
    try:
        returned = model(*args, **kwargs)
    finally:
        CALL.reset(token)
    if call.budget is not None:
        call.budget.count_left_out(list(_iterate_nodes(returned)), call.outside)
    return returned


def _iterate_nodes(values: object) -> Iterator[Any]:
    """Yield the nodes of autograd that made the tensors in `values`."""
    for value in pytree.tree_leaves(values):
        if isinstance(value, torch.Tensor) and value.grad_fn is not None:
            yield value.grad_fn
