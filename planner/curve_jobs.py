"""Solving one graph at many budgets: here, or in processes beside this one."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import wait as wait_for
from multiprocessing.synchronize import Event

from graphs.errors import PlannerError
from graphs.ir import Graph
from solvers.registry import get_solver
from solvers.result import Result

_POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class Job:
    """What is solved at every budget, and how."""

    graph: Graph
    solver: str
    tolerance: float
    time_limit_s: float

    def solve(self, budget_bytes: int, should_stop: Callable[[], bool]) -> Result:
        """Solve at `budget_bytes`."""
        return get_solver(self.solver)(
            self.graph, budget_bytes, tolerance=self.tolerance, time_limit_s=self.time_limit_s, should_stop=should_stop
        )


def solve_here(job: Job, take: Callable[[], int | None], should_stop: Callable[[], bool]) -> Iterator[Result]:
    """The results at the budgets that `take` names, one after the other, until it names none or `should_stop`."""
    while not should_stop() and (budget_bytes := take()) is not None:
        yield job.solve(budget_bytes, should_stop)


def solve_in_processes(job: Job, take: Callable[[], int | None], should_stop: Callable[[], bool], jobs: int) -> Iterator[Result]:
    """The same with `jobs` budgets at a time; once `should_stop`, the solves under way end with what they have.

    Raises:
        PlannerError: a process ended by itself.
    """
    # Spawned, not forked: solvers have threads. Its state is not ours, so all it needs is passed.
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    pool = ProcessPoolExecutor(jobs, mp_context=context, initializer=_begin, initargs=(job, stop))
    running: set[Future[Result]] = set()
    try:
        while True:
            while len(running) < jobs and not should_stop() and (budget_bytes := take()) is not None:
                with _uninterrupted():
                    running.add(pool.submit(_solve, budget_bytes))
            if not running:
                return
            done, running = wait(running, timeout=_POLL_S, return_when=FIRST_COMPLETED)
            if should_stop():
                stop.set()
            for future in done:
                yield future.result()
    except BrokenProcessPool:
        raise PlannerError("a solving process was ended from outside, perhaps because memory ran out: try --jobs 1") from None
    finally:
        stop.set()
        pool.shutdown(cancel_futures=True)


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Processes started meanwhile take no notice of Ctrl-C, from their first moment: this one tells them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


# In the solving process.

_given: tuple[Job, Event] | None = None


def _begin(job: Job, stop: Event) -> None:
    global _given
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _given = job, stop
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait_for([parent.sentinel])
        os._exit(1)


def _solve(budget_bytes: int) -> Result:
    assert _given is not None
    job, stop = _given
    return job.solve(budget_bytes, stop.is_set)
