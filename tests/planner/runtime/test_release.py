"""Freed memory goes back to the system, and what that costs is said once."""

import shutil
import subprocess
import sys

import pytest

from planner.memory import release
from planner.memory.release import return_large_blocks
from tests.support.logs import lines_of

_HELD = """
import torch
from benchmarks.process_memory import read_status_bytes
from planner.memory.release import return_blocks_beside_arena, return_large_blocks
for change, size_bytes in ((return_large_blocks, 2**22), (return_blocks_beside_arena, 2**19)):
    change()
    blocks = [torch.ones(size_bytes // 4) for _ in range(32)]
    between = [torch.ones(2**12) for _ in blocks]
    before = read_status_bytes("VmRSS")
    del blocks[1::2]
    print((before - read_status_bytes("VmRSS")) / size_bytes)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="memory is measured as on Linux")
def test_large_blocks_are_returned_when_they_are_freed_and_smaller_ones_beside_an_arena() -> None:
    run = subprocess.run([sys.executable, "-c", _HELD], capture_output=True, text=True, check=True)
    returned = [float(line) for line in run.stdout.split()]
    assert len(returned) == 2 and min(returned) > 15


def test_cost_of_released_memory_is_logged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Libc:
        def mallopt(self, parameter: int, value: int) -> None: ...

        def malloc_trim(self, pad: int) -> None: ...

    monkeypatch.setattr(release, "_load_glibc", Libc)
    monkeypatch.setattr(release, "_returns_large_blocks", False)
    with lines_of(release.__name__) as messages:
        return_large_blocks()
        return_large_blocks()
    assert len(messages) == 1


_ASKED = """
import re, torch
from planner.native.library import wait_for_library
from planner.runtime.arena_allocator import use_large_pages
wait_for_library()
use_large_pages()
block = torch.empty(2**26, dtype=torch.uint8)
middle = block.data_ptr() + 2**25
for area in re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", open("/proc/self/smaps").read(), flags=re.MULTILINE)[1:]:
    begin, end = (int(bound, 16) for bound in area.split()[0].split("-"))
    if begin <= middle < end:
        print(area.rpartition("VmFlags:")[2])
"""


@pytest.mark.skipif(sys.platform != "linux" or shutil.which("g++") is None, reason="pages of Linux, asked for in C++")
def test_large_pages_are_asked_for() -> None:
    run = subprocess.run([sys.executable, "-c", _ASKED], capture_output=True, text=True, check=True)
    assert "hg" in run.stdout.split()
