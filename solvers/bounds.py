"""What schedules need: lower bounds on the least feasible budget, in one order of the ops and in any, and what sets them."""

from collections.abc import Collection
from dataclasses import dataclass

from graphs.ir import Graph
from graphs.units import format_bytes


@dataclass(frozen=True, slots=True)
class Need:
    """What is in memory when an op is first executed, whatever else the schedule does.

    Attributes:
        op: id of the op.
        total_bytes: all of the following.
        static_bytes: what lives throughout.
        inputs_bytes, outputs_bytes, workspace_bytes: of the op itself, static inputs not counted.
        held_bytes: other tensors made before that must be there: kept ones, and what is read later
            and cannot be made again. What is made before is a matter of the order of first executions.
    """

    op: int
    total_bytes: int
    static_bytes: int
    inputs_bytes: int
    outputs_bytes: int
    workspace_bytes: int
    held_bytes: int


@dataclass(frozen=True, slots=True)
class LeastBudget:
    """A proved lower bound on the least feasible budget of schedules whose first executions come in program order.

    Attributes:
        budget_bytes: no such schedule runs within less.
        need: what refutes the budgets just below; its total may be more than `budget_bytes`, where one
            byte more would let an op be executed again.
    """

    budget_bytes: int
    need: Need


def least_budget_bound(graph: Graph, movable: Collection[int] = ()) -> LeastBudget:
    """The least budget that the needs of single ops do not refute, where ops are first executed in program order.

    A first execution of op v has in memory its inputs, outputs and workspace; the kept tensors made
    before; and every tensor made before and read after it whose producer cannot be executed again. At a
    given budget that includes producers which would take more than the budget. The least feasible budget
    may be higher.

    Args:
        graph: one without choices.
        movable: tensors that may be elsewhere until they are read, though nothing makes them again.
    """
    need = need_at(graph, None, movable)
    low, high = need.total_bytes, need_at(graph, 0, movable).total_bytes
    while low < high:  # budgets below `low` are refuted, `high` is not
        middle = (low + high) // 2
        found = need_at(graph, middle, movable)
        if found.total_bytes > middle:
            low, need = middle + 1, found
        else:
            high = middle
    return LeastBudget(low, need)


def need_at(graph: Graph, budget_bytes: int | None, movable: Collection[int] = ()) -> Need:
    """The largest need when nothing that takes more than `budget_bytes` (None: no limit) is executed again.

    `movable` as in ``least_budget_bound``.
    """
    sizes = [0 if t.static else t.size_bytes for t in graph.tensors]
    held = _held_bytes(graph, sizes, budget_bytes, movable)
    best: Need | None = None
    for op in graph.ops:
        inputs, outputs = sum(sizes[t] for t in op.inputs), sum(sizes[t] for t in op.outputs)
        total = graph.static_bytes + inputs + outputs + op.workspace_bytes + held[op.id]
        if best is None or total > best.total_bytes:
            best = Need(op.id, total, graph.static_bytes, inputs, outputs, op.workspace_bytes, held[op.id])
    assert best is not None  # a graph has an op
    return best


def _held_bytes(graph: Graph, sizes: list[int], budget_bytes: int | None, movable: Collection[int]) -> list[int]:
    """For each op the bytes outside its inputs and outputs that must be in memory when it is first executed."""
    change = [0] * (len(graph.ops) + 1)
    kept_bytes = 0
    for op in graph.ops:
        outputs = sum(sizes[t] for t in op.outputs)
        kept_bytes += sum(sizes[t] for t in op.outputs if t in graph.kept)
        # Executed again, it meets at least the kept tensors made up to it; its own are made a second time.
        again = graph.static_bytes + kept_bytes + sum(sizes[t] for t in op.inputs if t not in graph.kept)
        again += outputs + op.workspace_bytes
        fixed = not op.recomputable or (budget_bytes is not None and again > budget_bytes)
        for t in op.outputs:
            readers = graph.consumers[t]
            end = len(graph.ops) if t in graph.kept else readers[-1] if fixed and readers and t not in movable else op.id + 1
            change[op.id + 1] += sizes[t]
            change[max(end, op.id + 1)] -= sizes[t]
            # Those that read it have it among their inputs.
            for reader in readers:
                if reader < end:
                    change[reader] -= sizes[t]
                    change[reader + 1] += sizes[t]
    held, running = [], 0
    for position in range(len(graph.ops)):
        running += change[position]
        held.append(running)
    return held


def any_order_need(graph: Graph) -> Need:
    """The largest need of a single op that is there in every order of the ops.

    When op v is executed, what it depends on has been executed before. So in memory are its inputs, outputs and
    workspace, and the kept tensors that were made by what it depends on, directly or by way of others.
    ``need_at`` counts, for one order, all that comes before v there: its bound is no lower, but of that order.
    """
    sizes = [0 if t.static else t.size_bytes for t in graph.tensors]
    kept = [t for t in graph.tensors if t.id in graph.kept and t.size_bytes]
    depends: list[int] = []  # for each op a bit for each op that it depends on
    best: Need | None = None
    for op in graph.ops:
        bits = 0
        for t in op.inputs:
            for producer in graph.tensors[t].producers:
                bits |= depends[producer] | 1 << producer
        depends.append(bits)
        own = {*op.inputs, *op.outputs}
        inputs, outputs = sum(sizes[t] for t in op.inputs), sum(sizes[t] for t in op.outputs)
        held = sum(t.size_bytes for t in kept if t.id not in own and any(bits >> p & 1 for p in t.producers))
        total = graph.static_bytes + inputs + outputs + op.workspace_bytes + held
        if best is None or total > best.total_bytes:
            best = Need(op.id, total, graph.static_bytes, inputs, outputs, op.workspace_bytes, held)
    assert best is not None  # a graph has an op
    return best


def describe_need(graph: Graph, need: Need) -> str:
    """E.g. ``op 'mm_37' holds 5.20 GB of inputs, 3.10 GB of outputs and 0.11 GB of workspace at once``."""
    parts = [
        (need.inputs_bytes, "of inputs"),
        (need.outputs_bytes, "of outputs"),
        (need.workspace_bytes, "of workspace"),
        (need.held_bytes, "of tensors that must be kept"),
        (need.static_bytes, "that live throughout"),
    ]
    texts = [f"{format_bytes(size)} {what}" for size, what in parts if size]
    listed = " and ".join(filter(None, [", ".join(texts[:-1]), *texts[-1:]])) or "nothing"
    return f"op {graph.ops[need.op].name!r} holds {listed} at once"


WAY_OUT = "Raise --budget, or lower the batch size (planner info model.json shows the largest ops)."


def too_small_message(graph: Graph, budget_bytes: int, least: LeastBudget) -> str:
    """Why `budget_bytes`, which is below `least`, cannot do, and the way out."""
    anyway = any_order_need(graph)
    if budget_bytes >= anyway.total_bytes:
        return (
            f"budget {_below(budget_bytes, least.budget_bytes)}, the least any schedule of this graph needs that first executes "
            f"the ops in the order that was tried: {describe_need(graph, least.need)}. {WAY_OUT}"
        )
    more = ""
    if least.budget_bytes > anyway.total_bytes:
        more = f"In the order of the ops that was tried it is {format_bytes(least.budget_bytes)}. "
    return (
        f"budget {_below(budget_bytes, anyway.total_bytes)}, the least any schedule of this graph needs: "
        f"{describe_need(graph, anyway)}. {more}{WAY_OUT}"
    )


def _below(small_bytes: int, large_bytes: int) -> str:
    """That one is below the other, in bytes where they would look the same."""
    small, large = format_bytes(small_bytes), format_bytes(large_bytes)
    return f"{small} is below {large}" if small != large else f"{small_bytes} B is below {large_bytes} B"
