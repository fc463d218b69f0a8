"""Search with optional ops: commit to some of them, and solve the plain graph that this leaves.

In an order of executions, however it was found, there is a plain graph (``solution/plain.py``), in which everything that finds
schedules of plain graphs does so (``driver.py``).
"""

from collections.abc import Callable
from dataclasses import dataclass

from graphs.ir import Graph
from solvers.clock import left
from solvers.request import Request
from solvers.tolerance import Tolerance
from solvers.windows.formulation.granularity import Discretization
from solvers.windows.heuristics.stand_ins import in_place, is_possible, least_instead, simple
from solvers.windows.incumbent import Search
from solvers.windows.refinement import refine
from solvers.windows.solution.decode import Order, Trial, decoded, order_of, trial_of_whole
from solvers.windows.solution.plain import PlainGraph, plain_graph
from solvers.windows.solution.refine import halved

Run = Callable[[Search], None]


@dataclass(slots=True)
class Commitment:
    """A plain graph, and what has become of it.

    Attributes:
        plain: the graph.
        instead: ops that stand for others in it.
        best: its best schedule so far.
        away: from the host, in the order that it comes from.
        runs: how often it has been solved for.
        closed: it need not be looked at again.
    """

    plain: PlainGraph
    instead: frozenset[int]
    away: frozenset[tuple[int, int]]
    best: Trial | None = None
    runs: int = 0
    closed: bool = False

    @property
    def best_s(self) -> float:
        """Time of the best schedule, inf if there is none."""
        return float("inf") if self.best is None else self.best.time_s


def run_with_options(search: Search, run: Run) -> None:
    """Bound the graph with all its options, and look for schedules in what solutions commit to, by `run`, in turn."""
    places, params = search.problem.places, search.params.bound
    found = _Commitments(search, run)
    kept = found.try_instead(frozenset())
    assert kept is not None  # the program alone runs
    peak = max(range(len(kept.memory_bytes)), key=kept.memory_bytes.__getitem__)
    detail = found.whole.split({kept.order.computed[peak]})
    for instead in simple(search.problem):
        found.try_instead(instead)
    limit, bounded = params.first_slice, False
    if search.best is None and search.problem.copies is None:
        found.try_least(limit)
    if search.problem.copies is None:
        found.work_on_program()
    while not (search.solved() or search.stopped()):
        if not bounded:
            detail, exhausted = refine(search, detail, limit, is_relaxation=True)
            bounded = exhausted and len(detail.ends) == len(set(places.last))
            detail = halved(detail) if exhausted and not bounded else detail
        found.learn()
        found.work_without_copies(limit)
        if not found.work(limit) and bounded:
            break
        limit *= params.longer


def run_without_copies(search: Search, run: Run) -> None:
    """Look for schedules without round trips to the host, for with them nothing is to be slower.

    Not before those with them were looked for: beside a good schedule that sends nothing, a rough one that does, and would come
    to more when improved, is given up.
    """
    limit = search.params.round_trips.without_copies * left(search.clock)
    sub = part(search, search.problem.graph, limit)
    run(sub)
    if sub.best is not None:
        search.keep(sub.best)


def part(search: Search, graph: Graph, limit: float, on_stop: Callable[[], None] = lambda: None) -> Search:
    """A search in `graph`, a part of the choices, that ends when it is of no use; `on_stop` is called when it asks for that."""

    def stop() -> bool:
        on_stop()
        search.tell(f"in a part of the choices: {sub.activity}")
        return search.stopped() or search.solved() or sub.bound_s >= search.best_s()

    tolerance = Tolerance.of(search.params.commitments.share * search.tolerance)
    clock = search.clock.part(limit)
    sub = Search(Request(graph, search.budget_bytes, tolerance, clock, should_stop=stop, params=search.params))
    return sub


class _Commitments:
    """Those that have been found."""

    def __init__(self, search: Search, run: Run) -> None:
        self.search = search
        self.run = run
        self.places = search.problem.places
        self.whole = Discretization((search.problem.ops - 1,), places=self.places.last)
        self.all: dict[object, Commitment] = {}
        self.without_copies: Search | None = None

    def try_instead(self, instead: frozenset[int]) -> Trial | None:
        """What comes of executing `instead` in place of others, and nothing again but what is missing then, if that can be."""
        order = in_place(self.search.problem, instead)
        if order is None:
            return None
        self.add(order)
        return self.search.offer(order, self.whole)

    def try_least(self, limit: float) -> None:
        """Commit to what needs least memory with ops in place of others, whatever it takes longer."""
        order = least_instead(self.search.problem, self.search.clock.part(limit), self.search.stopped)
        if order is not None:
            self.add(order)
            self.search.offer(order, self.whole)

    def work_on_program(self) -> None:
        """Solve the program alone first: what it comes to is a start for all else, and with options nothing is to be slower."""
        program = next(iter(self.all.values()))
        self.solve(program, self.search.params.commitments.program * left(self.search.clock))

    def learn(self) -> None:
        """Commit to what the solutions do that have come in, and the best schedule."""
        search = self.search
        orders = [search.best.order] if search.best is not None else []
        while search.solutions:
            detail, choice = search.solutions.popleft()
            orders.append(decoded(search.problem, detail, choice))
        for order in orders:
            if is_possible(search.problem, order):
                self.add(order)

    def add(self, order: Order) -> None:
        """Commit to what `order` does, unless that is known."""
        plain = plain_graph(self.search.problem, order.computed)
        away = frozenset((here, place) for t, place in order.away if (here := plain.only(t)) is not None)
        key = (plain.ops, tuple(op.inputs for op in plain.graph.ops))
        self.all.setdefault(key, Commitment(plain, order.instead, away))

    def work(self, limit: float) -> bool:
        """Solve a few of the graphs, for so long each: those that have been least, then the best; whether any is open."""
        search = self.search
        still = [c for c in reversed(self.all.values()) if not c.closed]
        for commitment in sorted(still, key=lambda c: (c.runs, c.best_s))[: search.params.commitments.at_a_time]:
            if search.solved() or search.stopped():
                break
            self.solve(commitment, limit)
        return bool(still)

    def work_without_copies(self, limit: float) -> None:
        """Where there are round trips to the host, look for schedules without them: those are found more easily."""
        search, before = self.search, self.without_copies
        if search.problem.copies is None or (before is not None and self.is_done(before)):
            return
        if before is None:  # what they come to is a start for all else, and no schedule with them is to be worse
            limit = max(limit, search.params.commitments.without_copies * left(search.clock))
        sub = self.without_copies = part(search, search.problem.graph, limit)
        if before is not None and before.best is not None:
            sub.offer(before.best.order, self.whole)
        run_with_options(sub, self.run)
        if sub.best is not None:
            search.keep(sub.best)
            self.add(sub.best.order)

    def solve(self, commitment: Commitment, limit: float) -> None:
        """Solve a plain graph, offering its schedules."""
        sub = part(self.search, commitment.plain.graph, limit, lambda: self.take(commitment, sub.best))
        whole = Discretization((sub.problem.ops - 1,))
        best = commitment.best
        sub.offer(order_of(whole, commitment.plain.order, commitment.away) if best is None else best.order, whole)
        self.run(sub)
        self.take(commitment, sub.best)
        commitment.runs += 1
        commitment.closed = self.is_done(sub)

    def is_done(self, sub: Search) -> bool:
        """Whether a search need not be gone on with."""
        self.search.largest = max(self.search.largest, sub.largest)
        return sub.solved() or bool(sub.failure) or sub.bound_s >= self.search.best_s()

    def take(self, commitment: Commitment, trial: Trial | None) -> None:
        """Offer what a schedule of a plain graph is in the graph with options."""
        if trial is None or trial.time_s >= commitment.best_s:
            return
        commitment.best = trial
        problem, plain = self.search.problem, commitment.plain
        computed = [plain.ops[op] for op in trial.order.computed]
        away = frozenset((plain.tensors[t], place) for t, place in trial.order.away)
        order = order_of(self.whole, computed, away, commitment.instead, self.places)
        if problem.copies is None:
            self.search.offer(order, self.whole)
        else:
            self.search.keep(trial_of_whole(problem, plain, order, trial))
