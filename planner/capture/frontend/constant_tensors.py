"""Tensors of a step that depend on nothing but its code: positions that a model counts, and what is computed from them.

Libraries look at their values in eager PyTorch (whether sequences are packed) and do without where they are traced, since a
compiler cannot answer for tensors in general. For these it can: what makes them is executed. Masks of the batch are looked at in
a capture with its values (``guards.branches``).

Known weakness: one that is written in place anywhere in the step is not taken for constant.
"""

import operator
from typing import Any

import torch
from torch import fx

from planner.graphs.walks import walk
from planner.torch_private.capture import get_source_name
from planner.torch_private.core import TorchDispatchMode, disable_current_modes

_MOST_ELEMENTS = 2**20  # of each tensor on the way
_LIST_INPUTS = operator.attrgetter("all_input_nodes")
_WRITES = {operator.setitem, *(getattr(operator, f"i{name}") for name in ("add", "sub", "mul", "truediv", "and", "or", "xor"))}


class _DrawError(Exception):
    """A tensor depends on random numbers."""


class _RefuseDraws(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise _DrawError
        return func(*args, **(kwargs or {}))


def compute_constant(node: fx.Node) -> torch.Tensor | None:
    """Return the value of a tensor in Dynamo's graph if it depends on nothing but the code of the step; None otherwise."""
    needed = _list_ancestors(node)
    if needed is None or _is_any_written(needed):
        return None
    values: dict[fx.Node, Any] = {}
    with disable_current_modes(), torch.no_grad(), _RefuseDraws():  # type: ignore[no-untyped-call]
        try:
            for each in needed:
                values[each] = _execute(each, values)
        except _DrawError:
            return None
    found = values[node]
    return found if isinstance(found, torch.Tensor) else None


def is_constant(node: fx.Node) -> bool:
    """Return True if a tensor in Dynamo's graph depends on nothing but the code of the step."""
    return compute_constant(node) is not None


def is_of_batch(node: fx.Node) -> bool:
    """Return True if a tensor of flags or whole numbers depends on nothing but the batch, and the code."""
    reads_batch = False
    for each in walk([node], _LIST_INPUTS):
        value, given = each.meta.get("example_value"), each.meta.get("grapharg")
        if not isinstance(value, torch.Tensor) or value.is_floating_point():
            return False
        name = get_source_name(given.source) if given is not None else ""
        if each.op == "placeholder" and not name.startswith(("L['args']", "L['kwargs']")):
            return False
        reads_batch |= each.op == "placeholder"
    return reads_batch


def _list_ancestors(node: fx.Node) -> list[fx.Node] | None:
    """Return `node` and what it is computed from, in the order of the graph; None if it depends on an input, or one is large."""
    found: set[fx.Node] = set()
    for each in walk([node], _LIST_INPUTS):
        value = each.meta.get("example_value")
        if each.op not in ("call_function", "call_method") or not isinstance(value, torch.Tensor):
            return None
        if value.numel() > _MOST_ELEMENTS:
            return None
        found.add(each)
    return [each for each in node.graph.nodes if each in found]


def _is_any_written(needed: list[fx.Node]) -> bool:
    """Return True if one of the tensors, or what is computed from one and may be its view, is written in place."""
    related = set(needed)
    for node in needed[0].graph.nodes:
        if related.intersection(node.all_input_nodes):
            name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
            if node.target in _WRITES or "out" in node.kwargs or (name.endswith("_") and not name.endswith("__")):
                return True
            related.add(node)
    return False


def _execute(node: fx.Node, values: dict[fx.Node, Any]) -> Any:
    args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    assert callable(node.target)
    return node.target(*args, **kwargs)
