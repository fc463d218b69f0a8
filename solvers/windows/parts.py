"""Searches in a part of the choices, beside that of the whole: what one finds is found for the whole, what it proves is not.

With fewer choices schedules are found more easily, and none of the whole's best ones is slower. So a solve begins with the
next smaller set of choices beside that of all of them, and that one with the next smaller still: the program alone, what runs on
the computation's stream, everything. Each goes as it would if no more was allowed, and ends as soon: when it is within its own
tolerance. Or before, when its bound is above the best schedule of the whole; or when it is behind that and gets no better. From
then on it costs nothing.

Where time is counted and there are options, each has a process of its own, some at a low priority, for threads share the
interpreter's lock. Where work is counted they are threads, which take turns.
"""

import os
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from graphs.ir import Graph
from solvers.child_process import description
from solvers.clock import BackgroundThread, Clock, left
from solvers.request import Request
from solvers.tolerance import Tolerance
from solvers.windows.decoding.decode import Trial
from solvers.windows.params import WindowsParams
from solvers.windows.part_process import Inbox, PartProcess, SearchEnd, Task
from solvers.windows.search import Search

POLL = 0.05  # of the clock, between two looks at what is searched beside
# Steps of priority that a search is lower by, of which each is a fourth less of a core:
AFTER = 10  # if others go first,
LAST = 15  # and if these do too
_GRACE_S = 0.5  # how long the end of a solve waits for a thread beside it


def start_in_background(search: Search, function: Callable[[], object], *, nice: int = 0) -> BackgroundThread:
    """Call `function` in a thread beside this one; what it raises ends the search.

    Args:
        nice: steps of priority that it is lower by, where threads have priorities.
    """

    def run() -> None:
        if nice and sys.platform == "linux":
            with suppress(OSError):
                # What it starts in turn, such as HiGHS, has this priority too.
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), os.getpriority(os.PRIO_PROCESS, 0) + nice)
        try:
            function()
        except Exception as error:  # noqa: BLE001 (what was found until then is still an answer)
            _fail(search, description(error))

    return search.clock.start(run)


def end_background(thread: BackgroundThread) -> None:
    """Wait for a thread that has been asked to end.

    It may be in the middle of building a large model; it looks up after that, and changes nothing then.
    """
    thread.end(_GRACE_S)


def wait_for(search: Search, background: "Sequence[BackgroundThread | Part]", should_stop: Callable[[], bool]) -> None:
    """Wait until all beside this have ended, or `should_stop`; meanwhile progress is reported."""
    while (running := [one for one in background if one.running]) and not should_stop():
        search.progress.tell()
        running[0].wait(POLL)


def turn_of(search: Search, place: int) -> float:
    """Return when the one of this place begins, of those that begin one after another where time is counted."""
    params = search.params.parts
    return 0.0 if search.clock.counts_work else place * min(params.between, params.between_share * search.clock.limit)


def start_process(
    search: Search,
    graph: Graph,
    run: Callable[[Search, Inbox], None],
    *,
    params: WindowsParams,
    nice: int = 0,
    starts_others: bool = False,
) -> PartProcess | None:
    """Search `graph`, the whole or a part, in another process, as long as there is time; None if that is not to be, or cannot.

    Args:
        search: of the whole.
        run, params, nice, starts_others: as in ``Task``.
    """
    if search.clock.counts_work or not search.may_start_processes:
        return None
    try:
        clock, tolerance = search.clock, search.request.tolerance
        return PartProcess(Task(graph, search.budget_bytes, tolerance, params, left(clock), run, nice, starts_others))
    except OSError:
        return None  # a thread needs nothing that there might be too little of


def note_end(search: Search, end: SearchEnd) -> None:
    """Take note of what a search in another process came to."""
    search.models.note_size(end.largest)
    if end.failure:
        _fail(search, end.failure)


def _fail(search: Search, failure: str) -> None:
    search.incumbent.fail(f"looking for schedules failed: {failure}")


def search_of_part(
    whole: Search, graph: Graph, clock: Clock, tolerance: Tolerance, on_poll: Callable[[Trial | None], bool | None]
) -> Search:
    """Return a search in `graph`, a part of the choices, for the thread that asks for it; it ends when it is of no use.

    Args:
        clock: of its own.
        on_poll: is told its best schedule whenever it asks whether to stop; True ends it.
    """

    def stop() -> bool:
        ended = on_poll(part.incumbent.best)
        whole.progress.tell(f"in a part of the choices: {part.progress.activity}")
        if ended or whole.stopping.stopped() or whole.stopping.solved():
            return True
        return part.incumbent.bound_s >= whole.incumbent.best_s

    part = Search.of(Request(graph, whole.budget_bytes, tolerance, clock, should_stop=stop, params=whole.params))
    return part


@dataclass(frozen=True, slots=True)
class OwnProcess:
    """The process that one of several parts has where time is counted.

    Attributes:
        place: as in ``turn_of``.
        of: how many there are, which together have as much memory as the whole.
        nice, starts_others: as in ``Task``.
    """

    place: int
    of: int
    nice: int
    starts_others: bool = False


class Part:
    """A part of the choices that is searched beside the whole.

    Attributes:
        alone: True if no smaller parts are searched beside it.
        best: its best schedule so far.
        thread: in which it is searched.
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
        """What is searched.

        Args:
            receive: has the whole know of a schedule of the part, each time that it is better.
            process: its process; None if it is a thread.
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
        """True until it has ended."""
        return self.thread.running

    def wait(self, most: float) -> None:
        """Wait until it has ended, or for so long."""
        self.thread.wait(most)

    def await_turn(self) -> bool:
        """Wait until it is to begin; return False if the solve ends before."""
        whole = self.whole
        begin = turn_of(whole, self._process.place if self._process is not None else 0)
        while whole.clock.now < begin:
            if self._ended or whole.stopping.halted:
                return False
            whole.clock.wait(POLL)
        return True

    def start_process(self, run: Callable[[Search, Inbox], None]) -> PartProcess | None:
        """Start the process in which `run` searches it, if it has one of its own."""
        own, params = self._process, self.whole.params
        if own is None:
            return None
        params = replace(params, bound=replace(params.bound, most_bytes=params.bound.most_bytes // own.of))
        return start_process(self.whole, self.graph, run, params=params, nice=own.nice, starts_others=own.starts_others)

    def follow(self, process: PartProcess) -> None:
        """Take what a process finds, until it ends or is to."""
        whole = self.whole
        clock, sent_s = whole.clock.part(whole.clock.limit), np.inf
        while not (self._note(self.best, clock) or whole.stopping.stopped() or whole.stopping.solved()):
            if whole.incumbent.best_s < sent_s:
                sent_s = whole.incumbent.best_s
                process.send(sent_s)
            news = process.receive(POLL)
            if isinstance(news, SearchEnd):
                note_end(whole, news)
                return
            if news is not None:
                self._note(news, clock)

    def search(self) -> Search:
        """Return the search of it in this thread."""
        clock = self.whole.clock.part(self.whole.clock.limit)
        return search_of_part(self.whole, self.graph, clock, self.whole.request.tolerance, lambda best: self._note(best, clock))

    def close(self, search: Search) -> None:
        """Take note of what its search came to."""
        self._note(search.incumbent.best, search.clock)
        self.whole.models.note_size(search.models.largest)

    def finish(self) -> None:
        """Let it go on to the limit, which a thread that does all its work at once comes to before others, if that is of use."""
        whole = self.whole

        def of_no_use() -> bool:
            if not whole.clock.counts_work and left(whole.clock) <= 0:
                return True
            return whole.stopping.interrupted() or whole.stopping.halted or whole.stopping.satisfied()

        wait_for(whole, [self], of_no_use)

    def end(self) -> None:
        """End it."""
        self._ended = True
        end_background(self.thread)

    def _note(self, best: Trial | None, clock: Clock) -> bool:
        """Take note of its best schedule; return True if it is to end."""
        now, params = clock.now, self.whole.params.parts
        if self.best is not best:
            self.best, self._better_at = best, now
            if best is not None:
                self._receive(best)
        behind = self.whole.incumbent.best_s < (np.inf if best is None else best.time_s)
        return self._ended or (behind and now - self._better_at > max(params.least_idle, params.idle_share * now))
