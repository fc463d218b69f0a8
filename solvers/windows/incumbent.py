"""The incumbent of a solve: its best schedule, and the proved bounds.

Two things cannot be: a bound above a schedule, and an infeasible relaxation where one is known. Either ends the solve with an
error, and no result is reported: a wrong row or failed arithmetic must not become an "optimal".
"""

import math
import threading

from planner.graphs.units import format_seconds
from planner.solvers.problem import OBJECTIVE_SCALE, Problem
from planner.solvers.request import Request
from planner.solvers.windows.decoding.decode import NOWHERE_BYTES, Trial

_INTERVAL_S = 0.4


class ProgressReports:
    """Reports of the best schedule, the bound and the activity, in the caller's thread; other threads leave their news for it."""

    def __init__(self, request: Request) -> None:
        self.activity = "keeping everything"
        self._request = request
        self._caller = threading.current_thread()
        self._best: Trial | None = None
        self._bound_s = 0.0
        self._reported: Trial | None = None
        self._has_news = False
        self._reported_s = 0.0

    def note(self, best: Trial | None, bound_s: float) -> None:
        """Record news to be reported at once."""
        self._best, self._bound_s, self._has_news = best, bound_s, True

    def tell(self, activity: str | None = None) -> None:
        """Report news at once, otherwise the activity about twice a second."""
        self.activity = activity or self.activity
        if self._caller is not threading.current_thread():
            return
        request, best, bound_s = self._request, self._best, self._bound_s
        if request.on_schedule is not None and best is not None and best is not self._reported:
            self._reported = best
            request.on_schedule(best.schedule, bound_s)
        if request.on_progress is None:
            return
        seconds = request.clock.seconds
        if self._has_news or seconds - self._reported_s > _INTERVAL_S:
            self._has_news = False
            self._reported_s = seconds
            request.tell(self.activity, best.time_s if best else None, bound_s)


class Incumbent:
    """The best schedule, the lower bound, and the schedule of least peak; threads may share it.

    Attributes:
        best: the fastest schedule within the budget, None if none is known.
        bound_s: lower bound on the time of schedules within the budget.
        least_peak: the schedule of least peak of all that were tried, at any budget.
        infeasible: True if it is proved that no schedule fits the budget.
        failure: description of an internal error; "" if there was none.
    """

    def __init__(self, problem: Problem, arithmetic: float, progress: ProgressReports) -> None:
        """Start with the trivial bound.

        Args:
            arithmetic: as in ``BoundParams``.
            progress: is notified of improvements.
        """
        self.best: Trial | None = None
        self.bound_s = problem.least_s
        self.least_peak: Trial | None = None
        self.infeasible = False
        self.failure = ""
        self._problem = problem
        self._arithmetic = arithmetic
        self._progress = progress
        self._closed = False
        self._reserved: Trial | None = None
        self._released = False
        self._lock = threading.Lock()
        progress.note(None, self.bound_s)

    @property
    def best_s(self) -> float:
        """Time of the best schedule, inf if there is none."""
        return math.inf if self.best is None else self.best.time_s

    @property
    def best_trial(self) -> Trial:
        """The best schedule, which must exist."""
        assert self.best is not None
        return self.best

    def fits(self, trial: Trial) -> bool:
        """Return True if `trial` is within the budget."""
        return trial.peak_bytes <= self._problem.budget_bytes

    def compare_peak(self, trial: Trial) -> None:
        """Keep `trial` as the schedule of least peak if it has a lower one."""
        if trial.peak_bytes < (NOWHERE_BYTES if self.least_peak is None else self.least_peak.peak_bytes):
            self.least_peak = trial

    def take(self, trial: Trial) -> bool:
        """Keep `trial` if it fits and is the fastest so far; return True if it is."""
        with self._lock:
            better = self.fits(trial) and not self._closed and (self.best is None or self._is_better(trial, self.best))
            if better:
                self.best = trial
                self._refute_bound()
                self._progress.note(trial, self.bound_s)
        if better:
            self._progress.tell()
        return better

    def reserve(self, trial: Trial) -> None:
        """Hold `trial` back until ``release``."""
        with self._lock:
            self._reserved = trial
        if self._released:
            self.take(trial)

    def release(self) -> None:
        """Take the reserved trial, and take later ones at once."""
        self._released = True
        if self._reserved is not None:
            self.take(self._reserved)

    def prove(self, overhead: float) -> None:
        """Record the result of a relaxation: no schedule has less overhead or, for inf, there is none."""
        if overhead != math.inf:
            self.raise_bound(overhead)
        elif self.best is None:
            self.infeasible = True
        else:
            self.fail(
                "a relaxation is infeasible, though a schedule within the budget is known: a row of the program is no "
                "relaxation, or the arithmetic of HiGHS failed"
            )

    def raise_bound(self, overhead: float) -> None:
        """Record that no schedule has less overhead than this, in units of the objective."""
        bound_s = self._problem.base_s * (1 + overhead / OBJECTIVE_SCALE)
        with self._lock:
            higher = math.isfinite(bound_s) and bound_s > self.bound_s and not self.failure
            if higher:
                self.bound_s = bound_s
                self._refute_bound()
                self._progress.note(self.best, self.bound_s)
        if higher:
            self._progress.tell()

    def fail(self, message: str) -> None:
        """End the solve because of an internal error; the best schedule so far is kept."""
        self.failure = self.failure or message

    def close(self) -> None:
        """Ignore further schedules."""
        self._closed = True

    def _is_better(self, trial: Trial, best: Trial) -> bool:
        """Return True if `trial` takes less time; on several devices also if it takes as long with less work."""
        if trial.time_s != best.time_s or not self._problem.placed:
            return trial.time_s < best.time_s
        return self._compute_work_s(trial) < self._compute_work_s(best)

    def _compute_work_s(self, trial: Trial) -> float:
        return math.fsum(map(self._problem.get_seconds, trial.order.computed))

    def _refute_bound(self) -> None:
        """Fail if a schedule refutes the bound, and reset the bound."""
        if self.best is not None and self.best.time_s < self.bound_s * (1 - self._arithmetic):
            self.fail(
                f"the bound of {format_seconds(self.bound_s)} is above the time of a schedule within the budget, "
                f"{format_seconds(self.best.time_s)}: a row of the program is no relaxation, or the arithmetic of HiGHS failed"
            )
            # It is not known which of the programs was wrong, so none of their bounds counts any more.
            self.bound_s = self._problem.least_s
