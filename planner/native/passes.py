"""Passes that run in C++ (``passes.cpp``) once its library is loaded, and in Python until then.

Known weakness: a pass whose library cannot be compiled keeps both its code and its graph.
"""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from planner.capture.program.builder import Line, Pass, run_within
from planner.graphs.short_tracebacks import raise_at
from planner.native.library import Library, find_library
from planner.native.lowering import FlatProgram, lower_pass

_IN_PYTHON: list[None] = []  # not empty while passes run in Python although the library is there


@contextmanager
def use_python_passes() -> Iterator[None]:
    """Let passes that are compiled inside the context run in Python, to compare both."""
    _IN_PYTHON.append(None)
    try:
        yield
    finally:
        _IN_PYTHON.pop()


class SwitchedPass:
    """A pass that runs in C++ once the library is loaded, and in Python before.

    Both make the same calls and frees in the same order. A pass that calls Python most of the time stays there, such as one that
    launches Inductor's kernels: each call from C++ makes new Python objects of its tensors (a step of GPT-2 took 1.17 times as
    long).
    """

    def __init__(self, each: Pass) -> None:
        """Initialize with the pass in Python."""
        self._waiting: Pass | None = each
        self._run: Callable[..., Any] = each.run
        self._switch()  # here if possible, since a first step may be timed

    def __call__(self, *given: Any) -> Any:
        """Run the pass."""
        self._switch()
        return self._run(*given)

    def _switch(self) -> None:
        if (waiting := self._waiting) is not None and not _IN_PYTHON and (library := find_library()) is not None:
            self._waiting = None
            program = lower_pass(waiting.parameters, waiting.module.graph.nodes, library.accepts)
            if not program.is_mostly_python:
                self._run = run_within(waiting.guard, NativePass(waiting, program, library))


class NativePass:
    """A pass in C++."""

    def __init__(self, each: Pass, program: FlatProgram, library: Library) -> None:
        """Initialize with the pass in Python, and as a flat program."""
        self.called_in_python = frozenset(program.called_in_python)
        self._lines: tuple[Line, ...] = tuple(each.node_lines[node.name] for node in program.nodes)
        self._run, self._program = library.run, library.new_program(program.described)
        self._python = each.run  # whose lines tracebacks show

    def __call__(self, *given: Any) -> Any:
        """Run the pass; an error has the line of the op that failed in its traceback, as the pass in Python would.

        Raises:
            Exception: that of the op.
        """
        position = ctypes.c_int64(-1)
        try:
            return self._run(self._program, given, position)
        except BaseException as error:
            if not 0 <= position.value < len(self._lines):
                raise
            failed = [error]
        return raise_at(*self._lines[position.value], "forward", failed)
