"""One job for many tasks on executors of ``concurrent.futures``: in this process, in several processes, or on a cluster."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from multiprocessing.connection import wait as wait_for
from multiprocessing.synchronize import Event
from typing import Any, ParamSpec, TypeVar

from planner.graphs.errors import PlannerError
from planner.studies.cluster import start_on_cluster
from planner.studies.workers import POLL_S, Done, Job, Task, Workers

Given = ParamSpec("Given")
Returned = TypeVar("Returned")


def run(
    job: Job[Task, Done],
    take: Callable[[], Task | None],
    should_stop: Callable[[], bool],
    *,
    jobs: int = 1,
    cluster: str | None = None,
) -> Iterator[Done]:
    """Yield the result of each task of `take` as soon as it is known, until `take` returns None or `should_stop` returns True.

    After a stop, running tasks end with what they have.

    Args:
        take: returns the next task; None if there is none left.
        jobs: number of parallel tasks: one runs in this process, several run in other processes.
        cluster: address of the scheduler of a Dask cluster that runs them instead, one per thread.

    Raises:
        PlannerError: `jobs` is out of range; a process or the cluster was lost, or cannot be reached.
    """
    with _start_workers(job, should_stop, jobs, cluster) as workers:
        running: set[Future[Done]] = set()
        while True:
            while len(running) < workers.count and not should_stop() and (task := take()) is not None:
                running.add(workers.submit(task))
            if not running:
                return
            done, running = wait(running, timeout=POLL_S, return_when=FIRST_COMPLETED)
            if should_stop():
                workers.stop()
            if not done:
                workers.check()
            for future in done:
                yield future.result()


def _start_workers(
    job: Job[Task, Done], should_stop: Callable[[], bool], jobs: int, cluster: str | None
) -> AbstractContextManager[Workers[Task, Done]]:
    if jobs < 1:
        raise PlannerError(f"jobs is {jobs!r}: must be at least 1")
    if cluster is not None:
        return start_on_cluster(job, cluster)
    return nullcontext(Workers(partial(_do_here, job, should_stop), count=1)) if jobs == 1 else _start_processes(job, jobs)


def _do_here(job: Job[Task, Done], should_stop: Callable[[], bool], task: Task) -> Future[Done]:
    future: Future[Done] = Future()
    future.set_result(job(task, should_stop))
    return future


@contextmanager
def _start_processes(job: Job[Task, Done], jobs: int) -> Iterator[Workers[Task, Done]]:
    # Spawned, not forked: solvers have threads. A process does not inherit state, so all it needs is passed.
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    executor = _Undisturbed(jobs, mp_context=context, initializer=_begin, initargs=(job, stop))
    try:
        yield Workers(lambda task: executor.submit(_run, task), count=jobs, stop=stop.set)
    except BrokenProcessPool:
        raise PlannerError("a process was ended from outside, perhaps because memory ran out: try --jobs 1") from None
    finally:
        stop.set()
        executor.shutdown(cancel_futures=True)


class _Undisturbed(ProcessPoolExecutor):
    """A process pool whose processes ignore Ctrl-C from the start; the main process tells them to stop.

    Processes inherit that SIGINT is blocked until they ignore it. In this process a SIGINT is only delayed by that.
    """

    def submit(self, call: Callable[Given, Returned], /, *given: Given.args, **named: Given.kwargs) -> Future[Returned]:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            return super().submit(call, *given, **named)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


# In the worker process.

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
