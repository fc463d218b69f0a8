"""The library that all C++ code is in."""

from pathlib import Path

import pytest

from planner.native import library
from planner.native.library import describe_library


def test_without_a_compiler_the_state_says_what_that_means(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert "in the background" in describe_library()
    monkeypatch.setattr(library, "_COMPILER", "/nowhere/g++")
    assert "there is no C++ compiler, /nowhere/g++" in describe_library()
