"""Gradients of earlier steps: memory outside a step's plan, unless gradients are accumulated."""

from collections.abc import Iterable

import torch

from planner.graphs.errors import BudgetError
from planner.graphs.ir import Graph, Kind
from planner.graphs.schedule import Schedule, find_boundary
from planner.graphs.simulate import simulate
from planner.graphs.units import format_bytes
from planner.torch_private.core import get_local_tensor

BUCKETS = "gradient_buckets"  # memory of a wrapper apart from the gradients of parameters
_PASSES = ("forward", "backward")


class EarlierGradients:
    """A check that raises before a pass if earlier gradients would take it over the budget.

    Attributes:
        budget_bytes: budget of the plan; None before training, when nothing is checked.
    """

    def __init__(self, graph: Graph, schedule: Schedule) -> None:
        """Initialize for the step that `schedule` runs on `graph`."""
        self.budget_bytes: int | None = None
        gradients = (t for t in graph.tensors if t.kind is Kind.ACCUMULATED_GRADIENT and t.name != BUCKETS)
        self._counted_bytes = sum(t.size_bytes for t in gradients)
        self._peaks_bytes = dict(zip(_PASSES, pass_peaks(graph, schedule), strict=True))
        self._most_bytes = dict.fromkeys(_PASSES, 0)  # in memory during each

    def count(self, which_pass: str, parameters: Iterable[torch.Tensor]) -> int:
        """Return the bytes of gradients of `parameters` that the plan does not count, as its ``forward`` or ``backward`` begins.

        Raises:
            BudgetError: the pass would take more than the budget.
        """
        if self.budget_bytes is None:
            return 0
        there: int = sum(get_local_tensor(p.grad).nbytes for p in parameters if p.is_leaf and p.grad is not None)
        beside = max(0, there - self._counted_bytes)
        if beside and (peak := self._peaks_bytes[which_pass] + beside) > self.budget_bytes:
            raise BudgetError(
                f"gradients of an earlier step ({format_bytes(there)}) are in memory when the {which_pass} pass begins, which "
                f"would take {format_bytes(peak)} with them, over the budget of {format_bytes(self.budget_bytes)}: free them "
                "before the step (model.zero_grad(), or zero_grad() of all optimizers, with set_to_none=True), or plan with "
                "accumulate=True, which counts them"
            )
        self._most_bytes[which_pass] = max(self._most_bytes[which_pass], beside)
        return beside

    def fit_with(self, graph: Graph, schedule: Schedule) -> bool:
        """Return True if the largest gradients seen so far also fit with `schedule`."""
        peaks = zip(pass_peaks(graph, schedule), self._most_bytes.values(), strict=True)
        return self.budget_bytes is None or all(peak + beside <= self.budget_bytes for peak, beside in peaks)


def pass_peaks(graph: Graph, schedule: Schedule) -> tuple[int, int]:
    """Return the peak device memory of the forward and of the backward pass, in bytes."""
    memory, cut = simulate(graph, schedule).memory_bytes, find_boundary(graph, schedule)
    return max(memory[:cut]), max(memory[cut:])
