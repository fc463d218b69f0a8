"""The peak of keeping everything: in program order, and a lower bound for every order."""

from collections.abc import Collection, Sequence

from planner.graphs.ir import Graph, Op
from planner.graphs.schedule import Compute, keep_everything
from planner.graphs.simulate import simulate
from planner.graphs.walks import walk


def keep_everything_peak_bytes(graph: Graph) -> int:
    """Return the peak of keeping everything in program order."""
    return simulate(graph, keep_everything(graph)).peak_bytes


def bound_any_order_peak_bytes(graph: Graph, op: Op, before: Sequence[Collection[int]], after: Sequence[Collection[int]]) -> int:
    """Return a lower bound on the peak of keeping everything, over all orders in which ops stay in their phase.

    When op v runs, all its ancestors have run and none of its descendants has. So in memory are v's inputs, outputs and
    workspace, and every tensor produced by an ancestor that is kept or read by a descendant. The bound is their size for `op`.

    Args:
        graph: a graph without options.
        op: the op at the peak of program order (``find_peak``): if the bound equals that peak, no order has a lower one.
        before: for each op, ops that must come before it; others follow from these.
        after: for each op, ops that must come after it; others follow from these.
    """
    earlier, later = ({o.id for o in graph.ops if sign * o.phase.place < sign * op.phase.place} for sign in (1, -1))
    ancestors = earlier.union(walk(before[op.id], before.__getitem__))
    descendants = later.union(walk(after[op.id], after.__getitem__))
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


def find_peak(graph: Graph) -> tuple[int, Op]:
    """Return the peak of keeping everything in program order, and the op that it is at."""
    schedule = keep_everything(graph)
    judged = simulate(graph, schedule)
    executed = schedule.steps[judged.peak_step]
    assert isinstance(executed, Compute)  # a free adds nothing
    return judged.peak_bytes, graph.ops[executed.op]
