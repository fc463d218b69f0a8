"""Worker threads, each of which runs its jobs in order."""

import threading
import weakref
from queue import SimpleQueue
from typing import Any, Protocol

import torch

from graphs.errors import CopyError

_LOOK_S = 0.2  # interval at which waiters check that a thread is alive


class Job(Protocol):
    """A job that runs once.

    Attributes:
        thread: its thread, which waiters check for being alive.
    """

    thread: threading.Thread | None

    def make(self) -> None:
        """Run the job in that thread; it raises nothing."""


class Worker:
    """A thread that runs jobs in the order of issue; started with the first job, and restarted if it has died."""

    def __init__(self, name: str, does: str, threads: int | None = None) -> None:
        """Initialize with a `name`, and what it `does` for messages.

        Args:
            threads: number of operator threads (``torch.set_num_threads``, per thread); None for the default of new threads.
        """
        self._name, self._does, self._threads = name, does, threads
        self._thread: threading.Thread | None = None
        self._end: weakref.finalize[Any, Any] | None = None
        self._starting = threading.Lock()

    def issue(self, job: Job) -> None:
        """Queue `job`.

        Raises:
            CopyError: no thread can be started.
        """
        with self._starting:
            if self._thread is None or not self._thread.is_alive():
                self._start()
            job.thread = self._thread
            self._jobs.put(job)

    def _start(self) -> None:
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()  # the jobs of a dead thread are dropped with their memory
        thread = threading.Thread(target=_work, args=(self._jobs,), name=f"planner: {self._name}", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            raise CopyError(f"no thread can be started for {self._does}: {error}") from error
        if self._end is not None:
            self._end.detach()
        self._thread, self._end = thread, weakref.finalize(self, self._jobs.put, None)
        if self._threads is not None:
            counted = _Threads(self._threads)
            self._jobs.put(counted)
            while not counted.known.wait(_LOOK_S) and thread.is_alive():
                pass
            torch.set_num_threads(torch.get_num_threads())  # new threads inherit the value that was set last, by any thread


class _Threads:
    """A job that sets the number of operator threads of its thread."""

    def __init__(self, count: int) -> None:
        self.thread: threading.Thread | None = None
        self._count = count
        self.known = threading.Event()

    def make(self) -> None:
        torch.get_num_threads()  # a thread that has never asked takes the others' number when it first computes
        torch.set_num_threads(self._count)
        self.known.set()


def _work(jobs: "SimpleQueue[Job | None]") -> None:
    while (job := jobs.get()) is not None:
        job.make()
        del job  # not held until the next one arrives
