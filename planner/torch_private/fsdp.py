"""Private names of FSDP2 (``torch.distributed.fsdp.fully_shard``)."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    checkpoint_wrapper,  # of a module; what users of FSDP2 wrap units in
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    _get_gradient_divide_factors as get_gradient_divide_factors,  # division before and after a reduction, and its operators
)
from torch.distributed.fsdp._fully_shard._fsdp_common import (
    _from_local_no_grad as build_dtensor,  # from a local tensor and a sharding
)
from torch.distributed.tensor import DTensor


def list_states(model: nn.Module) -> list[Any]:
    """Return the state of each call of ``fully_shard`` on modules of `model`: those of one call share it."""
    states = (module._get_fsdp_state() for module in model.modules() if isinstance(module, FSDPModule))
    return list({id(state): state for state in states}.values())


def list_modules(state: Any) -> tuple[nn.Module, ...]:
    """Return the modules that one call of ``fully_shard`` was given."""
    modules: tuple[nn.Module, ...] = state._modules
    return modules


def get_mixed_precision(state: Any) -> MixedPrecisionPolicy:
    """Return the policy of one call of ``fully_shard``."""
    policy: MixedPrecisionPolicy = state._mp_policy
    return policy


def list_groups(states: Iterable[Any]) -> list[Any]:
    """Return the groups of parameters that are gathered together; PyTorch 2.11 has one in a state, or none."""
    found = (state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group] for state in states)
    return [group for groups in found for group in groups if group is not None]


def find_own_communication(group: Any) -> str:
    """Return the method of FSDP2 by which the user has set a communication of `group`, "" if all of it is FSDP2's."""
    setters = {
        "set_all_reduce_hook": group._all_reduce_hook,
        "set_custom_all_gather": group._all_gather_comm,
        "set_custom_reduce_scatter": group._reduce_scatter_comm,
    }
    used = (name for name, made in setters.items() if made is not None and not type(made).__module__.startswith("torch."))
    return next(used, "")


def get_shard(parameter: Any) -> torch.Tensor:
    """Return the shard of a parameter of a group."""
    shard: torch.Tensor = parameter._sharded_local_tensor
    return shard


def collect_gradient_sum(parameter: Any) -> torch.Tensor | None:
    """Return the sum of whole gradients of earlier batches of a parameter of a group; None if there is none.

    FSDP2 keeps it as the gradient of the gathered parameter, unless it is reduced in another dtype.
    """
    if parameter.unsharded_accumulated_grad is None and (gathered := getattr(parameter, "_unsharded_param", None)) is not None:
        parameter.unsharded_accumulated_grad, gathered.grad = gathered.grad, None
    found: torch.Tensor | None = parameter.unsharded_accumulated_grad
    return found


def set_gradient_sum(parameter: Any, total: torch.Tensor | None) -> None:
    """Replace the sum of whole gradients of earlier batches of a parameter of a group."""
    parameter.unsharded_accumulated_grad = total


def get_sharding(value: object) -> object:
    """Return how a DTensor is sharded; None for other values."""
    return value._spec if isinstance(value, DTensor) else None


def flatten_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return `mesh` with one dimension."""
    return mesh if mesh.ndim == 1 else mesh._flatten()


def count_storage_uses(tensor: torch.Tensor) -> int:
    """Return the number of references to the storage of `tensor`."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
