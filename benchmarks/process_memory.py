"""Memory of this process as the kernel counts it (Linux)."""

import ctypes
import mmap
import re
import resource
import threading
from pathlib import Path

_STATUS, _CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_SIZE = re.compile(r"^(\w+):\s+(\d+) kB$", re.MULTILINE)
_PERIOD_S = 0.001


def read_status_bytes(field: str) -> int:
    """Return a size of ``/proc/self/status``: VmRSS, VmHWM (the highest VmRSS), or VmData, which RLIMIT_DATA limits."""
    return 1024 * int(dict(_SIZE.findall(_STATUS.read_text()))[field])


def count_resident_bytes(address: int, size_bytes: int) -> int:
    """Return the resident bytes of the `size_bytes` of memory at `address`, which must be the beginning of a page.

    Raises:
        OSError: ``mincore`` failed.
    """
    there = ctypes.create_string_buffer(-(-size_bytes // mmap.PAGESIZE))
    if ctypes.CDLL(None, use_errno=True).mincore(ctypes.c_void_p(address), ctypes.c_size_t(size_bytes), there):
        raise OSError(ctypes.get_errno(), "mincore failed")
    return mmap.PAGESIZE * sum(byte & 1 for byte in there.raw)


def reset_highest_rss() -> None:
    """Reset VmHWM to the present VmRSS."""
    _CLEAR_REFS.write_text("5")


def limit_data(size_bytes: int) -> None:
    """Set the limit of VmData to `size_bytes`; allocations beyond it fail."""
    resource.setrlimit(resource.RLIMIT_DATA, (size_bytes, resource.RLIM_INFINITY))


class DataWatch:
    """Samples VmData while it is entered, for which the kernel keeps no highest value.

    Attributes:
        highest_bytes: of all samples.
    """

    def __init__(self) -> None:
        self.highest_bytes = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> "DataWatch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        stopped = False
        while not stopped:
            self.highest_bytes = max(self.highest_bytes, read_status_bytes("VmData"))
            stopped = self._stop.wait(_PERIOD_S)
