"""A HiGHS run in its own thread, watched by the caller's thread.

A thread, since HiGHS polls in its callbacks only, and presolve and long factorisations have none. A run that does not stop within
``_GRACE_S`` is left behind, and what it found counts. At the end of the process it is joined: a thread inside HiGHS aborted the
process there. Known weakness: work is estimated from the number of callbacks during a run, and corrected by the iterations at its
end, so a limit of work is exceeded a little, though at the same point each time.
"""

import atexit
import math
import threading
import time
import weakref
from collections import deque
from typing import Any

import highspy
import numpy as np

from planner.solvers.clock import Clock, measure_rest
from planner.solvers.highs.program import Floats, Milp, SolveCallbacks

_POLL_S = 0.05  # polling interval of the caller's thread
_GRACE_S = 2.0  # wait for a stopped solve before it is abandoned
_LAST_GRACE_S = 10.0  # wait at the end of the process for an abandoned solve
# Work, fitted to the times of 72 solves of models of 100 to 20,000 rows and columns; half are within 0.6 to 1.1 times it.
# HiGHS's callbacks carry no counts, and it reports simplex iterations only at the end.
_WORK_PER_ITERATION = 1e-5  # times the root of the rows and columns
_WORK_OF_LINEAR = 6e-7  # likewise for linear programs: no repeated presolve, no search tree
_ITERATIONS_PER_CALLBACK = 60.0  # about
_WORK_PER_RUN = 0.01
_LOOK = 0.05  # work between two looks of the caller's thread


class HighsRun:
    """One HiGHS run in its thread: its results so far, and requests to stop."""

    def __init__(self, solver: highspy.Highs, program: Milp) -> None:
        self.solver = solver
        self.is_mip = bool(program.integer.any())
        self.values: Floats | None = None
        self.objective: float | None = None
        self.bound = -np.inf
        self.incumbents: deque[tuple[Floats, float]] = deque()
        self.error: BaseException | None = None
        self._iteration_work = (_WORK_PER_ITERATION if self.is_mip else _WORK_OF_LINEAR) * math.sqrt(sum(program.matrix.shape))
        self._work = self._spent = 0.0
        self._counts_work = False
        self._stop = False
        self._done = threading.Event()
        self._to_see = threading.Event()  # set when there is news for the caller's thread, or the solve is done
        self._seen = threading.Event()
        self._thread = threading.Thread(target=self._solve, daemon=True, name="HiGHS")
        kinds = highspy.cb.HighsCallbackType
        # HiGHS holds the callback, invisible to Python's garbage collector: a reference to self would leak the whole solve.
        this = weakref.ref(self)
        solver.setCallback(lambda *told: run._handle_callback(*told) if (run := this()) else None, None)
        if self.is_mip:
            solver.startCallback(kinds.kCallbackMipImprovingSolution)
            solver.startCallback(kinds.kCallbackMipInterrupt)

    def finish(self, callbacks: SolveCallbacks, clock: Clock) -> bool:
        """Run to the end; return False if the thread had to be abandoned."""
        # A thread inside HiGHS when the interpreter ends would abort the process.
        atexit.register(self._end)
        self._counts_work = clock.counts_work
        if not self.is_mip and (self._counts_work or callbacks.should_stop is not None):
            # Only if needed: each iteration then waits for the interpreter's lock.
            self.solver.startCallback(highspy.cb.HighsCallbackType.kCallbackSimplexInterrupt)
            self.solver.startCallback(highspy.cb.HighsCallbackType.kCallbackIpmInterrupt)
        self._thread.start()
        try:
            if clock.counts_work:
                self._look_after_work(callbacks, clock)
            else:
                self._look_after(callbacks, clock)
        finally:
            # Also if a callback of the caller has failed.
            self._stop = True
            self._seen.set()
            if self._done.wait(_GRACE_S):
                atexit.unregister(self._end)
        if self._done.is_set():
            self._hand_over(callbacks)
        if self.error is not None:
            raise self.error
        if clock.counts_work:
            iterations = max(0, self.solver.getInfo().simplex_iteration_count)
            self._work = max(self._work, _WORK_PER_RUN + iterations * self._iteration_work)
            self._spend(clock)
        return self._done.is_set()

    def _end(self) -> None:
        self._stop = True
        self._seen.set()
        self._thread.join(_LAST_GRACE_S)

    def _look_after(self, callbacks: SolveCallbacks, clock: Clock) -> None:
        told = 0.0
        while not self._done.wait(_POLL_S):
            self._hand_over(callbacks)
            now = time.monotonic()
            if callbacks.on_bound and now - told > 0.1:
                told = now
                callbacks.on_bound(self.bound)
            if self._stop or measure_rest(clock) < -_GRACE_S or (callbacks.should_stop and callbacks.should_stop()):
                return

    def _look_after_work(self, callbacks: SolveCallbacks, clock: Clock) -> None:
        """Watch the run at points that do not depend on time, while HiGHS waits."""
        while True:
            while not self._to_see.wait(_POLL_S):
                if callbacks.interrupted and callbacks.interrupted():
                    return
            self._to_see.clear()
            if self._done.is_set():
                return
            self._spend(clock)
            self._hand_over(callbacks)
            if callbacks.on_bound:
                callbacks.on_bound(self.bound)
            if measure_rest(clock) <= 0 or (callbacks.should_stop and callbacks.should_stop()):
                self._stop = True
            self._seen.set()

    def _spend(self, clock: Clock) -> None:
        clock.spend(self._work - self._spent)
        self._spent = self._work

    def _hand_over(self, callbacks: SolveCallbacks) -> None:
        while self.incumbents:
            values, objective = self.incumbents.popleft()
            if callbacks.on_incumbent and callbacks.on_incumbent(values, objective):
                self._stop = True

    def _solve(self) -> None:
        try:
            self.solver.run()
        except Exception as error:  # noqa: BLE001 (the caller's thread raises it)
            self.error = error
        finally:
            self._done.set()
            self._to_see.set()

    def _handle_callback(self, kind: Any, message: str, out: Any, into: Any, data: Any) -> None:
        better = kind == highspy.cb.HighsCallbackType.kCallbackMipImprovingSolution
        if better:
            self.values = np.array(out.mip_solution, dtype=np.float64)
            self.objective = float(out.objective_function_value)
            self.incumbents.append((self.values, self.objective))
        if self.is_mip:
            self.bound = max(self.bound, float(out.mip_dual_bound))
            self._work += _ITERATIONS_PER_CALLBACK * self._iteration_work
        # HiGHS stands still here until the caller has looked: what the caller decides then is a function of the work alone.
        if self._counts_work and not self._stop and (better or self._work > self._spent + _LOOK):
            self._to_see.set()
            self._seen.wait()
            self._seen.clear()
        if into is not None and self._stop:
            into.user_interrupt = True
