"""Small steps with an inexact option compared with the same steps without it, with real tensors on the CPU."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial

import torch

from benchmarks.offload import compute_budget_bytes
from planner.capture.lowering.lower import Capture
from planner.capture.options import apply_options
from planner.capture.step import TrainingStep
from planner.capture.workload.models import Workload, build
from planner.graphs.ir import Op
from planner.graphs.options import remove_options
from planner.graphs.reordering import Reordering
from planner.graphs.schedule import keep_everything
from planner.graphs.units import format_bytes
from planner.measure import steps as measure, tracing
from planner.measure.pool_memory import measure_peak
from planner.measure.steps import StepOutcome, compute_ratio
from planner.plans.eager import Difference
from planner.plans.summary import summarize
from planner.runtime.executor import Executor
from planner.settings.option_settings import OptionSettings
from planner.settings.plan import PlanSettings
from planner.solvers.clock import Clock
from planner.solvers.least import bracket_least_budget
from planner.solvers.order.reorder import find_order, map_result_back
from planner.studies.experiment import Study
from planner.studies.measured import compute_relative_error
from planner.studies.rows import Made, collect_provenance, declare_column, declare_key, declare_text, declare_value, order_by
from planner.studies.solves import solve_allocated
from planner.studies.tables import Column, format_markdown, group_by, share_column

# At sizes at which a step takes 10 to 100 ms on one thread; logits have the same relative size as in real models.
MEASURED: Mapping[str, Callable[[], Workload]] = {
    "cpu-gpt2": partial(build, "gpt2", layers=4, width=64, heads=4, vocab=2000, batch=8, seq=128),
    "cpu-gpt2-bfloat16": partial(build, "gpt2", layers=4, width=64, heads=4, vocab=2000, batch=8, seq=128, dtype="bfloat16"),
    "cpu-llama": partial(build, "llama", layers=2, width=64, heads=4, hidden=192, vocab=2000, batch=8, seq=128, dtype="float32"),
    "cpu-vit": partial(build, "vit", layers=4, width=64, heads=4, size=64, patch=8, classes=10, batch=8),
    "cpu-mobilenet_v2": partial(build, "mobilenet_v2", multiplier=0.25, size=64, classes=10, batch=8, dropout=0),
    "cpu-unet": partial(build, "unet", channels=8, size=64, batch=4, depth=3),
    "cpu-head": partial(build, "mlp", batch=512, width=128, layers=2, classes=10000, dropout=0),
}
BUDGETS = ("least + 75%", "least + 50%", "least + 25%", "least + 5%")  # of the range between the least and the peak
_TOLERANCE = 0.01
_REPEATS = 5
_SEED = 0
_ROUNDING = "rounding"  # how ``Op.differs`` begins where nothing but rounding does


class Bits(StrEnum):
    """Kinds of differences from the program by optional ops, the least first."""

    EXACT = "exact"
    ROUNDING = "rounding"
    LOSSY = "lossy"


def find_most_bits(ops: Iterable[Op]) -> Bits:
    """Return the most that any of `ops` may differ from the program."""
    said = [op.differs for op in ops if op.differs]
    if all(differs.startswith(_ROUNDING) for differs in said):
        return Bits.ROUNDING if said else Bits.EXACT
    return Bits.LOSSY


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorRow(Made):
    """One plan with an option compared with the step that keeps everything."""

    model: str = declare_key()
    option: str = declare_key()
    bits: Bits = declare_key("the most that an op which the option offers may differ; exact: nothing else is to be said")
    budget: str = declare_key("a share of what lies between the least budget with the option and the peak")
    differing: int | None = declare_value("executions of ops that may differ")
    budget_bytes: int | None = declare_value("of the plan, as predicted and measured peak")
    predicted_peak_bytes: int | None = declare_value()
    measured_peak_bytes: int | None = declare_value()
    base_peak_bytes: int = declare_column("predicted, of the step that keeps everything")
    loss_error: float | None = declare_value("distance of the losses, over the absolute value")
    gradient_error: float | None = declare_value("Euclidean distance of all gradients in one vector, over its length")
    largest_error: float | None = declare_value(
        "the most that an element of a gradient differs, over the largest of that gradient"
    )
    predicted_ratio: float | None = declare_value("time over that of the step that keeps everything")
    measured_ratio: float | None = declare_value("the same, measured in turn")
    error: str = declare_text("why there is no plan, or it did not run")
    seed: int = declare_column("of parameters, batch and the random state of the step", default=_SEED)


@dataclass(frozen=True, slots=True)
class _Step:
    """A captured step with an option, and its results without the option.

    Attributes:
        workload: its model, loss function and batch.
        keeping: the executor that keeps everything, without the option.
        exact: the results of `keeping`.
        order: the order of the ops in its solves.
        least_bytes: the least budget with a known schedule with the option.
    """

    captured: Capture
    workload: Workload
    keeping: Executor
    exact: StepOutcome
    order: Reordering
    least_bytes: int

    @classmethod
    def of(cls, captured: Capture, workload: Workload, option: str, clock: Callable[[], Clock]) -> "_Step":
        program = remove_options(captured.graph)
        keeping = Executor(replace(captured, graph=program), keep_everything(program), workload.model, workload.loss_fn)
        order = find_order(apply_options(captured.graph, (option,)))
        least_bytes = bracket_least_budget(order.graph, clock=clock()).found_bytes
        return cls(captured, workload, keeping, _run_step(keeping, workload), order, least_bytes)

    def measure_row(self, blank: ErrorRow, clock: Callable[[], Clock]) -> ErrorRow:
        """Return the row of a plan for the budget of `blank`."""
        model, loss_fn, batch = self.workload
        row = replace(blank, budget_bytes=compute_budget_bytes(blank.budget, self.least_bytes, blank.base_peak_bytes))
        assert row.budget_bytes is not None
        solved = solve_allocated(self.order.graph, row.budget_bytes, clock(), tolerance=_TOLERANCE)
        result = map_result_back(self.order, solved)
        if result.schedule is None or result.time_s is None:
            return replace(row, error=" ".join(result.message.split()))
        graph = self.captured.graph
        planned = Executor(self.captured, result.schedule, model, loss_fn)
        found = _run_step(planned, self.workload)
        steps = {name: measure.Isolated(step, model, batch) for name, step in (("with", planned), ("without", self.keeping))}
        times = measure.turn_times(steps, batch, parameters=list(model.parameters()), repeats=_REPEATS)
        gradients = [name for name in self.exact.values if name.startswith("gradient of ")]
        return replace(
            row,
            differing=sum(not graph.ops[op].exact for op in result.schedule.computed),
            predicted_peak_bytes=result.peak_bytes,
            measured_peak_bytes=measure_peak(self.captured, planned, TrainingStep(model, loss_fn), batch).peak_bytes,
            loss_error=compute_relative_error(self.exact, found, ["loss"]),
            gradient_error=compute_relative_error(self.exact, found, gradients),
            largest_error=max(_find_largest(self.exact.compute_difference(name, found)) for name in gradients),
            predicted_ratio=result.time_s / graph.time_s,
            measured_ratio=compute_ratio(times["with"], times["without"])[0],
        )


def measure_errors(case: tuple[str, str, Callable[[], Clock]], known: Sequence[ErrorRow]) -> Iterator[ErrorRow]:
    """Yield a row for each budget; one row without a budget if the option offers nothing inexact.

    Args:
        case: a name in MEASURED, an option that is found when a step is traced, and a function that returns a new clock, for the
            least budget and for each solve.
        known: empty.
    """
    model, option, clock = case
    torch.manual_seed(_SEED)
    workload = MEASURED[model]()
    captured = tracing.capture_profiled(workload, PlanSettings(passes=_REPEATS, options=OptionSettings((option,))))
    bits, peak_bytes = find_most_bits(captured.graph.ops), summarize(captured.graph).keep_everything_peak_bytes
    row = ErrorRow(model=model, option=option, bits=bits, budget="", base_peak_bytes=peak_bytes, **collect_provenance())
    if bits is Bits.EXACT:
        yield row
        return
    step = _Step.of(captured, workload, option, clock)
    for budget in BUDGETS:
        yield step.measure_row(replace(row, budget=budget), clock)


def _run_step(step: Executor, workload: Workload) -> StepOutcome:
    return measure.measure_outcome(step, workload.model, workload.batch, seed=_SEED)


def _find_largest(difference: Difference) -> float:
    """Return the largest difference of an element of a gradient, relative to its largest element."""
    if difference.relative is not None:
        return difference.relative
    return 0.0 if difference.max_abs == 0 else float("inf")


_HEAD = """\
Small steps on the CPU with one option, compared with the same steps without it, which keep everything. Budgets are between the \
least with the option and the peak without it. Inexact ops: executions in the plan of ops that may differ. Errors are relative: \
that of the loss; the largest difference of an element of a gradient, divided by the largest element of that gradient; and the \
distance of all gradients as one vector, divided by its norm. Peaks are shares of the peak without the option, times are \
multiples of the time without it.
"""


TABLE = (
    *("model", "option"),
    Column("budget", lambda row: row.budget if row.budget_bytes is None else f"{row.budget} ({format_bytes(row.budget_bytes)})"),
    Column("inexact ops", lambda row: row.error or row.differing),
    Column("loss", "loss_error", "{:.1e}"),
    Column("largest", "largest_error", "{:.1e}"),
    Column("norm", "gradient_error", "{:.1e}"),
    share_column("peak predicted", "predicted_peak_bytes", "base_peak_bytes", "{:.2%}"),
    share_column("measured", "measured_peak_bytes", "base_peak_bytes", "{:.2%}"),
    Column("time predicted", "predicted_ratio"),
    Column("measured", "measured_ratio"),
)


def format_error_table(rows: Iterable[ErrorRow]) -> str:
    """Return errors of options that round, then of lossy ones; and of which models nothing was measured."""
    found = group_by(rows, "bits")
    parts = [_HEAD]
    for bits in (Bits.ROUNDING, Bits.LOSSY):
        parts += [f"## {str(bits).capitalize()}", format_markdown(found[bits], TABLE)] if bits in found else []
    if exact := [f"{row.option} on {row.model}" for row in found.get(Bits.EXACT, ())]:
        parts.append(f"Nothing inexact is offered by: {', '.join(exact)}.")
    run = {row.model for own in found.values() for row in own}
    if missing := [model for model in MEASURED if model not in run]:
        parts.append(f"Not run: {', '.join(missing)}.")
    return "\n\n".join(part.strip() for part in parts) + "\n"


ERRORS = Study(
    ErrorRow, measure_errors, order=order_by(model=MEASURED), pages={"errors.md": format_error_table}, file="errors.csv"
)
