"""What any schedule needs: a lower bound on the least feasible budget, and the op that sets it."""

from dataclasses import dataclass

from graphs.ir import Graph
from graphs.units import format_bytes


@dataclass(frozen=True, slots=True)
class Need:
    """What is in memory when an op is first executed, whatever the schedule.

    Attributes:
        op: id of the op.
        total_bytes: all of the following.
        static_bytes: what lives throughout.
        inputs_bytes, outputs_bytes, workspace_bytes: of the op itself, static inputs not counted.
        held_bytes: other tensors made before that must be there: kept ones, and what is read later
            and cannot be made again.
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
    """A proved lower bound on the least feasible budget.

    Attributes:
        budget_bytes: no schedule runs within less.
        need: what refutes the budgets just below; its total may be more than `budget_bytes`, where one
            byte more would let an op be executed again.
    """

    budget_bytes: int
    need: Need


def least_budget_bound(graph: Graph) -> LeastBudget:
    """The least budget that the needs of single ops do not refute.

    A first execution of op v has in memory its inputs, outputs and workspace; the kept tensors made
    before; and every tensor made before and read after it whose producer cannot be executed again. At a
    given budget that includes producers which would take more than the budget. The least feasible budget
    may be higher.
    """
    need = need_at(graph, None)
    low, high = need.total_bytes, need_at(graph, 0).total_bytes
    while low < high:  # budgets below `low` are refuted, `high` is not
        middle = (low + high) // 2
        found = need_at(graph, middle)
        if found.total_bytes > middle:
            low, need = middle + 1, found
        else:
            high = middle
    return LeastBudget(low, need)


def need_at(graph: Graph, budget_bytes: int | None) -> Need:
    """The largest need when nothing that takes more than `budget_bytes` (None: no limit) is executed again."""
    sizes = [0 if t.producer is None else t.size_bytes for t in graph.tensors]
    held = _held_bytes(graph, sizes, budget_bytes)
    best: Need | None = None
    for op in graph.ops:
        inputs, outputs = sum(sizes[t] for t in op.inputs), sum(sizes[t] for t in op.outputs)
        total = graph.static_bytes + inputs + outputs + op.workspace_bytes + held[op.id]
        if best is None or total > best.total_bytes:
            best = Need(op.id, total, graph.static_bytes, inputs, outputs, op.workspace_bytes, held[op.id])
    assert best is not None  # a graph has an op
    return best


def _held_bytes(graph: Graph, sizes: list[int], budget_bytes: int | None) -> list[int]:
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
            end = len(graph.ops) if t in graph.kept else readers[-1] if fixed and readers else op.id + 1
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
    return (
        f"budget {format_bytes(budget_bytes)} is below {format_bytes(least.budget_bytes)}, the least any schedule of this "
        f"graph needs: {describe_need(graph, least.need)}. {WAY_OUT}"
    )
