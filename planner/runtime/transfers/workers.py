"""Worker threads, each of which runs its jobs in order."""

import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Protocol

import torch

from planner.graphs.errors import PlannerError

LOOK_S = 0.2  # interval at which a waiting thread checks that the others are alive


class ThreadJob(Protocol):
    """A job that runs once.

    Attributes:
        thread: its thread, which waiters check for being alive.
    """

    thread: threading.Thread | None

    def make(self) -> None:
        """Run the job in that thread; it raises nothing."""


class ThreadedCall:
    """A function that is called in another thread.

    Attributes:
        ended: set when the function has returned or raised.
        value: its return value.
        error: the exception that it raised.
    """

    def __init__(self, run: Callable[[], object]) -> None:
        self.thread: threading.Thread | None = None
        self.ended = threading.Event()
        self.value: Any = None
        self.error: BaseException | None = None
        self._run: Callable[[], object] | None = run

    def make(self) -> None:
        """Call the function."""
        assert self._run is not None
        try:
            with torch.no_grad():
                self.value = self._run()
        except BaseException as error:  # noqa: BLE001  # whoever waits for it gets it
            self.error = error
        finally:
            self._run = None  # and release all that it holds
            self.ended.set()

    @property
    def is_lost(self) -> bool:
        """True if the thread has died before the function ended."""
        return is_dead(self.thread) and not self.ended.is_set()

    def wait(self, look: Callable[[], object]) -> None:
        """Wait until the function has ended; a long wait calls `look`, which may raise."""
        while not self.ended.wait(LOOK_S):
            look()

    def settle(self) -> None:
        """Wait until the function has ended or is lost."""
        while not self.ended.wait(LOOK_S):
            if self.is_lost:
                return


class Worker:
    """A thread that runs jobs in the order of issue; started with the first job, and restarted if it has died."""

    def __init__(self, name: str, does: str, fails: type[PlannerError], threads: int | None = None) -> None:
        """Initialize with a `name`, and what it `does` for messages.

        Args:
            fails: the error that no thread can be started.
            threads: number of operator threads (``torch.set_num_threads``, per thread); None for the default of new threads.
        """
        self._name, self._does, self._fails, self._threads = name, does, fails, threads
        self.thread: threading.Thread | None = None
        self._end: weakref.finalize[Any, Any] | None = None
        self._starting = threading.Lock()

    def issue(self, job: ThreadJob) -> None:
        """Queue `job`; raise a PlannerError if no thread can be started."""
        with self._starting:
            if self.thread is None or not self.thread.is_alive():
                self._start()
            job.thread = self.thread
            self._jobs.put(job)

    def _start(self) -> None:
        self._jobs: SimpleQueue[ThreadJob | None] = SimpleQueue()  # the jobs of a dead thread are dropped with their memory
        thread = threading.Thread(target=_run_jobs, args=(self._jobs,), name=f"planner: {self._name}", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            raise self._fails(f"no thread can be started for {self._does}: {error}") from error
        if self._end is not None:
            self._end.detach()
        self.thread, self._end = thread, weakref.finalize(self, self._jobs.put, None)
        if (threads := self._threads) is not None:
            counted = ThreadedCall(lambda: _set_threads(threads))
            self._jobs.put(counted)
            while not counted.ended.wait(LOOK_S) and thread.is_alive():
                pass
            torch.set_num_threads(torch.get_num_threads())  # new threads inherit the value that was set last, by any thread


def is_dead(thread: threading.Thread | None) -> bool:
    """Return True if `thread` was given and has died."""
    return thread is not None and not thread.is_alive()


def _set_threads(count: int) -> None:
    torch.get_num_threads()  # a thread that has never asked takes the others' number when it first computes
    torch.set_num_threads(count)


def _run_jobs(jobs: "SimpleQueue[ThreadJob | None]") -> None:
    while (job := jobs.get()) is not None:
        job.make()
        del job  # not held until the next one arrives
