"""Freed memory goes back to the system, and what that costs is said once."""

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
{setting}
blocks = [torch.ones({bytes} // 4) for _ in range(32)]
between = [torch.ones(2**12) for _ in blocks]
before = read_status_bytes("VmRSS")
del blocks[1::2]
print(before - read_status_bytes("VmRSS"))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="memory is measured as on Linux")
@pytest.mark.parametrize(
    ("setting", "size_bytes"),
    [("return_large_blocks()", 2**22), ("return_large_blocks()\nreturn_blocks_beside_arena()", 2**19)],
)
def test_large_blocks_are_returned_when_they_are_freed(setting: str, size_bytes: int) -> None:
    code = _HELD.format(setting=setting, bytes=size_bytes)
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(run.stdout) > 15 * size_bytes


def test_cost_of_released_memory_is_logged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Libc:
        def mallopt(self, parameter: int, value: int) -> None: ...

        def malloc_trim(self, pad: int) -> None: ...

    monkeypatch.setattr(release, "_load_glibc", Libc)
    for setting, said in (("0", 1), ("1", 0)):
        monkeypatch.setattr(release, "_returns_large_blocks", False)
        monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", setting)
        with lines_of(release.__name__) as messages:
            return_large_blocks()
            return_large_blocks()
        assert len(messages) == said
        assert all("THP_MEM_ALLOC_ENABLE=1, set before Python starts" in message for message in messages)
