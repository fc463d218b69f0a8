"""Clocks that limit a solve: by seconds, or by work that is counted instead of timed.

A clock measures what a solve has spent since it was created. All durations in solvers are in its unit: a second, or the work of
about a second.

Why work: results of a solve with a limit of seconds differ from run to run, so that no change of the search could be checked for
what it does. A thread that has waited for another goes on where that one ended: before, it went on as the first of the solve,
with what the others had happened to do by then.

Known weakness: a unit of work is about a second on a processor of 2020 and for the programs that it was fitted to; the work of
HiGHS is an estimate (``planner.solvers.highs.run``).
"""

import threading
import time
from collections.abc import Callable

from planner.graphs.units import format_seconds

_AHEAD = 0.02  # units of work by which a thread may be ahead of another before it waits for it


class WallClock:
    """A clock of seconds: a solve finds the best schedule that this machine finds in its time.

    Attributes:
        limit: most that may be spent.
    """

    counts_work = False

    def __init__(self, limit: float = 3600.0) -> None:
        self.limit = limit
        self._began = time.monotonic()

    @property
    def now(self) -> float:
        """Seconds since it was created."""
        return time.monotonic() - self._began

    seconds = now

    def spend(self, work: float) -> None:
        """Do nothing: seconds pass by themselves."""

    def wait(self, duration: float) -> None:
        """Sleep for `duration` seconds, or until the limit."""
        time.sleep(max(0.0, min(duration, measure_rest(self))))

    def start_part(self, limit: float) -> "WallClock":
        """Return a clock that starts now, with `limit` or the rest of this clock's limit, whichever is less."""
        return WallClock(min(limit, measure_rest(self)))

    def start(self, function: Callable[[], None]) -> "_Thread":
        """Call `function` in a background thread."""
        return _Thread(function)

    def format_amount(self, spent: float) -> str:
        """Return `spent` with a unit of time."""
        return format_seconds(spent)


class _Thread(threading.Thread):
    """A background thread of a solve."""

    def __init__(self, function: Callable[[], None]) -> None:
        super().__init__(target=function, daemon=True, name="background of a solve")
        self.start()

    @property
    def running(self) -> bool:
        """True until the thread has ended."""
        return self.is_alive()

    def wait(self, most: float) -> None:
        """Wait until it ends, but no longer than `most` seconds."""
        self.join(most)

    end = wait  # after a request to stop


class WorkClock:
    """A clock of work, in units of about a second each on a processor of the year 2020: the same schedule on every machine.

    It counts operations (simplex iterations, tried executions), like the deterministic time of CPLEX or the work units of Gurobi.
    Threads take turns: the one that has done least runs, so that what threads read from each other does not depend on their
    speed. So a solve is deterministic.

    Attributes:
        limit: most that may be spent.
    """

    counts_work = True

    def __init__(self, limit: float = 3600.0, *, of: "WorkClock | None" = None) -> None:
        self.limit = limit
        self._turns: _Turns = of._turns if of is not None else _Turns()
        self._since = self._turns.get_work() if of is not None else 0.0
        self._began = time.monotonic()

    @property
    def now(self) -> float:
        """Work of the calling thread since the clock was created."""
        return self._turns.get_work() - self._since

    @property
    def seconds(self) -> float:
        """Wall time since it was created."""
        return time.monotonic() - self._began

    def spend(self, work: float) -> None:
        """Record work, and wait while other threads are behind by more than a little."""
        self._turns.spend(work)

    def wait(self, duration: float) -> None:
        """Count `duration` as work."""
        self.spend(duration)

    def start_part(self, limit: float) -> "WorkClock":
        """Return a clock that starts now, with `limit` or the rest of this clock's limit, whichever is less."""
        return WorkClock(min(limit, measure_rest(self)), of=self)

    def start(self, function: Callable[[], None]) -> "_Turn":
        """Call `function` in a background thread, whose first turn comes when this thread has done more."""
        return _Turn(self._turns, function)

    def format_amount(self, spent: float) -> str:
        """Return `spent` in units of work."""
        return f"{spent:.4g} units of work"


class _Turns:
    """A scheduler of threads by the work that each has done; one of them runs at a time."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        # In the order in which threads joined, which breaks ties.
        self._done: dict[int, float] = {threading.get_ident(): 0.0}
        self._owner = self._turn = threading.get_ident()
        self._waiting: dict[int, tuple[int, float]] = {}  # by awaited thread: the waiting thread and its work

    def get_work(self) -> float:
        """Return the work of the calling thread."""
        return self._done[self._get_thread()]

    def spend(self, work: float) -> None:
        me = self._get_thread()
        self._done[me] += work
        if len(self._done) > 1 and self._done[me] > min(self._done.values()) + _AHEAD:
            with self._changed:
                self._hand_on()
                self._await(me)

    def join(self, me: int, done: float) -> None:
        """Add thread `me`, with an initial amount of work."""
        with self._changed:
            self._done[me] = done

    def await_turn(self) -> None:
        with self._changed:
            self._await(threading.get_ident())

    def leave(self) -> None:
        """Remove the calling thread; a thread that waits for it takes part again, with at least as much work."""
        with self._changed:
            me = threading.get_ident()
            done = self._done.pop(me)
            if me in self._waiting:
                waiting, had_done = self._waiting.pop(me)
                self._done[waiting] = max(had_done, done)
            self._hand_on()

    def wait_for(self, other: int) -> None:
        """Suspend the calling thread until thread `other` has left."""
        with self._changed:
            me = self._get_thread()
            self._waiting[other] = me, self._done.pop(me)
            self._hand_on()
            self._await(me)

    def _get_thread(self) -> int:
        """Return the calling thread, or the owner if it does not take part."""
        me = threading.get_ident()
        return me if me in self._done else self._owner

    def _hand_on(self) -> None:
        if self._done:
            self._turn = min(self._done, key=lambda thread: self._done[thread])
            self._changed.notify_all()

    def _await(self, me: int) -> None:
        while self._turn != me:
            self._changed.wait()


class _Turn:
    """A thread that takes turns with the one that started it."""

    def __init__(self, turns: _Turns, function: Callable[[], None]) -> None:
        self._turns = turns
        self._function = function
        self._joined = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="background of a solve")
        self._began_with = turns.get_work()
        self.running = True
        self._thread.start()
        self._joined.wait()

    def _run(self) -> None:
        self._turns.join(threading.get_ident(), self._began_with)
        self._joined.set()
        self._turns.await_turn()
        try:
            self._function()
        finally:
            self.running = False
            self._turns.leave()

    def wait(self, most: float) -> None:
        """Spend `most` of the clock, in which the thread may run."""
        self._turns.spend(most)

    def end(self, most: float) -> None:
        """Wait for its end after a request to stop, however long that takes."""
        if self.running and self._thread.ident is not None:
            self._turns.wait_for(self._thread.ident)
        self._thread.join()


Clock = WallClock | WorkClock
BackgroundThread = _Thread | _Turn


def measure_rest(clock: Clock) -> float:
    """Return the amount left until the limit."""
    return clock.limit - clock.now


def poll(clock: Clock, work: float, should_stop: Callable[[], bool] | None) -> bool:
    """Spend `work`, and return True at the limit of the clock, or if `should_stop` returns True."""
    clock.spend(work)
    return measure_rest(clock) <= 0 or (should_stop is not None and should_stop())
