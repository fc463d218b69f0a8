"""Memory of this process: how much is resident, and giving back what is free.

HiGHS has no limit of its own, and its search trees grow by tens of megabytes a second.
"""

import ctypes

import psutil

_PROCESS = psutil.Process()


def resident_bytes() -> int:
    """What the process has in memory now."""
    return int(_PROCESS.memory_info().rss)


def give_back() -> None:
    """Return freed memory to the system, where the C library can (glibc); it would stay resident."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError):
        return
