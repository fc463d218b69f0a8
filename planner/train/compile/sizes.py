"""Planned steps of one model for batches of several sizes, each made when its first batch comes.

Where units of parameters are sharded, a step that reduces gradients and one that adds them to sums have plans of their own too.
"""

from collections import Counter
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from planner.capture.signature import Batch, Shapes, detach_batch, format_shapes, has_fewer_rows, list_shapes
from planner.graphs.errors import InfeasibleError, LimitError
from planner.settings.budget import Budget
from planner.train.compile.lru import LRUCache
from planner.train.distributed.ranks import agree
from planner.train.distributed.wrappers import Unwrapped

Step = TypeVar("Step")  # a planned step


class SizePlans(Generic[Step]):
    """Planned steps by the shapes of their batches, and by what is done with gradients, all for one budget.

    Args:
        make: a planned step for a batch of another size and a budget.
        wrapper: the model with its wrapper for one or several processes.
        max_plans: number of cached plans; the least recently used one is dropped first.
    """

    def __init__(self, make: Callable[[Batch, Budget], Step], budget: Budget, wrapper: Unwrapped, *, max_plans: int) -> None:
        self._make, self._budget, self._wrapper = make, budget, wrapper
        self._first_mode = wrapper.mode
        self._kept: LRUCache[tuple[Hashable, Shapes], Step] = LRUCache(max_plans)
        self._times: Counter[Shapes] = Counter()
        self._fits: dict[Shapes, bool] = {}

    @property
    def in_other_mode(self) -> bool:
        """True if the model does something else with gradients than when the first plan was made."""
        return self._wrapper.mode != self._first_mode

    def list_steps(self) -> tuple[Step, ...]:
        """Return the cached steps, the most recently used last."""
        return tuple(self._kept.values())

    def add(self, batch: Batch, step: Step) -> None:
        """Use `step` for batches of the shapes of `batch`."""
        self._kept.use(self._build_key(batch), lambda: step)

    def count(self, batch: Batch) -> int:
        """Return how often batches of these shapes have come, with this one."""
        self._times[list_shapes(batch)] += 1
        return self._times[list_shapes(batch)]

    def fits_eager(self, batch: Batch, check: Callable[[], bool]) -> bool:
        """Return True if there is no plan for `batch`, and eager PyTorch takes it within the budget, as `check` finds once.

        Under ``fully_shard`` that is not known: eager PyTorch gathers units as its hooks say.
        """
        shapes = list_shapes(batch)
        if not self._wrapper.together.is_alone or self._build_key(batch) in self._kept:
            return False
        if shapes not in self._fits:
            self._fits[shapes] = check()
        return self._fits[shapes]

    def step(self, batch: Batch) -> Step:
        """Return the step for `batch`; plan first if it has new sizes, which must be those of all processes."""
        key = self._build_key(batch)
        if key not in self._kept:  # else the processes agree when it is called
            agree(self._wrapper.together, key, batch)
        return self._kept.use(key, lambda: self._make_step(detach_batch(batch)))

    def _build_key(self, batch: Batch) -> tuple[Hashable, Shapes]:
        return self._wrapper.mode, list_shapes(batch)

    def _make_step(self, batch: Batch) -> Step:
        try:
            return self._make(batch, self._budget)
        except (InfeasibleError, LimitError) as error:
            kept = (
                ", with whole gradients of several batches in memory (set_requires_gradient_sync)" * self._wrapper.sums_gradients
            )
            raise type(error)(f"for a batch of {format_shapes(batch)}{kept}: {error}") from error


def is_smaller(shapes: Shapes, planned: Shapes) -> bool:
    """Return True if each shape is as planned or has fewer rows, but not all are as planned."""
    if shapes == planned or len(shapes) != len(planned):
        return False
    return all(a == b or has_fewer_rows(a, b) for a, b in zip(shapes, planned, strict=True))
