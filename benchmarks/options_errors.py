"""Small steps with an option that is not exact, beside the same steps without, with real tensors on the CPU."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

import torch

from benchmarks.common import provenance
from benchmarks.offload_case import budget_bytes_of
from benchmarks.options_rows import Bits, ErrorRow, bits_of
from graphs.options import without_options
from graphs.schedule import keep_everything
from planner import tracing
from planner.capture.lowering.lower import Capture
from planner.capture.options import with_options
from planner.capture.step import TrainingStep
from planner.models import Workload, build
from planner.runtime import measure
from planner.runtime.executor import Executor
from planner.runtime.measure import StepOutcome
from planner.runtime.pool_memory import measured_peak
from planner.settings import TraceSettings
from planner.solving import summarize
from planner.studies.measured import relative_error
from solvers.clock import Clock
from solvers.least import least_budget
from solvers.order.reorder import Reordering, reordered
from solvers.registry import get_solver
from solvers.request import Request
from solvers.tolerance import Tolerance

# At sizes of which a step takes 10 to 100 ms on one thread; logits are as large beside the rest as in models that are used.
MEASURED: Mapping[str, Callable[[], Workload]] = {
    "cpu-gpt2": partial(build, "gpt2", layers=4, width=64, heads=4, vocab=2000, batch=8, seq=128),
    "cpu-gpt2-bfloat16": partial(build, "gpt2", layers=4, width=64, heads=4, vocab=2000, batch=8, seq=128, dtype="bfloat16"),
    "cpu-llama": partial(build, "llama", layers=2, width=64, heads=4, hidden=192, vocab=2000, batch=8, seq=128, dtype="float32"),
    "cpu-vit": partial(build, "vit", layers=4, width=64, heads=4, size=64, patch=8, classes=10, batch=8),
    "cpu-mobilenet_v2": partial(build, "mobilenet_v2", multiplier=0.25, size=64, classes=10, batch=8, dropout=0),
    "cpu-unet": partial(build, "unet", channels=8, size=64, batch=4, depth=3),
    "cpu-head": partial(build, "mlp", batch=512, width=128, layers=2, classes=10000, dropout=0),
}
BUDGETS = ("least + 75%", "least + 50%", "least + 25%", "least + 5%")  # of what lies between the least and the peak
_TOLERANCE = 0.01
_REPEATS = 5
_SEED = 0


@dataclass(frozen=True, slots=True)
class _Step:
    """A captured step with an option, and what it leaves behind without.

    Attributes:
        captured: with the option.
        workload: its model, loss function and batch.
        keeping: what keeps everything, without the option.
        exact: what that leaves behind.
        order: the order of the ops that it is solved in.
        least_bytes: the least budget that a schedule with the option is known for.
    """

    captured: Capture
    workload: Workload
    keeping: Executor
    exact: StepOutcome
    order: Reordering
    least_bytes: int

    @classmethod
    def of(cls, captured: Capture, workload: Workload, option: str, clock: Callable[[], Clock]) -> "_Step":
        program = without_options(captured.graph)
        keeping = Executor(replace(captured, graph=program), keep_everything(program), workload.model, workload.loss_fn)
        order = reordered(with_options(captured.graph, (option,)))
        least_bytes = least_budget(order.graph, clock=clock()).found_bytes
        return cls(captured, workload, keeping, _outcome(keeping, workload), order, least_bytes)

    def row(self, blank: ErrorRow, clock: Callable[[], Clock]) -> ErrorRow:
        """What a plan for the budget of `blank` comes to."""
        assert blank.base_peak_bytes is not None
        model, loss_fn, batch = self.workload
        row = replace(blank, budget_bytes=budget_bytes_of(blank.budget, self.least_bytes, blank.base_peak_bytes))
        assert row.budget_bytes is not None
        request = Request(self.order.graph, row.budget_bytes, Tolerance.of(_TOLERANCE), clock())
        result = self.order.result_of_source(get_solver("windows")(request))
        if result.schedule is None or result.time_s is None:
            return replace(row, error=" ".join(result.message.split()))
        graph = self.captured.graph
        planned = Executor(self.captured, result.schedule, model, loss_fn)
        found = _outcome(planned, self.workload)
        steps = {name: measure.Isolated(step, model, batch) for name, step in (("with", planned), ("without", self.keeping))}
        times = measure.turn_times(steps, batch, parameters=list(model.parameters()), repeats=_REPEATS)
        gradients = [name for name in self.exact.values if name.startswith("gradient of ")]
        return replace(
            row,
            differing=sum(not graph.ops[op].exact for op in result.schedule.computed),
            predicted_peak_bytes=result.peak_bytes,
            measured_peak_bytes=measured_peak(self.captured, planned, TrainingStep(model, loss_fn), batch).peak_bytes,
            loss_error=relative_error(self.exact, found, ["loss"]),
            gradient_error=relative_error(self.exact, found, gradients),
            largest_error=max(_largest(self.exact, found, name) for name in gradients),
            predicted_ratio=result.time_s / graph.time_s,
            measured_ratio=median(a / b for a, b in zip(times["with"], times["without"], strict=True)),
        )


def error_rows(model: str, option: str, clock: Callable[[], Clock]) -> Iterator[ErrorRow]:
    """Rows of `model` with `option` at each budget; one row without a budget where nothing that it offers is inexact.

    Args:
        model: a name in MEASURED.
        option: one that is found when a step is traced.
        clock: makes one that starts then, for the least budget and for each solve.
    """
    torch.manual_seed(_SEED)
    workload = MEASURED[model]()
    captured = tracing.capture_profiled(workload, TraceSettings(passes=_REPEATS, options=(option,)))
    blank = ErrorRow(
        model=model,
        option=option,
        bits=bits_of(captured.graph.ops),
        budget="",
        differing=None,
        budget_bytes=None,
        predicted_peak_bytes=None,
        measured_peak_bytes=None,
        base_peak_bytes=summarize(captured.graph).keep_everything_peak_bytes,
        loss_error=None,
        gradient_error=None,
        largest_error=None,
        predicted_ratio=None,
        measured_ratio=None,
        error="",
        seed=_SEED,
        **provenance(),
    )
    if blank.bits is Bits.EXACT:
        yield blank
        return
    step = _Step.of(captured, workload, option, clock)
    for budget in BUDGETS:
        yield step.row(replace(blank, budget=budget), clock)


def _outcome(step: Executor, workload: Workload) -> StepOutcome:
    return measure.outcome(step, workload.model, workload.batch, seed=_SEED)


def _largest(exact: StepOutcome, found: StepOutcome, name: str) -> float:
    """The most that an element of a gradient differs, over its largest."""
    difference = exact.difference(name, found)
    if difference.relative is not None:
        return difference.relative
    return 0.0 if difference.max_abs == 0 else float("inf")
