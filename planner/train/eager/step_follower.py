"""Connects the runtime with the plans of repeated steps: logs its ops, and makes the evictions of a plan."""

from collections.abc import Callable

from planner.train.eager.step_log import StepGraph, build_recorded_step
from planner.train.eager.step_plans import StepPlans
from planner.train.eager.storages import Memory

# If no step so far has evicted or taken more than this share of the budget, the next one is not logged.
_FAR = 0.9


class StepFollower:
    """Logs each step, and evicts what the plan of a repeated step evicts.

    A step begins when autograd saves a tensor and ends when it holds none: only tensors made in between can be evicted.

    Args:
        plans: the steps so far.
        memory: the budgeted memory, which writes the log.
    """

    def __init__(self, plans: StepPlans, memory: Memory) -> None:
        self.plans = plans
        self.memory = memory
        self._far_bytes = _FAR * memory.budget_bytes
        self._is_first = True

    # Events of the runtime.

    def begin(self) -> None:
        """Begin a step, when autograd saves its first tensor; no op may have run since the last step ended."""
        self.end()
        memory = self.memory
        if self._is_first or memory.evictions or memory.peak_bytes > self._far_bytes:
            self.plans.begin(memory.live_bytes)
            memory.log = self.plans.log
        self._is_first = False

    def evict_one(self) -> bool:
        """Evict a storage that the plan has evicted by now, and return True; return False if there is none."""
        log = self.memory.log
        if log is None:
            return False
        offered = self.plans.advance_offered()
        for number in tuple(offered):
            evicted = self.memory.evict_logged(number)
            if evicted is not False:
                del offered[number]
            if evicted:
                self.plans.borrows = log.followed is None
                return True
        return False

    def estimate_enough_bytes(self, enough_for: Callable[[StepGraph], int]) -> int:
        """Return a budget for the current step, from that of the largest earlier step that began like it; 0 if there is none."""
        log = self.memory.log
        if log is None or (earlier := self.plans.earlier) is None:
            return 0
        return enough_for(build_recorded_step(earlier)) + log.held_bytes - earlier.held_bytes

    def end(self) -> None:
        """End the step."""
        if self.memory.log is not None:
            self.plans.end()
        self.memory.log = None

    def close(self) -> None:
        """End the step, and stop the solve in progress."""
        self.end()
        self.plans.stop()
