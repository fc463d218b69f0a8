"""Schedules at once, at any budget: run the program, and evict what is cheapest to do without.

An imitation of what dynamic tensor rematerialization does online (Kirisame et al., ICLR 2021), with
two advantages of a static graph: the next use of every tensor is known (as in Belady's rule for
caches), and whether a rule works can be tried out.
"""

import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from graphs.errors import ScheduleError
from graphs.ir import Graph
from graphs.schedule import Schedule, schedule_of
from graphs.simulate import simulate

_GUIDED = 30.0  # times its rank for what a guide hands on, and one over that for what it does not


@dataclass(frozen=True, slots=True)
class Rule:
    """How tensors are ranked: evicted first is the one of least cost^a / (bytes^b x distance^c).

    The cost is the time to make it again with what is missing for that; the distance is the number of
    ops until its next use in the program.
    """

    cost: float = 1.0
    size: float = 1.0
    distance: float = 1.0


@dataclass(frozen=True, slots=True)
class Guide:
    """What a solution of a model says on what to keep; see ``Choice``.

    Attributes:
        ends: last op of each window.
        handed: (windows, tensors), whether a tensor is handed on at the end of the window.
    """

    ends: tuple[int, ...]
    handed: NDArray[np.bool_]


RULES = (
    Rule(),
    Rule(distance=0.5),
    Rule(size=0.5),
    Rule(cost=0.5),
    Rule(cost=0.0, size=1.0, distance=1.0),
    Rule(cost=1.0, size=1.0, distance=0.0),
    Rule(cost=1.0, size=0.0, distance=1.0),
    Rule(cost=0.0, size=0.0, distance=1.0),
)


def evicting_order(
    graph: Graph,
    budget_bytes: int,
    rule: Rule,
    *,
    bias: NDArray[np.float64] | None = None,
    guide: Guide | None = None,
    max_factor: float = 30.0,
    max_time_s: float = math.inf,
    should_stop: Callable[[], bool] | None = None,
) -> list[int] | None:
    """An order of execution whose tensors fit into `budget_bytes`, by `rule`; None if it fails.

    Args:
        graph: first executions come in its program order.
        budget_bytes: static bytes included.
        rule: what to evict.
        bias: for each tensor a factor to its rank; None: 1.
        guide: what is handed on from window to window, as far as there is room.
        max_factor: it has failed when it executes more than this many ops per op of the graph.
        max_time_s: likewise when all it executes takes longer than this.
        should_stop: polled; once True, it has failed.
    """
    max_executions = int(max_factor * len(graph.ops)) + 1000
    return _Run(graph, budget_bytes, rule, bias, guide, max_executions, max_time_s, should_stop).run()


def least_evicting_schedule(graph: Graph, *, should_stop: Callable[[], bool] | None = None) -> Schedule | None:
    """The schedule of least peak that some rule finds until `should_stop`; None if none finds any."""
    best: Schedule | None = None
    least = simulate(graph, schedule_of(graph, range(len(graph.ops)))).peak_bytes
    for rule in RULES:
        low, high = graph.static_bytes, least
        while high - low > 0.005 * high:
            budget = (low + high) // 2
            order = evicting_order(graph, budget, rule, should_stop=should_stop)
            schedule = None if order is None else schedule_of(graph, order)
            peak = None if schedule is None else _peak_bytes(graph, schedule)
            if peak is None:
                low = budget + 1
                continue
            if peak < least:
                best, least = schedule, peak
            high = min(budget, peak)
    return best


def _peak_bytes(graph: Graph, schedule: Schedule) -> int | None:
    try:
        return simulate(graph, schedule).peak_bytes
    except ScheduleError:  # it reads what has been written over: eviction does not look at that
        return None


class _FailedError(Exception):
    pass


class _Run:
    def __init__(
        self,
        graph: Graph,
        budget_bytes: int,
        rule: Rule,
        bias: NDArray[np.float64] | None,
        guide: Guide | None,
        max_executions: int,
        max_time_s: float,
        should_stop: Callable[[], bool] | None,
    ) -> None:
        self.graph = graph
        self.free_bytes = budget_bytes - graph.static_bytes
        self.rule = rule
        self.guide = guide
        self.max_executions = max_executions
        self.time_left_s = max_time_s
        self.should_stop = should_stop or (lambda: False)
        self.order: list[int] = []
        tensors, ops = len(graph.tensors), len(graph.ops)
        self.size = np.array([t.size_bytes for t in graph.tensors], dtype=np.float64)
        self.producer: NDArray[np.int64] = np.array(
            [-1 if t.producer is None else t.producer for t in graph.tensors], dtype=np.int64
        )
        self.time: NDArray[np.float64] = np.array([op.time_s for op in graph.ops], dtype=np.float64)
        self.sized = (self.size + 1.0) ** rule.size / (1.0 if bias is None else bias)
        self.live = np.zeros(tensors, dtype=bool)
        self.locks = np.zeros(tensors, dtype=np.int64)
        self.missing_cost = np.zeros(ops)  # to make again the inputs of each op that are not in memory
        self.chain = np.zeros(tensors)  # cost of each evicted tensor, as it was when evicted
        self.evictable = np.array([self._may_be_evicted(t.id) for t in graph.tensors])
        self.next_use = np.full(tensors, 0, dtype=np.int64)
        self.uses_left = [list(reversed(readers)) for readers in graph.consumers]
        for t in range(tensors):
            self._set_next_use(t)

    def run(self) -> list[int] | None:
        try:
            for op in self.graph.ops:
                self.now = op.id
                self._execute(op.id)
                for t in op.inputs:
                    if self.producer[t] >= 0:
                        self.uses_left[t].pop()
                        self._set_next_use(t)
        except (_FailedError, RecursionError):
            return None
        return self.order

    def _may_be_evicted(self, t: int) -> bool:
        """Kept tensors stay; so does what cannot be made again, while something that reads it may run."""
        producer = self.graph.tensors[t].producer
        return producer is not None and t not in self.graph.kept and self.graph.ops[producer].recomputable

    def _set_next_use(self, t: int) -> None:
        left = self.uses_left[t]
        self.next_use[t] = left[-1] if left else len(self.graph.ops) * 4
        if (
            not left
            and self.producer[t] >= 0
            and t not in self.graph.kept
            and not any(self.graph.ops[r].recomputable for r in self.graph.consumers[t])
        ):
            self.evictable[t] = True  # nothing will read it any more

    def _execute(self, op_id: int) -> None:
        op = self.graph.ops[op_id]
        inputs = [t for t in op.inputs if self.producer[t] >= 0]
        for t in inputs:
            self.locks[t] += 1
        # Those made last first: what they need is then the least likely to be evicted for the others.
        for t in sorted((t for t in inputs if not self.live[t]), reverse=True):
            if not self.live[t]:
                self._execute(int(self.producer[t]))
        # Making one input may have had to evict nothing that is locked, so all are here now.
        self.order.append(op_id)
        self.time_left_s -= op.time_s
        if len(self.order) > self.max_executions or self.time_left_s < 0.0 or self.should_stop():
            raise _FailedError
        outputs_bytes = sum(self.graph.tensors[t].size_bytes for t in op.outputs)
        for t in op.outputs:
            if self.live[t] and t not in self.graph.kept:
                self._drop(t, 0.0)  # made again anyway
        self._make_room(outputs_bytes + op.workspace_bytes)
        for t in op.outputs:
            if not self.live[t]:
                self.live[t] = True
                self.free_bytes -= self.graph.tensors[t].size_bytes
                if self.chain[t]:
                    for reader in self.graph.consumers[t]:
                        self.missing_cost[reader] -= self.chain[t]
                    self.chain[t] = 0.0
        for t in inputs:
            self.locks[t] -= 1

    def _make_room(self, wanted_bytes: int) -> None:
        while self.free_bytes < wanted_bytes:
            candidates = np.flatnonzero(self.live & self.evictable & (self.locks == 0))
            if not len(candidates):
                raise _FailedError
            producer = self.producer[candidates]
            cost = self.time[producer] + np.maximum(self.missing_cost[producer], 0.0) + 1e-9
            distance = np.maximum(self.next_use[candidates] - self.now, 1)
            rule = self.rule
            rank = (
                self._worth(candidates)
                * cost**rule.cost
                / (self.sized[candidates] * distance.astype(np.float64) ** rule.distance)
            )
            order = np.argsort(rank)
            for i in order[: max(1, len(order) // 50)]:
                self._drop(int(candidates[i]), float(cost[i]))
                if self.free_bytes >= wanted_bytes:
                    break

    def _worth(self, candidates: NDArray[np.int64]) -> NDArray[np.float64] | float:
        """What the guide says on keeping each of `candidates`."""
        if self.guide is None:
            return 1.0
        window = bisect_left(self.guide.ends, self.now)
        soon = np.where(self.next_use[candidates] <= self.guide.ends[window], 1.0, 1.0 / _GUIDED)
        return np.where(self.guide.handed[window, candidates], _GUIDED, soon)

    def _drop(self, t: int, cost: float) -> None:
        self.live[t] = False
        self.free_bytes += self.graph.tensors[t].size_bytes
        self.chain[t] = cost
        for reader in self.graph.consumers[t]:
            self.missing_cost[reader] += cost
