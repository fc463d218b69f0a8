"""Constants of a step: tensors that are neither parameters nor buffers nor inputs."""

import torch
from torch import fx

aten = torch.ops.aten


def read_constants(graph: fx.Graph) -> None:
    """Let the users of ``detach(constant)`` read the constant itself.

    Its fake value has a storage of its own, so that the view would be taken for a new tensor, and an op might overwrite it.
    """
    for node in graph.find_nodes(op="call_function", target=aten.detach.default):
        constant = node.args[0]
        if isinstance(constant, fx.Node) and constant.op == "get_attr":
            with graph.inserting_before(node):
                read = graph.get_attr(str(constant.target))
            read.meta = {"val": node.meta["val"]}
            node.replace_all_uses_with(read)
            graph.erase_node(node)
