"""Gradients that a planned graph does not give, because the loss does not read the results that they belong to.

If the loss reads one result of a graph, autograd runs the whole backward pass of that graph, and all nodes behind its inputs.
Eager PyTorch reaches only what leads to the loss: elsewhere it calls no hooks, and leaves ``grad`` as it is. Nodes cannot be
taken out of a backward pass that runs. So AOTAutograd's zeros are left out, and hooks of tensors and leaves that no gradient
reaches are skipped until the end of that backward pass. Hooks of other nodes between graphs are still called with None.
"""

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from planner.graphs.walks import walk
from planner.torch_private.capture import find_backward_nodes, is_backward_node
from planner.torch_private.core import (
    at_end_of_backward,
    current_autograd_node,
    current_backward_pass,
    list_hooks_after_gradient,
    list_hooks_of_handle,
    list_hooks_with_gradient,
    pytree,
)
from planner.train.backend.planned_graph import PlannedGraph

Hooks = MutableMapping[int, Callable[..., Any]]


def leave_out_unread(graph: PlannedGraph, outputs: object, args: Sequence[object]) -> None:
    """Leave out gradients that lead only to results which the loss does not read, in backward passes from `outputs`."""
    # Not the tensors themselves, which would stay in memory. Hooks of leaves are found in the backward pass.
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
    hooks = {i: list_hooks_with_gradient(t) for i, t in enumerate(tensors) if list_hooks_with_gradient(t) and not t.is_leaf}
    for node in find_backward_nodes(outputs):
        node.register_prehook(graph.follow_layouts)
        node.register_hook(partial(_leave_out, graph, hooks))


def _leave_out(
    graph: PlannedGraph, hooks: Mapping[int, Hooks], gradients: Sequence[object], incoming: Sequence[object]
) -> tuple[object, ...] | None:
    """Return the `gradients` of the inputs without those that are missing, and skip the hooks of these; None if all stay."""
    left = graph.drop_unread(gradients, incoming)
    behind = current_autograd_node().next_functions
    for i, ((node, _), gradient) in enumerate(zip(behind, gradients if left is None else left, strict=True)):
        if gradient is None and node is not None:
            _skip(hooks.get(i, {}))
            _skip_hooks_behind(node)
    return left


def _skip_hooks_behind(node: Any) -> None:
    """Skip the hooks of the leaves behind `node`; planned graphs on the way do so themselves."""
    for leaf in walk([node], _list_behind):
        if hasattr(leaf, "variable"):
            _skip_hooks_of_leaf(leaf)


def _list_behind(node: Any) -> list[Any]:
    return [] if is_backward_node(node) else [behind for behind, _ in node.next_functions if behind is not None]


def _skip_hooks_of_leaf(node: Any) -> None:
    """Skip the hooks of the leaf that `node` accumulates the gradient of."""
    reached: list[bool] = []
    before = node.register_prehook(lambda _: reached.append(True))
    after = node.register_hook(lambda *_: None)
    for hooks in (list_hooks_with_gradient(node.variable), list_hooks_of_handle(before), list_hooks_of_handle(after)):
        _skip(hooks)
    _skip(list_hooks_after_gradient(node.variable), reached)
    for handle in (before, after):
        at_end_of_backward(handle.remove)


@dataclass(frozen=True, slots=True)
class _OnlyWithGradient:
    """A hook that is called in a backward pass only if a gradient has come. It outlives one that fails.

    Attributes:
        reached: not empty if a gradient has come; None if it is among the hook's arguments.
    """

    hook: Callable[..., Any]
    backward_pass: int
    reached: list[bool] | None

    def __call__(self, *args: Any) -> Any:
        if self.backward_pass == current_backward_pass():
            given = pytree.tree_leaves(args) if self.reached is None else self.reached
            if all(value is None for value in given):
                return None
        return self.hook(*args)


def _skip(hooks: Hooks, reached: list[bool] | None = None) -> None:
    """Call `hooks` only if a gradient has come, until the end of this backward pass; `reached` as in ``_OnlyWithGradient``."""
    now = current_backward_pass()
    for key, hook in hooks.items():
        if not isinstance(hook, _OnlyWithGradient):
            hooks[key] = _OnlyWithGradient(hook, now, reached)
        elif hook.backward_pass != now:
            hooks[key] = _OnlyWithGradient(hook.hook, now, reached)

    def restore() -> None:
        hooks.update({key: hook.hook for key, hook in hooks.items() if isinstance(hook, _OnlyWithGradient)})

    at_end_of_backward(restore)
