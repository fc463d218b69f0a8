"""Graph options: rewrites that add optional ops to a graph, one file each (``planner.capture.options`` lists them by name)."""

from dataclasses import replace

from planner.graphs.checks import check_plain
from planner.graphs.ir import Graph, Tensor
from planner.graphs.options.transfers import find_transfers
from planner.graphs.pools import COMPUTE, DEVICE


def remove_options(graph: Graph) -> Graph:
    """Return the program on one stream, with the same ids; tensors that only optional ops produce are dropped or empty.

    Raises:
        GraphError: the program itself has several pools, or streams that compute.
    """
    if graph.plain:
        return graph
    n = len(graph.program)
    tensors: list[Tensor] = []
    count = 0
    for t in graph.tensors:
        made = tuple(p for p in t.producers if p < n)
        if made or t.static:
            count = t.id + 1
        tensors.append(replace(t, producers=made) if made or t.static else replace(t, producers=(), size_bytes=0, pool=DEVICE))
    transfers = find_transfers(graph)
    ops = tuple(replace(op, stream=COMPUTE) if op.id in transfers else op for op in graph.program)
    program = replace(graph, ops=ops, tensors=tuple(tensors[:count]), pools=graph.pools[:1], limits=())
    check_plain(program)
    return program


def extract_eager_program(graph: Graph) -> Graph:
    """Return the program as eager PyTorch runs it: without options, and without overwriting."""
    return remove_options(graph).out_of_place()
