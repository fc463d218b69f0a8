"""Train one model in one way, in this process, perhaps under a cap of its memory: a part of ``make bench-first-step``."""

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import torch

import planner
from benchmarks.common import one_thread
from benchmarks.first_step_cases import CASES, Case
from benchmarks.first_step_rows import (
    CHECKPOINTING,
    EAGER,
    FAILED,
    LARGE_PAGES,
    OUT_OF_MEMORY,
    PLANNED,
    RAN,
    REFUSED,
    UNCAPPED,
    WAYS,
    Row,
)
from benchmarks.process_memory import DataWatch, limit_data, reset_highest_rss, status_bytes
from benchmarks.training_loop import Loop, batches
from graphs.errors import PlannerError
from graphs.io.files import write_text
from planner.capture.lowering.statics import StaticTensors
from planner.capture.signature import Batch
from planner.capture.step import TrainingStep
from planner.models import Workload
from planner.runtime.allocator_failure import allocator_failure
from planner.runtime.measure import Step, measure_memory
from planner.runtime.release import release_unused
from planner.training.compiler import Compiler

SEED = 0
STEPS = 5
_SETTLED = 3  # of the steps, the last ones, which are timed
_CPU = torch.device("cpu")


class Run:
    """One way to train a model.

    Args:
        case: the model.
        row: what is known before.
    """

    def __init__(self, case: Case, row: Row) -> None:
        self._case = case
        self._row = row
        torch.manual_seed(SEED)
        before_bytes = status_bytes("VmRSS")
        workload = case.recipe.make()
        self._workload = Workload(workload.model, workload.loss_fn, next(batches(workload.batch, 1, seed=SEED)))
        del workload
        release_unused(_CPU)
        self._ready_data_bytes, ready_bytes = status_bytes("VmData"), status_bytes("VmRSS")
        static = StaticTensors(self._workload.model, self._workload.batch, _CPU).tensors
        imported_bytes = ready_bytes - before_bytes - sum(tensor.size_bytes for tensor in static)
        self._note(ready_rss_bytes=ready_bytes, library_rss_bytes=max(0, imported_bytes), steps=STEPS, seed=SEED)

    def run(self) -> Row:
        """Train; return the row."""
        if self._row.way != UNCAPPED:
            assert self._row.room_bytes is not None
            limit_data(self._ready_data_bytes + self._row.room_bytes)
        model, loss_fn, _ = self._workload
        runs: dict[str, Callable[[], None]] = {
            UNCAPPED: self._uncapped,
            PLANNED: self._planned,
            LARGE_PAGES: self._planned,
            EAGER: lambda: self._train(TrainingStep(model, loss_fn)),
            CHECKPOINTING: lambda: self._train(self._case.checkpointing(self._workload)),
        }
        try:
            runs[self._row.way]()
            self._note(status=RAN)
        except Exception as error:  # noqa: BLE001 (whatever it is, it is a row)
            self._note(status=status_of(error), message=first_line(error))
        return self._row

    def _uncapped(self) -> None:
        """Train, and find out what that takes."""
        self._train(TrainingStep(self._workload.model, self._workload.loss_fn), watched=2)
        model, loss_fn, batch = self._workload
        static_bytes = sum(tensor.size_bytes for tensor in StaticTensors(model, batch, _CPU).tensors)
        memory = measure_memory(TrainingStep(model, loss_fn), batch, static_bytes=static_bytes, device=_CPU)
        self._note(static_bytes=static_bytes, eager_peak_bytes=memory.peak_bytes)

    def _planned(self) -> None:
        """Plan within the budget, and train."""
        model, loss_fn, batch = self._workload
        budget_bytes, optimizer = self._row.budget_bytes, self._case.recipe.optimizer
        reset_highest_rss()
        began = time.perf_counter()
        with captures_timed() as captures_s:
            step = planner.compile(model, loss_fn, batch, budget=budget_bytes, optimizer=optimizer)
        compile_s = time.perf_counter() - began
        first = step.history[0].plan
        self._note(planning_rss_bytes=status_bytes("VmHWM"), compile_s=compile_s, capture_s=sum(captures_s))
        self._note(first_overhead=first.overhead, first_gap=first.gap)
        self._train(step, began=began)
        swaps = (f"step {use.step} after {use.seconds:.1f} s: {use.reason}" for use in step.history[1:])
        last = step.plan
        self._note(
            last_overhead=last.overhead,
            last_gap=last.gap,
            measured_peak_bytes=last.measured_peak_bytes,
            swaps="; ".join(swaps),
        )

    def _train(self, step: Step, *, began: float | None = None, watched: int = 0) -> None:
        """Take all steps.

        Args:
            began: when the call began that made `step`, where the end of the first step is noted.
            watched: during so many steps VmData is sampled.
        """
        reset_highest_rss()
        loop = Loop(self._workload.model, step, self._case.recipe, self._workload.model.state_dict(), seed=SEED)
        losses, times = [], []

        data = batches(self._workload.batch, STEPS, seed=SEED)  # one at a time is in memory, as a loader has it

        def take(count: int) -> None:
            for batch in islice(data, count):
                loss, _, loop_s = loop.timed(batch)
                if began is not None and not times:
                    self._note(first_step_s=time.perf_counter() - began)
                losses.append(loss)
                times.append(loop_s)

        if watched:
            with DataWatch() as watch:
                take(watched)
            self._note(eager_growth_bytes=watch.highest_bytes - self._ready_data_bytes)
        take(STEPS - watched)
        self._note(training_rss_bytes=status_bytes("VmHWM"), step_s=median(times[-_SETTLED:]))
        self._note(digest=digest(losses, loop.digest()))

    def _note(self, **values: Any) -> None:
        self._row = replace(self._row, **values)


@contextmanager
def captures_timed() -> Iterator[list[float]]:
    """Yield a list that gets the seconds of every capture of ``planner.compile`` inside."""
    times: list[float] = []
    capture = Compiler.capture

    def timed(compiler: Compiler, batch: Batch) -> Any:
        began = time.perf_counter()
        try:
            return capture(compiler, batch)
        finally:
            times.append(time.perf_counter() - began)

    Compiler.capture = timed  # type: ignore[method-assign]
    try:
        yield times
    finally:
        Compiler.capture = capture  # type: ignore[method-assign]


def digest(losses: Sequence[float], state: str) -> str:
    """Return one digest of all bits of `losses` and of the digest of the state."""
    return hashlib.sha256(" ".join([*(loss.hex() for loss in losses), state]).encode()).hexdigest()[:16]


def status_of(error: Exception) -> str:
    """Return the status of a run that ended with `error`."""
    if allocator_failure(error) is not None:
        return OUT_OF_MEMORY
    return REFUSED if isinstance(error, PlannerError) else FAILED


def first_line(error: Exception) -> str:
    """Return the first line of the message, with the type of an error that is not the planner's."""
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return line if isinstance(error, PlannerError) else f"{type(error).__name__}: {line}"


def main(words: Sequence[str] | None = None) -> None:
    """Train one model in one way; write its row into a file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=CASES)
    parser.add_argument("way", choices=WAYS)
    parser.add_argument("out", type=Path, help="file of the row, as JSON")
    parser.add_argument("--budget", type=int, help="bytes, of the plan")
    parser.add_argument("--room", type=int, help="bytes that VmData may grow by, of all ways but the first")
    arguments = parser.parse_args(words)
    one_thread()
    row = Row(arguments.model, arguments.way, FAILED, budget_bytes=arguments.budget, room_bytes=arguments.room)
    write_text(arguments.out, json.dumps(asdict(Run(CASES[arguments.model], row).run())))


if __name__ == "__main__":
    sys.exit(main())
