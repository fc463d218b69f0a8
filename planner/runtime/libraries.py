"""Memory that libraries keep on a CUDA device outside any plan: workspaces of cuBLAS and cuBLASLt.

PyTorch allocates one for each thread and stream that multiplies matrices, and keeps it: 32 MiB each on Hopper. A forward pass
runs in the caller's thread and a backward pass in autograd's, so that the first step of a process allocates two.
"""

from typing import Any
from weakref import WeakSet

import torch
import torch.nn.functional as F

# By device: the bytes of both workspaces of a pass, and the most that both passes together have allocated. Per process, like the
# workspaces.
_of_a_pass: dict[torch.device, tuple[int, int]] = {}
_of_both: dict[torch.device, int] = {}
# Planned steps that multiply matrices. If their workspaces were freed, the next product would allocate new ones in the arena.
library_users: WeakSet[Any] = WeakSet()


def warm_up_libraries(device: torch.device) -> int:
    """Allocate the workspaces of libraries for both passes on the current stream; return the most bytes that took so far."""
    if device.type != "cuda":
        return 0
    device = _index_device(device)
    factor = torch.ones(8, 8, device=device, requires_grad=True)
    before = torch.cuda.memory_allocated(device)
    with torch.enable_grad(), torch.autocast(device.type, enabled=False):
        factor.detach() @ factor.detach()
        product = torch.cuda.memory_allocated(device)
        _multiply(factor.detach())
        biased = torch.cuda.memory_allocated(device)
        torch.autograd.grad(_ProductsInBothPasses.apply(factor).sum(), factor)  # type: ignore[no-untyped-call]
    after = torch.cuda.memory_allocated(device)
    # The maximum: workspaces may be freed, as before a CUDA graph is captured, and allocated again.
    found = product - before, biased - product
    _of_a_pass[device] = max(_of_a_pass.get(device, (0, 0)), found)
    _of_both[device] = max(_of_both.get(device, 0), after - before)
    return _of_both[device]


def _multiply(factor: torch.Tensor) -> torch.Tensor:
    """Multiply by cuBLAS, and with a bias by cuBLASLt, which has its own workspace."""
    return factor @ factor + F.linear(factor, factor, factor[0])


class _ProductsInBothPasses(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, factor: torch.Tensor) -> torch.Tensor:
        return _multiply(factor)

    @staticmethod
    def backward(_: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return _multiply(gradients[0].contiguous())  # cuBLASLt takes no others


def get_workspaces(device: torch.device) -> tuple[int, ...]:
    """Return the bytes of each workspace of a thread and stream, as measured by ``warm_up_libraries``."""
    return tuple(size_bytes for size_bytes in _of_a_pass.get(_index_device(device), ()) if size_bytes)


def _index_device(device: torch.device) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" and device.index is None else device
