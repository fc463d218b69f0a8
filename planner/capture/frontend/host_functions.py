"""Functions on the host that captured code may call, as ops: they compute from tensors of the step, and their sizes are known.

SciPy's assignment is how detection models match predictions with targets (DETR, Mask2Former). Other functions in C are ops if the
user makes them one (``torch.library.custom_op``).

Batch norms with ``momentum=None`` average over all batches, by a factor that PyTorch takes from the count of batches on the host.
Known weakness: the statistics of such a layer are computed twice.
"""

import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from planner.torch_private import capture as private
from planner.torch_private.patches import wrap

_FORWARD = torch.nn.BatchNorm1d.forward


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


def _call_assign(cost_matrix: torch.Tensor | np.ndarray, maximize: bool = False) -> tuple[np.ndarray, np.ndarray]:  # noqa: FBT001, FBT002
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


def _normalize(norm: Any, value: torch.Tensor) -> torch.Tensor:
    """Do what ``forward`` of a batch norm with ``momentum=None`` does in training."""
    norm._check_input_dim(value)
    norm.num_batches_tracked.add_(1)
    average_statistics(
        norm.running_mean, norm.running_var, norm.num_batches_tracked, value.detach(), norm.weight, norm.bias, norm.eps
    )
    return F.batch_norm(value, None, None, norm.weight, norm.bias, training=True, eps=norm.eps)


def follow_host_functions_where(wanted: Callable[[Any], bool], stack: ExitStack) -> None:
    """Capture these functions in the frames that are `wanted`, until `stack` is closed."""
    stack.enter_context(wrap(private.InstructionTranslatorBase, "call_function", partial(_call_or_assign, wanted)))
    method = "inline_user_function_return"
    stack.enter_context(wrap(private.InstructionTranslatorBase, method, partial(_inline_or_average, wanted)))


def _call_or_assign(wanted: Callable[[Any], bool], call: Any, tx: Any, function: Any, args: Any, kwargs: Any) -> None:
    optimize = sys.modules.get("scipy.optimize")  # 18 MB and 0.1 s, for steps that call it
    if optimize is not None and getattr(function, "value", None) is optimize.linear_sum_assignment and wanted(tx):
        assign_as_op: Any = _call_assign
        function = private.UserFunctionVariable(assign_as_op)
    call(tx, function, args, kwargs)


def _inline_or_average(
    wanted: Callable[[Any], bool], inline: Any, tx: Any, function: Any, args: Any, kwargs: Any, **options: Any
) -> Any:
    is_norm = isinstance(function, private.UserFunctionVariable) and function.get_function() is _FORWARD
    if is_norm and _averages_all(args[0].realize().value) and wanted(tx):
        normalize: Any = _normalize
        function = private.UserFunctionVariable(normalize)
    return inline(tx, function, args, kwargs, **options)


def _averages_all(norm: Any) -> bool:
    return norm.momentum is None and norm.training and norm.track_running_stats and norm.num_batches_tracked is not None
