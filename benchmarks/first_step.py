"""Time from the call of ``planner.compile`` to the end of the first step, with limited memory: ``make bench-first-step``.

Each model is trained for 8 steps of SGD: by eager PyTorch without a cap, and then, with the memory of the process capped
(RLIMIT_DATA) half way between the plan's budget and eager PyTorch's memory, by a plan, by eager PyTorch and by eager PyTorch with
checkpointed blocks. Each run has its own process, with one thread. Rows in the CSV are skipped. The benchmark fails if a plan
does not train under the cap, or its results are not bit-identical to those of the run without one; memory and seconds beyond
their limits are marked in the table.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf

from benchmarks.command import Main
from benchmarks.first_step_cases import CASES
from benchmarks.first_step_run import FAILED, OUT_OF_MEMORY, RAN, UNCAPPED, WAYS, FirstStepRow, train
from planner.graphs.errors import PlannerError
from planner.graphs.units import format_bytes, format_ratio, format_seconds
from planner.plans.select_attributes import select_attributes
from planner.studies.experiment import Study
from planner.studies.processes import ALONE, ProcessError, iterate_results
from planner.studies.rows import collect_provenance, order_by
from planner.studies.tables import Column, describe_provenance, format_bullets, format_markdown, format_values, group_by

RSS_TOLERANCE = 0.02  # of the budget and the interpreter
TIME_TOLERANCE = 0.05  # of the predicted time
START_S = 2.0  # that planning may take besides the capture and some steps
_LIMIT_S = 600.0


def train_model(model: str, known: Sequence[FirstStepRow]) -> Iterator[FirstStepRow]:
    """Yield the rows of one model that are not `known`; only the first if eager PyTorch cannot train it."""
    if sys.platform != "linux":
        raise PlannerError(f"memory is capped and measured as on Linux, and this is {sys.platform}")
    ways = {row.way: row for row in known}
    uncapped = ways.get(UNCAPPED)
    if len(ways) == len(WAYS):
        return
    about = collect_provenance(packages=("transformers",))
    if uncapped is None or uncapped.status != RAN:
        uncapped, ways = replace(train_in_process(model, UNCAPPED, about), planning_steps=CASES[model].planning_steps), {}
        yield uncapped
    found = select_attributes(uncapped, "eager_peak_bytes", "static_bytes", "eager_growth_bytes", "planning_steps")
    if None in found.values():
        return
    budget_bytes = int(CASES[model].share * found["eager_peak_bytes"])
    room_bytes = (budget_bytes - found["static_bytes"] + found["eager_growth_bytes"]) // 2
    capped = {**about, **found, "budget_bytes": budget_bytes, "room_bytes": room_bytes}
    yield from (train_in_process(model, way, capped) for way in WAYS if way != UNCAPPED and way not in ways)


def train_in_process(model: str, way: str, about: Mapping[str, object]) -> FirstStepRow:
    """Return the row of a process that trains `model` in one way; `about` has the columns that all rows share."""
    row = replace(FirstStepRow(model=model, way=way, status=FAILED), **about)  # type: ignore[arg-type]
    try:
        (row,) = iterate_results(train, CASES[model], row, variables=ALONE, limit_s=_LIMIT_S)
    except ProcessError as error:
        row = replace(row, message=str(error))
    return row


@dataclass(frozen=True, slots=True)
class Trained:
    """The complete rows of one model."""

    uncapped: FirstStepRow
    planned: FirstStepRow
    eager: FirstStepRow
    checkpointing: FirstStepRow

    @property
    def model(self) -> str:
        """The name of the model."""
        return self.uncapped.model

    @property
    def same_bits(self) -> bool:
        """True if losses, parameters, buffers and the random state equal those of eager PyTorch without a cap."""
        return self.planned.status == RAN and self.planned.digest == self.uncapped.digest

    @property
    def excess_rss(self) -> str | None:
        """Part by which the highest RSS exceeds the budget and the interpreter together; None in no arena."""
        row = self.planned
        if row.arena_bytes is None or row.training_rss_bytes is None or not row.budget_bytes or row.interpreter_bytes is None:
            return None
        return _judge(row.training_rss_bytes / (row.budget_bytes + row.interpreter_bytes) - 1, RSS_TOLERANCE, "{:+.1%}")

    @property
    def prediction_verdict(self) -> str | None:
        """Time of both passes as a multiple of what the plan predicts."""
        measured_s, predicted_s = self.planned.passes_s, self.planned.predicted_s
        if measured_s is None or predicted_s is None:
            return None
        return _judge(measured_s / predicted_s, 1 + TIME_TOLERANCE, "{:.2f}", least=1 - TIME_TOLERANCE)

    @property
    def checkpointing_verdict(self) -> str | None:
        """Time of a step as a multiple of that with checkpointing under the same cap."""
        planned_s, others_s = self.planned.step_s, self.checkpointing.step_s
        return None if planned_s is None or others_s is None else _judge(planned_s / others_s, 1.0, "{:.2f}")

    @property
    def first_step(self) -> str | None:
        """Seconds until the first step ends."""
        taken_s, allowed_s = self.planned.first_step_s, self.allowed_first_step_s
        return None if taken_s is None or allowed_s is None else _judge(taken_s, allowed_s, "{:.1f} s")

    @property
    def allowed_first_step_s(self) -> float | None:
        """Allowed end of the first step: the capture, some steps of eager PyTorch and 2 s."""
        capture_s, step_s, steps = self.planned.capture_s, self.uncapped.step_s, self.planned.planning_steps
        return None if capture_s is None or step_s is None or steps is None else capture_s + steps * step_s + START_S


def _judge(found: float, most: float, form: str, *, least: float = -inf) -> str:
    """Return `found` as text, marked if it is above `most` or below `least`."""
    return form.format(found) + ("" if least <= found <= most else ": missed")


def group_by_model(rows: Sequence[FirstStepRow]) -> list[Trained]:
    """Return the models whose rows are complete."""
    groups = ({row.way: row for row in own} for own in group_by(rows, "model").values())
    return [Trained(*(found[way] for way in WAYS)) for found in groups if len(found) == len(WAYS)]


def list_failures(rows: Sequence[FirstStepRow]) -> list[str]:
    """Return a line for each model that eager PyTorch cannot train, or that a plan cannot train bit-identically under the cap."""
    bad = [row for row in rows if row.way == UNCAPPED and row.status != RAN]
    lines = [f"{row.model}: eager PyTorch without a cap: {row.status}: {row.message}" for row in bad]
    for trained in group_by_model(rows):
        row = trained.planned
        if row.status != RAN:
            lines.append(f"{row.model}: {row.way}: {row.status}: {row.message}")
        elif not trained.same_bits:
            lines.append(f"{trained.model}: losses, parameters, buffers or random state are not those of eager PyTorch")
    return lines


def format_table(rows: Sequence[FirstStepRow]) -> str:
    """Return the checks, training and memory of each model as tables, with the method and the provenance."""
    models = group_by_model(rows)
    if not models:
        return "No model has all of its rows.\n"
    planned = [trained.planned for trained in models]
    some = planned[0]
    method = (
        f"Each model is trained for {some.steps} steps of SGD with one thread, in a separate process for each method. The "
        "budget is a share of the peak of eager PyTorch's step. With model and batches in memory, the cap (RLIMIT_DATA) lets "
        "VmData grow by the mean of two amounts: the budget without parameters, buffers and batch, and the growth of VmData in "
        "eager training. The cap also holds during planning. Bits are equal if all losses, and at the end parameters, buffers "
        "and the random state, are those of eager PyTorch without a cap."
    )
    allowed = (
        "The interpreter is the RSS after planning without parameters and buffers: Python, libraries, the planner, and the batch "
        f"that others are drawn from. Allowed: in an arena, a highest RSS {RSS_TOLERANCE:.0%} above budget and interpreter; "
        f"passes that differ by {TIME_TOLERANCE:.0%} from what the last plan predicts; steps no longer than checkpointed ones. "
        "The time from the call of planner.compile to the end of the first step may be that of the capture, "
        f"{START_S:g} s, and the number of steps of eager PyTorch in brackets."
    )
    checks, training, rss = (format_markdown(models, columns) for columns in (_CHECKS, _TRAINING, _RSS))
    parts = [method, allowed, checks, "## Training", _LEGEND, training, "## RSS of the processes", rss]
    if messages := [f"{row.model}, {row.way}: {row.status}: {row.message}" for row in _select_ended_early(models)]:
        parts += ["## Not trained", format_bullets(messages)]
    made = f"Seed {format_values(planned, 'seed')}; {describe_provenance(planned, 'transformers')}"
    return "\n\n".join(part.strip() for part in [*parts, made]) + "\n"


_LEGEND = (
    "Seconds are medians of the last steps, with the optimizer's; in brackets are multiples of eager PyTorch's without a cap. "
    "Overheads of plans over keeping everything are predicted, gaps are proved; the last plan is that after the last step. "
    "Under the cap memory is returned to the system as soon as it is freed. Allocating it again takes time. Plans run in an "
    "arena, which keeps its memory."
)


def _step(row: FirstStepRow, uncapped: FirstStepRow) -> str:
    """Return the seconds of a step and the multiple of eager PyTorch's, or why there are none."""
    if row.status != RAN:
        return row.status
    ratio = "" if row.step_s is None or uncapped.step_s is None else f" ({row.step_s / uncapped.step_s:.2f}x)"
    return f"{_format_seconds(row.step_s)}{ratio}"


def _plan(overhead: float | None, gap: float | None) -> str | None:
    if overhead is None:
        return None
    return f"+{format_ratio(overhead)} ({'unknown' if gap is None else format_ratio(gap)})"


def _format_budget(trained: Trained) -> str | None:
    size_bytes, peak_bytes = trained.planned.budget_bytes, trained.planned.eager_peak_bytes
    return None if size_bytes is None or peak_bytes is None else f"{format_bytes(size_bytes)} ({size_bytes / peak_bytes:.0%})"


_column = partial(Column, missing="-")
_CHECKS = (
    "model",
    _column("eager's peak", "planned.eager_peak_bytes"),
    _column("budget", _format_budget),
    Column("trained", lambda trained: "yes" if trained.planned.status == RAN else f"NO: {trained.planned.status}"),
    Column("bits equal", lambda trained: "yes" if trained.same_bits else "NO"),
    _column("RSS beyond budget and interpreter", "excess_rss"),
    _column("measured / predicted", "prediction_verdict"),
    _column("planned / checkpointed", "checkpointing_verdict"),
    _column("capture", "planned.capture_s"),
    _column("first step ends", "first_step"),
    Column("allowed", lambda trained: f"{_format_seconds(trained.allowed_first_step_s)} ({trained.planned.planning_steps})"),
)
_TRAINING = (
    "model",
    _column("VmData may grow by", "planned.room_bytes"),
    _column("grows in eager", "planned.eager_growth_bytes"),
    _column("eager, no cap", "uncapped.step_s"),
    Column("planned", lambda trained: _step(trained.planned, trained.uncapped)),
    _column("first plan (gap)", lambda trained: _plan(trained.planned.first_overhead, trained.planned.first_gap)),
    _column("last plan (gap)", lambda trained: _plan(trained.planned.last_overhead, trained.planned.last_gap)),
    _column("measured peak", "planned.measured_peak_bytes"),
    _column("plans swapped in", lambda trained: trained.planned.swaps or ("none" if trained.planned.status == RAN else None)),
    Column("eager, capped", lambda trained: _step(trained.eager, trained.uncapped)),
    Column("checkpointing, capped", lambda trained: _step(trained.checkpointing, trained.uncapped)),
)
_RSS = (
    "model",
    _column("interpreter", "planned.interpreter_bytes"),
    _column("before planning", "planned.ready_rss_bytes"),
    _column("highest, planning", "planned.planning_rss_bytes"),
    _column("highest, training", "planned.training_rss_bytes"),
    _column("eager, no cap", "uncapped.training_rss_bytes"),
    _column("eager, capped", "eager.training_rss_bytes"),
    _column("checkpointing, capped", "checkpointing.training_rss_bytes"),
)


def _format_seconds(time_s: float | None) -> str:
    return "-" if time_s is None else format_seconds(time_s)


def _select_ended_early(models: Sequence[Trained]) -> list[FirstStepRow]:
    """Return the rows that failed for a reason other than that eager PyTorch needs more than the cap."""
    capped = [row for trained in models for row in (trained.planned, trained.eager, trained.checkpointing) if row.status != RAN]
    return [row for row in capped if row.status != OUT_OF_MEMORY or not row.message.startswith("RuntimeError")]


def _format_line(row: FirstStepRow) -> str:
    return f"{row.model}, {row.way}: {row.status} {row.message}".strip()


STUDY = Study(
    FirstStepRow,
    train_model,
    whole=False,
    order=order_by(model=CASES, way=WAYS),
    pages={"table.md": format_table},
    failures=list_failures,
)
main = Main(STUDY, CASES, say=_format_line)
