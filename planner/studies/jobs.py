"""One job for many tasks: here, or in processes beside this one."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.connection import wait as wait_for
from multiprocessing.synchronize import Event
from typing import Any, TypeAlias, TypeVar

from graphs.errors import PlannerError

_POLL_S = 0.2


Task = TypeVar("Task")
Done = TypeVar("Done")
# What is done with a task: can be pickled; the second argument is polled, and once True it ends with what it has.
Job: TypeAlias = Callable[[Task, Callable[[], bool]], Done]


def run_here(job: Job[Task, Done], take: Callable[[], Task | None], should_stop: Callable[[], bool]) -> Iterator[Done]:
    """What becomes of the tasks that `take` names, one after the other, until it names none or `should_stop`."""
    while not should_stop() and (task := take()) is not None:
        yield job(task, should_stop)


def run_in_processes(
    job: Job[Task, Done], take: Callable[[], Task | None], should_stop: Callable[[], bool], jobs: int
) -> Iterator[Done]:
    """The same with `jobs` tasks at a time; once `should_stop`, those under way end with what they have.

    Raises:
        PlannerError: a process ended by itself.
    """
    # Spawned, not forked: solvers have threads. Its state is not ours, so all it needs is passed.
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    pool = ProcessPoolExecutor(jobs, mp_context=context, initializer=_begin, initargs=(job, stop))
    running: set[Future[Done]] = set()
    try:
        while True:
            while len(running) < jobs and not should_stop() and (task := take()) is not None:
                with _uninterrupted():
                    running.add(pool.submit(_run, task))
            if not running:
                return
            done, running = wait(running, timeout=_POLL_S, return_when=FIRST_COMPLETED)
            if should_stop():
                stop.set()
            for future in done:
                yield future.result()
    except BrokenProcessPool:
        raise PlannerError("a process was ended from outside, perhaps because memory ran out: try --jobs 1") from None
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


# In the process beside.

_given: tuple[Job[Any, Any], Event] | None = None


def _begin(job: Job[Any, Any], stop: Event) -> None:
    global _given
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _given = job, stop
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait_for([parent.sentinel])
        os._exit(1)


def _run(task: Any) -> Any:
    assert _given is not None
    job, stop = _given
    return job(task, stop.is_set)
