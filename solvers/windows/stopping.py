"""The rule that decides when a solve ends."""

import threading
from collections.abc import Callable
from functools import partial

from planner.solvers.clock import measure_rest, poll
from planner.solvers.memory import read_resident_bytes
from planner.solvers.request import Request
from planner.solvers.result import is_within
from planner.solvers.windows.incumbent import Incumbent
from planner.solvers.windows.params import BoundParams

CLOSE_GAP = 0.05  # of the tolerance: models are solved to it once the tolerance is reached
_LEAST_MOMENT, _MOMENT_SHARE = 0.5, 0.5  # of the clock, and of the time so far: a solve within the tolerance goes on so long


class StoppingRule:
    """The end of a solve: by the caller, the clock, the tolerance on the gap, or memory."""

    def __init__(self, request: Request, incumbent: Incumbent, params: BoundParams) -> None:
        self._request = request
        self._clock = request.clock
        self._incumbent = incumbent
        self._params = params
        self._caller = threading.current_thread()
        self._halted = False
        self._solved_at: float | None = None  # by the clock, when the gap was first within the tolerance
        self._began_bytes = read_resident_bytes()

    @property
    def tolerance(self) -> float:
        """The current tolerance on the gap."""
        return self._request.tolerance.compute_at(self._clock.now)

    @property
    def halted(self) -> bool:
        """True if the solve ends regardless of the time left."""
        return self._halted or bool(self._incumbent.failure)

    def halt(self) -> None:
        """End the solve."""
        self._halted = True

    def poll_stop(self) -> bool:
        """Return True if the caller, a failure or the clock ends the solve; a request of the caller holds for all threads."""
        if self.is_interrupted():
            self._halted = True
        return self.halted or measure_rest(self._clock) <= 0

    def is_interrupted(self) -> bool:
        """Return True if the caller requests a stop; other threads get False."""
        return self._caller is threading.current_thread() and self._request.is_interrupted()

    def count_polls(self, work: float, should_stop: Callable[[], bool]) -> Callable[[], bool]:
        """Return `should_stop` for polling after each amount `work`, which is counted."""
        return partial(poll, self._clock, work, should_stop) if self._clock.counts_work else should_stop

    def is_solved(self) -> bool:
        """Return True if the problem is proved infeasible or the gap is within the tolerance."""
        return self._incumbent.infeasible or self._is_within(self.tolerance)

    def compute_settled(self) -> float:
        """Return the least tolerance so far that the gap is within; the current one if there is none."""
        return self._request.tolerance.compute_settled(self._clock.now, self._is_within)

    def poll_satisfied(self) -> bool:
        """Return True if the solve has also had time to improve beyond the tolerance, since it was first found solved.

        Schedules are often within the tolerance long before they stop improving, and the rest is cheap: half as long again, or a
        moment. If the tolerance has widened to the gap, the time before the widening does not count.
        """
        if not self.is_solved():
            return False
        if self._incumbent.infeasible or self._is_within(CLOSE_GAP * self.tolerance):
            return True
        now = self._clock.now
        self._solved_at = self._solved_at or now
        widened_at, _ = self._request.tolerance.list_begun(self._solved_at)[-1]
        return now - self._solved_at > self.compute_extra(self._solved_at - widened_at)

    def compute_extra(self, spent: float) -> float:
        """Return the time for further improvement of a solve that took `spent` to reach the tolerance."""
        return max(_LEAST_MOMENT, _MOMENT_SHARE * spent)

    def is_enough(self) -> bool:
        """Return True if better schedules need not be searched."""
        return self.poll_stop() or self.poll_satisfied()

    def make_enough_after(self, limit: float) -> Callable[[], bool]:
        """Return a function that is True if better schedules need not be searched, or after `limit` of the clock from now on."""
        clock = self._clock.start_part(limit)
        return lambda: self.is_enough() or measure_rest(clock) <= 0

    def is_out_of_memory(self) -> bool:
        """Return True if the process has grown by its limit."""
        return read_resident_bytes() - self._began_bytes > self._params.most_bytes

    def _is_within(self, tolerance: float) -> bool:
        best, bound_s = self._incumbent.best, self._incumbent.bound_s
        return best is not None and is_within(best.time_s, bound_s, tolerance)
