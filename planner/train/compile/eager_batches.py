"""Smaller batches that eager PyTorch takes within the budget of a plan, so that nothing is captured for them."""

from planner.capture.signature import Batch, list_leaves
from planner.measure.smaller_batch import is_sure_to_fit
from planner.memory.release import release_unused
from planner.plans.plan import Plan
from planner.runtime.executor import Executor


def fits_eager(executor: Executor, plan: Plan, batch: Batch) -> bool:
    """Return True if eager PyTorch takes a smaller batch within the budget of `plan`, which `executor` runs, with its bits."""
    static = executor.program.gather(executor.training_step, list_leaves(batch))
    return is_sure_to_fit(executor.graph, executor.program, static, plan.memory, plan.budget_bytes)


def has_earlier_gradients(executor: Executor) -> bool:
    """Return True if there are gradients of earlier steps, which plans check for, and which are not counted."""
    trained = executor.training_step.parameters()
    return not executor.accumulates and any(p.grad is not None for p in trained)


def release_for_eager(executor: Executor) -> None:
    """Free the memory that the plan holds between steps, or that eager PyTorch has left: each fits the budget alone."""
    if executor.arena is not None:
        executor.arena.shared.drop()
    if executor.arena is not None or executor.device.type == "cuda":
        release_unused(executor.device)
