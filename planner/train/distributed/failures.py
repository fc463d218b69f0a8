"""Failures of a process that trains with others: told through the store of the processes, so that none waits for them.

gloo ends the collectives of the others when a process dies, and not while it lives and does not join: they would wait for the
group's timeout, half an hour. So a process whose step fails says so, and one that waits for others asks every two seconds. To
abort the group instead does nothing with gloo (PyTorch 2.13).

A process that is stopped by a signal tells nothing. Linux shows it to the others of its machine, who tell those of other ones.
Signs of life were another way, but a process that holds Python's lock for long, in a C library, gives none either. A process that
is busy elsewhere, or is the only one of its machine and stopped, is still waited for.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import count
from pathlib import Path

import torch.distributed as dist

from planner.graphs.errors import MismatchError, PlannerError, first_line, typed_line
from planner.torch_private.distributed import get_default_store

_ASKED_EVERY = timedelta(seconds=2)
_steps = count()
_key = "remat-planner/failure"
_telling = 0  # contexts in which this process tells its failures, and asks for those of others
_ended_by = ""  # why this process has given up waiting in this step
_neighbours: dict[int, Path] = {}  # where Linux shows the state of each process of this machine, by its rank


def begin_step() -> None:
    """Forget failures of earlier steps; all processes begin the same steps, in the same order.

    While they plan, which is like one long step, steps that they run belong to it.
    """
    global _key, _ended_by  # of the whole process, as its group is
    if _telling:
        return
    _key, _ended_by = f"remat-planner/failure/{next(_steps)}", ""
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
    """Tell the other processes of an exception inside the context, and ask for theirs while this one waits for them.

    They have agreed on a MismatchError before a step issues a collective (``Sharding.agree``), and while they plan.
    """
    global _telling
    _telling += 1
    try:
        yield
    except MismatchError:
        raise
    except BaseException as error:
        with suppress(Exception):  # the store ends with the process that began it
            if not (store := get_default_store()).check([_key]):  # else this failure follows from the one told
                own = f"rank {dist.get_rank()}: {typed_line(error)} (this process has waited for that one)"
                store.set(_key, _ended_by or own)  # what has ended this process, if another one has
        raise
    finally:
        _telling -= 1


def wait_for_others(work: dist.Work) -> None:
    """Wait until a collective on the CPU has ended.

    In a step, those that were issued after one that the others have not joined are not waited for: in a thread of their own
    there may be many. Between steps a failure of the last one is past.

    Raises:
        PlannerError: another process has failed, ended or been stopped, and will not join it.
        RuntimeError: the collective has failed by itself.
    """
    global _ended_by
    if _telling and _ended_by:
        raise PlannerError(_ended_by)
    stopped = set[int]()
    while True:
        try:
            work.wait(_ASKED_EVERY)
        except RuntimeError as error:
            # By a signal, not by a debugger.
            before, stopped = stopped, {rank for rank, file in _neighbours.items() if _read_state(file) == "T"}
            if both := before & stopped:  # not for a moment only
                reason = _describe_stopped(min(both))
            elif stopped:  # the store may be held by one of them
                continue
            else:
                reason = _find_failure() if _telling else ""
                reason = reason or _find_end(work, error)
            if reason:
                _ended_by = reason
                raise PlannerError(reason) from error
        else:
            return


def _describe_stopped(rank: int) -> str:
    process, advice = _neighbours[rank].parent.name, "end it, and start again from a checkpoint"
    return f"rank {rank} (process {process}) is stopped, and this process has waited for it: {advice}"


def _find_end(work: dist.Work, error: RuntimeError) -> str:
    """Return that a process has ended if `work` has, with its `error`; "" if it is under way.

    Raises:
        RuntimeError: the work has failed by itself, and no connection to another process has.
    """
    if not work.is_completed() or work.exception() is None:
        return ""
    if "gloo/transport" not in str(error):
        raise error
    return f"a process that trains with this one has ended, and its own output says why ({first_line(error)})"


def _read_state(file: Path) -> str:
    with suppress(OSError):  # it has ended
        return file.read_text().rpartition(")")[2].split()[0]
    return ""


def _find_failure() -> str:
    """Return the failure that another process has told, "" if there is none."""
    with suppress(Exception):  # the store ends with the process that began it
        store = get_default_store()
        return str(store.get(_key).decode()) if store.check([_key]) else ""
    return ""
