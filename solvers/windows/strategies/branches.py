"""Branches of the relaxation of a graph with options: decisions in a few places, each branch with its own windows.

The tight places depend on how the largest ops are computed, and in a program with all alternatives a fraction of each makes space
for the others. So these are decided first: one alternative after another, or none of them. The least bound of the branches is a
bound on all schedules, as each is in one of them; the branch with the least bound is refined next.

Better windows do not help: where they should end depends on the alternative, and one program has one set of windows. Known
weakness: if more than ``_PLACES`` places are heavy (the layers of a transformer), none is decided, as no single one matters then;
the bound is that of one program with all alternatives.
"""

from collections import deque
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby

import numpy as np

from planner.solvers.highs.program import Outcome
from planner.solvers.problem import OBJECTIVE_SCALE, Problem
from planner.solvers.result import is_within
from planner.solvers.windows.decoding.decode import Order, try_out
from planner.solvers.windows.decoding.refinement import halve
from planner.solvers.windows.relaxation.discretization import Decision, Discretization
from planner.solvers.windows.search import Search
from planner.solvers.windows.strategies.refinement import RelaxationResult, solve_linear_relaxation, solve_relaxation
from planner.solvers.windows.strategies.strategy import Strategy
from planner.solvers.windows.strategies.substitution import substitute

Alternatives = tuple[tuple[int, ...], ...]  # alternatives for one heavy place, each a set of ops of which one is executed
Decided = frozenset[Decision]

_WHOLE = 0.01  # distance within which a value counts as an integer
_SPREAD, _SPREAD_SHARE = 0.05, 0.5  # of the capacity, and of the largest: least difference in memory of alternatives to decide on
_PLACES = 4  # nothing is decided if there are more
_ALIKE = 3e-3  # of the step: alternatives whose times differ by at most this count as one


@dataclass(slots=True)
class Branch:
    """A set of schedules with some decisions.

    Attributes:
        discretization: the discretization of its program, with the decisions.
        bound: on their overhead, in units of the objective; inf if there are none.
        limit: of the next solve of its program.
        undecided: alternatives of which one is to be decided before its program is solved.
        order: each op once, with the decisions, if there are any and that is possible; None once it has been passed on.
        closed: True if it cannot be refined further.
    """

    discretization: Discretization
    bound: float
    limit: float
    undecided: Alternatives = ()
    order: Order | None = None
    closed: bool = False


class Branches(Strategy):
    """Bounds with optional ops, by branches that cover all schedules.

    Attributes:
        orders: orders of the branches that were solved, each op once, latest last, to start searches from.
    """

    def __init__(self, search: Search) -> None:
        super().__init__(search)
        self.params = search.params.bound
        self.orders: deque[Order] = deque()
        self.whole = Discretization.whole(search.problem)
        self.here = replace(search.problem, round_trips={})  # keeping everything offloads nothing
        self.alternatives = _find_alternatives(search.problem)
        self.all = [self._branch(frozenset(), -np.inf)]
        if self.alternatives:
            self._solve_linear_relaxation(self.all[0])

    @staticmethod
    def applies(problem: Problem) -> bool:
        """Return True if the problem has optional ops other than transfers to the host."""
        return not problem.places.plain

    @property
    def closed(self) -> bool:
        """True if no branch can raise the bound."""
        return self._choose_next().closed

    def step(self, limit: float) -> bool:
        """Refine the branch of the least bound, for its own limit; once more when the problem is solved."""
        search = self.search
        if search.stopping.is_solved():
            if not search.stopping.poll_stop():
                self._look(self._choose_next(), search.stopping.compute_extra(search.clock.now))
            return False
        if search.stopping.poll_stop() or self.closed:
            return False
        self._look(self._choose_next())
        return True

    def _choose_next(self) -> Branch:
        # The bound of all is the least one, so that only this branch can raise it. Of equal ones the one with most decisions is
        # nearest to a plan.
        return min(self.all, key=lambda branch: (branch.bound, branch.closed, -len(branch.discretization.decided)))

    def _look(self, branch: Branch, limit: float | None = None) -> None:
        search = self.search
        if branch.undecided:
            self._split(branch, branch.undecided)
            return
        if branch.order is not None:
            self.orders.append(branch.order)
            branch.order = None
        result = solve_relaxation(
            search,
            branch.discretization,
            search.clock.start_part(limit or branch.limit),
            # The best schedule may have decided otherwise, and then is no solution of the branch.
            from_best=not branch.discretization.decided,
            prove=lambda overhead: self._prove(branch, overhead),
            should_stop=partial(self._is_of_no_use, branch),
        )
        if result is None or search.stopping.is_solved() or branch.bound == np.inf:
            return
        if alternatives := self._find_undecided(branch, result):
            self._split(branch, alternatives)
        elif result.outcome is not Outcome.OPTIMAL:
            branch.limit *= self.params.longer
            # Another try would neither free memory nor improve HiGHS's arithmetic.
            branch.closed = result.outcome is Outcome.FAILED or search.stopping.is_out_of_memory()
        elif result.finer == branch.discretization:
            branch.discretization = halve(result.finer)
            branch.closed = branch.discretization == result.finer
        else:
            branch.discretization = result.finer

    def _prove(self, branch: Branch, overhead: float) -> None:
        branch.bound = max(branch.bound, overhead)
        self.search.incumbent.prove(min(other.bound for other in self.all))

    def _is_of_no_use(self, branch: Branch) -> bool:
        """Return True if a branch with decisions cannot improve the best schedule by more than the tolerance."""
        search, bound_s = self.search, self.search.problem.base_s * (1 + branch.bound / OBJECTIVE_SCALE)
        return bool(branch.discretization.decided) and is_within(search.incumbent.best_s, bound_s, search.stopping.tolerance)

    def _find_undecided(self, branch: Branch, result: RelaxationResult) -> Alternatives:
        """Return the alternatives of the heavy place at which the solution exceeds the budget most, unless decided."""
        trial, budget = result.trial, self.search.budget_bytes
        if trial is None or trial.peak_bytes <= budget:
            return ()
        over = [
            (taken, -op)
            for op, first, taken in zip(trial.order.computed, trial.order.first, trial.memory_bytes, strict=True)
            if first and taken > budget and self._is_open(branch.discretization.decided, self.alternatives.get(op, ()))
        ]
        return self.alternatives[-max(over)[1]] if over else ()

    def _is_open(self, decided: Decided, alternatives: Alternatives) -> bool:
        return not {alternative for alternative, _ in decided}.issuperset(alternatives)

    def _split(self, branch: Branch, alternatives: Alternatives) -> None:
        """Replace a branch by one for each undecided alternative, without conflicting and earlier ones, and one without all."""
        decided, groups = branch.discretization.decided, self.search.problem.places.replaces
        alternatives = tuple(alternative for alternative in alternatives if self._is_open(decided, (alternative,)))
        parts = [decided.union((alternative, False) for alternative in alternatives)]
        for n, alternative in enumerate(alternatives):
            taken = set(groups[alternative[0]])
            rest = (
                other
                for other in alternatives
                if other != alternative and (other in alternatives[:n] or not taken.isdisjoint(groups[other[0]]))
            )
            parts.append(decided.union([(alternative, True)], ((other, False) for other in rest)))
        branches = [self._branch(part, branch.bound) for part in parts]
        self.all.remove(branch)
        self.all += branches
        for part in branches:
            self._solve_linear_relaxation(part)

    def _solve_linear_relaxation(self, branch: Branch) -> None:
        bound, instead = solve_linear_relaxation(self.search, branch.discretization)
        self._prove(branch, bound)
        for alternatives in sorted(set(self.alternatives.values())):
            decided = branch.discretization.decided
            shares = [
                sum(instead.get(b, 0.0) for b in alternative)
                for alternative in alternatives
                if self._is_open(decided, (alternative,))
            ]
            if not branch.undecided and any(_WHOLE < share < 1 - _WHOLE for share in shares):
                branch.undecided = alternatives

    def _branch(self, decided: Decided, bound: float) -> Branch:
        """Return a branch with two windows, split at the peak of keeping everything.

        If the peak is at a heavy place that is not decided, that place is decided next.
        """
        own_order = self._find_least_order(decided) if decided else None
        order = own_order or self._find_least_order(frozenset())
        assert order is not None  # the program alone runs
        memory = try_out(self.here, order).memory_bytes
        peak = order.computed[int(np.argmax(memory))]
        alternatives = self.alternatives.get(peak, ())
        is_open = max(memory) > self.search.budget_bytes and self._is_open(decided, alternatives)
        discretization = replace(self.whole.split({peak}), decided=decided)
        return Branch(discretization, bound, self.params.first_slice, alternatives if is_open else (), own_order)

    def _find_least_order(self, decided: Decided) -> Order | None:
        """Return the order that executes each op once, with the op of least memory of each decided alternative."""
        own = self.search.problem.own_bytes
        return substitute(
            self.search.problem,
            frozenset(min(alternative, key=own.__getitem__) for alternative, is_executed in decided if is_executed),
        )


def _find_alternatives(problem: Problem) -> dict[int, Alternatives]:
    """Return for ops of heavy places the alternatives that are worth a decision, grouped by shared replaced ops.

    The result is empty if many places are equally heavy: then no single one matters.
    """
    groups = problem.places.replaces
    spread = {b: abs(max(problem.own_bytes[i] for i in group) - problem.own_bytes[b]) for b, group in enumerate(groups) if group}
    together: dict[int, frozenset[int]] = {}
    for b, difference in spread.items():
        if difference >= _SPREAD * problem.capacity_bytes:
            found = frozenset({b}).union(*(together.get(i, ()) for i in groups[b]))
            together.update((i, found) for alternative in found for i in groups[alternative])
    least = _SPREAD_SHARE * max(spread.values(), default=0)
    heavy = {found for found in together.values() if max(spread[b] for b in found) >= least}
    if len(heavy) > _PLACES:
        return {}
    alternatives = {found: _group_alike(problem, found) for found in heavy}
    return {i: alternatives[found] for found in heavy for b in found for i in (b, *groups[b])}


def _group_alike(problem: Problem, found: frozenset[int]) -> Alternatives:
    """Return the ops of `found` grouped into alternatives: same replaced ops, same inputs, and about the same time."""
    alternatives: list[list[int]] = []
    for _, same in groupby(
        sorted(found, key=lambda b: (*_get_replaced_and_inputs(problem, b), problem.time_s[b], b)),
        lambda b: _get_replaced_and_inputs(problem, b),
    ):
        alternatives.append([])
        for b in same:
            if alternatives[-1] and problem.time_s[b] - problem.time_s[alternatives[-1][0]] > _ALIKE * problem.base_s:
                alternatives.append([])
            alternatives[-1].append(b)
    return tuple(map(tuple, alternatives))


def _get_replaced_and_inputs(problem: Problem, b: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return problem.places.replaces[b], problem.inputs[b]
