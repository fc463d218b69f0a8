"""The relaxation, solved and refined in turn where its solution exceeds the budget (dynamic discretization discovery).

Source: Boland, Hewitt, Marshall and Savelsbergh, *The Continuous-Time Service Network Design Problem*, Operations Research 65(5),
2017. Two things differ: rows are added as well as windows, and the finest model, with a window for each op, is still a
relaxation. It does not say in which order a window recomputes, so a gap may be left when nothing can be refined;
``strategies.state_space`` closes it on small graphs.

Each model starts from scratch, with the best schedule as values to start from. To add rows to a live HiGHS instance, which would
keep the last basis, was not tried. Models are solved to a gap relative to the whole step: the same gap relative to the
recomputation alone took 200 times as long in a prototype.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from planner.solvers.clock import Clock
from planner.solvers.highs import solve_program
from planner.solvers.highs.builder import POLL_EVERY, BuildStoppedError
from planner.solvers.highs.program import Answer, Floats, Milp, Outcome, SolveCallbacks
from planner.solvers.memory import give_back
from planner.solvers.problem import OBJECTIVE_SCALE
from planner.solvers.windows.decoding.decode import Trial, decode, find_late_writers, read_solution
from planner.solvers.windows.decoding.encode import encode_trial, start_values
from planner.solvers.windows.decoding.expand import Solution
from planner.solvers.windows.decoding.refinement import halve, refine_windows, split_at_waits
from planner.solvers.windows.relaxation.discretization import Discretization, Model
from planner.solvers.windows.relaxation.models import build_relaxation
from planner.solvers.windows.search import Search
from planner.solvers.windows.stopping import CLOSE_GAP
from planner.solvers.windows.strategies.strategy import Strategy

_WORK_PER_ENTRY = 2e-6  # of building a model
_INNER_GAP = 0.8  # of the tolerance: models are solved to it
_PSCOST_MINRELIABLE = 1  # HiGHS's option: searches for schedules need many nodes rather than a bound, so little strong branching


def solve_for_schedules(
    search: Search,
    program: Milp,
    limit: float,
    *,
    gap: float,
    start: Floats | None = None,
    on_incumbent: Callable[[Floats, float], bool] | None = None,
) -> Answer:
    """Solve a program of a strategy that finds schedules.

    Args:
        search: its clock counts.
        gap: at which it ends, as a share of the whole step.
        on_incumbent: as in ``planner.solvers.highs.program.SolveCallbacks``.
    """
    stopping = search.stopping
    search.clock.spend(_WORK_PER_ENTRY * len(program.matrix.values))  # of its construction
    return solve_program(
        program,
        clock=search.clock.start_part(limit),
        absolute_gap=gap * OBJECTIVE_SCALE,
        start=start,
        callbacks=SolveCallbacks(stopping.is_enough, on_incumbent, partial(_pass_on_bound, search), stopping.is_interrupted),
        options={"mip_pscost_minreliable": _PSCOST_MINRELIABLE},
    )


def _pass_on_bound(search: Search, bound: float) -> None:
    del bound  # of a restriction: it proves nothing
    search.progress.tell()


class Relaxation(Strategy):
    """Bounds by the relaxation, refined from two windows to as many as there are ops.

    The first step does not start from the incumbent, which other strategies improve meanwhile, so that its solutions differ.
    """

    def __init__(self, search: Search) -> None:
        super().__init__(search)
        self._begun = False

    def step(self, limit: float) -> bool:
        """Refine for about `limit`; return False once it is exhausted. Stopped models start from scratch."""
        search, first, self._begun = self.search, not self._begun, True
        discretization, exhausted = refine(search, search.models.refined, limit, from_best=not first)
        is_last = len(discretization.ends) == search.problem.ops or search.problem.ops <= search.params.bound.small_ops
        search.models.refined = halve(discretization) if exhausted and not (first or is_last) else discretization
        return first or not (exhausted and is_last)


@dataclass(frozen=True, slots=True)
class RelaxationResult:
    """The result of solving a model once.

    Attributes:
        finer: the model's discretization, refined where the last solution exceeds the budget.
        trial: of that solution; None if it has no valid order.
    """

    outcome: Outcome
    finer: Discretization
    trial: Trial | None


def refine(
    search: Search, discretization: Discretization, limit: float, *, from_best: bool = True
) -> tuple[Discretization, bool]:
    """Solve and refine in turn; return the last discretization, and True if nothing is left to refine.

    Args:
        from_best: start from the best schedule, if its values in the model are known.
    """
    clock = search.clock.start_part(limit)
    while not (search.stopping.is_solved() or search.stopping.poll_stop()):
        found = solve_relaxation(search, discretization, clock, from_best=from_best)
        if found is None:
            return discretization, False
        in_time = clock.now < limit
        if search.stopping.is_solved():
            more = search.clock.start_part(search.stopping.compute_extra(search.clock.now))
            solve_relaxation(search, discretization, more, from_best=from_best)
            return discretization, False
        if found.outcome is not Outcome.OPTIMAL:
            # The bound of a finer model would lag behind for long: this one gets more time.
            # If memory ended it, more time is useless.
            return (found.finer if in_time else discretization), found.outcome is Outcome.INFEASIBLE
        if found.finer == discretization:
            return discretization, True
        discretization = found.finer
    return discretization, False


def solve_relaxation(
    search: Search,
    discretization: Discretization,
    clock: Clock,
    *,
    from_best: bool = True,
    prove: Callable[[float], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> RelaxationResult | None:
    """Build a model, solve it and offer its solutions; return None if it was stopped before there was a model.

    Args:
        prove: gets the bounds; by default, ``Incumbent.prove``.
        should_stop: ends it, besides the search's own rule.
    """
    try:
        model = _build(search, discretization)
    except BuildStoppedError:
        return None
    latest = (model.discretization, None)
    return _Solving(search, model, prove or search.incumbent.prove, should_stop, latest).run(clock, from_best=from_best)


def solve_linear_relaxation(search: Search, discretization: Discretization) -> tuple[float, dict[int, float]]:
    """Return the bound of the linear relaxation, as for ``Incumbent.prove``, and its values of z."""
    try:
        model = _build(search, discretization)
    except BuildStoppedError:
        return -np.inf, {}
    program = replace(model.program, integer=np.zeros_like(model.program.integer))
    # No polling: with other threads running, it would take longer than the program.
    answer = solve_program(program, clock=search.clock, callbacks=SolveCallbacks(interrupted=search.stopping.is_interrupted))
    values = answer.values
    return answer.bound, {} if values is None else {b: float(values[column]) for b, column in model.instead.items()}


def _build(search: Search, discretization: Discretization) -> Model:
    search.progress.tell(f"bounding with {len(discretization.ends)} windows")
    stopped = search.stopping.count_polls(_WORK_PER_ENTRY * POLL_EVERY, search.stopping.poll_stop)
    return build_relaxation(search.problem, discretization, stopped)


@dataclass(slots=True)
class _Solving:
    """The solution of one model.

    Attributes:
        prove, should_stop: as in ``solve_relaxation``.
        latest: the discretization of the last solution, refined, and its trial.
    """

    search: Search
    model: Model
    prove: Callable[[float], None]
    should_stop: Callable[[], bool] | None
    latest: tuple[Discretization, Trial | None]

    def run(self, clock: Clock, *, from_best: bool) -> RelaxationResult:
        """Solve the model and offer its solutions."""
        search, model, stopping = self.search, self.model, self.search.stopping
        search.models.note_size(model.program.matrix.shape)
        start = None
        # A schedule with both optional ops and offloading has values only in the model of its plain graph.
        if from_best and search.incumbent.best is not None and (search.problem.places.plain or not search.problem.round_trips):
            start = start_values(model, encode_trial(search.problem, model.discretization, search.incumbent.best))
        answer = solve_program(
            model.program,
            clock=clock,
            absolute_gap=(CLOSE_GAP if stopping.is_solved() else _INNER_GAP) * stopping.tolerance * OBJECTIVE_SCALE,
            start=start,
            callbacks=SolveCallbacks(self.has_ended, self.try_solution, self.note_bound, stopping.is_interrupted),
        )
        give_back()
        self.prove(np.inf if answer.outcome is Outcome.INFEASIBLE else answer.bound)
        if answer.values is not None:
            self.try_solution(answer.values, 0.0)
        return RelaxationResult(answer.outcome, *self.latest)

    def has_ended(self) -> bool:
        stopping = self.search.stopping
        return stopping.is_enough() or stopping.is_out_of_memory() or (self.should_stop is not None and self.should_stop())

    def try_solution(self, values: Floats, _: float) -> bool:
        solution = read_solution(self.model, values)
        self.search.models.solutions.append((self.model.discretization, solution))
        self.latest = _offer(self.search, self.model, solution)
        return self.search.stopping.poll_satisfied()

    def note_bound(self, overhead: float) -> None:
        if np.isfinite(overhead):
            self.prove(overhead)
        self.search.progress.tell()


def _offer(search: Search, model: Model, solution: Solution) -> tuple[Discretization, Trial | None]:
    """Decode a solution and offer it; return the discretization, refined where it exceeds the budget, and the trial."""
    discretization = model.discretization
    order = decode(model.problem, discretization, solution)
    trial = search.offer(order, discretization)
    if trial is None:
        writers = find_late_writers(search.problem, order)  # none if it needs ops that the solution does not execute
        return (discretization.split(writers) if writers else discretization), None
    if trial.peak_bytes <= search.budget_bytes:
        return split_at_waits(discretization, trial), trial
    return refine_windows(discretization, trial, search.budget_bytes), trial
