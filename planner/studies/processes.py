"""Calls in separate processes, isolated in memory, threads and crashes. Imports neither torch nor pandas."""

import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from threading import Timer
from types import MappingProxyType
from typing import Any, TypeVar

from graphs.errors import PlannerError

Item = TypeVar("Item")

# Output of print goes to stderr, so that stdout carries only the results.
_CHILD = """
import os, pickle, sys
out = os.fdopen(os.dup(1), "wb")
os.dup2(2, 1)
function, given = pickle.load(sys.stdin.buffer)
for item in function(*given):
    pickle.dump(item, out)
    out.flush()
"""
ALONE = MappingProxyType({"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"})


class ProcessError(PlannerError):
    """The error that a process failed, was killed, or did not end in time."""


def iterate_results(
    function: Callable[..., Iterable[Item]],
    *arguments: object,
    variables: Mapping[str, str] = MappingProxyType({}),
    limit_s: float | None = None,
) -> Iterator[Item]:
    """Yield the results of `function`, called in a new process; the process ends with it.

    Workers of a cluster may start such a process, unlike a pool.

    Args:
        function: imported there by its name.
        arguments: its arguments, picklable like its results.
        variables: environment variables that differ from this process's.

    Raises:
        ProcessError: it failed; earlier results have been yielded.
    """
    with tempfile.TemporaryFile() as errors:
        began = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, "-c", _CHILD],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=os.environ | variables,
        )
        assert process.stdin is not None and process.stdout is not None
        timer = Timer(limit_s or 0.0, process.kill)
        if limit_s is not None:
            timer.start()
        try:
            with suppress(BrokenPipeError), process.stdin:  # a process that has ended is reported by its exit code
                pickle.dump((function, arguments), process.stdin)
            yield from _iterate_received(process.stdout)
            code = process.wait()
        finally:
            timer.cancel()
            process.kill()
            process.wait()
            process.stdout.close()
        if code and limit_s is not None and time.monotonic() - began >= limit_s:
            raise ProcessError(f"not ended after {limit_s:.0f} s")
        if code:
            errors.seek(0)
            lines = errors.read().decode(errors="replace").strip().splitlines()
            raise ProcessError(f"exit code {code}: {lines[-1] if lines else 'it said nothing'}")


def _iterate_received(pipe: Any) -> Iterator[Any]:
    while True:
        try:
            yield pickle.load(pipe)
        except (EOFError, pickle.UnpicklingError):  # the end, or a truncated message of a killed process
            return
