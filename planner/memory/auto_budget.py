"""``budget="auto"``: the memory that a step may use on its device, from the free memory."""

import logging
from collections.abc import Iterable

import torch
from torch.distributed.tensor import DTensor

from planner.capture.lowering.statics import compute_allocated_bytes
from planner.capture.rewrites.outputs import get_storage
from planner.graphs.errors import BudgetError
from planner.graphs.units import format_bytes
from planner.memory.free_memory import free_bytes

# Reserve by device type: bytes, and a share of the free memory. CUDA: workspaces of cuBLAS (32 MiB on Hopper for each of two
# threads) and kernels that libraries load when they are first called; the caching allocator, which ran steps of several models
# within 1.00 to 1.07 times their allocated peak. CPU: memory of Python, solvers and malloc apart from tensors.
_RESERVE = {"cuda": (192 * 2**20, 0.07), "cpu": (128 * 2**20, 0.05)}
_ROUNDED_TO = 128  # parts of a power of two: nearly the same free memory gives the same budget, and thus the same cached plan

_log = logging.getLogger(__name__)


def compute_auto_budget_bytes(
    device: torch.device,
    static: Iterable[torch.Tensor],
    inputs: Iterable[torch.Tensor] = (),
    *,
    other_static_bytes: int = 0,
) -> int:
    """Return the bytes a step may use on `device`, static memory included: free memory less a reserve, plus what it has.

    Args:
        device: a CUDA device or the CPU.
        static: tensors in memory that count in the budget: parameters, buffers, gradients, optimizer state. Room is left for
            missing ones (optimizer state before the first step).
        inputs: tensors of the batch; of a slice of a data set only the slice counts.
        other_static_bytes: bytes outside of the plan that will be allocated.

    Raises:
        BudgetError: nothing is left.
        PlannerError: the free memory of such a device is not known.
    """
    free, allocated = free_bytes(device), _count_bytes_on(device, static, inputs)
    reserve = reserve_bytes(device.type, free) + other_static_bytes
    budget = free + allocated - reserve
    said = (
        f"{format_bytes(free)} free on {device} and {format_bytes(allocated)} that the step already has there, less "
        f"{format_bytes(reserve)} for what is outside of a plan"
    )
    if budget <= 0:
        raise BudgetError(f"budget 'auto' leaves nothing: {said}; free some memory, or give a budget such as '8GB'")
    step = max(1, (1 << budget.bit_length() - 1) // _ROUNDED_TO)
    budget -= budget % step
    _log.info("budget auto is %s: %s", format_bytes(budget), said)
    return budget


def reserve_bytes(device_type: str, free: int) -> int:
    """Return the part of `free` bytes to reserve for memory outside a plan: a fixed amount, and a share of `free`."""
    fixed, share = _RESERVE[device_type]
    return fixed + int(share * free)


def _count_bytes_on(device: torch.device, static: Iterable[torch.Tensor], inputs: Iterable[torch.Tensor]) -> int:
    """Return the bytes of the storages of these tensors on `device`, each counted once, as in the static memory of a plan."""
    found: dict[int, int] = {}
    held: list[torch.Tensor] = []  # keeps the identities of storages valid
    for tensors, whole in ((static, True), (inputs, False)):
        for tensor in tensors:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            if _is_same_device(local.device, device):
                size = local.untyped_storage().nbytes() if whole else local.numel() * local.element_size()
                found.setdefault(get_storage(local), compute_allocated_bytes(size, device))
                held.append(local)
    return sum(found.values())


def _is_same_device(one: torch.device, other: torch.device) -> bool:
    if one.type != "cuda" or other.type != "cuda":
        return one.type == other.type
    indices = {torch.cuda.current_device() if device.index is None else device.index for device in (one, other)}
    return len(indices) == 1
