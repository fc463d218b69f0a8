"""The schedule of least peak with offloading, below what recomputation reaches: tensors are on the host while no op needs them.

If all tensors that can be offloaded are in memory only while an op reads or produces them, other memory holds kept tensors and
those that cannot be offloaded. If these exceed the budget, eviction rules recompute them (``planner.solvers.eviction``), on a
graph in which offloaded tensors have no size but count in the workspaces of their ops.

Only searches of the least budget use it. Tried and removed: the schedule of least peak in a solve that has found none, and
schedules for the budget of a solve, by all eviction rules and several shares of the tensors. By equal work, no cost or status of
256 random graphs and 8 transformers depended on them.
"""

from collections.abc import Callable, Sequence, Set
from dataclasses import replace

import numpy as np

from planner.graphs.ir import Graph, Phase
from planner.graphs.schedule import schedule_of
from planner.graphs.simulate import simulate
from planner.solvers.clock import Clock
from planner.solvers.eviction.least_peak import find_least_evicting_schedule
from planner.solvers.problem import Problem, build_problem
from planner.solvers.windows.decoding.decode import Order, Trial, order_of, try_out

_INSTANT_S = 1e-12  # of ops that take no time
# Shares of the ranking that are offloaded while the rest is recomputed; all of it needs least memory.
_LEAST_SHARES = (1.0, 0.5)


def find_least_offloaded(graph: Graph, clock: Clock, *, should_stop: Callable[[], bool] | None = None) -> Trial:
    """Return the schedule of least peak found before the clock's limit or `should_stop`; `graph` has transfers to the host."""
    problem = build_problem(graph, graph.static_bytes)
    ranking = _rank_tensors(problem)
    trials = []
    for share in _LEAST_SHARES:
        sent = _select_hosted(problem, ranking[: round(share * len(ranking))])
        apart = assume_offloaded(problem.graph, sent)
        evicting = find_least_evicting_schedule(
            apart, clock.start_part(clock.limit / len(_LEAST_SHARES)), should_stop=should_stop
        )
        computed = range(problem.ops) if evicting is None else evicting.computed
        within = build_problem(graph, _compute_peak_bytes(apart, computed))
        trials.append(try_out(within, _add_reloads(within, computed, sent)))
    return min(trials, key=lambda trial: (trial.peak_bytes, trial.time_s))


def _rank_tensors(problem: Problem) -> list[int]:
    """Return the tensors that can be offloaded: those that cannot be recomputed or are of the backward pass, then by transfers.

    Recomputation of tensors of the backward pass, deep in the step, is rarely useful.
    """
    transfers, ops = problem.round_trips, problem.graph.ops
    producer = {t: ops[problem.producer[t]] for t in transfers}
    return sorted(
        transfers,
        key=lambda t: (
            producer[t].recomputable and producer[t].phase is not Phase.BACKWARD,
            producer[t].recomputable,
            transfers[t].out.time_s / max(_INSTANT_S, producer[t].time_s),
            t,
        ),
    )


def _select_hosted(problem: Problem, ranked: Sequence[int]) -> frozenset[int]:
    """Return the first tensors of `ranked` that fit on the host together, from their production to their last read."""
    room = problem.host_bytes
    if room is None:
        return frozenset(ranked)
    taken = np.zeros(problem.ops, dtype=np.int64)
    sent = set()
    for t in ranked:
        during = taken[problem.producer[t] : problem.graph.consumers[t][-1]]
        if int(during.max()) + problem.sizes[t] <= room:
            during += problem.sizes[t]
            sent.add(t)
    return frozenset(sent)


def assume_offloaded(graph: Graph, sent: Set[int]) -> Graph:
    """Return `graph` with `sent` in memory only while an op reads or produces them.

    Ops that produce only such and kept tensors are not recomputable.
    """
    tensors = tuple(replace(t, size_bytes=0) if t.id in sent else t for t in graph.tensors)
    ops = tuple(
        replace(
            op,
            workspace_bytes=op.workspace_bytes + sum(graph.tensors[t].size_bytes for t in (*op.inputs, *op.outputs) if t in sent),
            recomputable=op.recomputable and any(t not in sent and t not in graph.kept for t in op.outputs),
            overwrites=tuple(pair for pair in op.overwrites if sent.isdisjoint(pair)),
        )
        for op in graph.ops
    )
    return Graph(ops, tensors, graph.kept, graph.provenance)


def _compute_peak_bytes(graph: Graph, computed: Sequence[int]) -> int:
    return simulate(graph, schedule_of(graph, computed)).peak_bytes


def _add_reloads(problem: Problem, computed: Sequence[int], sent: frozenset[int]) -> Order:
    """Return the order `computed` with reloads of `sent` so that it fits: the tensors that are read last are offloaded."""
    graph, reads = problem.graph, _find_next_reads(problem, computed)
    there: dict[int, int] = {}  # tensors on the device, with their next reads
    reloads: set[tuple[int, int]] = set()
    live_bytes = done = 0
    for place, op in enumerate(computed):
        touched = (*problem.inputs[op], *problem.outputs[op])
        live_bytes += sum(problem.sizes[t] for t in touched if t not in there)
        reloads.update((t, place) for t in problem.inputs[op] if t not in there)
        recompute_bytes = problem.recompute_bytes[op] - problem.own_bytes[op] if op < done else 0
        over_bytes = live_bytes + graph.ops[op].workspace_bytes + recompute_bytes - problem.capacity_bytes
        if over_bytes > 0:
            for t in sorted(sent & there.keys() - set(touched), key=lambda t: (-there[t], -problem.sizes[t], t)):
                del there[t]
                live_bytes -= problem.sizes[t]
                over_bytes -= problem.sizes[t]
                if over_bytes <= 0:
                    break
        for t in touched:
            if problem.kept[t] or t in reads[place]:
                there[t] = reads[place].get(t, len(computed))
            else:
                there.pop(t, None)
                live_bytes -= problem.sizes[t]
        done = max(done, op + 1)
    return order_of(problem, computed, frozenset(reloads))


def _find_next_reads(problem: Problem, computed: Sequence[int]) -> list[dict[int, int]]:
    """Return for each execution the next reads of its inputs and outputs, unless a tensor is recomputed before."""
    found: list[dict[int, int]] = []
    following: dict[int, int] = {}
    for place in range(len(computed) - 1, -1, -1):
        op = computed[place]
        touched = (*problem.inputs[op], *problem.outputs[op])
        found.append({t: following[t] for t in touched if t in following})
        for t in problem.outputs[op]:
            following.pop(t, None)
        following.update((t, place) for t in problem.inputs[op])
    return found[::-1]
