"""Expansion of the binaries of a solution to an order of executions.

The order is fixed by rule: what is missing is recomputed directly before its reader, in program order. Known weakness: a solution
that fits only in another order of the same recomputations is decoded to a schedule above the budget. Where several ops can make
one tensor, the cheapest derivation is chosen in place of program order. Nothing is executed that the solution does not pay for,
except where a solution with options leaves a tensor without a producer.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import pairwise

from planner.solvers.problem import Problem
from planner.solvers.windows.relaxation.discretization import Discretization


@dataclass(frozen=True, slots=True)
class Solution:
    """The binaries of a solution, window by window.

    Attributes:
        recomputed: for each window the ops that are recomputed in it (R and Q).
        handed: for each window the tensors handed over into it (S; without kept ones), and after the last one those handed over
            to the following ops.
        taken: for each window the tensors reloaded in it (A); empty without offloading.
        instead: ops that are executed in place of those that they replace (z).
    """

    recomputed: tuple[frozenset[int], ...]
    handed: tuple[frozenset[int], ...]
    taken: tuple[frozenset[int], ...] = ()
    instead: frozenset[int] = frozenset()


def expand(problem: Problem, discretization: Discretization, solution: Solution) -> tuple[int, ...]:
    """Return ops in order of execution.

    Window by window: the missing inputs of a new op are recomputed just before it, in program order. Before the last op of a
    window, missing tensors that are handed over are recomputed too, except by optional ops with ready inputs: these run as soon
    as their inputs have no other reader in the window.
    """
    return _Expansion(problem, discretization, solution).run()


class _Expansion:
    """A builder of an order.

    Attributes:
        there: tensors in memory according to the solution.
        made: all tensors that have been produced, which may be held instead.
        pending: recomputations and optional ops of the solution that have not been executed yet.
        in_order: the ops that are executed in their places, in order.
    """

    def __init__(self, problem: Problem, discretization: Discretization, solution: Solution) -> None:
        self.problem = problem
        self.places = problem.places
        self.discretization = discretization
        self.solution = solution
        self.computed: list[int] = []
        self.there: set[int] = set()
        self.made: set[int] = set()
        self.pending: set[int] = set()
        self.kept = [t for outputs in problem.outputs for t in outputs if problem.kept[t]]
        self.in_order = problem.places.list_executed(solution.instead)
        self.optional = {i for i, optional in enumerate(problem.places.optional) if optional}

    def run(self) -> tuple[int, ...]:
        for k in range(len(self.discretization.ends)):
            self.expand_window(k)
        return tuple(self.computed)

    def expand_window(self, k: int) -> None:
        start, end = self.discretization.start_of(k), self.discretization.ends[k]
        ops = self.in_order[bisect_left(self.in_order, start) : bisect_right(self.in_order, end)]
        if not ops:
            # All ops are replaced by one in a later window, at which this one ends.
            self.pending.update(self.solution.recomputed[k])
            return
        handed = {t for t in self.kept if self.problem.settled[t] < start} | self.solution.handed[k]
        if self.solution.taken:
            handed.update(t for t in self.solution.taken[k] if self.problem.producer[t] < start)
        self.there = (handed & self.made).union(t for t in self.kept if t in self.made)
        self.pending.update(self.solution.recomputed[k])
        wanted_on = self.solution.handed[k + 1]
        gone = self.find_gaps(k, frozenset(ops))
        self.there.difference_update(gone.get(start - 1, ()))
        for v in ops:
            wanted: Iterable[int] = self.problem.inputs[v]
            if v == ops[-1]:
                wanted = (*wanted, *(t for t in wanted_on if t not in self.problem.outputs[v]))
            for i in self.find_lacking(wanted, v):
                self.execute(i)
            self.execute(v)
            self.there.difference_update(gone.get(v, ()))
            self.make_early(v, ops, wanted_on)
        self.pending.clear()

    def execute(self, i: int) -> None:
        self.computed.append(i)
        self.there.update(self.problem.outputs[i])
        self.made.update(self.problem.outputs[i])
        self.pending.discard(i)

    def make_early(self, v: int, ops: list[int], wanted_on: Collection[int]) -> None:
        """Execute pending optional ops whose outputs are handed over, once their inputs have no other use."""
        problem = self.problem
        later: set[int] | None = None  # expensive, and rarely needed
        for i in sorted(self.optional & self.pending):
            if not self.there.issuperset(problem.inputs[i]):
                continue
            if any(t in wanted_on and t not in self.there for t in problem.outputs[i]):
                later = later or {t for c in ops if c > v for t in problem.inputs[c]}.union(wanted_on)
                if not later.issuperset(problem.inputs[i]):
                    self.execute(i)

    def find_lacking(self, wanted: Iterable[int], v: int) -> list[int]:
        """Return the pending ops to execute before op v so that `wanted` is in memory."""
        ops: set[int] = set()
        wanted = [t for t in wanted if t not in self.there]
        stack = list(wanted)
        while stack:
            t = stack.pop()
            for i in self.problem.producers[t] if t not in self.there else ():
                if i not in ops and i in self.pending and self.may_run(i, v):
                    ops.add(i)
                    stack.extend(self.problem.inputs[i])
        if self.places.plain:
            return sorted(ops)
        found, missing = self.find_cheapest(ops, self.there, wanted)
        if not missing.issubset(self.made):
            # The solution does not say how: keep the tensors produced so far, and compute the rest from them.
            able = {i for i, may in enumerate(self.problem.recomputable) if may and self.may_run(i, v)}
            found, _ = self.find_cheapest(able, self.made | self.there, wanted)
        return found

    def may_run(self, i: int, v: int) -> bool:
        """Return True if i may run outside its place before op v is executed."""
        places = self.places
        if places.optional[i]:
            return True
        return places.last[i] < v if places.replaces[i] else i < v

    def find_cheapest(self, ops: Collection[int], there: Collection[int], wanted: Iterable[int]) -> tuple[list[int], set[int]]:
        """Return those of `ops` that produce `wanted` at least cost, in a valid order, and the tensors that none can produce.

        Knuth, A generalization of Dijkstra's algorithm, Information Processing Letters 1977.
        """
        problem = self.problem
        waiting = {i: sum(t not in there for t in problem.inputs[i]) for i in ops}
        readers: dict[int, list[int]] = {}
        for i in sorted(ops):
            for t in problem.inputs[i]:
                if t not in there:
                    readers.setdefault(t, []).append(i)
        cost_s = {i: problem.get_seconds(i) for i in ops}
        producer: dict[int, int] = {}
        ready = [(cost_s[i], i) for i in ops if not waiting[i]]
        heapify(ready)
        done: list[int] = []
        while ready:
            _, i = heappop(ready)
            done.append(i)
            for t in problem.outputs[i]:
                if t in there or t in producer:
                    continue
                producer[t] = i
                for reader in readers.get(t, ()):
                    cost_s[reader] += cost_s[i]
                    waiting[reader] -= 1
                    if not waiting[reader]:
                        heappush(ready, (cost_s[reader], reader))
        chosen: set[int] = set()
        missing: set[int] = set()
        stack = [t for t in wanted if t not in there]
        while stack:
            t = stack.pop()
            if t not in producer:
                missing.add(t)
            elif producer[t] not in chosen:
                chosen.add(producer[t])
                stack.extend(u for u in problem.inputs[producer[t]] if u not in there)
        return [i for i in done if i in chosen], missing

    def find_gaps(self, k: int, ops: Collection[int]) -> dict[int, list[int]]:
        """Return for ops that are recomputed although their outputs are in memory the new op after which each output is freed.

        It is freed for the longest interval of window k without a reader.
        """
        start, end = self.discretization.start_of(k), self.discretization.ends[k]
        gone: dict[int, list[int]] = {}
        for i in self.pending:
            for t in self.problem.outputs[i]:
                if self.problem.kept[t]:
                    continue
                since = self.find_birth(t, start, ops)
                if since is None:
                    continue
                readers = self.problem.consumers[t]
                later = readers[bisect_right(readers, since) : bisect_right(readers, end)]
                stops = [since, *(c for c in later if c in ops)]
                if t in self.solution.handed[k + 1] and stops[-1] != end:
                    stops.append(end)
                if len(stops) > 1:
                    _, after = max((b - a, a) for a, b in pairwise(stops))
                    gone.setdefault(after, []).append(t)
        return gone

    def find_birth(self, t: int, start: int, ops: Collection[int]) -> int | None:
        """Return the op after which t is in memory in a window from `start` on; None if it is not."""
        if t in self.there:
            return start - 1
        return next((p for p in self.problem.producers[t] if p in ops), None)
