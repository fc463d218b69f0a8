"""The library that all C++ code is in."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from planner.graphs.errors import PlannerError
from planner.native import library
from planner.native.library import compile_library, describe_library, library_path
from tests.support.library_states import forget_library
from tests.support.native import NEEDS_LIBRARY

_SANITIZED = (
    *("-Werror", "-UNDEBUG", "-g1", "-O1", "-fno-omit-frame-pointer"),
    *("-fsanitize=address,undefined", "-fno-sanitize=vptr", "-fno-sanitize-recover=all"),
)
_TESTED = (
    "tests/planner/native/test_ledger.py",
    "tests/planner/native/test_passes.py",
    "tests/planner/native/test_unchanged.py",
    "tests/planner/native/test_undo.py",
    "tests/planner/runtime/test_arena.py",
    *(f"tests/planner/train/eager/test_{name}.py" for name in ("native_recording", "measured_ops")),
)


def _find_runtime(name: str) -> str:
    compiler = os.environ.get("CXX") or "g++"
    found = subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    return found.stdout.strip()


@pytest.mark.slow
@NEEDS_LIBRARY
def test_sanitizers_and_the_compiler_have_nothing_to_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests of the library run in a process whose library reports wrong accesses, undefined behaviour and leaked locks."""
    if not Path(_find_runtime("libasan.so")).is_absolute():
        pytest.skip("the compiler has no address sanitizer")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compile_library(library_path(), *_SANITIZED)
    run = subprocess.run(  # -s: pytest would keep what a sanitizer writes as it ends the process
        [sys.executable, "-m", "pytest", "-qsx", "-p", "no:cacheprovider", *_TESTED],
        env=os.environ
        | {
            "LD_PRELOAD": " ".join(map(_find_runtime, ("libasan.so", "libubsan.so", "libstdc++.so"))),
            "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1",  # Python leaks at its end
            "UBSAN_OPTIONS": "print_stacktrace=1",
        },
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-5000:] + run.stderr[-5000:]


def test_all_files_are_compiled_as_one_and_the_first_errors_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "g++"
    printed = (
        "passes.cpp: In function 'run':",
        "passes.cpp:7:3: error: 'stack' was not declared",
        "    7 |   stack.clear();",
        *(f"passes.cpp:{line}:1: error: follows" for line in (8, 9, 10)),
        "compilation terminated.",
    )
    given = tmp_path / "given.cpp"
    compiler.write_text(f"#!/bin/sh\ncat > {given}\ncat >&2 <<'END'\n" + "\n".join(printed) + "\nEND\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", str(compiler))
    forget_library(monkeypatch)
    with pytest.raises(PlannerError) as failed:
        library.wait_for_library()
    included = given.read_text().splitlines()
    assert included == [f'#include "{source}"' for source in sorted(Path(library.__file__).parent.glob("*.cpp"))]
    problem, _, way_out = str(failed.value).removeprefix("the C++ library cannot be compiled: ").partition("; install")
    assert way_out and [printed.index(line) for line in problem.splitlines()] == [1, 3, 4]


def test_without_a_compiler_the_state_says_what_that_means(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert "in the background" in describe_library()
    monkeypatch.setattr(library, "_COMPILER", "/nowhere/g++")
    assert "there is no C++ compiler, /nowhere/g++" in describe_library()
