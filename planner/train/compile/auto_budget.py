"""``budget="auto"`` of a model that is about to be trained."""

from collections.abc import Iterable

import torch

from planner.capture.signature import Batch, list_leaves
from planner.graphs.errors import BudgetError
from planner.memory.auto_budget import compute_auto_budget_bytes
from planner.settings.budget import Auto, Budget, Bytes
from planner.train.distributed.wrappers import Unwrapped


def resolve_auto(budget: Budget, wrapper: Unwrapped, batch: Batch, optimizer: torch.optim.Optimizer | None = None) -> Budget:
    """Return `budget`, with ``auto`` resolved to the free memory of the model's device plus what the step already uses.

    If several processes train, all call this, and get the smallest of their budgets.

    Raises:
        BudgetError: nothing is left, or several processes share the memory of a CPU.
        PlannerError: the free memory of the device is not known.
    """
    if not isinstance(budget, Auto):
        return budget
    module = wrapper.module
    device = next(module.parameters()).device
    if device.type == "cpu" and type(wrapper) is not Unwrapped:
        raise BudgetError(
            "budget 'auto' is all that is free on the CPU, and each of several processes would take it: give each an amount, "
            "such as budget='8GB'"
        )
    gradients = (p.grad for p in module.parameters() if p.grad is not None)
    inputs = (leaf for leaf in list_leaves(batch) if isinstance(leaf, torch.Tensor))
    static = (*module.parameters(), *module.buffers(), *gradients, *_list_state(optimizer))
    return Bytes(min(wrapper.ranks.gather(wrapper.ranks.run_each(lambda: compute_auto_budget_bytes(device, static, inputs)))))


def _list_state(optimizer: torch.optim.Optimizer | None) -> Iterable[torch.Tensor]:
    states = () if optimizer is None else optimizer.state.values()
    return (value for state in states for value in state.values() if isinstance(value, torch.Tensor))
