"""The state of one solve that all strategies share."""

from collections import deque
from dataclasses import dataclass, field
from typing import Self

import numpy as np

from planner.solvers.clock import Clock
from planner.solvers.problem import Problem, build_problem
from planner.solvers.request import Request
from planner.solvers.windows.decoding.decode import Order, Trial, is_possible, try_out
from planner.solvers.windows.decoding.expand import Solution
from planner.solvers.windows.decoding.pruning import prune
from planner.solvers.windows.incumbent import Incumbent, ProgressReports
from planner.solvers.windows.params import WindowsParams
from planner.solvers.windows.relaxation.discretization import Discretization
from planner.solvers.windows.stopping import StoppingRule

WORK_PER_EXECUTION = 1e-5  # of a simulation
_KEPT_SOLUTIONS = 3
_NEAR = 1.01  # times the best time: up to it a schedule that offloads is improved although it is not the best


@dataclass(slots=True)
class Models:
    """Results of the models that were solved.

    Attributes:
        coarse: two windows, split at the peak of keeping everything; one window before that is known.
        refined: the discretization of the relaxation so far.
        largest: rows and columns of the largest program.
        solutions: the latest solutions, newest last.
    """

    coarse: Discretization
    refined: Discretization
    largest: tuple[int, int] = (0, 0)
    solutions: deque[tuple[Discretization, Solution]] = field(default_factory=lambda: deque(maxlen=_KEPT_SOLUTIONS))

    def note_size(self, shape: tuple[int, int]) -> None:
        """Record the size of a program."""
        self.largest = max(self.largest, shape)


@dataclass(frozen=True, slots=True)
class Search:
    """A running request: the problem, the parameters, and the state that strategies and threads share.

    Attributes:
        may_start_processes: False in a process that was started for the search.
    """

    request: Request
    problem: Problem
    params: WindowsParams
    progress: ProgressReports
    incumbent: Incumbent
    stopping: StoppingRule
    models: Models
    may_start_processes: bool

    @classmethod
    def of(cls, request: Request, *, may_start_processes: bool = True) -> Self:
        """Begin the solve of `request`; progress is reported in the calling thread."""
        params = request.get_params(WindowsParams())
        problem, progress = build_problem(request.graph, request.budget_bytes), ProgressReports(request)
        incumbent = Incumbent(problem, params.bound.arithmetic, progress)
        stopping = StoppingRule(request, incumbent, params.bound)
        whole = Discretization.whole(problem)
        return cls(request, problem, params, progress, incumbent, stopping, Models(whole, whole), may_start_processes)

    @property
    def clock(self) -> Clock:
        """The clock of the solve."""
        return self.request.clock

    @property
    def budget_bytes(self) -> int:
        """The budget, including static bytes."""
        return self.request.budget_bytes

    def offer(self, order: Order, discretization: Discretization | None = None) -> Trial | None:
        """Simulate an order and keep it if it fits and is the fastest so far, as it is or after pruning.

        Return its trial; None if it is impossible (``is_possible``).

        Args:
            discretization: windows of the pruned order; None: one.
        """
        if not is_possible(self.problem, order):
            return None
        trial, incumbent = self._simulate(order), self.incumbent
        incumbent.compare_peak(trial)
        # A schedule that offloads may become the best after pruning.
        near_s = _NEAR * incumbent.best_s if self.problem.round_trips else -np.inf
        if incumbent.fits(trial) and (incumbent.take(trial) or trial.time_s <= near_s):
            incumbent.take(self._prune(trial, discretization))
        return trial

    def improve_order(self, order: Order, limit_s: float) -> Trial | None:
        """Return the trial of an order after pruning; None if it is impossible, does not fit or takes longer than `limit_s`."""
        if not is_possible(self.problem, order):
            return None
        trial, incumbent = self._simulate(order), self.incumbent
        if not incumbent.fits(trial) or trial.time_s > limit_s:
            return None
        incumbent.take(trial)
        trial = self._prune(trial)
        incumbent.take(trial)
        return trial

    def _simulate(self, order: Order) -> Trial:
        self.clock.spend(WORK_PER_EXECUTION * len(order.computed))
        return try_out(self.problem, order)

    def _prune(self, trial: Trial, discretization: Discretization | None = None) -> Trial:
        """Return `trial` without unnecessary recomputations."""
        should_stop = self.stopping.count_polls(WORK_PER_EXECUTION * len(trial.order.computed), self.stopping.poll_stop)
        return prune(self.problem, trial, discretization, self.budget_bytes, should_stop)
