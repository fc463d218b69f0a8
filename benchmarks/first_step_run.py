"""Training of one model in one way, in this process, possibly with limited memory: a part of ``make bench-first-step``."""

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from statistics import median
from typing import Any

import torch

import planner
from benchmarks.command import limit_threads
from benchmarks.first_step_cases import FirstStepCase
from benchmarks.process_memory import DataWatch, limit_data, read_status_bytes, reset_highest_rss
from benchmarks.training_loop import Loop, generate_batches
from planner.capture.lowering.statics import StaticTensors
from planner.capture.step import TrainingStep
from planner.capture.workload.models import Workload
from planner.graphs.errors import PlannerError, first_line, typed_line
from planner.measure.steps import Step, measure_memory
from planner.memory.release import release_unused
from planner.progress.stages import Event, Progress, Stage, View
from planner.runtime.allocator_failure import find_allocator_failure
from planner.studies.rows import Made, declare_column, declare_key, declare_made, declare_text, declare_value

RAN, OUT_OF_MEMORY, REFUSED, FAILED = "ran", "out of memory", "refused", "failed"
UNCAPPED, PLANNED = "uncapped", "planned"
EAGER, CHECKPOINTING = "eager", "checkpointing"
WAYS = (UNCAPPED, PLANNED, EAGER, CHECKPOINTING)
SEED = 0
_SETTLED = 3  # of the steps, the last ones, which are timed
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstStepRow(Made):
    """One way to train one model, in a process of its own."""

    model: str = declare_key()
    way: str = declare_key("eager PyTorch uncapped, or under the cap: planned, eager, checkpointing")
    status: str = declare_column("ran, out of memory, refused (with one clear error of the planner), or failed in another way")
    message: str = declare_text("the first line of the error")
    eager_peak_bytes: int | None = declare_value("of a step of eager PyTorch, by the allocator, static bytes included")
    static_bytes: int | None = declare_value("of parameters, buffers and the batch")
    eager_growth_bytes: int | None = declare_value("by how much VmData grows in eager training")
    budget_bytes: int | None = declare_value("of the plan")
    room_bytes: int | None = declare_value(
        "VmData may grow by: half way between what the budget leaves and what eager training takes"
    )
    ready_rss_bytes: int | None = declare_value("RSS before planning, with the model and a batch in memory")
    planning_rss_bytes: int | None = declare_value("highest RSS until planner.compile returns")
    training_rss_bytes: int | None = declare_value("highest RSS of the steps")
    interpreter_bytes: int | None = declare_value("RSS after planning, without parameters and buffers, and with no memory cached")
    arena_bytes: int | None = declare_value("of the plan in use after the last step; none: in no arena")
    digest: str = declare_text("of all losses, and of parameters, buffers and the random state in the end")
    step_s: float | None = declare_value("median of the last steps, with the optimizer's")
    passes_s: float | None = declare_value("the same without the optimizer's")
    predicted_s: float | None = declare_value("that, predicted by the plan in use after the last step")
    capture_s: float | None = declare_value("of capturing the step, a part of planning")
    compile_s: float | None = declare_value("of planner.compile")
    first_step_s: float | None = declare_value("from the call to the end of the first step")
    planning_steps: int | None = declare_value("how many eager steps planning may take, besides the capture")
    first_overhead: float | None = declare_value("predicted, of the plan that training began with, as first_gap")
    first_gap: float | None = declare_value()
    last_overhead: float | None = declare_value("of the plan in use after the last step, as last_gap and measured_peak_bytes")
    last_gap: float | None = declare_value()
    measured_peak_bytes: int | None = declare_value()
    swaps: str = declare_text("of each plan but the first: step, seconds since the step was made, and reason")
    steps: int | None = declare_value("that are trained")
    seed: int | None = declare_value("of weights, batches and random state")
    transformers: str = declare_made("its version")


def train(case: FirstStepCase, row: FirstStepRow) -> Iterator[FirstStepRow]:
    """Train a model in the way of `row`, in this process, possibly with limited memory; yield the complete row."""
    limit_threads()
    yield Run(case, row).run()


class Run:
    """One way to train a model.

    Args:
        row: the columns known before.
    """

    def __init__(self, case: FirstStepCase, row: FirstStepRow) -> None:
        self._case = case
        self._row = row
        torch.manual_seed(SEED)
        workload = case.recipe.make()
        self._workload = Workload(workload.model, workload.loss_fn, next(generate_batches(workload.batch, 1, seed=SEED)))
        del workload
        release_unused(_CPU)
        self._ready_data_bytes = read_status_bytes("VmData")
        static = StaticTensors(self._workload.model, self._workload.batch, _CPU).tensors
        self._static_bytes = sum(tensor.size_bytes for tensor in static)
        self._note(ready_rss_bytes=read_status_bytes("VmRSS"), steps=self._case.steps, seed=SEED)

    def run(self) -> FirstStepRow:
        """Train, and return the row."""
        if self._row.way != UNCAPPED:
            assert self._row.room_bytes is not None
            limit_data(self._ready_data_bytes + self._row.room_bytes)
        model, loss_fn, _ = self._workload
        runs: dict[str, Callable[[], None]] = {
            UNCAPPED: self._train_uncapped,
            PLANNED: self._train_planned,
            EAGER: lambda: self._train(TrainingStep(model, loss_fn)),
            CHECKPOINTING: lambda: self._train(self._case.checkpointing(self._workload)),
        }
        try:
            runs[self._row.way]()
            self._note(status=RAN)
        except Exception as error:  # noqa: BLE001 (whatever it is, it is a row)
            self._note(status=get_status(error), message=format_message(error))
        return self._row

    def _train_uncapped(self) -> None:
        """Train without a cap, and measure the memory."""
        step = TrainingStep(self._workload.model, self._workload.loss_fn)
        self._train(step, watched=2)
        memory = measure_memory(step, self._workload.batch, static_bytes=self._static_bytes, device=_CPU)
        self._note(static_bytes=self._static_bytes, eager_peak_bytes=memory.peak_bytes)

    def _train_planned(self) -> None:
        """Plan within the budget, and train."""
        model, loss_fn, batch = self._workload
        budget_bytes, optimizer = self._row.budget_bytes, self._case.recipe.optimizer
        reset_highest_rss()
        began = time.perf_counter()
        captures_s: list[float] = []
        view = capture_timer(captures_s)
        step = planner.compile(model, loss_fn, batch, budget=budget_bytes, optimizer=optimizer, on_progress=view)
        compile_s = time.perf_counter() - began
        first = step.history[0].plan
        self._note(planning_rss_bytes=read_status_bytes("VmHWM"), compile_s=compile_s, capture_s=sum(captures_s))
        self._note(first_overhead=first.overhead, first_gap=first.gap)
        release_unused(_CPU)
        parameters_bytes = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
        self._note(interpreter_bytes=read_status_bytes("VmRSS") - parameters_bytes)
        self._train(step, began=began)
        swaps = (f"step {use.step} after {use.seconds:.1f} s: {use.reason}" for use in step.history[1:])
        last = step.plan
        self._note(last_overhead=last.overhead, last_gap=last.gap, measured_peak_bytes=last.measured_peak_bytes)
        self._note(swaps="; ".join(swaps), arena_bytes=last.arena_bytes, predicted_s=last.predicted_s)

    def _train(self, step: Step, *, began: float | None = None, watched: int = 0) -> None:
        """Take all steps.

        Args:
            began: time at which the call that made `step` began, if the end of the first step is noted; else None.
            watched: during so many steps VmData is sampled.
        """
        reset_highest_rss()
        loop = Loop(self._workload.model, step, self._case.recipe, self._workload.model.state_dict(), seed=SEED)
        losses, passes, times = [], [], []
        data = generate_batches(self._workload.batch, self._case.steps, seed=SEED)  # one at a time, as a loader has it

        def take(count: int) -> None:
            for batch in islice(data, count):
                loss, passes_s, loop_s = loop.time_step(batch)
                if began is not None and not times:
                    self._note(first_step_s=time.perf_counter() - began)
                losses.append(loss)
                passes.append(passes_s)
                times.append(loop_s)

        if watched:
            with DataWatch() as watch:
                take(watched)
            self._note(eager_growth_bytes=watch.highest_bytes - self._ready_data_bytes)
        take(self._case.steps - watched)
        self._note(training_rss_bytes=read_status_bytes("VmHWM"), step_s=median(times[-_SETTLED:]))
        self._note(passes_s=median(passes[-_SETTLED:]))
        self._note(digest=compute_digest(losses, loop.compute_digest()))

    def _note(self, **values: Any) -> None:
        self._row = replace(self._row, **values)


def capture_timer(times_s: list[float]) -> View:
    """Return a view of the progress of planning that adds the seconds of each capture to `times_s`."""

    def view(progress: Progress) -> None:
        if (progress.stage, progress.event) == (Stage.CAPTURE, Event.END):
            times_s.append(progress.stage_seconds)

    return view


def compute_digest(losses: Sequence[float], state: str) -> str:
    """Return one digest of all bits of `losses` and of the digest of the state."""
    return hashlib.sha256(" ".join([*(loss.hex() for loss in losses), state]).encode()).hexdigest()[:16]


def get_status(error: Exception) -> str:
    """Return the status of a run that ended with `error`."""
    if find_allocator_failure(error) is not None:
        return OUT_OF_MEMORY
    return REFUSED if isinstance(error, PlannerError) else FAILED


def format_message(error: Exception) -> str:
    """Return the first line of the message, with the type of an error that is not the planner's."""
    return first_line(error) if isinstance(error, PlannerError) else typed_line(error)
