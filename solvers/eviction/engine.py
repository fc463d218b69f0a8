"""Eviction: schedules in milliseconds at any budget. Run the program, and evict the tensors that are cheapest to bring back.

This is dynamic tensor rematerialization (Kirisame et al., ICLR 2021) with the advantages of a static graph: the next use of every
tensor is known (as in Belady's rule for caches), missing tensors are recomputed in program order, so that none waits in memory
for the others, and several rules can be tried. A tensor that may be offloaded is reloaded or recomputed, whichever costs less.

Known weaknesses: a run does not look ahead for an op that will not fit, except that rules may keep gradients (`gradients_stay`),
and a rule that fails proves nothing. So several rules are tried, and ``planner.solvers.windows.strategies.random_keys`` varies
them and follows solutions of the relaxation.
"""

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from heapq import heapify, heappop, heapreplace
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from planner.graphs.ir import Phase
from planner.solvers.eviction.channels import NEVER, Channels
from planner.solvers.eviction.rules import DEFAULT, SLACK_EXECUTIONS, EvictionRule, EvictionSettings, Guide
from planner.solvers.problem import Problem

_DOOMED_S = 1e9  # cost of a tensor that there will be no room to recompute
WORK_PER_EVICTION = 4e-5  # and per execution, see ``planner.solvers.clock``


class Evicted(NamedTuple):
    """An order of execution from a run of eviction.

    Attributes:
        computed: ids of the executed ops, in order.
        reloads: (tensor, position), where a tensor is reloaded before that execution.
    """

    computed: list[int]
    reloads: frozenset[tuple[int, int]]


def find_evicting_order(problem: Problem, rule: EvictionRule, settings: EvictionSettings = DEFAULT) -> Evicted | None:
    """Return an order of execution that fits the capacity, by `rule`; None if the rule fails.

    First executions are in the program order of `problem`.
    """
    return Eviction(problem, rule, settings).run()


class EvictionFailedError(Exception):
    """The failure of a rule: it executes too much, or finds no room."""


class Eviction:
    """One run of an eviction rule."""

    def __init__(self, problem: Problem, rule: EvictionRule, settings: EvictionSettings = DEFAULT) -> None:
        graph = self.graph = problem.graph
        given_bytes = settings.capacity_bytes
        self.capacity_bytes = self.free_bytes = problem.capacity_bytes if given_bytes is None else given_bytes
        self.rule = rule
        self.guide = settings.guide
        self.max_executions = int(settings.max_factor * problem.ops) + SLACK_EXECUTIONS
        self.time_left_s = settings.max_time_s
        self.should_stop = settings.should_stop or (lambda: False)
        self.order: list[int] = []
        self.done = -1  # the last new op
        self.rounds: Counter[int] = Counter()  # executions since then
        self.size = problem.sizes
        factors = np.ones(len(self.size)) if settings.bias is None else settings.bias
        self.sized: list[float] = ((np.array(self.size, dtype=np.float64) + 1.0) ** rule.size / factors).tolist()
        self.producer = problem.producer
        self.inputs = problem.inputs
        self.time = problem.time_s
        self.live: set[int] = set()  # in memory, and may leave it
        self.dropped: set[int] = set()  # since the last recomputation began
        self.there = [t.static for t in graph.tensors]  # in memory: alive, or static
        self.at_hand = list(self.there)  # nothing need be executed for it: in memory, or on the host
        self.next_use = [readers[0] if readers else NEVER for readers in graph.consumers]
        self.cost: dict[int, float] = {}  # cached costs of recomputation
        self.costs_with: dict[int, set[int]] = {}  # by tensor: those whose costs change when it is evicted or recomputed
        self.recomputable = [p >= 0 and t not in graph.kept and graph.ops[p].recomputable for t, p in enumerate(self.producer)]
        self.channels = Channels(problem)
        self.round_trips = self.channels.round_trips
        self.evictable = [recomputable or t in self.round_trips for t, recomputable in enumerate(self.recomputable)]
        self.reloads: set[tuple[int, int]] = set()
        self.alone_bytes = [op.workspace_bytes + sum(self.size[t] for t in problem.held[op.id] - graph.kept) for op in graph.ops]
        self.staying_bytes = self._compute_staying_bytes()

    def run(self) -> Evicted | None:
        """Return the order of execution; None if the rule fails."""
        try:
            for op in range(len(self.graph.ops)):
                self.rounds.clear()
                while missing := self._list_missing(op):
                    self._recompute(missing, op)
                self._execute(op, {})
                self.done = op
                self._look_ahead(op)
        except EvictionFailedError:
            return None
        return Evicted(self.order, frozenset(self.reloads))

    def _compute_staying_bytes(self) -> list[int]:
        """Return for each op the bytes in memory before it that are never evicted; with gradients, if the rule keeps them."""
        change = [0] * (len(self.graph.ops) + 1)
        for op in self.graph.ops:
            for t in op.outputs:
                readers = self.graph.consumers[t]
                if t in self.graph.kept:
                    change[op.id + 1] += self.size[t]
                elif self.rule.gradients_stay and op.phase is Phase.BACKWARD and readers:
                    change[op.id + 1] += self.size[t]
                    change[readers[-1] + 1] -= self.size[t]
        return list(accumulate(change))

    # What there is to do.

    def _list_missing(self, op: int) -> list[int]:
        """Return the ops to recompute before `op`, in program order."""
        found: set[int] = set()
        stack = [self.producer[t] for t in self.inputs[op] if not self.at_hand[t]]
        while stack:
            i = stack.pop()
            if i not in found:
                found.add(i)
                stack.extend(self.producer[t] for t in self.inputs[i] if not self.at_hand[t])
        return sorted(found)

    def _recompute(self, missing: Sequence[int], op: int) -> None:
        """Execute the ops in `missing` before `op`, until room for one is made by evicting what a later one reads."""
        wanted: dict[int, list[int]] = {}  # by tensor: its readers, the last one first
        for reader in (op, *reversed(missing)):
            for t in self.inputs[reader]:
                wanted.setdefault(t, []).append(reader)
        for i in missing:
            for t in self.inputs[i]:
                wanted[t].pop()
                if not wanted[t]:
                    del wanted[t]
            self.dropped.clear()
            self._execute(i, wanted)
            self._look_ahead(i)
            if not self.dropped.isdisjoint(wanted):
                return

    def _execute(self, i: int, wanted: Mapping[int, Sequence[int]]) -> None:
        """Execute op `i`, whose inputs are at hand; tensors in `wanted` are read soon, by these ops, the last one first."""
        if self.channels.away:
            self._reload(i, wanted)
        op = self.graph.ops[i]
        self.rounds[i] += 1
        self.time_left_s -= op.time_s
        spent = len(self.order) >= self.max_executions or self.rounds[i] > self.rule.rounds or self.time_left_s < 0.0
        if spent or self.should_stop():
            raise EvictionFailedError
        for t in op.outputs:
            if self.there[t] and t not in self.graph.kept:
                self._drop(t)  # produced again anyway
        new = [t for t in op.outputs if not self.there[t]]
        # A new op counts as done for the uses of its inputs; a recomputed one changes nothing.
        done = max(self.done, i)
        uses = {t: self._use_after(t, done, i) for _, t in op.overwrites if t not in wanted and self._may_go(t, done)}
        over = [t for t, use in uses.items() if use == NEVER]
        needed = op.workspace_bytes + sum(self.size[t] for t in new) - sum(self.size[t] for t in over)
        if self.free_bytes < needed:
            over += self._make_room(needed, i, wanted, [t for t in uses if t not in over])
        self.order.append(i)
        for t in new:
            self.there[t] = self.at_hand[t] = True
            if self.evictable[t] or t not in self.graph.kept:
                self.live.add(t)
            self.free_bytes -= self.size[t]
            self._forget_costs(t)
        for t in over:
            self.next_use[t] = uses[t]
            self._drop(t)
        if self.round_trips:
            self.channels.execute(i, self.done)

    def _reload(self, i: int, wanted: Mapping[int, Sequence[int]]) -> None:
        """Reload the inputs of op `i` that are on the host only."""
        reloaded = [t for t in self.inputs[i] if not self.there[t]]
        needed = sum(self.size[t] for t in reloaded)
        if reloaded and self.free_bytes < needed:
            self._make_room(needed, i, wanted)
        for t in reloaded:
            self.reloads.add((t, len(self.order)))
            self.channels.reload(t)
            self.there[t] = True
            self.live.add(t)
            self.free_bytes -= self.size[t]

    def _may_go(self, t: int, done: int) -> bool:
        """Return True if t, an input of the new op `done`, may be overwritten: it can be recomputed or is not needed again."""
        return self.recomputable[t] or self._is_useless(t, done)

    # What to evict.

    def _make_room(self, needed_bytes: int, i: int, wanted: Mapping[int, Sequence[int]], over: Sequence[int] = ()) -> list[int]:
        """Evict tensors until op `i` has room: unwanted ones, then those wanted last, then those of `over`, which it returns."""
        others, soon = [], []
        for t in sorted(self.live.difference(self.inputs[i])):
            if not (self.evictable[t] or self._is_useless(t, self.done)):
                continue
            if t in wanted:
                soon.append(t)
            elif self.next_use[t] == NEVER:
                self._drop(t)
            else:
                others.append(t)
        if self.free_bytes < needed_bytes:
            self._evict_cheapest(needed_bytes, others)
        soon.sort(key=lambda t: wanted[t][-1])
        left = [t for t in over if self.evictable[t]]
        going: list[int] = []
        while self.free_bytes < needed_bytes:
            if soon:
                self._evict(soon.pop())
            elif left:
                going.append(left.pop())
                needed_bytes -= self.size[going[-1]]
            else:
                raise EvictionFailedError
        return going

    def _evict_cheapest(self, needed_bytes: int, tensors: list[int]) -> None:
        self._update_costs(tensors)
        ranked = list(zip(self._compute_ranks(tensors), tensors, strict=True))
        heapify(ranked)
        while self.free_bytes < needed_bytes and ranked:
            rank, t = ranked[0]
            # Unknown since an earlier eviction, or higher because of the load of the channels.
            if t not in self.cost or self.round_trips:
                self._update_costs([t])
                if (now := self._compute_ranks([t])[0]) > rank:
                    heapreplace(ranked, (now, t))
                    continue
            heappop(ranked)
            self._evict(t)

    def _update_costs(self, tensors: Sequence[int]) -> None:
        for t in tensors:
            if t not in self.cost:
                self.cost[t] = self._compute_cost(t) if self.recomputable[t] else np.inf

    def _evict(self, t: int) -> None:
        """Drop a tensor or, if reloading it costs less, offload it."""
        if t in self.round_trips:
            self._update_costs([t])
            if self.channels.compute_cost_s(t, self.next_use[t], self.rule.channel) < self.cost[t]:
                self._offload(t)
                return
        self._drop(t)

    def _offload(self, t: int) -> None:
        # A tensor without a known next use is taken to be read last.
        self.channels.offload(t, min(self.next_use[t], len(self.time) - 1))
        self.live.discard(t)
        self.there[t] = False
        self.free_bytes += self.size[t]
        self._forget_costs(t)

    def _is_useless(self, t: int, done: int) -> bool:
        """Return True if no op that may run after the new op `done` reads t."""
        readers = self.graph.consumers[t]
        if t in self.graph.kept:
            return False
        return not readers or (readers[-1] <= done and not any(self.graph.ops[r].recomputable for r in readers))

    def _compute_ranks(self, tensors: Sequence[int]) -> list[float]:
        rule = self.rule
        cost = np.array(self._compute_costs(tensors)) ** rule.cost
        distance = np.maximum(1.0, np.array([self.next_use[t] - self.done for t in tensors], dtype=np.float64)) ** rule.distance
        worth = 1.0 if self.guide is None else np.array([self._compute_worth(self.guide, t) for t in tensors])
        ranks: list[float] = (worth * cost / (np.array([self.sized[t] for t in tensors]) * distance)).tolist()
        return ranks

    def _compute_costs(self, tensors: Sequence[int]) -> list[float]:
        if not self.round_trips:
            return [self.cost[t] for t in tensors]
        price = self.rule.channel
        return [min(self.cost[t], self.channels.compute_cost_s(t, self.next_use[t], price)) for t in tensors]

    def _compute_worth(self, guide: Guide, t: int) -> float:
        """Return the factor to the rank of t by the guide."""
        window = bisect_left(guide.ends, self.done + 1)
        if guide.handed[window, t]:
            return self.rule.guided
        return 1.0 if self.next_use[t] <= guide.ends[window] else 1.0 / self.rule.guided

    def _compute_cost(self, t: int) -> float:
        """Return the seconds to recompute a tensor, including its missing ancestors."""
        # Not 0, or sizes and distances of tensors that cost nothing would not count.
        total = 1e-9
        staying_bytes = self.staying_bytes[min(self.next_use[t], len(self.time))]
        found, stack = {self.producer[t]}, [self.producer[t]]
        while stack:
            i = stack.pop()
            total += self.time[i]
            if self.alone_bytes[i] + staying_bytes > self.capacity_bytes:
                return _DOOMED_S
            for u in self.inputs[i]:
                self.costs_with.setdefault(u, set()).add(t)
                if not self.at_hand[u] and (producer := self.producer[u]) not in found:
                    found.add(producer)
                    stack.append(producer)
        return total

    # Next uses of tensors: by a new op, or by the recomputation of a missing tensor.

    def _drop(self, t: int) -> None:
        if t in self.round_trips and not (self.recomputable[t] or self._is_useless(t, self.done)):
            self._offload(t)  # tensors computed from it may be evicted and recomputed later
            return
        self.live.discard(t)
        self.dropped.add(t)
        self.there[t] = self.at_hand[t] = False
        self.free_bytes += self.size[t]
        # Whoever needs t now needs its inputs first: their next use is no later than that of t, and so on through missing ones.
        use = self.next_use[t]
        stack = [t]
        while stack:
            for u in self.inputs[self.producer[stack.pop()]]:
                if self.next_use[u] > use:
                    self.next_use[u] = use
                    self.cost.pop(u, None)
                    if not self.at_hand[u]:
                        stack.append(u)
        self._forget_costs(t)

    def _forget_costs(self, t: int) -> None:
        """Discard the cached costs of `t` and of the tensors that would be recomputed from it."""
        self.cost.pop(t, None)
        for u in self.costs_with.pop(t, ()):
            self.cost.pop(u, None)

    def _look_ahead(self, op: int) -> None:
        """Update the next uses of the inputs of `op`, which has just been executed."""
        for t in self.inputs[op]:
            use = self._use_after(t, self.done)
            if use != self.next_use[t]:
                self.next_use[t] = use
                self.cost.pop(t, None)

    def _use_after(self, t: int, done: int, made: int = -1) -> int:
        """Return the next use of t once `done` is the last new op and the outputs of op `made` are in memory."""
        readers = self.graph.consumers[t]
        old = bisect_right(readers, done)
        use = readers[old] if old < len(readers) else NEVER
        for reader in readers[:old]:
            for u in self.graph.ops[reader].outputs:
                if not self.at_hand[u] and reader != made:
                    use = min(use, self.next_use[u])
        return use
