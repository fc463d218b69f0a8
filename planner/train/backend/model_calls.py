"""Calls of a planned model, from its inputs to its outputs, which the graphs that Dynamo captures of it do not see.

What autograd holds behind the inputs of a call belongs to other models, or to the layers before a planned block. What it holds
between the inputs and the outputs, beside the graphs, is of code that Dynamo leaves out.
"""

from collections.abc import Callable, Collection, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from planner.graphs.short_tracebacks import warn_caller
from planner.torch_private.capture import is_compiling_forbidden
from planner.torch_private.core import list_parts, pytree


@dataclass(slots=True)
class ModelCall:
    """A call of a model.

    Attributes:
        outside: the nodes of autograd that made its inputs.
        count_left_out: takes the nodes behind its results, and `outside`; None until a planned graph has run.
        trains: a graph was captured in it that a backward pass may follow.
    """

    model: nn.Module
    outside: frozenset[Any]
    count_left_out: Callable[[Collection[Any], Collection[Any]], None] | None = None
    trains: bool = False


_CALLED = WeakSet[nn.Module]()  # models without a planned graph in a call that could have captured one
CALL: ContextVar[ModelCall | None] = ContextVar("CALL", default=None)  # the call that runs, if it is known


def get_outside() -> Collection[Any]:
    """Return the nodes of autograd that made the inputs of the model that is called; none if the call is not known."""
    call = CALL.get()
    return () if call is None else call.outside


def list_model_tensors() -> list[torch.Tensor]:
    """Return the parameters and buffers of the model that is called, whether or not its code reads them."""
    call = CALL.get()
    held = [] if call is None else [*call.model.parameters(), *call.model.buffers()]
    return [part for tensor in held for part in list_parts(tensor)]


def call_model(model: nn.Module, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what `run`, the compiled `model`, returns, and count what its code beside the graphs keeps for the backward pass.

    The first call in which graphs could have been captured warns if there is none that trains.
    """
    call = ModelCall(model, frozenset(_iterate_nodes((args, kwargs))))
    token = CALL.set(call)
    try:
        returned = run(*args, **kwargs)
    finally:
        CALL.reset(token)
    nodes = list(_iterate_nodes(returned))
    if call.count_left_out is not None:
        call.count_left_out(nodes, call.outside)
    elif model not in _CALLED and not is_compiling_forbidden() and not call.outside.issuperset(nodes):
        _CALLED.add(model)
        if not call.trains:
            _warn_of_no_graph(model)
    return returned


def _warn_of_no_graph(model: nn.Module) -> None:
    warn_caller(
        f"no graph was found in {type(model).__name__}, which runs without a plan: nothing keeps its memory within the budget. "
        "Dynamo captures nothing of a forward() that is excluded (torch.compiler.disable), or that has a graph break in a with "
        "or try block, or in a loop over what the loop may change, such as a generator, map() or filter(). "
        "TORCH_LOGS=graph_breaks names the line: loop over a tuple, take the line out of the loop or the block, or train in a "
        "block of planner.rematerialize(budget=...), which needs no graph"
    )


def _iterate_nodes(values: object) -> Iterator[Any]:
    """Yield the nodes of autograd that made the tensors in `values`."""
    for value in pytree.tree_leaves(values):
        if isinstance(value, torch.Tensor) and value.grad_fn is not None:
            yield value.grad_fn
