"""What steps leave behind that were executed by a schedule: once, in several threads, with copies that are late."""

import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from graphs.ir import Op
from graphs.schedule import Schedule
from planner.capture.lowering.lower import Capture
from planner.capture.replay import written_tensors
from planner.capture.step import TrainingStep
from planner.models import Workload
from planner.runtime.executor import Executor
from planner.runtime.measure import StepOutcome, outcome
from planner.runtime.pool_memory import measured_peak


def executed(capture: Capture, schedule: Schedule, workload: Workload) -> tuple[StepOutcome, int]:
    """What the step leaves behind, and its measured peak."""
    model, loss_fn, batch = workload
    step = TrainingStep(model, loss_fn)
    executor = Executor(capture, schedule, model, loss_fn)
    found = outcome(executor, model, batch, seed=0, written=written_tensors(capture, step, batch))
    return found, measured_peak(capture, executor, step, batch).peak_bytes


def may_differ(capture: Capture, op: Op) -> set[str]:
    """Names of the results of the step that may differ by `op`, as ``StepOutcome`` has them."""
    said = op.differs.partition("(")[2].removesuffix(")")
    gradients = [f"gradient of {capture.graph.tensors[t].name.removeprefix('model.')}" for t, _ in capture.program.gradients]
    return {name.removeprefix("the ") for name in said.split(", ")}.union(gradients if said.endswith("gradients") else ())


def assert_alike_in_threads(executor: Executor, batch: Sequence[Any], *, rounds: int) -> None:
    """Three threads that step at once compute the gradients that one does, `rounds` times."""
    parameters = list(executor._step.parameters())
    expected = torch.autograd.grad(executor(*batch), parameters)
    wrong = []

    def steps() -> None:
        for _ in range(rounds):
            found = torch.autograd.grad(executor(*batch), parameters)
            wrong.extend(not torch.equal(a, b) for a, b in zip(expected, found, strict=True))

    threads = [threading.Thread(target=steps) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(wrong) == 3 * rounds * len(parameters) and not any(wrong)


def late_copies(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Make copies in the host's memory slow; the names of the threads that have made some."""
    makers: set[str] = set()

    def slow(target: Any, source: Any) -> None:
        makers.add(threading.current_thread().name)
        time.sleep(0.001)
        target[:] = source

    monkeypatch.setattr(np, "copyto", slow)
    return makers
