"""Processes beside that of the test, forked of one that has imported what most of them need, which takes seconds."""

import gc
import multiprocessing
from collections.abc import Callable
from typing import Any

import torch

FORKSERVER = "forkserver"
PATIENCE_S = 240.0

# It starts no thread, so that what it starts may be forked again.
multiprocessing.set_forkserver_preload(["planner.train.compile.compile", "torch._dynamo.variables", "tests.support.budgets"])


def run_apart(function: Callable[..., None], *given: Any) -> None:
    """Call `function` in a process of its own; what fails there fails here."""
    context = torch.multiprocessing.start_processes(_call, (function, given), nprocs=1, join=False, start_method=FORKSERVER)
    if not context.join(PATIENCE_S):
        context.processes[0].kill()
        raise TimeoutError(f"{function.__name__} has not ended after {PATIENCE_S:.0f} s")


def _call(_: int, function: Callable[..., None], given: tuple[Any, ...]) -> None:
    begin()
    function(*given)


def begin() -> None:
    """Let the process have one thread, and a garbage collector that leaves alone what was imported before the fork."""
    torch.set_num_threads(1)
    gc.freeze()
