"""Smaller batches that eager PyTorch takes within the budget of a plan, so that nothing is captured for them."""

import torch

from planner.capture.signature import Batch, list_leaves
from planner.measure.smaller_batch import bound_graph
from planner.memory.release import release_unused
from planner.memory.reserved import predict_eager_bytes
from planner.plans.plan import Plan
from planner.runtime.executor import Executor


def is_run_eagerly(executor: Executor, plan: Plan, batch: Batch) -> bool:
    """Return True if eager PyTorch takes a smaller batch within the budget, with the bits of the plan.

    Args:
        executor: of `plan`, which is for a larger batch.
    """
    graph, program = executor.graph, executor.program
    if any(calls.launches for calls in program.calls):  # Inductor's kernels round differently
        return False
    leaves = list_leaves(batch)
    static = program.gather(executor.training_step, leaves)
    accumulates = graph.provenance.get("accumulate")
    if not accumulates and any(t is not None and t.is_leaf and t.grad is not None for t in static):
        return False  # gradients of earlier steps, which the plan checks for
    shares = [
        given.shape[0] / planned.shape[0]
        for given, planned in ((leaves[int(s.name)], graph.tensors[s.tensor]) for s in executor.inputs)
        if isinstance(given, torch.Tensor) and tuple(given.shape) != planned.shape
    ]
    whole_bytes = predict_eager_bytes(graph, plan.memory)
    if graph.static_bytes + min(shares) * (whole_bytes - graph.static_bytes) > plan.budget_bytes:
        return False  # also if all sizes were in proportion to the rows
    return predict_eager_bytes(bound_graph(graph, program, static), plan.memory) <= plan.budget_bytes


def release_for_eager(executor: Executor) -> None:
    """Free the memory that the plan holds between steps, or that eager PyTorch has left: each fits the budget alone."""
    if executor.arena is not None:
        executor.arena.shared.drop()
    if executor.arena is not None or executor.device.type == "cuda":
        release_unused(executor.device)
