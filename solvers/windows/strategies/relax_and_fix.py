"""Relax-and-fix, for tight budgets: fix the windows that fit, refine the next ones, from the first op to the last.

The restricted model is solved with few windows: fine ones at the current place, and coarse ones for the rest of the step, which
decide on useful recomputations there. The windows in which the decoded order fits are fixed; the first place where it does not
fit gets finer windows; and so on to the end. Each model is small, as fixed windows are constants, so that the time grows with the
number of tight places rather than exponentially. If the fixed windows have no continuation, the last of them are opened again.
"""

from dataclasses import dataclass, replace

from solvers.clock import Clock, left
from solvers.problem import Problem, problem_of
from solvers.windows.decoding.decode import Trial, late_writers, order_of, read_solution
from solvers.windows.decoding.expand import Solution, expand
from solvers.windows.decoding.refinement import refined, with_stages_in_order
from solvers.windows.params import RefinementParams
from solvers.windows.relaxation.discretization import Discretization, Model
from solvers.windows.relaxation.models import build_ordered
from solvers.windows.strategies.refinement import solve_part
from solvers.windows.strategies.strategy import Strategy


@dataclass(frozen=True, slots=True)
class FixedPrefix:
    """The progress of relax-and-fix.

    Attributes:
        prefix: fixed executions; all of window 0 and before.
        entering: tensors in memory after them (None: nothing is fixed).
        detail: the windows; window 0 is in the past if anything is fixed.
    """

    prefix: tuple[int, ...]
    entering: frozenset[int] | None
    detail: Discretization

    @property
    def first_window(self) -> int:
        """The first open window."""
        return 0 if self.entering is None else 1


class RelaxAndFix(Strategy):
    """A first schedule from the first op to the last; first without recomputation of ops after the peak."""

    def step(self, limit: float) -> bool:
        """Search for about `limit`, then twice as long with all ops recomputable; return False."""
        search = self.search
        before_peak = range(search.models.coarse.ends[0] + 1)
        for repeatable, share in ((before_peak, 1), (None, 2)):
            problem = problem_of(search.problem.graph, search.budget_bytes, repeatable=repeatable)
            clock = search.clock.part(share * limit)
            if search.stopping.stopped() or self._advance(problem, search.models.coarse, clock):
                break
        return False

    def _advance(self, problem: Problem, detail: Discretization, clock: Clock) -> bool:
        """Find a schedule of `problem` from coarse windows on, before the limit of `clock`; return True if it did."""
        search, params = self.search, self.search.params
        place = FixedPrefix((), None, detail)
        behind: list[FixedPrefix] = []
        back = 1
        for _ in range(params.relax_and_fix.most_solves):
            if left(clock) <= 0:
                return False
            solution = self._solve(build_ordered(problem, place.detail, place.entering), left(clock))
            closer = None
            if solution is not None:
                inside = expand(problem, place.detail, solution, first_window=place.first_window)
                order = order_of(problem, place.prefix + inside, detail=place.detail)
                if writers := late_writers(problem, order):
                    place = replace(place, detail=place.detail.ending_at(writers))
                    continue
                trial = search.offer(order, place.detail)
                if trial.peak_bytes <= problem.budget_bytes:
                    return True
                closer = _closer(place.detail, trial, problem.budget_bytes, params.refinement)
            if solution is None or closer is None or closer == place.detail:
                if not behind:
                    return False
                for _ in range(min(back, len(behind))):
                    earlier = behind.pop()
                back *= 2
                place = replace(earlier, detail=_merged(earlier.detail, place.detail))
                continue
            still_open = params.relax_and_fix.open_windows
            settled = _settle(replace(place, detail=closer), place.detail, solution, trial, problem.budget_bytes, still_open)
            if settled is not None:
                behind.append(replace(place, detail=closer))
                place = settled
                back = max(1, back // 2)
            else:
                place = replace(place, detail=closer)
        return False

    def _solve(self, model: Model, most: float) -> Solution | None:
        """Return a solution to continue from, None if there is none within `most` by the clock."""
        search, params = self.search, self.search.params.portfolio
        search.progress.tell(f"searching from op {model.detail.ends[0] if model.detail.ends else 0} on")
        limit = min(most, params.place_limit)
        answer = solve_part(search, model.program, limit, gap=params.place_gap, should_stop=search.stopping.stopped)
        return None if answer.values is None else read_solution(model, answer.values)


def _closer(detail: Discretization, trial: Trial, budget_bytes: int, params: RefinementParams) -> Discretization:
    """Return `detail` refined at the first run of executions over the budget, and at others in that window."""
    first = next(step for step, taken in enumerate(trial.memory_bytes) if taken > budget_bytes)
    window = trial.order.windows[first]
    memory = tuple(
        taken if at == window else min(taken, budget_bytes)
        for taken, at in zip(trial.memory_bytes, trial.order.windows, strict=True)
    )
    here = replace(trial, memory_bytes=memory)
    return with_stages_in_order(refined(detail, here, budget_bytes, params), here, budget_bytes, params)


def _settle(
    place: FixedPrefix, solved: Discretization, solution: Solution, trial: Trial, budget_bytes: int, still_open: int
) -> FixedPrefix | None:
    """Return `place` with those windows of `solved` fixed that lie well before the first execution over the budget."""
    first = next(step for step, taken in enumerate(trial.memory_bytes) if taken > budget_bytes)
    last = trial.order.windows[first] - 1 - still_open  # the last window to settle
    if last < place.first_window:
        return None
    end = solved.ends[last]
    executed = trial.order.computed.index(end)
    ends = tuple(e for e in place.detail.ends if e >= end)
    return FixedPrefix(trial.order.computed[: executed + 1], solution.handed[last + 1], replace(place.detail, ends=ends))


def _merged(earlier: Discretization, later: Discretization) -> Discretization:
    """Return the windows of `later`, and before them those of `earlier`."""
    return Discretization(
        tuple(sorted({*earlier.ends, *later.ends})),
        earlier.firsts | later.firsts,
        earlier.repeats | later.repeats,
        ordered=earlier.ordered | later.ordered,
    )
