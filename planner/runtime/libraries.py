"""Memory that libraries keep on a CUDA device beside a step's tensors: workspaces of cuBLAS, which are in no plan.

PyTorch allocates one for each thread and stream that multiplies matrices, and keeps it: 32 MiB each on Hopper. A forward pass
runs in the caller's thread and a backward pass in autograd's, so that the first step of a process allocates two.
"""

import torch
import torch.nn.functional as F

_allocated_bytes: dict[torch.device, int] = {}  # of the process, as the workspaces are


def warm_up_libraries(device: torch.device) -> int:
    """Let libraries allocate what they keep for both passes of a step on the present stream of `device`.

    Returns:
        The most bytes that a call in this process has found missing: 0 on the CPU, and where all was there before the first.
    """
    if device.type != "cuda":
        return 0
    before = torch.cuda.memory_allocated(device)
    with torch.enable_grad(), torch.autocast(device.type, enabled=False):
        factor = torch.ones(8, 8, device=device, requires_grad=True)
        torch.autograd.grad(F.linear(factor, factor, factor[0]).sum(), factor)
    del factor
    allocated = torch.cuda.memory_allocated(device) - before
    # The most: workspaces may be cleared, as before a CUDA graph is captured, and are allocated again.
    _allocated_bytes[device] = max(_allocated_bytes.get(device, 0), allocated)
    return _allocated_bytes[device]
