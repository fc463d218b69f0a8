"""A search in a part of the choices: what it finds is found for the whole, what it proves is not.

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
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import Self

import numpy as np

from graphs.ir import Graph
from solvers.child_process import description
from solvers.clock import Beside, Clock, left
from solvers.request import Request
from solvers.tolerance import Tolerance
from solvers.windows.decoding.decode import Trial
from solvers.windows.params import WindowsParams
from solvers.windows.search import Search
from solvers.windows.strategies.part_process import Ended, Heard, PartProcess, Task

POLL = 0.05  # of the clock, between two looks at what is searched beside
# Steps of priority that a search is lower by, of which each is a fourth less of a core:
AFTER = 10  # if others go first,
LAST = 15  # and if these do too
_GRACE_S = 0.5  # how long the end of a solve waits for a thread beside it


def part(
    search: Search,
    graph: Graph,
    clock: Clock,
    tolerance: Tolerance,
    on_stop: Callable[[], bool | None] = lambda: None,
) -> Search:
    """A search in `graph`, a part of the choices, by the thread that asks for it; it ends when it is of no use.

    Args:
        clock: of its own.
        on_stop: called when it asks for that; True ends it.
    """

    def stop() -> bool:
        ended = on_stop()
        search.progress.tell(f"in a part of the choices: {sub.progress.activity}")
        return (
            bool(ended)
            or search.stopping.stopped()
            or search.stopping.solved()
            or sub.incumbent.bound_s >= search.incumbent.best_s
        )

    sub = Search.of(Request(graph, search.budget_bytes, tolerance, clock, should_stop=stop, params=search.params))
    return sub


def start_beside(search: Search, function: Callable[[], None], *, nice: int = 0) -> Beside:
    """Search in a thread beside this one.

    Args:
        nice: steps of priority that it is lower by, where threads have priorities.
    """

    def find() -> None:
        if nice and sys.platform == "linux":
            with suppress(OSError):
                # What it starts in turn, such as HiGHS, has this priority too.
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), os.getpriority(os.PRIO_PROCESS, 0) + nice)
        try:
            function()
        except Exception as error:  # noqa: BLE001 (what was found until then is still an answer)
            _fail(search, description(error))

    return search.clock.start(find)


def end_beside(beside: Beside) -> None:
    """Wait for a thread that has been asked to end.

    It may be in the middle of building a large model; it looks up after that, and changes nothing then.
    """
    beside.end(_GRACE_S)


def begin_of(search: Search, place: int) -> float:
    """When the one of this place begins, of those that begin one after another where time is counted."""
    params = search.params.parts
    return 0.0 if search.clock.counts_work else place * min(params.between, params.between_share * search.clock.limit)


def start_process(
    search: Search,
    graph: Graph,
    run: Callable[[Search, Heard], None],
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


def take_end(search: Search, end: Ended) -> None:
    """Take note of what a search in another process came to."""
    search.models.note_size(end.largest)
    if end.failure:
        _fail(search, end.failure)


def _fail(search: Search, failure: str) -> None:
    search.incumbent.fail(f"looking for schedules failed: {failure}")


def _without_hearing(search: Search, _: Heard, *, run: Callable[[Search], None]) -> None:
    run(search)


@dataclass(frozen=True, slots=True)
class Own:
    """The process that one of several parts has where time is counted.

    Attributes:
        place: as in ``begin_of``.
        of: how many there are, which together have as much memory as the whole.
        nice, starts_others: as in ``Task``.
    """

    place: int
    of: int
    nice: int
    starts_others: bool = False


class PartBeside:
    """A part of the choices that is searched beside the whole, in a ``with`` statement that ends it.

    Attributes:
        best: its best schedule so far.
    """

    def __init__(
        self,
        search: Search,
        graph: Graph,
        run: Callable[[Search], None],
        take: Callable[[Trial], object],
        own: Own | None = None,
    ) -> None:
        """What it searches.

        Args:
            search: of the whole.
            graph: the part.
            run: searches it.
            take: has the whole know of a schedule of the part.
            own: its process; None if it is a thread.
        """
        self.search = search
        self.own = own
        self.graph = graph
        self.run = run
        self.take = take
        self.best: Trial | None = None
        self._better_at = 0.0  # by the clock of the part
        self._told: Trial | None = None
        self._may_tell = self._ended = False

    def __enter__(self) -> Self:
        self._beside = start_beside(self.search, self._go)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self.finish()
        self._ended = True
        end_beside(self._beside)

    @property
    def running(self) -> bool:
        """Whether it has not ended yet."""
        return self._beside.running

    def tell(self) -> None:
        """Let the whole know of its schedules: of those there are, and from now on of each as it is found."""
        self._may_tell = True
        if self.best is not None and self.best is not self._told:
            self._told = self.best
            self.take(self.best)

    def finish(self) -> None:
        """Let it go on to the limit, which a thread that does all its work at once comes to before others, if that is of use."""
        self.tell()
        search = self.search
        while self.running and (search.clock.counts_work or left(search.clock) > 0):
            if search.stopping.interrupted() or search.stopping.halted or search.stopping.satisfied():
                break
            search.progress.tell()
            self.wait(POLL)

    def wait(self, most: float) -> None:
        """Until it has ended, or for so long."""
        self._beside.wait(most)

    def _go(self) -> None:
        search = self.search
        begin = begin_of(search, self.own.place if self.own is not None else 0)
        while search.clock.now < begin:
            if self._ended or search.stopping.halted:
                return
            search.clock.wait(POLL)
        process = self._start(self.own) if self.own is not None else None
        if process is None:
            self._search()
        else:
            with process:
                self._follow(process)

    def _start(self, own: Own) -> PartProcess | None:
        params = self.search.params
        bound = replace(params.bound, most_bytes=params.bound.most_bytes // own.of)
        return start_process(
            self.search,
            self.graph,
            partial(_without_hearing, run=self.run),
            params=replace(params, bound=bound),
            nice=own.nice,
            starts_others=own.starts_others,
        )

    def _search(self) -> None:
        """Search it in this thread."""
        search = self.search
        clock = search.clock.part(search.clock.limit)
        sub = part(search, self.graph, clock, search.request.tolerance, lambda: self._look(sub.incumbent.best, clock))
        self.run(sub)
        self._look(sub.incumbent.best, clock)
        search.models.note_size(sub.models.largest)

    def _follow(self, process: PartProcess) -> None:
        """Take what it finds elsewhere."""
        search = self.search
        clock, told_s = search.clock.part(search.clock.limit), np.inf
        while not (self._look(self.best, clock) or search.stopping.stopped() or search.stopping.solved()):
            if search.incumbent.best_s < told_s:
                told_s = search.incumbent.best_s
                process.tell(told_s)
            news = process.hear(POLL)
            if isinstance(news, Ended):
                take_end(search, news)
                return
            if news is not None:
                self._look(news, clock)

    def _look(self, best: Trial | None, clock: Clock) -> bool:
        """Take note of its best schedule; whether it is to end."""
        now, params = clock.now, self.search.params.parts
        if self.best is not best:
            self.best, self._better_at = best, now
        if self._may_tell:
            self.tell()
        behind = self.search.incumbent.best_s < (np.inf if best is None else best.time_s)
        return self._ended or (behind and now - self._better_at > max(params.least_idle, params.idle_share * now))
