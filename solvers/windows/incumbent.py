"""The best schedule of a solve, the bound, and when they are good enough."""

import math
import threading
from collections import deque
from collections.abc import Callable

import numpy as np

from graphs.units import format_seconds
from solvers.clock import left
from solvers.memory import resident_bytes
from solvers.problem import OBJECTIVE_SCALE, Problem, problem_of
from solvers.request import Request
from solvers.result import is_within
from solvers.windows.decoding.decode import NOWHERE_BYTES, Order, Trial, try_out
from solvers.windows.decoding.encode import without_needless
from solvers.windows.decoding.expand import Choice
from solvers.windows.decoding.pruning import lean
from solvers.windows.params import WindowsParams
from solvers.windows.relaxation.discretization import Discretization

_TELL_S = 0.4
WORK_PER_EXECUTION = 1e-5  # of trying an order out


class Search:
    """One solve: the best schedule, the bound, and when they are good enough.

    Schedules are looked for in a second thread; the caller is spoken to from its own.
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        self.clock = request.clock
        self.params = request.params_of(WindowsParams())
        self.problem: Problem = problem_of(request.graph, request.budget_bytes)
        self.budget_bytes = request.budget_bytes
        self.best: Trial | None = None
        self.bound_s = self.problem.least_s
        self.least: Trial | None = None  # the one of least peak of all that were tried
        self.infeasible = False
        self.solved_at: float | None = None  # by the clock, when it first was
        self.activity = "keeping everything"
        self.largest = (0, 0)  # rows and columns of a program that was solved
        self.solutions: deque[tuple[Discretization, Choice]] = deque(maxlen=3)  # of models, latest last
        self.is_apart = False  # in a process that has been started for it: it starts no other
        self.halted = False
        self.closed = False
        self.failure = ""  # what must not happen, and did
        self._told = 0.0
        self._sent: Trial | None = None  # the best schedule that the caller was told
        self._owner = threading.current_thread()
        self._lock = threading.Lock()
        self._news = False
        self._began_bytes = resident_bytes()

    # When to end.

    @property
    def tolerance(self) -> float:
        """On the gap, as it is now."""
        return self.request.tolerance.at(self.clock.now)

    def stopped(self) -> bool:
        """Whether the caller or the clock ends the solve."""
        if self.interrupted():
            self.halted = True
        return self.halted or left(self.clock) <= 0

    def interrupted(self) -> bool:
        """Whether the caller wants an end; only its own thread asks."""
        return self._owner is threading.current_thread() and self.request.interrupted()

    def spending(self, work: float, should_stop: Callable[[], bool]) -> Callable[[], bool]:
        """`should_stop`, which is polled whenever so much work has been done."""
        if not self.clock.counts_work:
            return should_stop

        def spend() -> bool:
            self.clock.spend(work)
            return should_stop()

        return spend

    def solved(self) -> bool:
        """Whether nothing is left to find out: proved infeasible, or within the tolerance."""
        if self.infeasible:
            return True
        return self.within(self.tolerance)

    def within(self, tolerance: float) -> bool:
        """Whether the best schedule is."""
        return self.best is not None and is_within(self.best.time_s, self.bound_s, tolerance)

    def settled_for(self) -> float:
        """The least tolerance so far that the best schedule is within; the present one where it is within none."""
        begun = [tolerance for _, tolerance in self.request.tolerance.begun(self.clock.now)]
        return next(filter(self.within, begun), begun[-1])

    def satisfied(self) -> bool:
        """Whether the solve has also had its time to do better than the tolerance asks for.

        Solutions are often within the tolerance long before they are as good as they get, and the rest costs
        little: half as long again as it took to get there, or a moment. Where it was the tolerance that came to
        them, the time before has been had already.
        """
        if not self.solved():
            return False
        if self.infeasible or self.within(self.params.bound.close_gap * self.tolerance):
            return True
        now = self.clock.now
        self.solved_at = self.solved_at or now
        widened_at, _ = self.request.tolerance.begun(self.solved_at)[-1]
        return now - self.solved_at > self.more(self.solved_at - widened_at)

    def more(self, spent: float) -> float:
        """How long a solve that took so long to get within the tolerance goes on."""
        return max(self.params.bound.least_moment, self.params.bound.moment_share * spent)

    def enough(self) -> bool:
        """Whether to stop looking for better schedules."""
        return self.stopped() or self.satisfied()

    def crowded(self) -> bool:
        """Whether the solve has taken as much memory as it may."""
        return resident_bytes() - self._began_bytes > self.params.bound.most_bytes

    def tell(self, activity: str | None = None, *, news: bool = False) -> None:
        """Report progress: at once when there is news, else twice a second."""
        self.activity = activity or self.activity
        self._news |= news
        if self._owner is not threading.current_thread():
            return
        if self.request.on_schedule is not None and self.best is not None and self.best is not self._sent:
            self._sent = self.best
            self.request.on_schedule(self.best.schedule, self.bound_s)
        if self.request.on_progress is None:
            return
        seconds = self.clock.seconds
        if self._news or seconds - self._told > _TELL_S:
            self._news = False
            self._told = seconds
            best = self.best
            self.request.tell(self.activity, best.time_s if best else None, self.bound_s)

    def fail(self, message: str) -> None:
        """End the solve because of what must not happen; the best schedule so far is kept."""
        self.failure = self.failure or message
        self.halted = True

    # The best schedule and the bound.

    def best_trial(self) -> Trial:
        """The best schedule; there is one."""
        assert self.best is not None
        return self.best

    def best_s(self) -> float:
        """Time of the best schedule, inf if there is none."""
        return np.inf if self.best is None else self.best.time_s

    def offer(self, order: Order, detail: Discretization) -> Trial:
        """Try an order out and keep it if it fits and is the fastest so far, or is once it is improved."""
        trial = self._tried(order)
        if trial.peak_bytes < (NOWHERE_BYTES if self.least is None else self.least.peak_bytes):
            self.least = trial
        if trial.peak_bytes <= self.budget_bytes and (self._take(trial) or self._is_near(trial)):
            self._take(self._improved(trial, detail))
        return trial

    def _is_near(self, trial: Trial) -> bool:
        """Whether a schedule with round trips may be the best once it is improved."""
        return self.problem.copies is not None and trial.time_s <= self.params.round_trips.near * self.best_s()

    def keep(self, trial: Trial) -> None:
        """Keep a trial as it is, if it fits and is the fastest so far."""
        if trial.peak_bytes <= self.budget_bytes:
            self._take(trial)

    def improve_order(self, order: Order, detail: Discretization, limit_s: float) -> Trial | None:
        """The trial of an order that fits, less what is needless; None where it does not, or takes longer than `limit_s`."""
        trial = self._tried(order)
        if trial.peak_bytes > self.budget_bytes or trial.time_s > limit_s:
            return None
        self._take(trial)
        trial = self._improved(trial, detail)
        self._take(trial)
        return trial

    def _tried(self, order: Order) -> Trial:
        self.clock.spend(WORK_PER_EXECUTION * len(order.computed))
        return try_out(self.problem, order)

    def _improved(self, trial: Trial, detail: Discretization) -> Trial:
        """`trial` less what is needless."""
        pass_work = WORK_PER_EXECUTION * len(trial.order.computed)
        should_stop = self.spending(pass_work, self.stopped)
        passes = self.params.refinement.passes
        if self.problem.copies is not None and not self.problem.places.plain:
            return trial  # improved in the plain graph that it commits to
        if self.problem.copies is not None:
            return lean(self.problem, trial, self.budget_bytes, should_stop, passes)
        return without_needless(self.problem, detail, trial, self.budget_bytes, should_stop, passes)

    def _take(self, trial: Trial) -> bool:
        """Keep a trial that fits if it is the fastest so far; whether it is."""
        with self._lock:
            better = not self.closed and (self.best is None or self._is_better(trial, self.best))
            if better:
                self.best = trial
                self._check_bound()
        if better:
            self.tell(news=True)
        return better

    def _is_better(self, trial: Trial, best: Trial) -> bool:
        """Whether it takes less time; on several devices, as long and does less."""
        if trial.time_s != best.time_s or self.problem.devices is None:
            return trial.time_s < best.time_s
        return self._work_s(trial) < self._work_s(best)

    def _work_s(self, trial: Trial) -> float:
        return math.fsum(map(self.problem.seconds, trial.order.computed))

    def prove(self, overhead: float) -> None:
        """Take note of what a relaxation proves: no schedule has less overhead, or for inf that there is none."""
        if overhead != np.inf:
            self.raise_bound(overhead)
        elif self.best is None:
            self.infeasible = True
        else:
            self.fail(
                "a relaxation is infeasible, though a schedule within the budget is known: a row of the program is no "
                "relaxation, or the arithmetic of HiGHS failed"
            )

    def raise_bound(self, overhead: float) -> None:
        """Take note that no schedule has less overhead than this, in units of the objective."""
        bound_s = self.problem.base_s * (1 + overhead / OBJECTIVE_SCALE)
        if np.isfinite(bound_s) and bound_s > self.bound_s and not self.failure:
            with self._lock:
                self.bound_s = bound_s
                self._check_bound()
            self.tell(news=True)

    def _check_bound(self) -> None:
        """End the solve where a schedule refutes the bound, which is then forgotten."""
        if self.best is not None and self.best.time_s < self.bound_s * (1 - self.params.bound.arithmetic):
            self.fail(
                f"the bound of {format_seconds(self.bound_s)} is above the time of a schedule within the budget, "
                f"{format_seconds(self.best.time_s)}: a row of the program is no relaxation, or the arithmetic of HiGHS failed"
            )
            self.bound_s = self.problem.least_s
