"""Free memory of a device that this process may use."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import torch

from planner.graphs.errors import PlannerError

_PROCESS = Path("/proc/self")
_STATUS_FIELD = re.compile(r"^(\w+):\s+(\d+) kB$", re.MULTILINE)
_GROUP_ENTRY = re.compile(r"^(\w+) (\d+)$", re.MULTILINE)


def _get_soft_limit(name: str) -> int | None:
    if not psutil.LINUX:
        return None
    soft, _ = psutil.Process().rlimit(getattr(psutil, f"RLIMIT_{name}"))
    return None if soft == psutil.RLIM_INFINITY else int(soft)


def free_bytes(device: torch.device) -> int:
    """Return the number of bytes that this process can still allocate on `device`; 0 or more.

    On CUDA: what the driver has free, plus what the caching allocator has reserved and does not use, within the process's
    memory fraction. On the CPU: the least of the available memory, the limits of the process's control groups, and its
    RLIMIT_DATA and RLIMIT_AS.

    Raises:
        PlannerError: it is neither a CUDA device nor the CPU.
    """
    if device.type == "cuda":
        return _free_cuda_bytes(device)
    if device.type == "cpu":
        return free_host_bytes()
    raise PlannerError(f"the free memory of a device of type {device.type!r} is not known: give the budget in bytes, as '8GB'")


def free_host_bytes(
    *,
    available_bytes: Callable[[], int] = lambda: int(psutil.virtual_memory().available),
    process: Path = _PROCESS,
    limit: Callable[[str], int | None] = _get_soft_limit,
) -> int:
    """Return the number of bytes that this process can still allocate in the host's memory; 0 or more.

    Args:
        available_bytes: returns the memory that the machine has available.
        process: the process's folder in the proc file system; its files are left out where they do not exist (not Linux).
        limit: returns the soft limit of a resource ("DATA" or "AS") in bytes, None if it is unlimited.
    """
    free = [available_bytes(), *_iterate_control_group_bytes(process)]
    sizes = {name: int(size_kib) * 1024 for name, size_kib in _STATUS_FIELD.findall(_read_text(process / "status"))}
    for resource, field in (("DATA", "VmData"), ("AS", "VmSize")):
        limit_bytes = limit(resource)
        if limit_bytes is not None and field in sizes:
            free.append(limit_bytes - sizes[field])
    return max(0, min(free))


def _free_cuda_bytes(device: torch.device) -> int:
    free, total = torch.cuda.mem_get_info(device)
    allocated = torch.cuda.memory_allocated(device)
    unused = torch.cuda.memory_reserved(device) - allocated
    allowed = int(torch.cuda.get_per_process_memory_fraction(device) * total) - allocated
    return max(0, min(free + unused, allowed))


def _iterate_control_group_bytes(process: Path) -> Iterator[int]:
    """Yield the bytes left under the limit of each memory control group of the process (v1 and v2)."""
    paths = {}
    for line in _read_text(process / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory") or "memory" in controllers.split(","):
            paths["cgroup2" if controllers == "" else "cgroup"] = path
    for line in _read_text(process / "mountinfo").splitlines():
        mount, _, source = line.partition(" - ")
        kind, _, options = source.split(" ", 2)
        if kind not in paths or (kind == "cgroup" and "memory" not in options.split(",")):
            continue
        _, _, _, root, mounted_at = mount.split(" ", 5)[:5]
        files = _FILES[kind]
        for folder in _list_groups(Path(mounted_at), root, paths[kind]):
            limit, usage = _read_text(folder / files[0]).strip(), _read_text(folder / files[1]).strip()
            if limit.isdecimal() and usage.isdecimal():  # not "max", and not the root of v2, which has neither
                yield int(limit) - int(usage) + _read_reclaimable_bytes(folder, files[2])


# Names of a group's limit and usage, and the prefix of hierarchical entries in memory.stat.
_FILES = {"cgroup": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"), "cgroup2": ("memory.max", "memory.current", "")}


def _list_groups(mounted_at: Path, root: str, path: str) -> list[Path]:
    """Return the folders of a control group and its ancestors; `root` of the hierarchy is mounted at `mounted_at`."""
    parts = Path(path).parts[1:] if root == "/" else Path(path).parts[len(Path(root).parts) :]
    folders = [mounted_at.joinpath(*parts[:depth]) for depth in range(len(parts) + 1)]
    return [folder for folder in folders if folder.is_dir()]


def _read_reclaimable_bytes(folder: Path, prefix: str) -> int:
    """Return the bytes of a group's file cache, which the kernel drops before it refuses memory."""
    entries = dict(_GROUP_ENTRY.findall(_read_text(folder / "memory.stat")))
    return sum(int(entries.get(f"{prefix}{name}", 0)) for name in ("inactive_file", "active_file"))


def _read_text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
