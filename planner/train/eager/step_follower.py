"""Connects the runtime with the plans of repeated steps: logs its ops, and makes the evictions of a plan."""

import weakref
from collections.abc import Callable

from planner.train.eager.step_log import StepGraph, StepLog, build_recorded_step
from planner.train.eager.step_plans import StepPlans
from planner.train.eager.storages import Memory, TrackedStorage

# If no step so far has evicted or taken more than this share of the budget, the next one is not logged.
_FAR = 0.9


class StepFollower:
    """Logs each step, and evicts what the plan of a repeated step evicts.

    A step begins when autograd saves a tensor and ends when it holds none: only tensors made in between can be evicted.

    Args:
        plans: the steps so far.
        memory: the budgeted memory.

    Attributes:
        number: number of the current step.
        log: log of the current step; None if no step runs, or it is not logged.
    """

    __slots__ = ("__dict__", "_storages", "log", "number")

    def __init__(self, plans: StepPlans, memory: Memory) -> None:
        self.plans = plans
        self.memory = memory
        self._far_bytes = _FAR * memory.budget_bytes
        self.number = 0
        self.log: StepLog | None = None
        self._storages: list[weakref.ref[TrackedStorage]] = []  # by their number in the step

    @property
    def is_far(self) -> bool:
        """True if all steps so far stayed below the budget, and there were any: then the next one is not logged."""
        memory = self.memory
        return self.number > 0 and not memory.evictions and memory.peak_bytes <= self._far_bytes

    # Events of the runtime.

    def begin(self) -> None:
        """Begin a step, when autograd saves its first tensor; no op may have run since the last step ended."""
        self.end()
        memory = self.memory
        if not self.is_far:
            self.plans.begin(memory.live_bytes)
            self.log = self.plans.log
        self.number += 1
        self._storages = []

    def evict_one(self) -> bool:
        """Evict a storage that the plan has evicted by now, and return True; return False if there is none."""
        if self.log is None:
            return False
        offered = self.plans.get_offered()
        for number in tuple(offered):
            storage = self._storages[number]() if number < len(self._storages) else None  # it was dropped, or is not used yet
            if storage is None or not storage.is_owned():
                del offered[number]
            elif self.memory.evict(storage):
                del offered[number]
                self.plans.borrows = not self.plans.is_following
                return True
        return False

    def estimate_enough_bytes(self, enough_for: Callable[[StepGraph], int]) -> int:
        """Return a budget for the current step, from that of the largest earlier step that began like it; 0 if there is none."""
        if self.log is None or (earlier := self.plans.earlier) is None:
            return 0
        return enough_for(build_recorded_step(earlier)) + self.log.held_bytes - earlier.held_bytes

    def end(self) -> None:
        """End the step."""
        if self.log is not None:
            self.plans.end()
        self.log = None

    def close(self) -> None:
        """End the step, and stop the solve in progress."""
        self.end()
        self.plans.stop()
