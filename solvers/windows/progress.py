"""Progress reports to the caller of a solve."""

import threading

from solvers.request import Request
from solvers.windows.decoding.decode import Trial

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
