import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

from planner.graphs.errors import PlannerError
from planner.memory.free_memory import free_bytes, free_host_bytes
from tests.support.marks import slow

GB = 10**9


def free(process: Path, *, available: int = 64 * GB, **limits: int) -> int:
    return free_host_bytes(available_bytes=lambda: available, process=process, limit=limits.get)


def in_group(folder: Path, version: int, path: str = "/jobs/mine", root: str = "/") -> Path:
    """A process's folder, and the mount point of the control groups that its files name."""
    mounted = folder / "groups"
    kind, controllers = ("cgroup2", "0:") if version == 2 else ("cgroup", "4:memory")
    (folder / "cgroup").write_text(f"9:cpu:/elsewhere\n{controllers}:{path}\n")
    options = "rw" if version == 2 else "rw,memory"
    (folder / "mountinfo").write_text(
        f"31 23 0:28 / /sys rw,relatime - tmpfs tmpfs rw\n35 31 0:32 {root} {mounted} rw shared:1 - {kind} none {options}\n"
    )
    mounted.mkdir()
    return mounted


def write_group(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (folder / name.replace("memory_", "memory.", 1)).write_text(f"{value}\n")


def test_without_limits_the_available_memory_is_free(tmp_path: Path) -> None:
    assert free(tmp_path, available=3 * GB) == 3 * GB


@pytest.mark.parametrize("path", ["/jobs/mine", "/jobs/mine/step"])
def test_a_v2_limit_counts_less_the_usage_that_cannot_be_reclaimed(tmp_path: Path, path: str) -> None:
    mounted = in_group(tmp_path, 2, path)
    write_group(mounted / "jobs/mine/step", memory_max="max", memory_current=GB, memory_stat="inactive_file 5\nactive_file 6")
    write_group(
        mounted / "jobs/mine",
        memory_max=8 * GB,
        memory_current=5 * GB,
        memory_stat=f"anon 7\nfile {3 * GB}\ninactive_file {GB}\nactive_file {GB // 2}",
    )
    assert free(tmp_path) == 8 * GB - 5 * GB + GB + GB // 2


def test_the_tightest_group_above_a_process_counts(tmp_path: Path) -> None:
    mounted = in_group(tmp_path, 2)
    write_group(mounted / "jobs/mine", memory_max=8 * GB, memory_current=GB, memory_stat="inactive_file 0\nactive_file 0")
    write_group(mounted / "jobs", memory_max=9 * GB, memory_current=7 * GB, memory_stat="inactive_file 0\nactive_file 0")
    assert free(tmp_path) == 2 * GB


@pytest.mark.parametrize("root", ["/", "/jobs"])
def test_a_v1_limit_counts_with_the_totals_of_its_subgroups(tmp_path: Path, root: str) -> None:
    mounted = in_group(tmp_path, 1, root=root)
    write_group(
        mounted / ("jobs/mine" if root == "/" else "mine"),
        memory_limit_in_bytes=4 * GB,
        memory_usage_in_bytes=3 * GB,
        memory_stat=f"inactive_file 1\ntotal_inactive_file {GB}\ntotal_active_file 2",
    )
    assert free(tmp_path) == 2 * GB + 2


def test_a_group_that_is_mounted_as_the_root_counts(tmp_path: Path) -> None:
    mounted = in_group(tmp_path, 2, path="/../hidden")
    write_group(mounted, memory_max=2 * GB, memory_current=GB, memory_stat="")
    assert free(tmp_path) == GB


def test_resource_limits_are_reduced_by_memory_of_the_process(tmp_path: Path) -> None:
    (tmp_path / "status").write_text("Name:\tpython\nVmSize:\t 2000000 kB\nVmData:\t 1000000 kB\nThreads:\t1\n")
    assert free(tmp_path, DATA=2 * GB) == 2 * GB - 1_024_000_000
    assert free(tmp_path, AS=3 * GB) == 3 * GB - 2_048_000_000
    assert free(tmp_path, AS=3 * GB, DATA=5 * GB) == 3 * GB - 2_048_000_000
    assert free(tmp_path, AS=GB) == 0


@pytest.mark.parametrize("name", ["AS", *slow("DATA")])
def test_a_process_can_allocate_nearly_all_that_is_free_and_no_more(name: str) -> None:
    program = f"""
import resource, torch
from planner.memory.free_memory import free_bytes
cpu = torch.device("cpu")
used = dict(line.split(":") for line in open("/proc/self/status").read().splitlines())
size = int(used["{"VmData" if name == "DATA" else "VmSize"}"].split()[0]) * 1024 + 300_000_000
resource.setrlimit(resource.RLIMIT_{name}, (size, size))
free = free_bytes(cpu)
assert 280_000_000 < free <= 300_000_000, free
kept = torch.empty(free - 20_000_000, dtype=torch.uint8)
try:
    torch.empty(40_000_000, dtype=torch.uint8)
except RuntimeError:
    print("refused")
assert free_bytes(cpu) < 25_000_000
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ran.stdout == "refused\n", ran.stderr


def test_the_cpu_has_at_most_its_memory_free() -> None:
    assert 0 < free_bytes(torch.device("cpu")) < psutil.virtual_memory().total


def test_unused_reserved_memory_counts_as_free_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    fraction = 1.0
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (5 * GB, 80 * GB))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 10 * GB)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 13 * GB)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda _: fraction)
    assert free_bytes(torch.device("cuda")) == 8 * GB
    fraction = 0.15
    assert free_bytes(torch.device("cuda")) == 2 * GB


def test_other_devices_raise() -> None:
    with pytest.raises(PlannerError, match="type 'meta' is not known"):
        free_bytes(torch.device("meta"))
