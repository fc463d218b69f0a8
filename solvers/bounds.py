"""What schedules need: lower bounds on the least feasible budget, in one order of the ops and in any, and what sets them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from graphs.ir import Graph, Op
from graphs.options.offload import Copies
from graphs.units import format_bytes
from solvers.devices import sizes_in, workspace_bytes_in


@dataclass(frozen=True, slots=True)
class Need:
    """What is in memory when an op is first executed, whatever else the schedule does.

    Attributes:
        op: id of the op.
        total_bytes: all of the following.
        static_bytes: what lives throughout.
        inputs_bytes, outputs_bytes, workspace_bytes: of the op itself, static inputs not counted, nor outputs that may be
            written over an input.
        held_bytes: other tensors made before that must be there: kept ones, and what is read later,
            cannot be made again, and has no place on the host. What is made before is a matter of the
            order of first executions.
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


def least_budget_bound(graph: Graph, copies: Copies | None = None) -> LeastBudget:
    """The least budget that the needs of single ops do not refute, where ops are first executed in program order.

    A first execution of op v has in memory its inputs, outputs and workspace; the kept tensors made
    before; and every tensor made before and read after it whose producer cannot be executed again. At a
    given budget that includes producers which would take more than the budget. The least feasible budget
    may be higher.

    Args:
        graph: one without round trips to the host.
        copies: round trips to the host. What makes one may be there until it is read, though nothing makes it again; of
            these tensors together no more than the host holds.
    """
    need = need_at(graph, None, copies)
    low = need.total_bytes
    if (found := need_at(graph, low, copies)).total_bytes <= low:
        return LeastBudget(low, need)  # as mostly: nothing that may be executed again takes more
    low, need, high = low + 1, found, need_at(graph, 0, copies).total_bytes
    while low < high:  # budgets below `low` are refuted, `high` is not
        middle = (low + high) // 2
        found = need_at(graph, middle, copies)
        if found.total_bytes > middle:
            low, need = middle + 1, found
        else:
            high = middle
    return LeastBudget(low, need)


def need_at(graph: Graph, budget_bytes: int | None, copies: Copies | None = None) -> Need:
    """The largest need when nothing that takes more than `budget_bytes` (None: no limit) is executed again.

    Of ops that may be executed in one place the least need counts, and none where the place may be left out.
    `copies` as in ``least_budget_bound``.
    """
    sizes = sizes_in(graph, graph.pools[0])
    held, stays, away = _held_bytes(graph, sizes, budget_bytes, copies)
    instead: dict[int, list[Op]] = {}
    left_out: set[int] = set()
    for op in graph.ops[len(graph.program) :]:
        if op.replaces:
            instead.setdefault(op.replaces[-1], []).append(op)
            left_out.update(op.replaces[:-1])
    best: Need | None = None
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
    if best is None:  # all places may be left out
        last = graph.program[-1]
        return Need(last.id, graph.static_bytes, graph.static_bytes, 0, 0, 0, 0)
    return best


_Stays = dict[int, tuple[int, int]]  # for tensors, from which op to before which they must be somewhere


def _need_of(graph: Graph, sizes: Sequence[int], op: Op, held_bytes: int, stays: _Stays) -> Need:
    """Of `op` with what must be in memory beside it. An output takes the place of an input that need not stay, where it may."""
    over = {o for o, t in op.overwrites if t not in stays or not stays[t][0] <= op.id < stays[t][1]}
    inputs, outputs = sum(sizes[t] for t in op.inputs), sum(sizes[t] for t in op.outputs if t not in over)
    workspace = workspace_bytes_in(graph.pools[0], op)
    total = graph.static_bytes + inputs + outputs + workspace + held_bytes
    return Need(op.id, total, graph.static_bytes, inputs, outputs, workspace, held_bytes)


def _held_bytes(
    graph: Graph, sizes: Sequence[int], budget_bytes: int | None, copies: Copies | None
) -> tuple[list[int], _Stays, _Stays]:
    """For each op of the program the bytes outside its inputs and outputs that must be in memory when it is first executed.

    And the tensors that these are of: those that must be there, and those that may be on the host, as far as it holds them.
    """
    n = len(graph.program)
    stood_for = {p for op in graph.ops for p in op.replaces}
    here, movable = [0] * (n + 1), [0] * (n + 1)
    stays: _Stays = {}
    away: _Stays = {}
    kept_bytes = 0
    for op in graph.program:
        if op.id in stood_for:
            continue  # nothing is sure of what it makes
        outputs = sum(sizes[t] for t in op.outputs)
        kept_bytes += sum(sizes[t] for t in op.outputs if t in graph.kept)
        # Executed again, it meets at least the kept tensors made up to it; its own are made a second time.
        again = graph.static_bytes + kept_bytes + sum(sizes[t] for t in op.inputs if t not in graph.kept)
        again += outputs - sum(sizes[o] for o, _ in op.overwrites) + op.workspace_bytes
        fixed = not op.recomputable or (budget_bytes is not None and again > budget_bytes)
        for t in op.outputs:
            readers = [r for r in graph.consumers[t] if r < n]
            sure = [r for r in readers if r not in stood_for]
            if t in graph.kept:
                stays[t] = op.id + 1, n
            elif fixed and sure and len(graph.tensors[t].producers) == 1:
                (away if copies is not None and t in copies.trips else stays)[t] = op.id + 1, sure[-1]
            for change, whose in ((here, stays), (movable, away)):
                if t in whose:
                    _add(change, sizes[t], *whose[t], readers)
    room = None if copies is None else copies.host_bytes
    left = [0 if room is None else max(0, size - room) for size in accumulate(movable)]
    return [held + more for held, more in zip(accumulate(here[:n]), left, strict=False)], stays, away


def _add(change: list[int], size: int, begin: int, end: int, readers: Iterable[int]) -> None:
    """Count `size` at the ops from `begin` on and before `end`, but not at `readers`, which have it among their inputs."""
    change[begin] += size
    change[max(begin, end)] -= size
    for reader in readers:
        if reader < end:
            change[reader] -= size
            change[reader + 1] += size


def any_order_need(graph: Graph) -> Need:
    """The largest need of a single op that is there in every order of the ops of a graph without choices.

    When op v is executed, what it depends on has been executed before. So in memory are its inputs, outputs and
    workspace, and the kept tensors that were made by what it depends on, directly or by way of others.
    ``need_at`` counts, for one order, all that comes before v there: its bound is no lower, but of that order.
    """
    sizes = sizes_in(graph, graph.pools[0])
    kept = {t: bit for bit, t in enumerate(sorted(graph.kept))}
    kept_bytes = np.array([sizes[t] for t in kept], dtype=np.int64)
    made: list[int] = []  # for each op a bit for each kept tensor that it makes or depends on
    best: Need | None = None
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
    return best


def _sum_of(sizes: NDArray[np.int64], bits: int) -> int:
    """Return the sum of the `sizes` whose bit is set."""
    held = np.frombuffer(bits.to_bytes((len(sizes) + 7) // 8, "little"), dtype=np.uint8)
    return int(sizes @ np.unpackbits(held, count=len(sizes), bitorder="little"))


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


WAY_OUT = "Raise the budget, or lower the batch size."


def too_small_message(graph: Graph, budget_bytes: int, least: LeastBudget) -> str:
    """Why `budget_bytes`, which is below `least`, cannot do, and the way out."""
    anyway = None if len(graph.ops) > len(graph.program) else any_order_need(graph)
    if anyway is None or budget_bytes >= anyway.total_bytes:
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
