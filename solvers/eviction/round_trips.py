"""Eviction with offloading: each evicted tensor is reloaded or recomputed, whichever costs less.

The cost of a transfer is the time that the computation would wait for it, by an estimate of the load of the channels, plus a
price for channel time, which another tensor might use.
"""

from collections.abc import Sequence
from heapq import heapify, heappop, heapreplace
from itertools import accumulate
from typing import Unpack

import numpy as np
from numpy.typing import NDArray

from graphs.options.offload import Offloads
from solvers.eviction.engine import NEVER, Eviction
from solvers.eviction.rules import EvictionRule, Limits
from solvers.problem import Problem


def evicting_with_copies(
    problem: Problem, rule: EvictionRule, **limits: Unpack[Limits]
) -> tuple[list[int], frozenset[tuple[int, int]]] | None:
    """Return an order as ``evicting_order`` does, and pairs (tensor, position): the tensor is reloaded before that execution."""
    eviction = EvictionWithCopies(problem, rule, **limits)
    computed = eviction.run()
    return None if computed is None else (computed, frozenset(eviction.away))


class EvictionWithCopies(Eviction):
    """An ``Eviction`` that can recompute or reload a tensor."""

    def __init__(self, problem: Problem, rule: EvictionRule, **limits: Unpack[Limits]) -> None:
        super().__init__(problem, rule, **limits)
        assert problem.offloads is not None
        self.by_tensor = problem.offloads.by_tensor
        self.evictable = [again or t in self.by_tensor for t, again in enumerate(self.evictable)]
        self.at_hand = list(self.there)
        self.channels = _Channels(problem, problem.offloads)
        self.away: set[tuple[int, int]] = set()

    def _execute(self, i: int, wanted: dict[int, int]) -> None:
        fetched = [t for t in self.inputs[i] if not self.there[t]]
        if fetched:
            needed = sum(self.size[t] for t in fetched)
            if self.free_bytes < needed:
                self._make_room(needed, i, wanted)
            for t in fetched:
                self.away.add((t, len(self.order)))
                self.channels.fetch(t)
                self.there[t] = True
                self.live.add(t)
                self.free_bytes -= self.size[t]
        super()._execute(i, wanted)
        self.channels.execute(i, self.done)
        for t in self.graph.ops[i].outputs:
            self.at_hand[t] = True
            self.channels.make(t)

    def _may_go(self, t: int, done: int) -> bool:
        again = self.graph.ops[self.producer[t]].recomputable and t not in self.graph.kept
        return again or self._of_no_use(t, done)

    def _evict_cheapest(self, needed_bytes: int, tensors: list[int]) -> None:
        """Evict the cheapest tensors; costs rise with the load of the channels, so look again before each eviction."""
        self._find_costs(tensors)
        ranked = list(zip(self._ranks(tensors), tensors, strict=True))
        heapify(ranked)
        while self.free_bytes < needed_bytes and ranked:
            rank, t = ranked[0]
            self._find_costs([t])
            if (now := self._ranks([t])[0]) > rank:
                heapreplace(ranked, (now, t))
                continue
            heappop(ranked)
            self._evict(t)

    def _find_costs(self, tensors: list[int]) -> None:
        for t in tensors:
            if t not in self.cost:
                self.cost[t] = self._cost(t)

    def _cost(self, t: int) -> float:
        return super()._cost(t) if self.graph.ops[self.producer[t]].recomputable else np.inf

    def _costs(self, tensors: Sequence[int]) -> list[float]:
        price = self.rule.channel
        return [min(self.cost[t], self.channels.cost_s(t, self.next_use[t], price)) for t in tensors]

    def _evict(self, t: int) -> None:
        self._find_costs([t])
        if self.channels.cost_s(t, self.next_use[t], self.rule.channel) >= self.cost[t]:
            self._drop(t)
        else:
            self._send(t)

    def _send(self, t: int) -> None:
        # A tensor without a known next use is taken to be read last.
        self.channels.send(t, min(self.next_use[t], len(self.time) - 1))
        self.live.discard(t)
        self.there[t] = False
        self.free_bytes += self.size[t]
        self._forget_costs(t)

    def _drop(self, t: int) -> None:
        if not (self.graph.ops[self.producer[t]].recomputable or self._of_no_use(t, self.done)):
            self._send(t)  # tensors computed from it may be evicted and recomputed later
            return
        self.at_hand[t] = False
        super()._drop(t)


class _Channels:
    """An estimate of both channels: transfers to the host one at a time, each after its tensor was produced; reloads by deadline.

    Reloads start after the peak of keeping everything: before it, there is no room to be ahead of their readers.
    """

    def __init__(self, problem: Problem, copies: Offloads) -> None:
        self.by_tensor = copies.by_tensor
        self.time_s = problem.time_s
        self.starts_s = np.array(list(accumulate(problem.time_s, initial=0.0)))
        self.peak = _peak(problem)
        self.now_s = self.out_s = self.in_s = 0.0
        self.begin_s = float(self.starts_s[self.peak])  # earliest start of reloads, on the time axis of keeping everything
        self.made_s: dict[int, float] = {}
        self.sent: set[int] = set()
        self.away: dict[int, int] = {}  # offloaded tensors, and the ops that need them back
        self.slack_s = self.starts_s.copy()  # for each op, the time before it minus that of the reloads due by then
        self.least_s: NDArray[np.float64] | None = None  # the least slack of an op and its successors

    def make(self, t: int) -> None:
        self.made_s[t] = self.now_s
        if t in self.away:
            self._forget(t)

    def execute(self, i: int, done: int) -> None:
        self.now_s += self.time_s[i]
        self.begin_s = float(self.starts_s[max(done + 1, self.peak)])
        if done < self.peak:
            self.in_s = max(self.in_s, self.now_s)

    def cost_s(self, t: int, use: int, price: float) -> float:
        """Return the cost of offloading and reloading `t` in seconds, inf if that is impossible."""
        if t not in self.by_tensor or use >= NEVER:
            return np.inf
        transfers = self.by_tensor[t]
        if self.least_s is None:
            self.least_s = np.minimum.accumulate(self.slack_s[::-1])[::-1]
        left_s = float(self.least_s[use]) - self.begin_s
        cost_s = price * transfers.reload_s + max(0.0, transfers.reload_s - max(0.0, left_s))
        if t not in self.sent:
            cost_s += price * transfers.offload_s + max(0.0, self._out_s(t) - self.now_s)
        return cost_s

    def _out_s(self, t: int) -> float:
        return max(self.out_s, self.made_s[t]) + self.by_tensor[t].offload_s

    def send(self, t: int, use: int) -> None:
        if t not in self.sent:
            self.out_s = self._out_s(t)
            self.now_s = max(self.now_s, self.out_s)
            self.sent.add(t)
        self.away[t] = use
        self.slack_s[use:] -= self.by_tensor[t].reload_s
        self.least_s = None

    def fetch(self, t: int) -> None:
        self._forget(t)
        self.in_s += self.by_tensor[t].reload_s
        self.now_s = max(self.now_s, self.in_s)

    def _forget(self, t: int) -> None:
        self.slack_s[self.away.pop(t) :] += self.by_tensor[t].reload_s
        self.least_s = None


def _peak(problem: Problem) -> int:
    """Return the op at which keeping everything needs most memory."""
    change = np.zeros(problem.ops + 1)
    for t, readers in enumerate(problem.graph.consumers):
        maker = problem.producers[t]
        if maker >= 0:
            change[maker] += problem.sizes[t]
            change[problem.ops if problem.kept[t] else max(readers, default=maker) + 1] -= problem.sizes[t]
    return int(np.argmax(np.cumsum(change)[: problem.ops]))
