"""Search over placements: where ops run is varied for a few of them at a time, and timed by the clocks of all devices.

The program's rows count the work of each stream and the lengths of paths, not waits. So the placement of the best schedule is
varied: ops that are consecutive, or depend on each other, move to another device, and their inputs are transferred or recomputed
there. Variations that are no worse than the placement accepted some time ago are accepted (late acceptance hill climbing, Burke
and Bykov, European Journal of Operational Research 258, 2017).
"""

import math
from array import array
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import numpy as np

from planner.graphs.pools import COMPUTE
from planner.solvers.problem import Problem
from planner.solvers.windows.decoding.decode import NOWHERE_BYTES, Order, Trial, is_possible, order_of, try_out
from planner.solvers.windows.decoding.transfers import add_transfers
from planner.solvers.windows.search import WORK_PER_EXECUTION, Search
from planner.solvers.windows.strategies.strategy import Strategy

_MOST_KNOWN = 10_000  # orders whose cost is known

Cost = tuple[int, float, float]  # bytes over the budget, end of the last stream, and seconds of all streams
# Late acceptance: a variation is compared with the one accepted so many variations ago, and twice as many after each restart.
_MEMORY, _MOST_MEMORY = 30, 500
_IDLE, _BEGINNINGS = 2_000, 10  # variations without improvement before a restart from the best, and number of restarts
# Shares of variations that add or remove a recomputation of an op, and a transfer where a tensor is produced.
_RECOMPUTE_SHARE, _SENT_SHARE = 0.2, 0.15
_LINKED_SHARE = 0.5  # of the others: dependent ops are moved instead of consecutive ones
_FEW = 0.5  # half of them move as many ops as are drawn with this probability of an end after each


@dataclass(frozen=True, slots=True)
class Placing:
    """A placement of the ops of the program.

    Attributes:
        device: for each op its device; without those that others on the main device replace.
        recomputed: (op, device): the op is recomputed there instead of transferring its outputs.
        sent: (tensor, device, other device): the tensor is transferred to the other device when it is produced, and transferred
            back or recomputed for each later reader.
        instead: ops that replace others on the main device.
    """

    device: Mapping[int, int]
    recomputed: frozenset[tuple[int, int]] = frozenset()
    sent: frozenset[tuple[int, int, int]] = frozenset()
    instead: frozenset[int] = frozenset()


class DeviceOps:
    """Ops and transfers by device. Ops are positions, tensors those of the program.

    Attributes:
        runs: by op of the program and device, the op that runs there.
        spots: the inverse: by op, its op of the program and its device.
        copies: by tensor, source and target device, the transfer.
        producer: by tensor, its op in the program.
    """

    def __init__(self, problem: Problem) -> None:
        streams = problem.streams
        self.problem, self.places, self.device = problem, problem.places, streams.pool
        ops = [problem.graph.ops[op] for op in self.places.ids]
        self.inputs = [tuple(streams.base[t] for t in op.inputs) for op in ops]
        self.outputs = [tuple(streams.base[t] for t in op.outputs) for op in ops]
        self.runs: dict[tuple[int, int], int] = {}
        self.copies: dict[tuple[int, int, int], int] = {}
        self.producer: dict[int, int] = {}
        for i, op in enumerate(ops):
            if op.id in streams.transfers:
                here, there = (streams.pool[t] for t in (op.inputs[0], op.outputs[0]))
                self.copies[self.inputs[i][0], here, there] = i
            elif op.stream != COMPUTE:
                self.runs[self.places.replaces[i][0], streams.pool[op.outputs[0]]] = i
            elif not (self.places.optional[i] or self.places.replaces[i]):
                self.runs[i, 0] = i
                self.producer.update(dict.fromkeys(self.outputs[i], i))
        self.spots = {i: spot for spot, i in self.runs.items()}
        self.copying = set(self.copies.values())
        self.count = sum(streams.computes)
        self.movable = sorted({v for v, d in self.runs if d})
        self.static = [(t.id, 0) for t in problem.graph.tensors if t.static]
        self.static_or_kept = {*self.static, *((t, 0) for t in problem.graph.kept)}

    def list_computed(self, placing: Placing) -> list[int] | None:
        """Return the executions and transfers, each before its readers; None if a tensor cannot be produced."""
        return _OrderBuilder(self, placing).run()


@dataclass(slots=True)
class _OrderBuilder:
    """A builder of an order."""

    device_ops: DeviceOps
    placing: Placing
    computed: list[int] = field(default_factory=list)
    there: set[tuple[int, int]] = field(default_factory=set)
    sent: dict[tuple[int, int], int] = field(default_factory=dict)
    touched: dict[tuple[int, int], int] = field(default_factory=dict)  # turn of the last op to use it
    turns: dict[int, int] = field(default_factory=dict)  # how many each device has executed

    def run(self) -> list[int] | None:
        device_ops, placing = self.device_ops, self.placing
        self.there.update(device_ops.static)
        self.sent.update(((t, device), other) for t, device, other in placing.sent)
        replaced = {i for b in placing.instead for i in device_ops.places.replaces[b]}
        for v in sorted({*placing.device, *placing.instead}.difference(replaced - set(placing.instead))):
            device = placing.device.get(v, 0)
            if not self.execute(v if v in placing.instead else device_ops.runs[v, device], device):
                return None
        return self.remove_unread()

    def remove_unread(self) -> list[int]:
        """Return the order without transfers whose result is not read before it is transferred again."""
        device_ops, device = self.device_ops, self.device_ops.device
        wanted = {t for t, kept in enumerate(device_ops.problem.kept) if kept}
        found: list[int] = []
        for i in reversed(self.computed):
            outputs = device_ops.problem.outputs[i]
            if i in device_ops.copying and wanted.isdisjoint(outputs):
                continue
            wanted.difference_update(t for t in outputs if device[t] or not device_ops.problem.kept[t])
            wanted.update(device_ops.problem.inputs[i])
            found.append(i)
        return found[::-1]

    def execute(self, i: int, device: int) -> bool:
        if not all(self.need(t, device) for t in self.device_ops.inputs[i]):
            return False
        self.computed.append(i)
        self.turns[device] = self.turns.get(device, 0) + 1
        made = [(t, device) for t in self.device_ops.outputs[i]]
        self.there.update(made)
        for spot in (*made, *((t, device) for t in self.device_ops.inputs[i])):
            if spot in self.sent:
                self.touched[spot] = self.turns[device]
        return all(self.need(t, self.sent[t, device]) for t, _ in made if (t, device) in self.sent)

    def need(self, t: int, device: int) -> bool:
        """Make t available on `device`, by recomputation or the earliest transfer; return True if that is possible."""
        device_ops = self.device_ops
        if (t, device) in self.there:
            # A tensor that was sent away is transferred back, unless the previous op used it.
            if (t, device) not in self.sent or self.turns.get(device, 0) - self.touched.get((t, device), 0) <= 1:
                return True
            if (t, self.sent[t, device]) not in self.there or (t, 0) in device_ops.static_or_kept:
                return True
        producer = device_ops.producer.get(t)
        if producer is not None and (producer, device) in self.placing.recomputed and (producer, device) in device_ops.runs:
            recomputed = device_ops.runs[producer, device]
            if device_ops.problem.recomputable[recomputed] and self.execute(recomputed, device):
                return True
            if (t, device) in self.there and (t, device) in device_ops.static_or_kept:
                return True  # though something else that was made could not be sent: what is kept is there once
        transfers = [
            (device_ops.problem.get_seconds(i), i)
            for d in range(device_ops.count)
            if d != device and (t, d) in self.there and (i := device_ops.copies.get((t, d, device))) is not None
        ]
        if not transfers:
            return False
        self.computed.append(min(transfers)[1])
        self.there.add((t, device))
        return True


class Placements(Strategy):
    """A local search for a better placement, starting at that of the best schedule.

    Attributes:
        lacking: the best order of the last step that exceeds the budget, for other strategies to add recomputations.
    """

    def __init__(self, search: Search) -> None:
        super().__init__(search)
        self.lacking: Order | None = None
        self.device_ops = DeviceOps(search.problem)
        self._draw = np.random.default_rng(0)
        self._now: Placing | None = None
        self._cost: Cost = (0, np.inf, np.inf)
        self._accepted: list[Cost] = []
        self._costs: dict[bytes, Cost] = {}  # of orders, as variations often lead to the same one
        self._from: Trial | None = None
        self._best: Cost = (0, np.inf, np.inf)
        self._idle = self._fruitless = 0

    @staticmethod
    def applies(problem: Problem) -> bool:
        """Return True if the problem has other devices."""
        return problem.has_devices

    def step(self, limit: float) -> bool:
        """Vary the placement for about `limit`; return False once several restarts have failed."""
        search, stop = self.search, self.search.stopping.make_enough_after(limit)
        self.lacking = None
        while not stop():
            if self._now is None or self._idle > _IDLE or search.incumbent.best is not self._from:
                self._begin()
            assert self._now is not None
            varied = self.vary(self._now)
            cost = None if varied == self._now else self.compute_cost(varied)
            self._idle += 1
            if cost is None:
                continue
            # Late acceptance: compared with the cost that was accepted as many variations ago as the list is long.
            at = self._idle % len(self._accepted)
            if cost <= self._accepted[at] or cost <= self._cost:
                self._now, self._cost = varied, cost
            self._accepted[at] = self._cost
            if cost < self._best and is_possible(search.problem, order := self.order(varied)):
                self._best, self._idle, self._fruitless = cost, 0, 0
                if cost[0]:
                    self.lacking = order
                elif cost[1] <= search.incumbent.best_s:
                    search.incumbent.take(try_out(search.problem, order))
                    self._from = search.incumbent.best
        return not self.done

    @property
    def done(self) -> bool:
        """True if several restarts have not improved the best schedule."""
        return self._fruitless > _BEGINNINGS

    def compute_cost(self, placing: Placing) -> Cost | None:
        """Return the cost of a placement; None if it is invalid."""
        computed = self.device_ops.list_computed(placing)
        if computed is None:
            return None
        problem, search = self.search.problem, self.search
        search.clock.spend(0.5 * WORK_PER_EXECUTION * len(computed))
        key = array("i", computed).tobytes()
        if (cost := self._costs.get(key)) is None:
            search.clock.spend(1.5 * WORK_PER_EXECUTION * len(computed))
            if len(self._costs) == _MOST_KNOWN:
                self._costs.clear()
            found = add_transfers(problem, [problem.places.ids[i] for i in computed])
            over = max(found.memory_bytes) - search.budget_bytes if found.fits_elsewhere else NOWHERE_BYTES
            cost = self._costs[key] = max(0, over), found.time_s, math.fsum(map(problem.get_seconds, computed))
        return cost

    def order(self, placing: Placing) -> Order:
        """Return a valid placement as an order of executions."""
        computed = self.device_ops.list_computed(placing)
        assert computed is not None
        away = frozenset(self.device_ops.runs[v, d] for v, d in placing.device.items() if d)
        return order_of(self.search.problem, computed, instead=away | placing.instead)

    def vary(self, placing: Placing) -> Placing:
        """Return a variation: some ops on another device, or a recomputation or a transfer away added or removed."""
        draw, device_ops = self._draw, self.device_ops
        movable = [v for v in device_ops.movable if v in placing.device]
        if not movable:
            return placing
        kind = draw.random()
        if kind < _RECOMPUTE_SHARE + _SENT_SHARE:
            v, device = movable[int(draw.integers(len(movable)))], int(draw.integers(device_ops.count))
            if kind < _RECOMPUTE_SHARE or not device_ops.outputs[v]:
                return replace(placing, recomputed=placing.recomputed ^ {(v, device)})
            outputs = device_ops.outputs[v]
            t, other = outputs[int(draw.integers(len(outputs)))], int(draw.integers(device_ops.count - 1))
            return replace(placing, sent=placing.sent ^ {(t, device, other + (other >= device))})
        device = int(draw.integers(device_ops.count))
        size = 1 + int(draw.geometric(_FEW)) if draw.random() < 0.5 else 1 + int(draw.integers(len(movable)))
        begin = int(draw.integers(len(movable)))
        chosen: Collection[int] = movable[begin : begin + size]
        if draw.random() < _LINKED_SHARE:
            chosen = self._find_linked(movable[begin], set(movable), size)
        moved = {v: device for v in chosen if (v, device) in device_ops.runs}
        return replace(placing, device=MappingProxyType({**placing.device, **moved}))

    def _find_linked(self, v: int, among: set[int], size: int) -> list[int]:
        """Return up to `size` ops that depend on each other, including v."""
        found, waiting = {v}, [v]
        while waiting and len(found) < size:
            i = waiting.pop(0)
            near = [self.device_ops.producer.get(t, -1) for t in self.device_ops.inputs[i]]
            near += (c for t in self.device_ops.outputs[i] for c in self.search.problem.consumers[t])
            for other in near:
                if other in among and other not in found and len(found) < size:
                    found.add(other)
                    waiting.append(other)
        return sorted(found)

    def _begin(self) -> None:
        """Start from the best schedule, or without ops on other devices."""
        self._fruitless = self._fruitless + 1 if self._from is self.search.incumbent.best else 0
        self._from, self._idle = self.search.incumbent.best, 0
        start = self._build_placing(() if self._from is None else self._from.order.instead)
        if self._from is not None:
            start = replace(start, recomputed=self._list_recomputed(self._from.order))
        cost = self.compute_cost(start)
        if cost is None:
            start = self._build_placing(())
            cost = self.compute_cost(start)
        self._now, self._cost = start, cost or (0, np.inf, np.inf)
        self._best = self._cost
        # A longer memory takes longer to converge, to better placements.
        self._accepted = [self._cost] * min(_MEMORY * 2**self._fruitless, _MOST_MEMORY)

    def _build_placing(self, instead: Iterable[int]) -> Placing:
        away = dict(self.device_ops.spots[b] for b in instead if b in self.device_ops.spots)
        here = frozenset(b for b in instead if b not in self.device_ops.spots)
        executed = [v for v in self.search.problem.places.list_executed(here) if v not in here]
        return Placing(MappingProxyType({v: away.get(v, 0) for v in executed}), instead=here)

    def _list_recomputed(self, order: Order) -> frozenset[tuple[int, int]]:
        pairs = zip(order.computed, order.first, strict=True)
        return frozenset(self.device_ops.spots[i] for i, first in pairs if not first and i in self.device_ops.spots)
