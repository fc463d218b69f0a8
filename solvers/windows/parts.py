"""Background searches of smaller sets of options: their schedules count for the whole search, their proofs do not.

With fewer options schedules are found faster, and more options should never make a solve slower. So the sets of
``option_sets.py`` are searched at the same time. Each search runs as if there were no other options, and ends when its gap is
within the tolerance, when its bound is above the best schedule of the whole, or when it is behind and does not improve. Then it
costs nothing.

With a clock of seconds and with optional ops, each has its own process, some with a low priority, since threads share the
interpreter's lock. With a clock of work they are threads, which take turns.

Tried and given up: the graph without transfers first, for a third of the time; and threads for all parts, where the bound had a
fifth of a core. Known weakness: sets that are not in the table, such as two of three options, are not searched alone, so a solve
with all three may be slower than with those two.
"""

import os
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from planner.graphs.ir import Graph
from planner.solvers.child_process import describe_error
from planner.solvers.clock import BackgroundThread, Clock, measure_rest
from planner.solvers.request import Request
from planner.solvers.tolerance import Tolerance
from planner.solvers.windows.decoding.decode import Trial
from planner.solvers.windows.params import WindowsParams
from planner.solvers.windows.part_process import Inbox, PartProcess, PartTask, SearchEnd
from planner.solvers.windows.search import Search

POLL = 0.05  # of the clock, between two polls of background searches
# Steps of lower priority of a search, each a fourth less of a core:
AFTER = 10  # if others start first,
LAST = 15  # and if those start too
_GRACE_S = 0.5  # wait of the end of a solve for a background thread
_BETWEEN_SHARE = 0.05  # of the limit: time between the starts of two processes, if that is less than the parameter


def start_in_background(search: Search, function: Callable[[], object], *, nice: int = 0) -> BackgroundThread:
    """Call `function` in a background thread; an exception ends the search as failed.

    Args:
        nice: steps of lower priority, where threads have priorities.
    """
    return search.clock.start(partial(_run_nicely, search, function, nice))


def _run_nicely(search: Search, function: Callable[[], object], nice: int) -> None:
    if nice and sys.platform == "linux":
        with suppress(OSError):
            # Threads that it starts, such as HiGHS's, inherit this priority.
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), os.getpriority(os.PRIO_PROCESS, 0) + nice)
    try:
        function()
    except Exception as error:  # noqa: BLE001
        fail(search, describe_error(error))


def end_background(thread: BackgroundThread) -> None:
    """Wait for a thread that was asked to stop.

    It may be building a large model; it polls after that, and changes nothing then.
    """
    thread.end(_GRACE_S)


def wait_for(search: Search, background: "Sequence[BackgroundThread | Part]", should_stop: Callable[[], bool]) -> None:
    """Wait until all of `background` have ended, or `should_stop`, and report progress meanwhile."""
    while (running := [one for one in background if one.running]) and not should_stop():
        search.progress.tell()
        running[0].wait(POLL)


def turn_of(search: Search, place: int) -> float:
    """Return the start of the search at this position; with a clock of seconds they start one after another."""
    params = search.params.parts
    return 0.0 if search.clock.counts_work else place * min(params.between, _BETWEEN_SHARE * search.clock.limit)


def start_process(
    search: Search,
    graph: Graph,
    run: Callable[[Search, Inbox], None],
    *,
    params: WindowsParams,
    nice: int = 0,
    starts_others: bool = False,
) -> PartProcess | None:
    """Search `graph`, the whole or a part, in another process up to the limit; return None if that is not allowed or fails.

    Args:
        run, params, nice, starts_others: as in ``PartTask``.
    """
    if search.clock.counts_work or not search.may_start_processes:
        return None
    try:
        clock, tolerance = search.clock, search.request.tolerance
        return PartProcess(PartTask(graph, search.budget_bytes, tolerance, params, measure_rest(clock), run, nice, starts_others))
    except OSError:
        return None  # a thread is used instead


def note_end(search: Search, end: SearchEnd) -> None:
    """Record the end of a search in another process."""
    search.models.note_size(end.largest)
    if end.failure:
        fail(search, end.failure)


def fail(search: Search, failure: str) -> None:
    """End the search because of an internal error; schedules found so far remain valid."""
    search.incumbent.fail(f"looking for schedules failed: {failure}")


def search_of_part(
    whole: Search,
    graph: Graph,
    clock: Clock,
    tolerance: Tolerance,
    on_poll: Callable[[Trial | None], bool | None],
    *,
    described: str,
) -> Search:
    """Return a search of `graph`, a part, for the calling thread; it stops when it cannot improve the whole.

    Args:
        on_poll: gets its best schedule at each poll; True stops it.
        described: the part, in reports of progress.
    """

    def stop() -> bool:
        ended = on_poll(part.incumbent.best)
        whole.progress.tell(f"{described}: {part.progress.activity}")
        if ended or whole.stopping.poll_stop() or whole.stopping.is_solved():
            return True
        return part.incumbent.bound_s >= whole.incumbent.best_s

    part = Search.of(Request(graph, whole.budget_bytes, tolerance, clock, should_stop=stop, params=whole.params))
    return part


@dataclass(frozen=True, slots=True)
class OwnProcess:
    """The process of one of several parts, with a clock of seconds.

    Attributes:
        of: number of parts, which together may use as much memory as the whole.
        nice, starts_others: as in ``PartTask``.
    """

    place: int
    of: int
    nice: int
    starts_others: bool = False


class Part:
    """A smaller set of options that is searched in the background of the whole.

    Attributes:
        alone: True if no smaller parts are searched for it.
        best: its best schedule so far.
    """

    thread: BackgroundThread

    def __init__(
        self,
        whole: Search,
        graph: Graph,
        receive: Callable[[Trial], object],
        *,
        alone: bool = False,
        process: OwnProcess | None = None,
    ) -> None:
        """Create the part without starting its search.

        Args:
            receive: called with each better schedule of the part.
        """
        self.whole = whole
        self.graph = graph
        self.alone = alone
        self.best: Trial | None = None
        self._receive = receive
        self._process = process
        self._better_at = 0.0  # by the clock of the part
        self._ended = False

    @property
    def running(self) -> bool:
        """True until its search has ended."""
        return self.thread.running

    def wait(self, most: float) -> None:
        """Wait until its search has ended, up to `most` of the clock."""
        self.thread.wait(most)

    def await_turn(self) -> bool:
        """Wait for its start; return False if the solve ends before."""
        whole = self.whole
        begin = turn_of(whole, self._process.place if self._process is not None else 0)
        while whole.clock.now < begin:
            if self._ended or whole.stopping.halted:
                return False
            whole.clock.wait(POLL)
        return True

    def start_process(self, run: Callable[[Search, Inbox], None]) -> PartProcess | None:
        """Start its process with the search `run` and return it; None if it has none."""
        own, params = self._process, self.whole.params
        if own is None:
            return None
        params = replace(params, bound=replace(params.bound, most_bytes=params.bound.most_bytes // own.of))
        return start_process(self.whole, self.graph, run, params=params, nice=own.nice, starts_others=own.starts_others)

    def follow(self, process: PartProcess) -> bool:
        """Receive the schedules of its process, until it ends or should end; return False if the process died."""
        whole = self.whole
        clock, sent_s = whole.clock.start_part(whole.clock.limit), np.inf
        while not (self._note(self.best, clock) or whole.stopping.poll_stop() or whole.stopping.is_solved()):
            if whole.incumbent.best_s < sent_s:
                sent_s = whole.incumbent.best_s
                process.send(sent_s)
            news = process.receive(POLL)
            if isinstance(news, SearchEnd):
                note_end(whole, news)
                return not news.died
            if news is not None:
                self._note(news, clock)
        return True

    def search(self) -> Search:
        """Return the search for this thread."""
        clock = self.whole.clock.start_part(self.whole.clock.limit)
        tolerance = self.whole.request.tolerance
        return search_of_part(
            self.whole, self.graph, clock, tolerance, lambda best: self._note(best, clock), described="with fewer options"
        )

    def close(self, search: Search) -> None:
        """Record the end of its search."""
        self._note(search.incumbent.best, search.clock)
        self.whole.models.note_size(search.models.largest)

    def finish(self) -> None:
        """Wait for its search up to the limit, which it may reach later than the whole, if it can still improve the whole."""
        wait_for(self.whole, [self], self._is_useless)

    def _is_useless(self) -> bool:
        clock, stopping = self.whole.clock, self.whole.stopping
        is_late = not clock.counts_work and measure_rest(clock) <= 0
        return is_late or stopping.is_interrupted() or stopping.halted or stopping.poll_satisfied()

    def end(self) -> None:
        """Stop its search."""
        self._ended = True
        end_background(self.thread)

    def _note(self, best: Trial | None, clock: Clock) -> bool:
        """Record its best schedule; return True if its search should end."""
        now, params = clock.now, self.whole.params.parts
        if self.best is not best:
            self.best, self._better_at = best, now
            if best is not None:
                self._receive(best)
        behind = self.whole.incumbent.best_s < (np.inf if best is None else best.time_s)
        return self._ended or (behind and now - self._better_at > max(params.least_idle, params.idle_share * now))
