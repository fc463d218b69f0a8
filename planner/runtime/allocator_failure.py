"""Recognize the errors of memory allocators: PyTorch's on any device, page-locked host memory, C++, NumPy and Python.

Never imports torch: the command line reports these errors whether or not torch is loaded.
"""

import errno
import re
from dataclasses import dataclass

from planner.graphs.errors import OutOfMemoryError, causes
from planner.graphs.units import format_bytes

_UNITS = {"bytes": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40, "pib": 2**50, "eib": 2**60}
_ASKED = re.compile(r"(?:tried to allocate|unable to allocate)\s+([0-9.]+)\s*(bytes|[KMGTPE]iB|B)\b", re.IGNORECASE)
_MESSAGES = re.compile(
    r"""
      DefaultCPUAllocator:\ (?:can't\ allocate|not\ enough)\ memory   # Linux and macOS, Windows
    | std::bad_alloc
    | \w+\ out\ of\ memory\.\ Tried\ to\ allocate\ [0-9.]+\ \w+      # the caching allocator of CUDA, HIP, XPU
    | \w+\ error:\ out\ of\ memory                                   # the CUDA runtime: page-locked memory, modules, graphs
    | cudaErrorMemoryAllocation
    | ^out\ of\ memory\ \(2\)                                        # torch.cuda.check_error
    | CU\w+_STATUS_ALLOC_FAILED                                      # cuBLAS, cuDNN, cuSOLVER
    | could\ not\ (?:create|execute)\ a\ primitive\s*$               # oneDNN does not say why; it is memory
    | can(?:'t|not)\ allocate\ memory
    """,
    re.IGNORECASE | re.VERBOSE,
)


@dataclass(frozen=True, slots=True)
class AllocatorFailure:
    """An allocation that failed.

    Attributes:
        asked_bytes: its size; None if the allocator does not say.
        message: the part of the allocator's message that names it, as PyTorch's users and libraries know it.
    """

    asked_bytes: int | None
    message: str

    def describe(self) -> str:
        """Return e.g. ``asked for 40.00 MB``."""
        return "asked for more memory" if self.asked_bytes is None else f"asked for {format_bytes(self.asked_bytes)}"


def find_allocator_failure(error: BaseException) -> AllocatorFailure | None:
    """Return the allocation whose failure raised `error`, directly or as a cause; None if the error has another reason."""
    for cause in causes(error):
        if isinstance(cause, OutOfMemoryError):
            inner = None if cause.__cause__ is None else find_allocator_failure(cause.__cause__)
            return AllocatorFailure(cause.asked_bytes, type(cause).__name__ if inner is None else inner.message)
        text = str(cause)
        found = _MESSAGES.search(text)
        if not _is_memory_error(cause) and (found is None or not isinstance(cause, RuntimeError)):
            continue
        asked = _ASKED.search(text)
        asked_bytes = None if asked is None else int(float(asked[1]) * _UNITS[asked[2].lower()])
        return AllocatorFailure(asked_bytes, type(cause).__name__ if found is None else found[0])
    return None


def _is_memory_error(error: BaseException) -> bool:
    # torch.OutOfMemoryError, also known as torch.cuda.OutOfMemoryError, is a RuntimeError.
    torch_own = isinstance(error, RuntimeError) and type(error).__name__ == "OutOfMemoryError"
    return torch_own or isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
