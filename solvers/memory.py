"""Memory of this process: how much is resident, and giving back what is free.

HiGHS has no limit of its own, and its search trees grow by tens of megabytes a second.
"""

import ctypes
import os
from pathlib import Path

_STATM = Path("/proc/self/statm")


def resident_bytes() -> int:
    """What the process has in memory now; 0 where the system does not say (other than Linux)."""
    try:
        return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


def give_back() -> None:
    """Return freed memory to the system, where the C library can (glibc); it would stay resident."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError):
        return
