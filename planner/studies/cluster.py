"""Jobs on a Dask cluster, given the address of its scheduler."""

import logging
import secrets
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from functools import partial
from typing import Any

from planner.graphs.errors import PlannerError
from planner.studies.workers import POLL_S, Done, Job, Task, Workers

_CONNECT_S = 10.0  # seconds until a scheduler must have answered, and until it must have a worker


@contextmanager
def start_on_cluster(job: Job[Task, Done], address: str) -> Iterator[Workers[Task, Done]]:
    """Yield the workers for `job` on the cluster at `address`. Each worker receives the job once, and no files.

    Raises:
        PlannerError: the cluster cannot be reached, has no workers, loses them, or they run other versions.
    """
    try:
        import distributed
    except ImportError as error:
        raise PlannerError("clusters need dask: pip install 'remat-planner[cluster]'") from error
    for name in ("distributed", "distributed.client"):  # the command prints its own messages
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        client = distributed.Client(address, timeout=_CONNECT_S, set_as_default=False)
    except (OSError, ValueError) as error:
        raise PlannerError(
            f"the cluster at {address} cannot be reached ({error}): give the address that `dask scheduler` prints, such as "
            "tcp://10.0.0.1:8786, or leave out --cluster"
        ) from None
    stop = distributed.Event(f"planner-{secrets.token_hex(8)}", client=client)
    try:
        client.wait_for_workers(1, timeout=_CONNECT_S)
        executor = client.get_executor(pure=False)
        there = client.scatter(job, broadcast=True, hash=False)
        yield Workers(
            partial(_submit, executor, there, stop.name), sum(client.nthreads().values()), stop.set, _WorkerWatch(client.nthreads)
        )
    except (OSError, CancelledError, distributed.CancelledError, distributed.KilledWorker) as error:
        raise PlannerError(
            f"the cluster at {address} has no workers, or lost what they had to do ({type(error).__name__}), perhaps because "
            "their memory ran out: start more with `dask worker`, or leave out --cluster"
        ) from None
    except ImportError as error:
        raise PlannerError(
            f"the workers of the cluster at {address} cannot do it ({error}): install this version of remat-planner there"
        ) from None
    finally:
        _end(client, stop)


def _submit(executor: Any, job: Any, stop: str, task: Task) -> Future[Done]:
    future: Future[Done] = executor.submit(_run, job, task, stop)
    return future


def _end(client: Any, stop: Any) -> None:
    """Tell running tasks to stop, and disconnect; the scheduler forgets tasks of a disconnected client."""
    try:
        if client.status == "running":
            stop.set()
    except OSError:
        pass  # the scheduler is gone, and its tasks with it
    finally:
        client.close()


class _WorkerWatch:
    """A check that raises if the cluster has had no worker for too long.

    Args:
        nthreads: threads by worker.
    """

    def __init__(self, nthreads: Callable[[], dict[str, int]]) -> None:
        self._nthreads = nthreads
        self._seen = time.monotonic()

    def __call__(self) -> None:
        now = time.monotonic()
        if self._nthreads():
            self._seen = now
        elif now - self._seen > _CONNECT_S:
            raise TimeoutError


# Runs in a worker.


def _run(job: Job[Task, Done], task: Task, stop: str) -> Done:
    import distributed

    return job(task, _Flag(distributed.Event(stop)))


class _Flag:
    """The state of `event`, polled from the scheduler only at intervals, since solvers ask often."""

    def __init__(self, event: Any) -> None:
        self._event = event
        self._set = False
        self._asked = -POLL_S

    def __call__(self) -> bool:
        if not self._set and time.monotonic() - self._asked >= POLL_S:
            self._set = self._event.is_set()
            self._asked = time.monotonic()
        return self._set
