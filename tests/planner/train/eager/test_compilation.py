"""Libraries of C++ are compiled once on a machine."""

import ctypes
from pathlib import Path

import pytest

from planner.torch_private.cpp import CppCodeCache, load_cpp
from planner.train.eager.deferred_log import DeferredLog

pytestmark = pytest.mark.skipif(not DeferredLog.is_available(), reason="there is no C++ compiler")


def test_only_a_library_that_is_not_on_disk_is_announced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    announced: list[str] = []
    source = 'extern "C" int lucky_number() { return 7; }'
    for _ in range(2):
        library = load_cpp(source, "lucky", {"number": (ctypes.c_int, [])}, on_compile=lambda: announced.append("compiled"))
        assert library.lucky_number() == 7
        assert announced == ["compiled"]
        CppCodeCache.cache_clear()  # as in another process
