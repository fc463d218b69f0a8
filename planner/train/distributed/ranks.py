"""The processes that train a model together: they share plans and errors.

Each method is a collective: one rank that plans alone would wait for the others for ever. So before each step the ranks compare
what they are about to do, and an error of one is raised on all.
"""

from collections.abc import Callable, Hashable
from hashlib import blake2b
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from planner.capture.signature import Batch, format_shapes, list_shapes
from planner.graphs.errors import MismatchError, NumberMismatchError, PlannerError
from planner.torch_private.distributed import collective_device
from planner.train.distributed.failures import wait_for_others

T = TypeVar("T")


class SingleProcess:
    """A training run of one process.

    Attributes:
        is_alone: True if there is no other process.
        is_first: True on the process that makes the plan for all, and reports for all.
    """

    is_alone = is_first = True

    def run_each(self, make: Callable[[], T]) -> T:
        """Return the result of `make`."""
        return make()

    def run_first(self, make: Callable[[], T], *, share: Callable[[T], Any], adopt: Callable[[Any], T]) -> T:
        """Return the result of `make`; there is no process to share it with."""
        return make()

    def is_same(self, value: object) -> bool:
        """Return True if all processes call this with equal values, compared by their ``repr``."""
        return True

    def gather(self, value: T) -> list[T]:
        """Return the values of all processes, that of rank 0 first."""
        return [value]

    def share(self, make: Callable[[], T]) -> T:
        """Return the result of `make` on rank 0, on all ranks."""
        return make()


ALONE = SingleProcess()


def agree(ranks: SingleProcess, plan: Hashable, batch: Batch, error: MismatchError | None = None) -> None:
    """Raise on all processes if what they are about to do differs: one that goes on alone would wait for the others for ever.

    Args:
        plan: what is run on `batch`, or what a plan is made for.
        error: the refusal of the batch on this process.

    Raises:
        PlannerError: their batches have different sizes, or their plans differ.
        MismatchError: some have refused the batch; a NumberMismatchError if all of them follow the change, and then together.
    """
    if ranks.is_same((plan, type(error), list_shapes(batch))):
        return
    told = ranks.gather((format_shapes(batch), None if error is None else (type(error), error.what)))
    if len({shapes for shapes, _ in told}) > 1:
        found = "; ".join(f"rank {rank}: {shapes}" for rank, (shapes, _) in enumerate(told))
        raise PlannerError(
            f"the batches of the processes differ ({found}), but one plan is for all of them: pad to one length, and drop the "
            "last batch"
        )
    refused_by = [(rank, *refusal) for rank, (_, refusal) in enumerate(told) if refusal is not None]
    advice = ": processes run each step together, so give all of them batches like the one that was planned for"
    if not refused_by:
        raise PlannerError(f"the plans of the processes for a batch of {told[0][0]} differ{advice}")
    rank, _, what = refused_by[0]
    followed = all(kind is NumberMismatchError for _, kind, _ in refused_by)
    raise (NumberMismatchError if followed else MismatchError)(f"rank {rank}: {what}", advice)


class Ranks(SingleProcess):
    """The processes of a group. All call the same methods, in the same order."""

    is_alone = False

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._rank = dist.get_rank(group)
        self.is_first = self._rank == 0
        # One for all calls: gloo's threads hold it for a while after a collective, and a step would begin with more memory.
        self._extremes = torch.empty(2, dtype=torch.int64, device=collective_device(group))

    def run_each(self, make: Callable[[], T]) -> T:
        """Return the result of `make`, executed on each rank.

        Raises:
            PlannerError: it failed on another rank, which the message names.
        """
        return self._agree(*_try_make(make))

    def run_first(self, make: Callable[[], T], *, share: Callable[[T], Any], adopt: Callable[[Any], T]) -> T:
        """Return the result of `make` on rank 0, and on other ranks that of `adopt` on the object that `share` extracts from it.

        Raises:
            PlannerError: one of them failed on another rank, which the message names.
        """
        made, error = _try_make(make) if self._rank == 0 else ((), None)
        sent = [share(made[0]) if made else None, bool(made)]
        self._join()
        dist.broadcast_object_list(sent, group=self._group, group_src=0)
        shared, done = sent
        if self._rank and done:
            made, error = _try_make(lambda: adopt(shared))
        return self._agree(made, error)

    def is_same(self, value: object) -> bool:
        """Return True if all processes call this with equal values, compared by their ``repr``.

        Called before every step, so it is one collective on two numbers: the greatest digest must be the least one too.
        """
        digest = int.from_bytes(blake2b(repr(value).encode(), digest_size=7).digest())
        extremes = self._extremes.copy_(torch.tensor([digest, -digest]))
        work = dist.all_reduce(extremes, dist.ReduceOp.MAX, group=self._group, async_op=True)
        if work is not None and extremes.device.type == "cpu":
            wait_for_others(work)
        elif work is not None:
            work.wait()
        return extremes.sum().item() == 0

    def gather(self, value: T) -> list[T]:
        """Return the values of all processes, that of rank 0 first."""
        self._join()
        gathered: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(gathered, value, group=self._group)
        return gathered

    def _join(self) -> None:
        """Wait until all processes are here: collectives on objects cannot look for stopped ones while they wait."""
        self.is_same(None)

    def share(self, make: Callable[[], T]) -> T:
        """Return the result of `make` on rank 0, on all ranks.

        Raises:
            PlannerError: it failed on rank 0; raised on all ranks.
        """
        shared: T = self.run_first(make, share=lambda made: made, adopt=lambda received: received)
        return shared

    def _agree(self, made: tuple[()] | tuple[T], error: Exception | None) -> T:
        """Return the result of this rank if no rank failed."""
        failures = self.gather(None if error is None else _encode_error(error))
        if error is not None:
            raise error
        for rank, failed in enumerate(failures):
            if failed is not None:
                kind, message = failed
                raise kind(f"rank {rank}: {message}")
        assert made
        return made[0]


def _try_make(make: Callable[[], T]) -> tuple[tuple[()] | tuple[T], Exception | None]:
    """Return the result of `make` in a tuple, or its exception."""
    try:
        return (make(),), None
    except Exception as error:  # noqa: BLE001  # the other ranks must not wait for this one
        return (), error


def _encode_error(error: Exception) -> tuple[type[PlannerError], str]:
    """Return the type and message with which other ranks raise `error`."""
    if isinstance(error, PlannerError):
        return type(error), str(error)
    return PlannerError, f"{type(error).__name__}: {error}"
