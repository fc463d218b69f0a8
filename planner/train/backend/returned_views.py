"""Results of a captured graph that are views of one tensor: they are made outside of its plan, as eager PyTorch makes them.

AOTAutograd returns the tensor, and makes its views by ``as_strided``. Autograd then adds up their gradients in other layouts and
in another order than for the views of the user's code, so that sums over them round otherwise. Views of tensors that the graph
writes, and those under ``torch.no_grad()``, stay in the graph.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import fx

from planner.capture.rewrites.outputs import get_storage

_DETACHING = ("detach", torch.detach)


def take_out_views(module: fx.GraphModule) -> Callable[..., Any] | None:
    """Take results that are views of one tensor out of a captured graph, in place; return what makes all results, or None.

    The function takes the results that are left, and the inputs.
    """
    output = module.graph.output_node()
    returned: Sequence[Any] = output.args[0]  # type: ignore[assignment]
    paths = {value: _find_viewed(value) for value in returned if isinstance(value, fx.Node)}
    bases = {value: _find_base(path, paths.values()) for value, path in paths.items()}
    moved = {node for value, path in paths.items() for node in path[path.index(bases[value]) + 1 :]}
    if not moved:
        return None
    given = module.graph.find_nodes(op="placeholder")
    kept = [base for base in dict.fromkeys(bases.values()) if base not in given]
    views = fx.Graph()
    copies = {node: views.placeholder(node.name) for node in (*kept, *given)}
    for node in module.graph.nodes:
        if node in moved:
            copies[node] = views.node_copy(node, copies.__getitem__)
    views.output(fx.map_arg(returned, lambda node: copies[node]))
    output.args = (tuple(kept),)
    for node in reversed(module.graph.nodes):
        if node in moved and not node.users:
            module.graph.erase_node(node)
    module.recompile()
    return fx.GraphModule(module, views).forward


def _find_viewed(node: fx.Node) -> list[fx.Node]:
    """Return the tensors that `node` is a view of, the base first, and `node`."""
    value, inputs = node.meta.get("example_value"), node.all_input_nodes
    base = inputs[0].meta.get("example_value") if len(inputs) == 1 else None
    if not isinstance(value, torch.Tensor) or not isinstance(base, torch.Tensor) or value is base or value._version:
        return [node]
    requires_grad = base.requires_grad and node.target not in _DETACHING
    is_view = get_storage(value) == get_storage(base) and value.requires_grad == requires_grad
    return [*_find_viewed(inputs[0]), node] if is_view else [node]


def _find_base(path: list[fx.Node], paths: Iterable[list[fx.Node]]) -> fx.Node:
    """Return the last node of `path` that is on all `paths` from the same node."""
    beside = [other for other in paths if other[0] is path[0]]
    return next(node for node in reversed(path) if all(node in other for other in beside))
