"""Lower bounds on the least feasible budget, in program order and in any order, and the ops that determine them.

Two ops count at once where the inputs of one must be in memory while the other makes the last of them. Single ops alone left
brackets of 10% on convolutional networks, and no solve closed them: for a U-Net, pairs prove the schedule of least memory.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from planner.graphs.ir import Graph, Op
from planner.graphs.options.offload import NO_OFFLOADS, Offloads, remove_offload
from planner.graphs.units import format_bytes, format_enough
from planner.solvers.streams import get_workspace_bytes, list_sizes


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """The memory that an execution of an op needs in every schedule: its first, or the last before another op.

    Attributes:
        total_bytes: sum of the following.
        inputs_bytes, outputs_bytes, workspace_bytes: of the op itself, without static inputs and outputs that may overwrite an
            input.
        held_bytes: other tensors produced before it that must be in memory: kept ones, and those that are read later, cannot be
            recomputed and cannot be on the host. Which tensors are produced before it depends on the order of first executions.
        reader: the op that reads an output of this execution; None for first executions.
        beside_bytes: the other inputs of `reader`, which are in memory.
    """

    op: int
    total_bytes: int
    static_bytes: int
    inputs_bytes: int
    outputs_bytes: int
    workspace_bytes: int
    held_bytes: int
    reader: int | None = None
    beside_bytes: int = 0


@dataclass(frozen=True, slots=True)
class LeastBudget:
    """A proved lower bound on the least feasible budget of schedules whose first executions are in program order.

    Attributes:
        budget_bytes: no such schedule runs within less.
        need: the need that refutes the next lower budgets; its total may exceed `budget_bytes` if another byte would allow an op
            to be recomputed.
    """

    budget_bytes: int
    need: MemoryNeed


def bound_least_budget(graph: Graph) -> LeastBudget:
    """Return the least budget that neither single ops nor pairs refute if first executions are in program order.

    The first execution of op v has in memory its inputs, outputs and workspace; the kept tensors produced before it; and every
    tensor that was produced before it, is read after it, and whose producer cannot be executed again, because it must not or
    because it needs more than the budget. Tensors that can be offloaded may be on the host until they are read, up to its
    capacity. Pairs of ops are in ``_raise_by_pairs``. The least feasible budget may be higher.
    """
    graph, offloads = remove_offload(graph)
    need = need_at(graph, None, offloads)
    low = need.total_bytes
    if (found := need_at(graph, low, offloads)).total_bytes <= low:
        return LeastBudget(low, need)  # the usual case: no recomputable op needs more
    low, need, high = low + 1, found, need_at(graph, 0, offloads).total_bytes
    while low < high:  # budgets below `low` are refuted, `high` is not
        middle = (low + high) // 2
        found = need_at(graph, middle, offloads)
        if found.total_bytes > middle:
            low, need = middle + 1, found
        else:
            high = middle
    return LeastBudget(low, need)


def need_at(graph: Graph, budget_bytes: int | None, offloads: Offloads = NO_OFFLOADS) -> MemoryNeed:
    """Return the largest need of an op, or two, if no op that needs more than `budget_bytes` (None: no limit) is executed again.

    Of alternatives, the one with the least need counts; a place that may be left out has no need.

    Args:
        graph: a graph without transfers to the host, which are in `offloads`.
    """
    sizes = list_sizes(graph, graph.pools[0])
    held, stays, away = _compute_held_bytes(graph, sizes, budget_bytes, offloads)
    instead: dict[int, list[Op]] = {}
    left_out: set[int] = set()
    for op in graph.ops[len(graph.program) :]:
        if op.replaces:
            instead.setdefault(op.replaces[-1], []).append(op)
            left_out.update(op.replaces[:-1])
    best: MemoryNeed | None = None
    for place in graph.program:
        if place.id in left_out:
            continue
        needs = [_need_of(graph, sizes, place, held[place.id], stays)]
        for op in instead.get(place.id, ()):
            own = {*op.inputs, *op.outputs}.difference(place.inputs, place.outputs)
            twice = sum(sizes[t] for t in own for whose in (stays, away) if t in whose and whose[t][0] <= place.id < whose[t][1])
            apart = set(place.inputs).difference(op.inputs, op.outputs)
            more = sum(sizes[t] for t in apart if t in stays and stays[t][0] <= place.id < stays[t][1])
            needs.append(_need_of(graph, sizes, op, held[place.id] - twice + more, stays))
        need = min(needs, key=lambda need: need.total_bytes)
        if best is None or need.total_bytes > best.total_bytes:
            best = need
    if best is None:  # every place may be left out
        last = graph.program[-1]
        return MemoryNeed(last.id, graph.static_bytes, graph.static_bytes, 0, 0, 0, 0)

    def hold(op: Op, reader: Op, own: set[int]) -> int:
        return sum(sizes[t] for t, (begin, end) in stays.items() if begin <= op.id and end >= reader.id and t not in own)

    returning = {*offloads.by_tensor, *away}
    sure = [op for op in graph.program if op.id not in left_out and op.id not in instead]
    return _raise_by_pairs(graph, sizes, best, sure, returning, lambda op: held[op.id], hold)


def _raise_by_pairs(
    graph: Graph,
    sizes: Sequence[int],
    best: MemoryNeed,
    sure: Iterable[Op],
    returning: Collection[int],
    hold_most: Callable[[Op], int],
    hold: Callable[[Op, Op, set[int]], int],
) -> MemoryNeed:
    """Return `best`, or the largest need of two ops at once if that is more.

    When op v is first executed, its inputs A are in memory. One of them was produced last, by an execution of op u. So in that
    execution A, the inputs and outputs of u and its workspace are in memory, and what is in memory from u until v in any case.
    Which input is the last is not known: the u of least need counts.

    Args:
        sure: the ops v that every schedule executes.
        returning: tensors that may be in memory again without an execution of their producer.
        hold_most: returns an upper bound on `hold` for all v.
        hold: returns the bytes, without the tensors that are given, in memory in every execution of u between its first and v's.
    """
    for v in sure:
        inputs = {t for t in v.inputs if not graph.tensors[t].static}
        producers = {graph.tensors[t].producers for t in inputs}
        if any(len(ops) != 1 for ops in producers) or not inputs.isdisjoint(returning):
            continue
        least: MemoryNeed | None = None
        for (u,) in sorted(producers):
            need = _need_of_pair(graph, sizes, graph.ops[u], v, inputs)
            if need.total_bytes + hold_most(graph.ops[u]) > best.total_bytes:
                held_bytes = hold(graph.ops[u], v, {*graph.ops[u].inputs, *graph.ops[u].outputs, *inputs})
                need = replace(need, total_bytes=need.total_bytes + held_bytes, held_bytes=held_bytes)
            if least is None or need.total_bytes < least.total_bytes:
                least = need
            if least.total_bytes <= best.total_bytes:
                break
        if least is not None and least.total_bytes > best.total_bytes:
            best = least
    return best


def _need_of_pair(graph: Graph, sizes: Sequence[int], u: Op, v: Op, inputs: set[int]) -> MemoryNeed:
    """Return what op `u` needs while it makes the last of the `inputs` of `v`, without what is held besides."""
    over = {o for o, t in u.overwrites if t not in inputs}
    own = {t for t in u.inputs if not graph.tensors[t].static}
    beside_bytes = sum(sizes[t] for t in inputs - own - set(u.outputs))
    parts = sum(sizes[t] for t in own), sum(sizes[t] for t in u.outputs if t not in over)
    workspace_bytes = get_workspace_bytes(graph.pools[0], u)
    total_bytes = graph.static_bytes + sum(parts) + workspace_bytes + beside_bytes
    return MemoryNeed(u.id, total_bytes, graph.static_bytes, *parts, workspace_bytes, 0, v.id, beside_bytes)


_Stays = dict[int, tuple[int, int]]  # by tensor, the interval of ops (end excluded) in which it must be in some memory


def _need_of(graph: Graph, sizes: Sequence[int], op: Op, held_bytes: int, stays: _Stays) -> MemoryNeed:
    """Return the need of `op` beside `held_bytes`; an output may take the memory of an input that need not stay."""
    over = {o for o, t in op.overwrites if t not in stays or not stays[t][0] <= op.id < stays[t][1]}
    inputs, outputs = sum(sizes[t] for t in op.inputs), sum(sizes[t] for t in op.outputs if t not in over)
    workspace = get_workspace_bytes(graph.pools[0], op)
    total = graph.static_bytes + inputs + outputs + workspace + held_bytes
    return MemoryNeed(op.id, total, graph.static_bytes, inputs, outputs, workspace, held_bytes)


def _compute_held_bytes(
    graph: Graph, sizes: Sequence[int], budget_bytes: int | None, offloads: Offloads
) -> tuple[list[int], _Stays, _Stays]:
    """Return for each op of the program the bytes, outside its inputs and outputs, that must be in memory at its first execution.

    Return also the intervals of these tensors: those that must be on the device, and those that may be on the host, up to its
    capacity.
    """
    n = len(graph.program)
    replaced = {p for op in graph.ops for p in op.replaces}
    here, movable = [0] * (n + 1), [0] * (n + 1)
    stays: _Stays = {}
    away: _Stays = {}
    kept_bytes = 0
    for op in graph.program:
        if op.id in replaced:
            continue  # its outputs may not be produced
        outputs = sum(sizes[t] for t in op.outputs)
        kept_bytes += sum(sizes[t] for t in op.outputs if t in graph.kept)
        # Executed again, it meets at least the kept tensors made up to it; its own are made a second time.
        again = graph.static_bytes + kept_bytes + sum(sizes[t] for t in op.inputs if t not in graph.kept)
        again += outputs - sum(sizes[o] for o, _ in op.overwrites) + op.workspace_bytes
        fixed = not op.recomputable or (budget_bytes is not None and again > budget_bytes)
        for t in op.outputs:
            readers = [r for r in graph.consumers[t] if r < n]
            sure = [r for r in readers if r not in replaced]
            if t in graph.kept:
                stays[t] = op.id + 1, n
            elif fixed and sure and len(graph.tensors[t].producers) == 1:
                (away if t in offloads.by_tensor else stays)[t] = op.id + 1, sure[-1]
            for change, whose in ((here, stays), (movable, away)):
                if t in whose:
                    _add(change, sizes[t], *whose[t], readers)
    left = [0 if offloads.host_bytes is None else max(0, size - offloads.host_bytes) for size in accumulate(movable)]
    return [held + more for held, more in zip(accumulate(here[:n]), left, strict=False)], stays, away


def _add(change: list[int], size: int, begin: int, end: int, readers: Iterable[int]) -> None:
    """Add `size` at the ops from `begin` to before `end`, except at `readers`, which count it among their inputs."""
    change[begin] += size
    change[max(begin, end)] -= size
    for reader in readers:
        if reader < end:
            change[reader] -= size
            change[reader + 1] += size


def find_any_order_need(graph: Graph) -> MemoryNeed:
    """Return the largest need of an op, or two, that holds in every order of the ops of a plain graph.

    When op v is executed, its ancestors have been executed. So its inputs, outputs and workspace are in memory, and the kept
    tensors that its ancestors produce. ``need_at`` counts all tensors before v in one order: its bound is at least as high, but
    valid for that order only.
    """
    sizes = list_sizes(graph, graph.pools[0])
    kept = {t: bit for bit, t in enumerate(sorted(graph.kept))}
    kept_bytes = np.array([sizes[t] for t in kept], dtype=np.int64)
    made: list[int] = []  # for each op a bit for each kept tensor that it produces or depends on
    best: MemoryNeed | None = None
    for op in graph.ops:
        bits = 0
        for t in op.inputs:
            for producer in graph.tensors[t].producers:
                bits |= made[producer]
        own = sum(1 << kept[t] for t in {*op.inputs, *op.outputs} & kept.keys())
        made.append(bits | sum(1 << kept[t] for t in op.outputs if t in kept))
        need = _need_of(graph, sizes, op, _sum_of(kept_bytes, bits & ~own), {})
        if best is None or need.total_bytes > best.total_bytes:
            best = need
    assert best is not None  # a graph has an op

    def hold(op: Op, reader: Op, own: set[int]) -> int:
        return _sum_of(kept_bytes, made[op.id] & ~sum(1 << kept[t] for t in own & kept.keys()))

    return _raise_by_pairs(graph, sizes, best, graph.ops, (), lambda op: _sum_of(kept_bytes, made[op.id]), hold)


def _sum_of(sizes: NDArray[np.int64], bits: int) -> int:
    """Return the sum of the `sizes` whose bit is set."""
    held = np.frombuffer(bits.to_bytes((len(sizes) + 7) // 8, "little"), dtype=np.uint8)
    return int(sizes @ np.unpackbits(held, count=len(sizes), bitorder="little"))


def describe_need(graph: Graph, need: MemoryNeed) -> str:
    """Return, e.g., ``op 'mm_37' needs 5.20 GB of inputs, 3.10 GB of outputs and 0.11 GB of workspace at once``."""
    parts = [
        (need.inputs_bytes, "of inputs"),
        (need.outputs_bytes, "of outputs"),
        (need.workspace_bytes, "of workspace"),
        (need.beside_bytes, f"of other inputs of op {graph.ops[need.reader or 0].name!r}"),
        (need.held_bytes, "of tensors that must be kept"),
        (need.static_bytes, "of static memory"),
    ]
    texts = [f"{format_bytes(size)} {what}" for size, what in parts if size]
    listed = " and ".join(filter(None, [", ".join(texts[:-1]), *texts[-1:]])) or "nothing"
    return f"op {graph.ops[need.op].name!r} needs {listed} at once"


WAY_OUT = "Raise the budget, or lower the batch size."


def describe_too_small(graph: Graph, budget_bytes: int, least: LeastBudget) -> str:
    """Return the message that `budget_bytes` is below `least`, with the reason and the way out."""
    least_bytes = least.budget_bytes
    in_any_order = None if len(graph.ops) > len(graph.program) else find_any_order_need(graph).total_bytes
    scope, other_orders = "", ""
    if in_any_order != least_bytes:
        scope = " that first executes the ops in the order that was tried"
        if in_any_order is not None and budget_bytes < in_any_order:
            other_orders = f" No other order needs less than {format_bytes(in_any_order)}."
    return (
        f"budget {_describe_below(budget_bytes, least_bytes)}, the least any schedule of this graph needs{scope}: "
        f"{describe_need(graph, least.need)}.{other_orders} {WAY_OUT}"
    )


def _describe_below(small_bytes: int, large_bytes: int) -> str:
    """Return the text that one size is below another, in bytes if they would look the same."""
    small, large = format_bytes(small_bytes), format_enough(large_bytes)
    return f"{small} is below {large}" if small != large else f"{small_bytes} B is below {large_bytes} B"
