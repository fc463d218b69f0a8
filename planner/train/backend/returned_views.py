"""Results of a captured graph that are views of one tensor: they are made outside of its plan, as eager PyTorch makes them.

AOTAutograd returns the tensor, and makes its views by ``as_strided``. Autograd then adds up their gradients in other layouts and
in another order than for the views of the user's code, so that sums over them round otherwise. Views of an input are made before
the graph runs if they come before it is read there: autograd takes the gradient of what was made last first. Views of tensors
that the graph writes, and those under ``torch.no_grad()``, stay in the graph.

Known weakness: a graph gets the gradients of all views of a tensor that it has made in one sum, and adds those of its own ops to
it. Where eager PyTorch adds them up in another order, a warning says so.
"""

import operator
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch import fx

from planner.capture.rewrites.outputs import get_storage
from planner.capture.source_lines import format_node
from planner.graphs.short_tracebacks import warn_caller
from planner.train.backend.planned_graph import describe_rounding

_DETACHING = ("detach", torch.detach)


def take_out_views(module: fx.GraphModule) -> Callable[..., Any] | None:
    """Take results that are views of one tensor out of a captured graph, in place; return what makes all results, or None.

    The function takes what computes the results that are left, and the inputs.
    """
    output = module.graph.output_node()
    returned: Sequence[Any] = output.args[0]  # type: ignore[assignment]
    paths = [_find_viewed(value) for value in returned if isinstance(value, fx.Node)]
    taken: dict[fx.Node, list[list[fx.Node]]] = {}
    for path in paths:
        base = _find_base(path, paths)
        taken.setdefault(base, []).append(path[path.index(base) + 1 :])
    moved = {node for chains in taken.values() for chain in chains for node in chain}
    if not moved:
        return None
    given = module.graph.find_nodes(op="placeholder")
    position = {node: i for i, node in enumerate(module.graph.nodes)}
    late = set[fx.Node]()
    for base, chains in taken.items():
        reads = [position[user] for user in _list_readers(base, moved)]
        late |= {node for chain in chains for node in chain if base not in given or position[chain[0]] > min(reads, default=-1)}
        made = {position[chain[0]] if chain else len(position) for chain in chains}
        is_in_order = len(reads) + len(made) < 3 or min(made) > max(reads, default=-1) or base in given
        if not is_in_order or any(_list_readers(node, moved) for chain in chains for node in chain):
            _warn_of_sums(base)
    views = fx.Graph()
    compute = views.placeholder("compute")
    copies = {node: views.placeholder(node.name) for node in given}
    in_order = [node for node in module.graph.nodes if node in moved]
    _copy_nodes(views, (node for node in in_order if node not in late), copies)
    kept = [base for base in taken if base not in given]
    computed = views.call_function(operator.call, (compute, *(copies[node] for node in given)))
    copies |= {node: views.call_function(operator.getitem, (computed, i)) for i, node in enumerate(kept)}
    _copy_nodes(views, (node for node in in_order if node in late), copies)
    views.output(fx.map_arg(returned, copies.__getitem__))
    output.args = (tuple(kept),)
    for node in reversed(in_order):
        if not node.users:
            module.graph.erase_node(node)
    module.recompile()
    return fx.GraphModule(module, views).forward


def _copy_nodes(graph: fx.Graph, nodes: Iterable[fx.Node], copies: dict[fx.Node, fx.Node]) -> None:
    for node in nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)


def _list_readers(node: fx.Node, moved: Collection[fx.Node]) -> list[fx.Node]:
    """Return the nodes that read `node` in the graph, once those that are only `moved` are out of it, and give it a gradient."""
    trained = [
        user for user in node.users if getattr(user.meta.get("example_value"), "requires_grad", True) and user.op != "output"
    ]
    return [user for user in trained if user not in moved or _list_readers(user, moved)]


def _warn_of_sums(base: fx.Node) -> None:
    dtype = base.meta["example_value"].dtype
    warn_caller(
        f"the graph returns several views of {base.name} ({format_node(base)}) and reads it behind them: gradients of it are "
        f"added up in another order than in eager PyTorch, which may change their last bits ({describe_rounding([dtype])}). Take "
        "the views behind the graph break, or return copies of them"
    )


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
    """Return the input that `path` begins with, or the last node of `path` that is on all `paths` from the same node."""
    if path[0].op == "placeholder":
        return path[0]
    beside = [other for other in paths if other[0] is path[0]]
    return next(node for node in reversed(path) if all(node in other for other in beside))
