"""The C++ library of this process as if it were not loaded. Imported by processes that must not load it."""

import pytest

from planner.native import library
from planner.native.library import Library


def forget_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the library be as at the start of a process: neither loaded nor refused."""
    monkeypatch.setattr(library, "_LOADER", library._Loader())


def set_library(monkeypatch: pytest.MonkeyPatch, loaded: Library | None) -> None:
    """Let the library be `loaded`; None: still being compiled, as long as the test runs."""
    monkeypatch.setattr(library._LOADER, "library", loaded)
    monkeypatch.setattr(library._LOADER, "start", lambda: None)
