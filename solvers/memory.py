"""Memory of this process: its resident size, and the release of freed memory.

HiGHS has no memory limit of its own, and its search trees grow by tens of megabytes a second.
"""

import ctypes

import psutil

_PROCESS = psutil.Process()


def read_resident_bytes() -> int:
    """Return the resident memory of the process."""
    return int(_PROCESS.memory_info().rss)


def give_back() -> None:
    """Return freed memory to the system, if the C library can (glibc); otherwise it stays resident."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError):
        return
