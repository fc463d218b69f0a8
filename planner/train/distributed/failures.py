"""Failures of a process that trains with others: told through the store of the processes, so that none waits for them.

gloo ends the collectives of the others when a process dies, and not while it lives and does not join: they would wait for the
group's timeout, half an hour. So a process whose step fails says so, and one that waits for others asks every two seconds. To
abort the group instead does nothing with gloo (PyTorch 2.13).

A process that is stopped by a signal tells nothing. Linux shows it to the others of its machine, who tell those of other ones.
Signs of life were another way, but a process that holds Python's lock for long, in a C library, gives none either. A process that
is busy elsewhere, or is the only one of its machine and stopped, is still waited for.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

import torch.distributed as dist

from graphs.errors import PlannerError, first_line, typed_line
from planner.runtime.code import Backward, Forward, Returned
from planner.torch_private.distributed import get_default_store

_ASKED_EVERY = timedelta(seconds=2)
_steps = count()
_key = "remat-planner/failure"
_neighbours: dict[int, Path] = {}  # where Linux shows the state of each process of this machine, by its rank


def begin_step() -> None:
    """Forget failures of earlier steps; all processes begin the same steps, in the same order."""
    global _key  # of the whole process, as its group is
    _key = f"remat-planner/failure/{next(_steps)}"
    if not _neighbours:
        _neighbours.update(_find_neighbours())


def _find_neighbours() -> dict[int, Path]:
    """Return where Linux shows the state of each process of this machine; all processes call this together."""
    files = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
    if not all(file.exists() for file in files):
        return {}
    store, own = get_default_store(), f"{files[0].read_text().strip()} {files[1].readlink()}"
    store.set(f"remat-planner/process/{dist.get_rank()}", f"{os.getpid()} {own}")
    told = (store.get(f"remat-planner/process/{rank}").decode().split(" ", 1) for rank in range(dist.get_world_size()))
    return {rank: Path("/proc", process, "stat") for rank, (process, machine) in enumerate(told) if machine == own}


@contextmanager
def tell_failures() -> Iterator[None]:
    """Tell the other processes of an exception inside the context."""
    try:
        yield
    except BaseException as error:
        with suppress(Exception):  # the store ends with the process that began it
            get_default_store().set(_key, f"rank {dist.get_rank()}: {typed_line(error)}")
        raise


class ToldPasses:
    """A stage of a step that tells the other processes if its backward pass fails."""

    def run_forward(self, run: Forward, static: Sequence[Any]) -> Returned:
        """Run the forward pass, which is inside of the step's call, whose failures are told."""
        return run(static)

    def run_backward(self, run: Backward, static: Sequence[Any], saved: list[Any]) -> tuple[Any, ...]:
        """Run the backward pass."""
        with tell_failures():
            return run(static, saved)


def wait_for_others(work: dist.Work, *, in_step: bool = True) -> None:
    """Wait until a collective on the CPU has ended.

    Args:
        in_step: False between steps, where a failure of the last one is past.

    Raises:
        PlannerError: another process has failed, ended or been stopped, and will not join it.
    """
    stopped = set[int]()
    while True:
        try:
            work.wait(_ASKED_EVERY)
        except RuntimeError as error:
            before, stopped = stopped, _find_stopped()
            if both := before & stopped:  # not for a moment only; the store may be held by one of them
                process = _neighbours[min(both)].parent.name
                raise PlannerError(
                    f"rank {min(both)} (process {process}) is stopped, and this process has waited for it: end it, and start "
                    "again from a checkpoint"
                ) from error
            if stopped:
                continue
            if in_step and (failure := _find_failure()) is not None:
                raise PlannerError(f"{failure} (this process has waited for that one)") from error
            if work.is_completed() and work.exception() is not None:
                raise PlannerError(
                    f"a process that trains with this one has ended, and its own output says why ({first_line(error)})"
                ) from error
        else:
            return


def _find_stopped() -> set[int]:
    """Return the ranks of the processes of this machine that a signal has stopped, not a debugger."""
    return {rank for rank, file in _neighbours.items() if _read_state(file) == "T"}


def _read_state(file: Path) -> str:
    with suppress(OSError):  # it has ended
        return file.read_text().rpartition(")")[2].split()[0]
    return ""


def _find_failure() -> str | None:
    """Return the failure that another process has told, if any."""
    try:
        store = get_default_store()
        return store.get(_key).decode() if store.check([_key]) else None
    except Exception:  # noqa: BLE001  # it ends with the process that began it
        return None
