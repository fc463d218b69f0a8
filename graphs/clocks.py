"""Start and end times of the steps of a schedule, with one clock per stream. The schedule is one that ``simulate`` accepts.

The waits are those that the runtime makes. Known weakness: streams do not slow each other here. Therefore a link has the rate
that transfers reach beside computation (``planner.settings.link``).
"""

from collections.abc import Iterable
from dataclasses import dataclass

from planner.graphs.ir import Graph, Phase
from planner.graphs.pools import COMPUTE
from planner.graphs.schedule import Compute, Schedule


@dataclass(frozen=True, slots=True)
class Clocks:
    """The times of a schedule, in seconds from its start, added up along each stream.

    Attributes:
        starts_s, ends_s: for each step, the start and end of its execution (Compute), or of the wait before its memory is
            returned (Free).
        clocks_s: for each of ``Graph.streams``, the time at which it is done.
    """

    starts_s: tuple[float, ...]
    ends_s: tuple[float, ...]
    clocks_s: tuple[float, ...]


def run_clocks(graph: Graph, schedule: Schedule, *, issued: bool = False) -> Clocks:
    """Return the start and end times of each step of `schedule`.

    An op starts when its stream is free, its inputs are ready, the tensors that it writes in place are no longer in use, and the
    owners of the other pools that hold its outputs have reached this step: the bytes may just have been freed there. Before a
    tensor is freed, the owner of its pool waits for the ops on other streams that use it. Where the forward pass ends, the main
    device waits for results that other devices may have computed, since the caller receives them there.

    Args:
        issued: True if an op starts no earlier than the host has issued it: one op after the other, in the order of the steps,
            and without waiting for any to be done (``Op.host_s``).
    """
    running, (results, _) = _Running(graph, issued=issued), find_results_elsewhere(graph)
    end = _end_of_forward(graph, schedule, results) if results else None
    starts_s, ends_s = [], []
    for place, step in enumerate(schedule.steps):
        start_s, end_s = running.compute(step.op) if isinstance(step, Compute) else running.free(step.tensor)
        starts_s.append(start_s)
        ends_s.append(end_s)
        if place == end:
            running.receive(results)
    return Clocks(tuple(starts_s), tuple(ends_s), tuple(running.clock_s))


def find_results_elsewhere(graph: Graph) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the kept tensors that another device may compute: those of the forward pass, and the others."""
    elsewhere = {t for op in graph.ops if op.stream != COMPUTE for p in op.replaces for t in graph.ops[p].outputs}
    copied = sorted(graph.kept & elsewhere)
    early = tuple(t for t in copied if graph.ops[graph.tensors[t].producers[0]].phase is Phase.FORWARD)
    return early, tuple(t for t in copied if t not in early)


def _end_of_forward(graph: Graph, schedule: Schedule, results: tuple[int, ...]) -> int | None:
    """Return the step after which all forward ops have been executed or replaced, and `results` are on the main device."""
    pending, missing = {op.id for op in graph.program if op.phase is Phase.FORWARD}, set(results)
    for place, step in enumerate(schedule.steps):
        if isinstance(step, Compute):
            op = graph.ops[step.op]
            pending.difference_update((step.op, *op.replaces))
            missing.difference_update(op.outputs)
            if not pending and not missing:
                return place
    return None


def find_passages(graph: Graph, schedule: Schedule, clocks: Clocks, stream: str) -> tuple[tuple[float, float], ...]:
    """Return for each step the interval, in seconds, in which `stream` executes it; steps of other streams take no time.

    The stream's own steps are the ops that it executes and the frees in pools that it owns. Between them it waits. Memory of its
    pools is allocated and freed in this order, by any stream.

    Args:
        clocks: the result of ``run_clocks`` for the schedule.
    """
    owned = {pool.name for pool in graph.pools if pool.owner == stream}
    now_s, found = 0.0, []
    for step, start_s, end_s in zip(schedule.steps, clocks.starts_s, clocks.ends_s, strict=True):
        own = graph.ops[step.op].stream == stream if isinstance(step, Compute) else graph.tensors[step.tensor].pool in owned
        found.append((start_s, end_s) if own else (now_s, now_s))
        now_s = found[-1][1]
    return tuple(found)


class _Running:
    """The state of the streams between two steps."""

    def __init__(self, graph: Graph, *, issued: bool) -> None:
        self.graph = graph
        self.host_s = [op.host_s if issued else 0.0 for op in graph.ops]
        self.issued_s = 0.0  # by the host's clock
        stream = {name: i for i, name in enumerate(graph.streams)}
        self.main = stream[COMPUTE]
        owner = {pool.name: stream[pool.owner] for pool in graph.pools}
        self.stream = [stream[op.stream] for op in graph.ops]
        self.owner = [owner[t.pool] for t in graph.tensors]
        self.clock_s = [0.0] * len(stream)
        self.ready_s = [0.0] * len(graph.tensors)
        self.there = [t.static for t in graph.tensors]
        # For each tensor, the streams whose ops use it, and the end of the last such op on each.
        self.busy_s: list[dict[int, float]] = [{} for _ in graph.tensors]

    def compute(self, op_id: int) -> tuple[float, float]:
        op, stream = self.graph.ops[op_id], self.stream[op_id]
        waits_s = [self.clock_s[self.owner[t]] for t in op.outputs]
        waits_s += (self.ready_s[t] for t in op.inputs)
        self.issued_s += self.host_s[op_id]
        start_s = max(self.clock_s[stream], self.issued_s, *waits_s, *self._list_uses(op.mutates))
        end_s = self.clock_s[stream] = start_s + op.time_s
        for t in (*op.inputs, *op.mutates):
            self.busy_s[t][stream] = end_s
        for t in op.mutates:
            self.ready_s[t] = end_s
        for t in op.outputs:
            if not self.there[t]:
                self.there[t] = True
                self.ready_s[t] = end_s
                self.busy_s[t] = {stream: end_s}
        return start_s, end_s

    def free(self, t: int) -> tuple[float, float]:
        owner = self.owner[t]
        start_s = self.clock_s[owner]
        end_s = self.clock_s[owner] = max(start_s, *self._list_uses((t,)), 0.0)
        self.there[t] = False
        return start_s, end_s

    def receive(self, tensors: Iterable[int]) -> None:
        """Let the main device wait for `tensors`."""
        self.clock_s[self.main] = max(self.clock_s[self.main], *(self.ready_s[t] for t in tensors))

    def _list_uses(self, tensors: Iterable[int]) -> Iterable[float]:
        return (end_s for t in tensors for end_s in self.busy_s[t].values())
