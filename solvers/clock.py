"""What a solve may spend: seconds, or work that is counted and not timed."""

import threading
import time
from collections.abc import Callable
from typing import Protocol

from graphs.units import format_seconds

_AHEAD = 0.02  # units of work by which a thread may be ahead of another before it waits for it


class Clock(Protocol):
    """Tells what has been spent, and how much may be. It runs from when it is made.

    All durations of a solver are in its unit: a second, or the work of about a second.

    Attributes:
        limit: what may be spent.
        counts_work: whether it counts work, so that whatever the machine does the same is done between two readings.
    """

    limit: float
    counts_work: bool

    @property
    def now(self) -> float:
        """What has been spent, by the thread that asks."""
        ...

    @property
    def seconds(self) -> float:
        """Wall time since it was made."""
        ...

    def spend(self, work: float) -> None:
        """Take note of work that was done."""
        ...

    def wait(self, duration: float) -> None:
        """Let so much go by."""

    def part(self, limit: float) -> "Clock":
        """A clock that starts now and has this limit, or less where less is left."""
        ...

    def start(self, function: Callable[[], None]) -> "BackgroundThread":
        """Call `function` in a thread beside this one."""
        ...

    def amount(self, spent: float) -> str:
        """`spent` for people to read, with its unit."""
        ...


class BackgroundThread(Protocol):
    """A thread that was started beside another."""

    @property
    def running(self) -> bool:
        """Whether it has not ended yet."""
        ...

    def wait(self, most: float) -> None:
        """Let it go on until it ends, or for so long."""
        ...

    def end(self, most: float) -> None:
        """Wait for its end, which it has been asked for; not longer than `most` seconds unless work is counted."""
        ...


def left(clock: Clock) -> float:
    """Until the limit."""
    return clock.limit - clock.now


class WallClock:
    """Seconds: the best schedule that this machine finds in them."""

    counts_work = False

    def __init__(self, limit: float = 3600.0) -> None:
        self.limit = limit
        self._began = time.monotonic()

    @property
    def now(self) -> float:
        """As ``Clock.now``."""
        return time.monotonic() - self._began

    seconds = now

    def spend(self, work: float) -> None:
        """As ``Clock.spend``: seconds pass by themselves."""

    def wait(self, duration: float) -> None:
        """As ``Clock.wait``."""
        time.sleep(max(0.0, min(duration, left(self))))

    def part(self, limit: float) -> "WallClock":
        """As ``Clock.part``."""
        return WallClock(min(limit, left(self)))

    def start(self, function: Callable[[], None]) -> "_Thread":
        """As ``Clock.start``."""
        return _Thread(function)

    def amount(self, spent: float) -> str:
        """As ``Clock.amount``."""
        return format_seconds(spent)


class _Thread:
    def __init__(self, function: Callable[[], None]) -> None:
        self._thread = threading.Thread(target=function, daemon=True, name="background of a solve")
        self._thread.start()

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def wait(self, most: float) -> None:
        self._thread.join(most)

    def end(self, most: float) -> None:
        self._thread.join(most)


class WorkClock:
    """Work, in units of about a second each on a processor of the year 2020: the same schedule on every machine.

    What is counted is what is done (iterations of the simplex method, executions that are tried), as by the
    deterministic time of CPLEX or the work units of Gurobi. Threads take turns: whoever has done least goes on, so
    that what each finds when it looks at the other does not depend on their speed.
    """

    counts_work = True

    def __init__(self, limit: float = 3600.0, *, of: "WorkClock | None" = None) -> None:
        self.limit = limit
        self._turns: _Turns = of._turns if of is not None else _Turns()
        self._since = self._turns.done() if of is not None else 0.0
        self._began = time.monotonic()

    @property
    def now(self) -> float:
        """As ``Clock.now``."""
        return self._turns.done() - self._since

    @property
    def seconds(self) -> float:
        """As ``Clock.seconds``."""
        return time.monotonic() - self._began

    def spend(self, work: float) -> None:
        """As ``Clock.spend``; returns when no other thread is behind by more than a little."""
        self._turns.spend(work)

    def wait(self, duration: float) -> None:
        """As ``Clock.wait``: it counts as work."""
        self.spend(duration)

    def part(self, limit: float) -> "WorkClock":
        """As ``Clock.part``."""
        return WorkClock(min(limit, left(self)), of=self)

    def start(self, function: Callable[[], None]) -> "_Turn":
        """As ``Clock.start``; it has its first turn when this thread has done more."""
        return _Turn(self._turns, function)

    def amount(self, spent: float) -> str:
        """As ``Clock.amount``."""
        return f"{spent:.4g} units of work"


class _Turns:
    """The work that each of several threads has done; one of them runs at a time."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        # In the order in which they joined, which decides among equals.
        self._done: dict[int, float] = {threading.get_ident(): 0.0}
        self._owner = self._turn = threading.get_ident()
        self._waiting: dict[int, tuple[int, float]] = {}  # for whose end: who, and what it had done

    def done(self) -> float:
        """By the thread that asks."""
        return self._done[self._me()]

    def spend(self, work: float) -> None:
        me = self._me()
        self._done[me] += work
        if len(self._done) > 1 and self._done[me] > min(self._done.values()) + _AHEAD:
            with self._changed:
                self._hand_on()
                self._await(me)

    def join(self, me: int, done: float) -> None:
        """Thread `me` takes part, as if it had done as much as that."""
        with self._changed:
            self._done[me] = done

    def await_turn(self) -> None:
        with self._changed:
            self._await(threading.get_ident())

    def leave(self) -> None:
        """This thread takes no part any more; who waits for its end does again, as if it had done as much at least."""
        with self._changed:
            me = threading.get_ident()
            done = self._done.pop(me)
            if me in self._waiting:
                waiting, had_done = self._waiting.pop(me)
                self._done[waiting] = max(had_done, done)
            self._hand_on()

    def wait_for(self, other: int) -> None:
        """This thread has no turn until thread `other`, which takes part, has left."""
        with self._changed:
            me = self._me()
            self._waiting[other] = me, self._done.pop(me)
            self._hand_on()
            self._await(me)

    def _me(self) -> int:
        """Who asks: one of those that take part, or one that speaks for the first of them."""
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
        self._began_with = turns.done()
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
        self._turns.spend(most)

    def end(self, most: float) -> None:
        if self.running and self._thread.ident is not None:
            self._turns.wait_for(self._thread.ident)
        self._thread.join()
