"""Functions on the host that captured code may call, as ops: they compute from tensors of the step, and their sizes are known.

SciPy's assignment is how detection models match predictions with targets (DETR, Mask2Former). Other functions in C are ops if the
user makes them one (``torch.library.custom_op``).
"""

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment

from planner.torch_private.capture import substitute_in_graph

_solve = linear_sum_assignment


@torch.library.custom_op("planner::linear_sum_assignment", mutates_args=(), device_types="cpu")
def assign(costs: torch.Tensor, maximize: bool) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: FBT001 (an operator's)
    """Return the rows and columns of an optimal assignment."""
    rows, columns = _solve(costs.detach().numpy(), maximize)
    return torch.from_numpy(rows), torch.from_numpy(columns)


@assign.register_fake
def describe_assignment(costs: torch.Tensor, maximize: bool) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: FBT001
    """Return tensors of the sizes of an assignment."""
    return tuple(costs.new_empty(min(costs.shape), dtype=torch.long) for _ in range(2))  # type: ignore[return-value]


@substitute_in_graph(linear_sum_assignment, skip_signature_check=True)
def call_assign(cost_matrix: torch.Tensor | np.ndarray, maximize: bool = False) -> tuple[np.ndarray, np.ndarray]:  # noqa: FBT001, FBT002
    """Return what SciPy returns, in captured code."""
    rows, columns = assign(torch.as_tensor(cost_matrix), maximize)
    return rows.numpy(), columns.numpy()
