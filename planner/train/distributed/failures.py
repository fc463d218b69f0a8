"""Failures of a process that trains with others: told through the store of the processes, so that none waits for them.

gloo ends the collectives of the others when a process dies, and not while it lives and does not join: they would wait for the
group's timeout, half an hour. So a process whose step fails says so, and one that waits for others asks every two seconds. To
abort the group instead does nothing with gloo (PyTorch 2.13). A process that is stopped, or busy elsewhere, tells nothing.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import count
from typing import Any

import torch.distributed as dist

from graphs.errors import PlannerError, first_line, typed_line
from planner.runtime.code import Backward, Forward, Returned
from planner.torch_private.distributed import get_default_store

_ASKED_EVERY = timedelta(seconds=2)
_steps = count()
_key = "remat-planner/failure"


def begin_step() -> None:
    """Forget failures of earlier steps; all processes begin the same steps, in the same order."""
    global _key  # of the whole process, as its group is
    _key = f"remat-planner/failure/{next(_steps)}"


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


def wait_for_others(work: dist.Work) -> None:
    """Wait until a collective on the CPU has ended.

    Raises:
        PlannerError: another process has failed or ended, and will not join it.
    """
    while True:
        try:
            work.wait(_ASKED_EVERY)
        except RuntimeError as error:
            if (failure := _find_failure()) is not None:
                raise PlannerError(f"{failure} (this process has waited for that one)") from error
            if work.is_completed() and work.exception() is not None:
                raise PlannerError(
                    f"a process that trains with this one has ended, and its own output says why ({first_line(error)})"
                ) from error
        else:
            return


def _find_failure() -> str | None:
    """Return the failure that another process has told, if any."""
    try:
        store = get_default_store()
        return store.get(_key).decode() if store.check([_key]) else None
    except Exception:  # noqa: BLE001  # it ends with the process that began it
        return None
