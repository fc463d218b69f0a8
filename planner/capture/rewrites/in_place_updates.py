"""Updates of the step's inputs by the ops in place that eager PyTorch calls.

AOTAutograd captures ops that return new values, and a copy writes each back. A batch norm in training then copies both running
statistics before and after its kernel, and counts its batches by two ops in place of one: 213 of ResNet-50's 566 ops.
"""

import torch
from torch import fx

from planner.capture.rewrites.batch_norms import find_ignored_inputs, find_updates, update_statistics_in_place
from planner.torch_private.core import OpOverload

aten = torch.ops.aten


def update_in_place(graph: fx.Graph) -> None:
    """Let batch norms and counters write their new values themselves, where nothing else reads old or new ones."""
    for node in list(graph.nodes):
        updates = find_updates(node)
        writes = [write for target, value in updates if (write := _find_only_write(node, target, value)) is not None]
        if updates and len(writes) == len(updates):
            for write in writes:
                graph.erase_node(write)
            update_statistics_in_place(node)
    for write in graph.find_nodes(op="call_function", target=aten.copy_.default):
        _count_in_place(write)


def list_written(node: fx.Node) -> list[fx.Node]:
    """Return the inputs of the step that `node` writes."""
    if not isinstance(node.target, OpOverload) or not node.target._schema.is_mutable:
        return []
    pairs = zip(node.args, node.target._schema.arguments, strict=False)
    return [arg for arg, argument in pairs if argument.is_write and isinstance(arg, fx.Node) and arg.op == "placeholder"]


def _find_only_write(node: fx.Node, target: fx.Node, value: fx.Node) -> fx.Node | None:
    """Return the copy of a `value` of `node` to `target`, if no other node needs the value, or reads the target."""
    old, new = (
        [user for user in read.users if user is not node and read not in find_ignored_inputs(user)] for read in (target, value)
    )
    return new[0] if old == new and [reader.target for reader in new] == [aten.copy_.default] else None


def _count_in_place(write: fx.Node) -> None:
    """Replace the sum of an input and a number, and its copy, by an addition in place."""
    target, total = write.args
    assert isinstance(target, fx.Node) and isinstance(total, fx.Node)
    if total.target is not aten.add.Tensor or total.args[0] is not target or isinstance(total.args[1], fx.Node):
        return
    before, after = target.meta["val"], total.meta["val"]
    if list(total.users) != [write] or (before.dtype, before.shape) != (after.dtype, after.shape):
        return
    with write.graph.inserting_before(write):
        count = write.graph.call_function(aten.add_.Tensor, total.args, total.kwargs)
    count.meta = {**total.meta, "val": before}
    write.graph.erase_node(write)
    write.graph.erase_node(total)
