"""The peak of keeping everything: in program order, and a lower bound for every order."""

from collections.abc import Collection, Sequence

from graphs.ir import Graph
from graphs.schedule import Compute, keep_everything
from graphs.simulate import simulate


def keep_everything_peak_bytes(graph: Graph) -> int:
    """Return the peak of keeping everything in program order."""
    return simulate(graph, keep_everything(graph)).peak_bytes


def bound_any_order_peak_bytes(graph: Graph, before: Sequence[Collection[int]], after: Sequence[Collection[int]]) -> int:
    """Return a lower bound on the peak of keeping everything, over all orders in which ops stay in their phase.

    When op v runs, all its ancestors have run and none of its descendants has. So in memory are v's inputs, outputs and
    workspace, and every tensor produced by an ancestor that is kept or read by a descendant. The bound is their size for the op
    at the peak of program order; if it equals that peak, no order has a lower one.

    Args:
        graph: a graph without options.
        before: for each op, ops that must come before it; others follow from these.
        after: for each op, ops that must come after it; others follow from these.
    """
    op = graph.ops[_find_peak_op(graph)]
    ancestors = _find_reached(op.id, before) | {other.id for other in graph.ops if other.phase.place < op.phase.place}
    descendants = _find_reached(op.id, after) | {other.id for other in graph.ops if other.phase.place > op.phase.place}
    own = {*op.inputs, *op.outputs}
    live = (
        t.size_bytes
        for t in graph.tensors
        if not t.static
        and (
            t.id in own
            or (t.producers[0] in ancestors and (t.id in graph.kept or not descendants.isdisjoint(graph.consumers[t.id])))
        )
    )
    return graph.static_bytes + op.workspace_bytes + sum(live)


def _find_peak_op(graph: Graph) -> int:
    """Return the op at the peak of keeping everything."""
    schedule = keep_everything(graph)
    executed = schedule.steps[simulate(graph, schedule).peak_step]
    assert isinstance(executed, Compute)  # a free adds nothing
    return executed.op


def _find_reached(op: int, edges: Sequence[Collection[int]]) -> set[int]:
    """Return all ops that `edges` lead to from `op`."""
    reached: set[int] = set()
    waiting = [op]
    while waiting:
        new = [other for other in edges[waiting.pop()] if other not in reached]
        reached.update(new)
        waiting += new
    return reached
