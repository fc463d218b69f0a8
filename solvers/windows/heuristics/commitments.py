"""Search with optional ops: commit to some of them, and solve the plain graph that this leaves.

In an order of executions, however it was found, there is a plain graph (``solution/plain.py``), in which everything that finds
schedules of plain graphs does so (``driver.py``).
"""

from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Self

from graphs.ir import Graph
from graphs.options.offload import without_copies
from graphs.options.selection import PartOf, option_of, without
from graphs.pools import COMPUTE
from solvers.clock import Beside
from solvers.places import places_of
from solvers.tolerance import Tolerance
from solvers.windows.branches import Branches
from solvers.windows.formulation.granularity import Discretization
from solvers.windows.heuristics.parts import POLL, PartBeside, end_beside, part, start_beside
from solvers.windows.heuristics.stand_ins import in_place, is_possible, least_instead, simple
from solvers.windows.incumbent import Search
from solvers.windows.solution.decode import Order, Trial, decoded, order_of, trial_of_whole
from solvers.windows.solution.plain import PlainGraph, plain_graph

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


def run_with_options(search: Search, run_plain: Run, run: Run) -> None:
    """Bound the graph with all its options, and look for schedules in what solutions commit to, in turn.

    Beside that smaller sets of choices are searched: the program, with its round trips to the host where there are some; all
    else without round trips; all that is not lossy; and each kind of options alone, with nothing written over anything.

    Args:
        search: of the graph.
        run_plain: solves a plain graph.
        run: solves any graph, and with it what has fewer choices.
    """
    found = _begin(search, run_plain)
    program = next(iter(found.all.values()))
    program.closed = True  # it is not looked at again here
    smaller: list[tuple[Graph, Run, Callable[[Trial], None]]]
    smaller = [(program.plain.graph, run, lambda trial: found.take(program, trial))]
    kinds = _Kinds.of(search.problem.whole)
    if search.problem.copies is not None and not kinds.several_with_lossy:
        smaller.append((search.problem.graph, run, found.take_fewer))
    if kinds.several_with_lossy:
        faithful = _only(search.problem.whole, kinds.exact)
        smaller.append((faithful, run, found.taking(faithful)))
    for kind in kinds.apart:
        alone = _only(search.problem.whole.out_of_place(), (kind,))
        smaller.append((alone, partial(_run_alone, run_plain=run_plain), found.taking(alone)))
    parts = [PartBeside(search, *one, gives_way=True, place=place) for place, one in enumerate(smaller, start=1)]
    with ExitStack() as stack:
        for part_beside in parts:
            stack.enter_context(part_beside).tell()
        _bound_and_commit(search, found, parts)


def _run_alone(search: Search, run_plain: Run) -> None:
    """The same without a search beside it."""
    _bound_and_commit(search, _begin(search, run_plain), ())


def _begin(search: Search, run_plain: Run) -> "_Commitments":
    """With the program alone, nothing of it executed again."""
    found = _Commitments(search, run_plain)
    kept = found.try_instead(frozenset())
    assert kept is not None  # the program alone runs
    return found


@dataclass(frozen=True, slots=True)
class _Kinds:
    """The options that ops on the computation's stream are of, by what they may differ."""

    exact: tuple[str, ...]
    lossy: tuple[str, ...]

    @classmethod
    def of(cls, graph: Graph) -> Self:
        """Those of `graph`."""
        computed = [op for op in graph.ops if op.optional and op.stream == COMPUTE]
        lossy = {option_of(op): None for op in computed if op.variance}
        return cls(tuple(dict.fromkeys(kind for kind in map(option_of, computed) if kind not in lossy)), tuple(lossy))

    @property
    def several_with_lossy(self) -> bool:
        """Whether there are lossy ones and others."""
        return bool(self.exact and self.lossy)

    @property
    def apart(self) -> tuple[str, ...]:
        """Those to be searched alone: of several, but for those that a smaller set is searched with, which sees to them."""
        if self.several_with_lossy:
            return self.lossy
        kinds = (*self.exact, *self.lossy)
        return kinds if len(kinds) > 1 else ()


def _only(graph: Graph, kinds: Collection[str]) -> Graph:
    """`graph` with no other options than `kinds` on the computation's stream."""
    return without(graph, lambda op: op.stream == COMPUTE and option_of(op) not in kinds)


def _bound_and_commit(search: Search, found: "_Commitments", parts: Sequence[PartBeside]) -> None:
    """Refine the relaxation, and beside that solve what its solutions and others commit to, while there is anything to do."""
    branches = Branches(search)
    for instead in simple(search.problem):
        found.try_instead(instead)
    if search.best is None and search.problem.copies is None:
        found.try_least(search.params.bound.first_slice)
    committing = start_beside(search, lambda: found.work_on(branches))
    try:
        branches.refine()
        beside: list[Beside | PartBeside] = [committing, *parts]
        while not (search.solved() or search.stopped()) and (running := [one for one in beside if one.running]):
            search.tell()
            running[0].wait(POLL)
    except BaseException:
        search.halted = True
        raise
    finally:
        end_beside(committing)


class _Commitments:
    """Those that have been found."""

    def __init__(self, search: Search, run_plain: Run) -> None:
        self.search = search
        self.run_plain = run_plain
        self.fewer: Trial | None = None  # the best without round trips to the host
        self.known: list[Trial] = []  # the best when it was last looked
        self.places = search.problem.places
        self.whole = Discretization((search.problem.ops - 1,), places=self.places.last)
        self.all: dict[object, Commitment] = {}

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

    def take_fewer(self, trial: Trial) -> None:
        """Keep a schedule of the graph without round trips to the host, and commit to what it does."""
        self.search.keep(trial)
        self.fewer = trial

    def taking(self, part: Graph) -> Callable[[Trial], None]:
        """What keeps a schedule of `part`, which is the graph without some of its ops, and commits to what it does."""
        problem = self.search.problem
        of_whole = PartOf(problem.whole, part)
        place = {op: i for i, op in enumerate(problem.places.ids)}
        own = places_of(without_copies(part)[0]).ids

        def take(trial: Trial) -> None:
            schedule = of_whole.schedule(trial.schedule)
            executed = [op for op in schedule.computed if problem.whole.ops[op].stream == COMPUTE]
            if any(op not in place for op in executed):
                return
            instead = frozenset(place[of_whole.ops[own[i]]] for i in trial.order.instead)
            away = frozenset((of_whole.tensors[t], position) for t, position in trial.order.away)
            order = order_of(self.whole, [place[op] for op in executed], away, instead, self.places)
            self.search.keep(replace(trial, order=order, schedule=schedule, ends=()))

        return take

    def learn(self) -> None:
        """Commit to what the solutions do that have come in, and the best schedules."""
        search = self.search
        best = [trial for trial in (search.best, self.fewer) if trial is not None]
        orders = [trial.order for trial in best if all(trial is not known for known in self.known)]
        self.known = best
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

    def work_on(self, branches: Branches) -> None:
        """Solve them in turn, for longer and longer, until all are solved and nothing comes from the branches any more."""
        search, params = self.search, self.search.params.bound
        limit = params.first_slice
        while not (search.solved() or search.stopped()):
            self.learn()
            while branches.orders:
                self.add(branches.orders.popleft())
            if not self.work(limit):
                if branches.closed:
                    return
                search.clock.wait(POLL)
            limit *= params.longer

    def work(self, limit: float) -> bool:
        """Solve a few of the graphs, for so long each: those that have been least, then the best; whether any is open."""
        search = self.search
        still = [c for c in reversed(self.all.values()) if not c.closed]
        for commitment in sorted(still, key=lambda c: (c.runs, c.best_s))[: search.params.commitments.at_a_time]:
            if search.solved() or search.stopped():
                break
            self.solve(commitment, limit)
        return bool(still)

    def solve(self, commitment: Commitment, limit: float) -> None:
        """Solve a plain graph, offering its schedules."""
        tolerance = Tolerance.of(self.search.params.commitments.share * self.search.tolerance)
        clock = self.search.clock.part(limit)
        sub = part(self.search, commitment.plain.graph, clock, tolerance, lambda: self.take(commitment, sub.best))
        whole = Discretization((sub.problem.ops - 1,))
        best = commitment.best
        sub.offer(order_of(whole, commitment.plain.order, commitment.away) if best is None else best.order, whole)
        self.run_plain(sub)
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
