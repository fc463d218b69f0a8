"""Functions on the host that captured code may call, as ops: they compute from tensors of the step, and their sizes are known.

SciPy's assignment is how detection models match predictions with targets (DETR, Mask2Former). Other functions in C are ops if the
user makes them one (``torch.library.custom_op``).

Batch norms with ``momentum=None`` average over all batches, by a factor that PyTorch takes from the count of batches on the host.
Known weakness: the statistics of such a layer are computed twice.
"""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F


@torch.library.custom_op("planner::linear_sum_assignment", mutates_args=(), device_types="cpu")
def assign(costs: torch.Tensor, maximize: bool) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: FBT001 (an operator's)
    """Return the rows and columns of an optimal assignment."""
    from scipy.optimize import linear_sum_assignment

    rows, columns = linear_sum_assignment(costs.detach().numpy(), maximize)
    return torch.from_numpy(rows), torch.from_numpy(columns)


@assign.register_fake
def describe_assignment(costs: torch.Tensor, maximize: bool) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: FBT001
    """Return tensors of the sizes of an assignment."""
    return tuple(costs.new_empty(min(costs.shape), dtype=torch.long) for _ in range(2))  # type: ignore[return-value]


def assign_in_step(cost_matrix: torch.Tensor | np.ndarray, maximize: bool = False) -> tuple[np.ndarray, np.ndarray]:  # noqa: FBT001, FBT002
    """Return what SciPy returns, in captured code."""
    rows, columns = assign(torch.as_tensor(cost_matrix), maximize)
    return rows.numpy(), columns.numpy()


@torch.library.custom_op("planner::average_statistics", mutates_args=("mean", "variance"))
def average_statistics(
    mean: torch.Tensor,
    variance: torch.Tensor,
    count: torch.Tensor,
    value: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
) -> None:
    """Update the running statistics of a batch norm to those of all batches, of which there were `count`."""
    F.batch_norm(value, mean, variance, weight, bias, training=True, momentum=1 / float(count), eps=eps)


def normalize_by_average(norm: Any, value: torch.Tensor) -> torch.Tensor:
    """Do what ``forward`` of a batch norm with ``momentum=None`` does in training."""
    norm._check_input_dim(value)
    norm.num_batches_tracked.add_(1)
    average_statistics(
        norm.running_mean, norm.running_var, norm.num_batches_tracked, value.detach(), norm.weight, norm.bias, norm.eps
    )
    return F.batch_norm(value, None, None, norm.weight, norm.bias, training=True, eps=norm.eps)


def averages_all(norm: Any) -> bool:
    """Return True if a batch norm in training averages over all batches."""
    return norm.momentum is None and norm.training and norm.track_running_stats and norm.num_batches_tracked is not None
