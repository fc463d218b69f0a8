"""A graph and a budget as the exact solver sees them: produced tensors only, with sizes and uses in tuples."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from planner.graphs.ir import Graph
from planner.graphs.options import remove_options
from planner.graphs.options.offload import RoundTrip, remove_offload
from planner.graphs.options.placement import is_placed
from planner.graphs.pools import COMPUTE
from planner.solvers.pass_ends import find_requested_outputs
from planner.solvers.places import Places, find_circles, find_places
from planner.solvers.streams import Streams, get_workspace_bytes, list_sizes

OBJECTIVE_SCALE = 1e4  # the step without recomputation, in the units of the objectives


@dataclass(frozen=True)
class Problem:
    """The data of all models of a graph, for one budget.

    Ops are numbered by their positions in `places`: in program order, with optional ops in between.

    Attributes:
        graph: the graph without transfers to the host; ops and tensors have the same ids.
        round_trips: these transfers, of each tensor that may be offloaded and reloaded.
        host_bytes: capacity of the host's pool, None if all of them fit together.
        places: the order of ops, and which ops replace which.
        capacity_bytes: M, the budget less the static bytes.
        time_s: c_i for each op, 0 for ops on other streams.
        inputs, outputs: in(i) without static tensors, and out(i), for each op.
        sizes: b_t for each tensor (0 for static ones and those in other pools).
        producers: for each tensor its producers, in order.
        producer: p(t), for each tensor the first of its producers (-1 for static ones).
        consumers: for each tensor the ops that read it, in order.
        kept: for each tensor, True if it must be in memory at the end.
        settled: for each kept tensor, the op by whose place it has certainly been produced.
        requested: kept tensors for which that op is a pass end, since another device may produce them.
        held: for each op io(i) without inputs that an output may overwrite: the tensors in memory together throughout it.
        own_bytes: bytes(held(i)) + w_i for each op.
        recompute_bytes: the same for a recomputation of i, whose kept outputs are in memory twice.
        recomputable: for each op, True if executions other than the one in its place are allowed and may be useful.
        circles: sets of ops that depend on each other, by way of recomputed tensors.
        last_use: for each tensor the last op that can need it, including recomputations of its readers.
        last_worth: for each op the last op for which a recomputation of i may be useful (-1: none).
        recompute_before: for each op the op before which it must be recomputed at the latest: the next one that writes in place a
            tensor that it reads (n: no limit).
    """

    whole: Graph
    graph: Graph
    round_trips: Mapping[int, RoundTrip]
    host_bytes: int | None
    places: Places
    capacity_bytes: int
    time_s: tuple[float, ...]
    inputs: tuple[tuple[int, ...], ...]
    outputs: tuple[tuple[int, ...], ...]
    sizes: tuple[int, ...]
    producers: tuple[tuple[int, ...], ...]
    producer: tuple[int, ...]
    consumers: tuple[tuple[int, ...], ...]
    kept: tuple[bool, ...]
    settled: tuple[int, ...]
    requested: frozenset[int]
    held: tuple[frozenset[int], ...]
    own_bytes: tuple[int, ...]
    recompute_bytes: tuple[int, ...]
    recomputable: tuple[bool, ...]
    circles: tuple[tuple[int, ...], ...]
    last_use: tuple[int, ...]
    last_worth: tuple[int, ...]
    recompute_before: tuple[int, ...]

    def allows(self, computed: Iterable[int]) -> bool:
        """Return True if the executed ops `computed` respect the graph's limits on resources."""
        return self.graph.allows({self.places.ids[i] for i in computed})

    @property
    def ops(self) -> int:
        """n, the number of ops."""
        return len(self.time_s)

    @cached_property
    def streams(self) -> Streams:
        """The streams and pools of the original graph."""
        return Streams(self.whole)

    @property
    def placed(self) -> bool:
        """True if ops run on other streams, of devices or collectives, whose times are not those of the main device."""
        return len(self.graph.streams) > 1

    @property
    def has_devices(self) -> bool:
        """True if ops may run on other devices."""
        return is_placed(self.graph)

    @property
    def has_streams(self) -> bool:
        """True if anything runs in parallel with the main device."""
        return self.placed or bool(self.round_trips)

    @property
    def plain(self) -> bool:
        """True if only recomputations are to be chosen: there are neither optional ops nor transfers."""
        return self.places.plain and not self.has_streams

    @property
    def budget_bytes(self) -> int:
        """The budget: M plus the static bytes."""
        return self.capacity_bytes + self.graph.static_bytes

    @property
    def base_s(self) -> float:
        """Seconds of the program's ops on the main device, each executed once."""
        return self.graph.compute_s

    def get_seconds(self, i: int) -> float:
        """Return the time of op i on its stream."""
        return self.streams.time_s[self.places.ids[i]]

    @property
    def least_s(self) -> float:
        """Lower bound on the time of all schedules: the program's ops once, or faster ops that replace them."""
        gains: dict[int, float] = {}
        for b, group in enumerate(self.places.replaces):
            if group:
                gain = sum(self.time_s[i] for i in group) - self.time_s[b]
                gains[group[-1]] = max(gains.get(group[-1], 0.0), gain)
        return self.base_s - sum(gains.values())

    def may_overwrite(self, op: int, t: int) -> bool:
        """Return True if an output of `op` may overwrite its input t."""
        return t in self.inputs[op] and t not in self.held[op]

    def convert_to_units(self, seconds: float) -> float:
        """Return `seconds` in the units of the objectives; 0 if no op takes time."""
        return seconds * OBJECTIVE_SCALE / self.base_s if self.base_s > 0 else 0.0


def build_problem(graph: Graph, budget_bytes: int) -> Problem:
    """Return the problem of `graph` within `budget_bytes` (including static bytes).

    Raises:
        GraphError: the graph has pools or streams that belong neither to the host nor to other devices.
    """
    whole = graph
    graph, offloads = remove_offload(whole)
    places = find_places(graph)
    if places.plain and len(graph.ops) > len(graph.program):  # no optional op can be used
        graph = replace(remove_options(graph), ops=graph.program)
    ops = [graph.ops[op] for op in places.ids]
    capacity_bytes = budget_bytes - graph.static_bytes
    allowed = [places.optional[i] or all(graph.ops[p].recomputable for p in (*op.replaces, op.id)) for i, op in enumerate(ops)]
    produced = [not t.static for t in graph.tensors]
    sizes = list_sizes(graph, graph.pools[0])
    kept = tuple(t.id in graph.kept for t in graph.tensors)
    inputs = tuple(tuple(t for t in op.inputs if produced[t]) for op in ops)
    outputs = tuple(op.outputs for op in ops)
    read = {t for of_op in inputs for t in of_op}
    held = tuple(frozenset((*inputs[i], *outputs[i])).difference(t for _, t in op.overwrites) for i, op in enumerate(ops))
    own = tuple(sum(sizes[t] for t in held[i]) + get_workspace_bytes(graph.pools[0], op) for i, op in enumerate(ops))
    recompute_bytes = tuple(own[i] + sum(sizes[t] for t in outputs[i] if kept[t]) for i in range(len(ops)))
    producers = _index_ops(outputs, len(sizes))
    requested = {t: places.ids.index(op) for t, op in find_requested_outputs(graph).items()}
    settled = _find_settled(places, [[p for p in of_t if not ops[p].optional] for of_t in producers], requested)
    last_use, last_worth = _find_uses(
        places, inputs, outputs, allowed, [s if kept[t] else len(ops) for t, s in enumerate(settled)]
    )
    needed = [recompute_bytes[i] if places.sure[i] else own[i] for i in range(len(ops))]
    return Problem(
        whole=whole,
        graph=graph,
        round_trips={t: trip for t, trip in offloads.by_tensor.items() if t in read},  # others need not be reloaded
        host_bytes=offloads.host_bytes,
        places=places,
        capacity_bytes=capacity_bytes,
        time_s=tuple(op.time_s if op.stream == COMPUTE else 0.0 for op in ops),
        inputs=inputs,
        outputs=outputs,
        sizes=sizes,
        producers=producers,
        producer=tuple(of_t[0] if of_t else -1 for of_t in producers),
        consumers=_index_ops(inputs, len(sizes)),
        kept=kept,
        settled=settled,
        requested=frozenset(requested),
        held=held,
        own_bytes=own,
        recompute_bytes=recompute_bytes,
        recomputable=tuple(allowed[i] and last_worth[i] > i and needed[i] <= capacity_bytes for i in range(len(ops))),
        circles=() if places.plain else find_circles(inputs, outputs),
        last_use=last_use,
        last_worth=last_worth,
        recompute_before=_find_writers_after(graph, places),
    )


def keep_small(problem: Problem, share: float) -> Problem:
    """Return `problem` with its smallest tensors always in memory, which removes variables of little consequence.

    The capacity is reduced by their size, so that schedules of the result fit `problem`.

    Args:
        share: most that they may take together, relative to the capacity.
    """
    candidates = sorted((size, t) for t, size in enumerate(problem.sizes) if problem.producer[t] >= 0 and not problem.kept[t])
    small: set[int] = set()
    total = 0
    for size, t in candidates:
        if total + size > share * problem.capacity_bytes:
            break
        total += size
        small.add(t)
    kept = tuple(always or t in small for t, always in enumerate(problem.kept))
    return replace(
        problem,
        round_trips={t: trip for t, trip in problem.round_trips.items() if t not in small},
        capacity_bytes=problem.capacity_bytes - total,
        sizes=tuple(0 if t in small else size for t, size in enumerate(problem.sizes)),
        kept=kept,
        recomputable=tuple(
            allowed and not all(kept[t] for t in outputs)
            for allowed, outputs in zip(problem.recomputable, problem.outputs, strict=True)
        ),
    )


def _index_ops(tensors: Sequence[Sequence[int]], count: int) -> tuple[tuple[int, ...], ...]:
    """Return for each of `count` tensors the ops that list it in `tensors`."""
    found: list[list[int]] = [[] for _ in range(count)]
    for i, of_op in enumerate(tensors):
        for t in of_op:
            found[t].append(i)
    return tuple(map(tuple, found))


def _find_settled(places: Places, producers: Sequence[Sequence[int]], requested: Mapping[int, int]) -> tuple[int, ...]:
    """Return ``Problem.settled``, given for each tensor its producers in the program, and the pass ends that read some."""
    return tuple(
        requested[t] if t in requested else max((of_t[0], *places.replaced_by[of_t[0]])) if of_t else len(places.ids)
        for t, of_t in enumerate(producers)
    )


def _find_writers_after(graph: Graph, places: Places) -> tuple[int, ...]:
    """Return ``Problem.recompute_before``."""
    ops = [graph.ops[op] for op in places.ids]
    writers: dict[int, list[int]] = {}
    for i, op in enumerate(ops):
        for t in () if op.optional else op.mutates:
            writers.setdefault(t, []).append(i)
    return tuple(
        min((w for t in (*op.inputs, *op.mutates) for w in writers.get(t, ()) if w > i), default=len(ops))
        for i, op in enumerate(ops)
    )


def _find_uses(
    places: Places,
    inputs: Sequence[Sequence[int]],
    outputs: Sequence[Sequence[int]],
    allowed: Sequence[bool],
    there: Sequence[int],
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return ``Problem.last_use`` and ``Problem.last_worth``.

    last_use(t)   = max over consumers c of t of: c, if it is executed in its place, and last_worth(c) if it may be elsewhere
    last_worth(i) = max of last_use(t) over outputs t of i, but for those that are certainly in memory

    Args:
        there: for each tensor the op from whose place on it is in memory.
    """
    last_use = [-1] * len(there)
    last_worth = [-1] * len(inputs)
    before: list[int] = []
    while last_use != before:  # more than twice only where ops depend on each other
        before = list(last_use)
        for i in range(len(inputs) - 1, -1, -1):
            last_worth[i] = max((last_use[t] for t in outputs[i] if there[t] > i), default=-1)
            latest = max(-1 if places.optional[i] else i, last_worth[i] if allowed[i] else -1)
            for t in inputs[i]:
                last_use[t] = max(last_use[t], latest)
        if places.plain:
            break
    return tuple(last_use), tuple(last_worth)
