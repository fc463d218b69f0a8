"""A stand-in for CUDA devices, on the CPU: tensors that say that they are on ``cuda:0``, and ``torch.cuda`` as it is there.

What it does as CUDA does:

- Work is queued on streams and done later, in an order that the events allow and that is chosen to hurt (``streams``).
- Memory is handed out by the rules of PyTorch's caching allocator, in real addresses; what is freed is overwritten, on the
  stream that it was allocated for, so that a use behind that reads NaN (``memory``).
- Backward passes run in a thread of their own, as autograd runs them on a device (``autograd``).
- Libraries allocate a workspace for each thread and stream that multiplies matrices (``memory``).
- A graph capture refuses what CUDA refuses, and replays into the same memory (``graphs``).

What it does not do: kernels of CUDA (those of the CPU compute), real time (streams have a clock of their own), attention
kernels that are chosen by the device.
"""

from tests.support.cuda_device.installed import cuda_device, on_device
from tests.support.cuda_device.machine import Machine
from tests.support.cuda_device.streams import Order

__all__ = ["Machine", "Order", "cuda_device", "on_device"]
