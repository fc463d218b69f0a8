"""A graph and a budget as the exact solver sees them: produced tensors only, sizes and uses in tuples."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from graphs.ir import Graph
from graphs.options.offload import Copies, without_copies

OBJECTIVE_SCALE = 1e4  # the step without recomputation, in the units of the objectives


@dataclass(frozen=True, slots=True)
class Problem:
    """What the models need to know of a graph, for one budget.

    Attributes:
        whole: where it comes from.
        graph: the same without round trips to the host; ops and tensors have the same ids.
        copies: these round trips, None if there are none.
        capacity_bytes: M, the budget less the static bytes.
        time_s: c_i for each op.
        inputs, outputs: in(i) without static tensors, and out(i), for each op.
        sizes: b_t for each tensor (0 for static ones).
        producers: p(t) for each tensor (-1 for static ones).
        kept: whether t must be in memory at the end.
        own_bytes: bytes(io(i)) + w_i for each op.
        again_bytes: the same for a recomputation of i: its kept outputs are there already, and made again.
        recomputable: whether a further execution of i is allowed and may serve something.
        last_use: for each tensor the last op that can want it, recomputations of its readers included.
        last_worth: for each op the last op for which a recomputation of i may be worth anything (-1: none).
        last_again: for each op the op before which it may run again at the latest: the first one after it
            that writes in place what it reads (n: no limit).
    """

    whole: Graph
    graph: Graph
    copies: Copies | None
    capacity_bytes: int
    time_s: tuple[float, ...]
    inputs: tuple[tuple[int, ...], ...]
    outputs: tuple[tuple[int, ...], ...]
    sizes: tuple[int, ...]
    producers: tuple[int, ...]
    kept: tuple[bool, ...]
    own_bytes: tuple[int, ...]
    again_bytes: tuple[int, ...]
    recomputable: tuple[bool, ...]
    last_use: tuple[int, ...]
    last_worth: tuple[int, ...]
    last_again: tuple[int, ...]

    @property
    def ops(self) -> int:
        """n, the number of ops."""
        return len(self.time_s)

    @property
    def budget_bytes(self) -> int:
        """M and the static bytes."""
        return self.capacity_bytes + self.graph.static_bytes

    @property
    def base_s(self) -> float:
        """Seconds of the step without recomputation."""
        return self.graph.time_s

    def units(self, seconds: float) -> float:
        """Seconds in the units of the objectives; 0 if no op takes time."""
        return seconds * OBJECTIVE_SCALE / self.base_s if self.base_s > 0 else 0.0


def problem_of(graph: Graph, budget_bytes: int, *, repeatable: Collection[int] | None = None) -> Problem:
    """`graph` within `budget_bytes` (static bytes included).

    Args:
        repeatable: ops that may be executed again; all that the graph allows if None. With fewer, what the
            models find are schedules of the graph still, but no bounds.

    Raises:
        GraphError: the graph has choices other than round trips to the host.
    """
    whole = graph
    graph, copies = without_copies(whole)
    allowed = [op.recomputable and (repeatable is None or op.id in repeatable) for op in graph.ops]
    produced = [not t.static for t in graph.tensors]
    sizes = tuple(t.size_bytes if produced[t.id] else 0 for t in graph.tensors)
    kept = tuple(t.id in graph.kept for t in graph.tensors)
    inputs = tuple(tuple(t for t in op.inputs if produced[t]) for op in graph.ops)
    own = tuple(sum(sizes[t] for t in (*inputs[op.id], *op.outputs)) + op.workspace_bytes for op in graph.ops)
    again = tuple(own[op.id] + sum(sizes[t] for t in op.outputs if kept[t]) for op in graph.ops)
    last_use, last_worth = _uses(graph, allowed)
    return Problem(
        whole=whole,
        graph=graph,
        copies=copies,
        capacity_bytes=budget_bytes - graph.static_bytes,
        time_s=tuple(op.time_s for op in graph.ops),
        inputs=inputs,
        outputs=tuple(op.outputs for op in graph.ops),
        sizes=sizes,
        producers=tuple(t.producers[0] if t.producers else -1 for t in graph.tensors),
        kept=kept,
        own_bytes=own,
        again_bytes=again,
        recomputable=tuple(
            allowed[op.id] and last_worth[op.id] > op.id and again[op.id] <= budget_bytes - graph.static_bytes for op in graph.ops
        ),
        last_use=last_use,
        last_worth=last_worth,
        last_again=_writers_after(graph),
    )


def without_small(problem: Problem, share: float) -> Problem:
    """`problem` with its smallest tensors always there: fewer choices, of no consequence.

    The capacity is less by what they take, so that what fits the result fits `problem`.

    Args:
        share: of the capacity, that they may take all together.
    """
    candidates = sorted((size, t) for t, size in enumerate(problem.sizes) if problem.producers[t] >= 0 and not problem.kept[t])
    small: set[int] = set()
    total = 0
    for size, t in candidates:
        if total + size > share * problem.capacity_bytes:
            break
        total += size
        small.add(t)
    kept = tuple(always or t in small for t, always in enumerate(problem.kept))
    copies = problem.copies
    if copies is not None:
        copies = replace(copies, trips={t: trip for t, trip in copies.trips.items() if t not in small})
    return replace(
        problem,
        copies=copies,
        capacity_bytes=problem.capacity_bytes - total,
        sizes=tuple(0 if t in small else size for t, size in enumerate(problem.sizes)),
        kept=kept,
        recomputable=tuple(
            again and not all(kept[t] for t in outputs)
            for again, outputs in zip(problem.recomputable, problem.outputs, strict=True)
        ),
    )


def _writers_after(graph: Graph) -> tuple[int, ...]:
    """`last_again`."""
    writers: dict[int, list[int]] = {}
    for op in graph.ops:
        for t in op.mutates:
            writers.setdefault(t, []).append(op.id)
    return tuple(
        min((w for t in (*op.inputs, *op.mutates) for w in writers.get(t, ()) if w > op.id), default=len(graph.ops))
        for op in graph.ops
    )


def _uses(graph: Graph, allowed: Sequence[bool]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """`last_use` and `last_worth`.

    last_use(t)   = max over consumers c of t of: c, and last_worth(c) if c may be recomputed
    last_worth(i) = max over outputs t of i that are not kept of last_use(t)
    """
    last_use = [-1] * len(graph.tensors)
    last_worth = [-1] * len(graph.ops)
    for op in reversed(graph.ops):
        last_worth[op.id] = max((last_use[t] for t in op.outputs if t not in graph.kept), default=-1)
        latest = max(op.id, last_worth[op.id]) if allowed[op.id] else op.id
        for t in op.inputs:
            last_use[t] = max(last_use[t], latest)
    return tuple(last_use), tuple(last_worth)
