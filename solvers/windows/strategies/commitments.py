"""Search with optional ops: commit to some of them, and solve the resulting plain graph.

Every order of executions has a plain graph (``decoding/plain_graph.py``), in which all strategies for plain graphs apply.

The bound of a plain graph counts for that graph only; proofs come from ``branches``. Half of the time goes to the best plain
graph, the rest to the others, those with the fewest slices first. Tried before: new ones first. As solutions kept arriving, the
best one was never solved for long.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import Protocol, Self

from planner.graphs.ir import Graph
from planner.graphs.options.offload import remove_offload
from planner.graphs.options.selection import PartOf
from planner.graphs.pools import DEVICE_TO_HOST, HOST_TO_DEVICE
from planner.solvers.places import find_places
from planner.solvers.tolerance import Tolerance
from planner.solvers.windows.decoding.decode import Order, Trial, decode, is_possible, map_trial_back, order_of, order_of_schedule
from planner.solvers.windows.decoding.plain_graph import PlainGraph, build_plain_graph
from planner.solvers.windows.decoding.transfer_plan import Reloads
from planner.solvers.windows.part_process import PartProcess, SearchEnd
from planner.solvers.windows.parts import POLL, note_end, search_of_part
from planner.solvers.windows.search import Search
from planner.solvers.windows.strategies.placement import Placements
from planner.solvers.windows.strategies.substitution import find_least_substitution, list_simple_substitutions, substitute

_TOLERANCE_SHARE = 0.25  # of the tolerance: plain graphs of solutions with optional ops are solved to it
_PLACE_FIRST, _PLACE_FIRST_SHARE = 2.0, 0.2  # of the clock, at most of its limit: placements before other strategies,
_PLACE_SLICE = 0.5  # and at a time in parallel with other searches


class Orders(Protocol):
    """A source of orders to commit to."""

    @property
    def orders(self) -> deque[Order]:
        """Orders that have arrived, latest last."""

    @property
    def closed(self) -> bool:
        """True if no more orders will arrive."""


@dataclass(slots=True)
class Commitment:
    """A plain graph, and the results of its solves.

    Attributes:
        instead: ops that replace others in it.
        best: its best schedule so far.
        reloads: those of the order that it comes from.
        found_s: time of its best schedule in the graph with options; inf if there is none.
        promise_s: time of the schedule that it comes from; inf if it comes from a solution of a relaxation.
        spent: time of these, by the clock.
        closed: True if it need not be solved again.
    """

    plain: PlainGraph
    instead: frozenset[int]
    reloads: Reloads
    best: Trial | None = None
    found_s: float = inf
    promise_s: float = inf
    runs: int = 0
    spent: float = 0.0
    closed: bool = False

    @property
    def best_s(self) -> float:
        """Time of the best schedule, inf if there is none."""
        return inf if self.best is None else self.best.time_s

    @property
    def known_s(self) -> float:
        """Time of its best schedule or the schedule that it comes from, inf if there is none."""
        return min(self.found_s, self.promise_s)


class Commitments:
    """The plain graphs of a search with optional ops; the driver solves them (``driver.py``)."""

    def __init__(self, search: Search, known: dict[object, Commitment] | None = None) -> None:
        """Create the set of plain graphs.

        Args:
            known: those found before, in another process.
        """
        self.search = search
        self.all: dict[object, Commitment] = {} if known is None else known
        self._without_offloading: Trial | None = None  # the best that is known
        self._learned: list[Trial] = []  # the best schedules at the last call of ``learn``
        self._placements = Placements(search) if Placements.applies(search.problem) else None

    @classmethod
    def begin(cls, search: Search) -> Self:
        """Return a set with the program alone, without recomputation, and with the schedule of the request's start."""
        found, start = cls(search), search.request.start
        kept = found.try_instead(frozenset())
        assert kept is not None  # the program alone runs
        order = None if start is None else order_of_schedule(search.problem, start.schedule)
        if order is not None and search.offer(order) is not None:
            found.add(order)
        return found

    @property
    def program(self) -> Commitment:
        """The commitment to the program alone."""
        return next(iter(self.all.values()))

    def add_simple(self) -> None:
        """Commit to orders that need no model: alternatives of least memory or time, the least peak, placements."""
        search, params = self.search, self.search.params
        for instead in list_simple_substitutions(search.problem):
            self.try_instead(instead)
        if search.incumbent.best is None and not search.problem.round_trips:
            self.try_least(params.bound.first_slice)
        self.place(min(_PLACE_FIRST, _PLACE_FIRST_SHARE * search.clock.limit))

    def try_instead(self, instead: frozenset[int]) -> Trial | None:
        """Return the trial with `instead` in place of others and only necessary recomputations; None if impossible."""
        order = substitute(self.search.problem, instead)
        if order is None:
            return None
        self.add(order)
        return self.search.offer(order)

    def try_least(self, limit: float) -> None:
        """Commit to the alternatives with the least peak, at any time."""
        order = find_least_substitution(self.search.problem, self.search.clock.start_part(limit), self.search.stopping.poll_stop)
        if order is not None:
            self.add(order)
            self.search.offer(order)

    def keep_without_offloading(self, trial: Trial) -> None:
        """Keep a schedule of the graph without transfers to the host; ``learn`` commits to its plain graph."""
        self.search.incumbent.take(trial)
        self._without_offloading = trial

    def lift_from(self, part: Graph) -> Callable[[Trial], None]:
        """Return a function that offers a schedule of `part`, the graph without some ops, as one of the whole graph."""
        return partial(self._lift, PartOf(self.search.problem.whole, part), find_places(remove_offload(part)[0]).ids)

    def _lift(self, part: PartOf, own: Sequence[int], trial: Trial) -> None:
        problem, schedule = self.search.problem, part.schedule(trial.schedule)
        place = {op: i for i, op in enumerate(problem.places.ids)}
        executed = [op for op in schedule.computed if problem.whole.ops[op].stream not in {DEVICE_TO_HOST, HOST_TO_DEVICE}]
        if any(op not in place for op in executed):
            return
        instead = frozenset(place[part.ops[own[i]]] for i in trial.order.instead)
        reloads = frozenset((part.tensors[t], position) for t, position in trial.order.reloads)
        order = order_of(problem, [place[op] for op in executed], reloads, instead)
        self.search.incumbent.take(replace(trial, order=order, schedule=schedule, ends=()))

    def learn(self, orders: Orders) -> None:
        """Commit to the best schedules and to the orders that have arrived."""
        best = [trial for trial in (self.search.incumbent.best, self._without_offloading) if trial is not None]
        for trial in best:
            if all(trial is not known for known in self._learned) and is_possible(self.search.problem, trial.order):
                self.add(trial.order, trial.time_s)
        self._learned = best
        for order in self._come_in(orders):
            self.add(order)

    def _come_in(self, orders: Orders) -> Iterator[Order]:
        """Yield the orders of the relaxation's solutions and the orders that have arrived, each once."""
        search = self.search
        while search.models.solutions:
            discretization, solution = search.models.solutions.popleft()
            order = decode(search.problem, discretization, solution)
            if is_possible(search.problem, order):
                yield order
        while orders.orders:
            yield orders.orders.popleft()

    def place(self, limit: float) -> None:
        """Vary the placement of ops for `limit` of the clock, and commit to a fast one that exceeds the budget."""
        if self._placements is not None:
            self._placements.step(limit)
            if self._placements.lacking is not None:
                self.add(self._placements.lacking)

    def add(self, order: Order, promise_s: float = inf) -> None:
        """Commit to the plain graph of `order`, unless it is known."""
        plain = build_plain_graph(self.search.problem, order.computed)
        reloads = frozenset((here, place) for t, place in order.reloads if (here := plain.find_only(t)) is not None)
        key = (plain.ops, tuple(op.inputs for op in plain.graph.ops))
        commitment = self.all.setdefault(key, Commitment(plain, order.instead, reloads))
        commitment.promise_s = min(commitment.promise_s, promise_s)

    def generate_searches(self, orders: Orders, until: float = inf) -> Iterator[Search]:
        """Yield searches to be run in turn, each longer than the last, until all are closed and no orders will arrive.

        In between, placements are varied for as long.

        Args:
            orders: source of further orders.
            until: latest end, by the clock.
        """
        search = self.search
        while not (search.stopping.is_solved() or search.stopping.poll_stop()):
            closed = orders.closed  # read before the orders are taken from it
            self.learn(orders)
            if search.clock.now >= until:
                return
            began, commitment = search.clock.now, self.choose_next()
            if commitment is not None:
                sub = self._begin(commitment)
                yield sub
                self._end(commitment, sub, began)
            is_open = commitment is not None
            if self._placements is not None:
                self.place(max(_PLACE_SLICE, search.clock.now - began))
                is_open |= not self._placements.done
            if not is_open:
                if closed:
                    return
                search.clock.wait(POLL)

    def choose_next(self) -> Commitment | None:
        """Return the best one until it has had as much time as all others, then the best of those solved least often.

        Return None if none is open. New ones arrive as long as the bound is refined: if they came first, the best would not be
        solved for longer.
        """
        still = [commitment for commitment in reversed(self.all.values()) if not commitment.closed]
        best = min(still, key=lambda c: c.known_s, default=None)
        if best is not None and best.known_s < inf and 2 * best.spent <= sum(c.spent for c in self.all.values()):
            return best
        others = [commitment for commitment in still if commitment is not best]
        return min(others, key=lambda c: (c.runs, c.known_s), default=best)

    def follow(self, process: PartProcess, orders: Orders) -> bool:
        """Have them solved in `process`: send new orders, receive schedules; return False if the process died."""
        search = self.search
        best, fewer, sent_closed = None, self._without_offloading, False
        with process:
            while not (search.stopping.is_solved() or search.stopping.poll_stop()):
                closed = orders.closed
                for order in self._come_in(orders):
                    process.send(order)
                if search.incumbent.best is not None and search.incumbent.best is not best:
                    best = search.incumbent.best
                    process.send(best)
                if self._without_offloading is not None and self._without_offloading is not fewer:
                    fewer = self._without_offloading
                    process.send(fewer.order)
                if closed and not sent_closed:
                    sent_closed = True
                    process.send(None)
                news = process.receive(POLL)
                if isinstance(news, SearchEnd):
                    note_end(search, news)
                    return not news.died
                if news is not None:
                    search.incumbent.take(news)
                    best = news if search.incumbent.best is news else best
        return True

    def _begin(self, commitment: Commitment) -> Search:
        """Return the search of a plain graph, with a longer limit than the last time."""
        params = self.search.params
        tolerance = Tolerance.of(_TOLERANCE_SHARE * self.search.stopping.tolerance)
        clock = self.search.clock.start_part(params.bound.first_slice * params.bound.longer**commitment.runs)
        sub = search_of_part(
            self.search,
            commitment.plain.graph,
            clock,
            tolerance,
            lambda best: self.take(commitment, best),
            described="with all options decided",
        )
        best = commitment.best
        sub.offer(order_of(sub.problem, commitment.plain.order, commitment.reloads) if best is None else best.order)
        return sub

    def _end(self, commitment: Commitment, sub: Search, began: float) -> None:
        """Record the result of a search; close the commitment if it is solved or cannot improve."""
        self.take(commitment, sub.incumbent.best)
        self.search.models.note_size(sub.models.largest)
        commitment.runs += 1
        commitment.spent += self.search.clock.now - began
        # The bound is of the plain graph only: it closes the commitment, and proves nothing of the whole.
        of_no_use = sub.incumbent.bound_s >= self.search.incumbent.best_s
        commitment.closed = sub.stopping.is_solved() or bool(sub.incumbent.failure) or of_no_use

    def take(self, commitment: Commitment, trial: Trial | None) -> None:
        """Offer a schedule of a plain graph as a schedule of the graph with options."""
        if trial is None or trial.time_s >= commitment.best_s:
            return
        commitment.best = trial
        problem, plain = self.search.problem, commitment.plain
        computed = [plain.ops[op] for op in trial.order.computed]
        reloads = frozenset((plain.tensors[t], place) for t, place in trial.order.reloads)
        order = order_of(problem, computed, reloads, commitment.instead)
        if not problem.round_trips:
            found = self.search.offer(order)
        else:
            found = map_trial_back(problem, plain, order, trial)
            self.search.incumbent.take(found)
        if found is not None and found.peak_bytes <= self.search.budget_bytes:
            commitment.found_s = min(commitment.found_s, found.time_s)
