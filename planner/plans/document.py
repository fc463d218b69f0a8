"""The JSON format of plans, described in docs/formats.md."""

import os
from collections.abc import Mapping
from dataclasses import fields, replace
from enum import StrEnum
from typing import Any

from msgspec import UNSET, Struct, UnsetType, field

from planner.graphs.documents import (
    PLAN_FORMAT,
    VERSION,
    Natural,
    Seconds,
    build_struct,
    check_header,
    convert_document,
    convert_to_json_object,
    list_arguments,
    list_fields,
    refuse,
)
from planner.graphs.errors import FormatError, MismatchError
from planner.graphs.io.files import format_json, write_text
from planner.graphs.provenance import Provenance
from planner.graphs.schedule import Compute, Free, Schedule, Step
from planner.memory.reserved_prediction import Reserved
from planner.plans.eager import Difference, DifferingOp, EagerComparison
from planner.plans.record import GraphSummary, PlanRecord
from planner.settings.counted_memory import CountedMemory
from planner.settings.option_settings import RECORDED_OPTIONS
from planner.solvers.result import SOLVED, Ending, SolveSettings, Status

_FREE = ("limit", "method", "options")  # fields of settings whose entries are in a file by themselves


class PlanStatus(StrEnum):
    """The status of a solve that found a schedule."""

    OPTIMAL = "optimal"
    WITHIN = "within tolerance"
    FEASIBLE = "feasible"


class _StepKind(StrEnum):
    COMPUTE = "compute"
    FREE = "free"


class _SummaryDocument(Struct, forbid_unknown_fields=True):
    fingerprint: str
    ops: Natural
    tensors: Natural
    static_bytes: Natural
    keep_everything_peak_bytes: Natural
    time_s: Seconds
    provenance: dict[str, object]
    optional_ops: Natural = 0
    optional_tensors: Natural = 0
    step_s: Seconds | None = None
    around_s: Seconds = 0.0


class _DifferenceDocument(Struct, forbid_unknown_fields=True):
    name: str
    max_abs: Seconds | None
    relative: Seconds | None


class _DifferingOpDocument(Struct, forbid_unknown_fields=True):
    name: str
    target: str
    module: str


class _EagerDocument(Struct, forbid_unknown_fields=True):
    differences: tuple[_DifferenceDocument, ...]
    first_op: _DifferingOpDocument | None
    peak_bytes: Natural
    time_s: Seconds
    planned_time_s: Seconds
    failure: str
    reference: str = field(name="beside", default="eager")
    gradient_error: Seconds | UnsetType = UNSET
    eager_error: Seconds | UnsetType = UNSET
    spread: Seconds | UnsetType = UNSET


class _ReservedDocument(Struct, forbid_unknown_fields=True):
    total_bytes: Natural
    allocated_bytes: Natural
    eager_bytes: Natural
    library_bytes: Natural = 0
    context_bytes: Natural = 0
    optimizer_bytes: Natural = 0
    pool_bytes: Natural = 0
    expandable: bool = False


class _PlanDocument(Struct, forbid_unknown_fields=True, kw_only=True):
    format: str
    version: int
    graph: _SummaryDocument
    budget_bytes: Natural
    peak_bytes: Natural
    time_s: Seconds
    bound_s: Seconds | None
    status: PlanStatus
    solver: str
    seconds: Seconds
    settings: dict[str, object]
    versions: dict[str, str]
    measured_peak_bytes: Natural | None
    arena_bytes: Natural | UnsetType = UNSET
    outside_arena_bytes: Natural | UnsetType = UNSET
    pool_peaks_bytes: dict[str, Natural] | UnsetType = UNSET
    differs: tuple[str, ...] | UnsetType = UNSET
    gradient_error: Seconds | UnsetType = UNSET
    ended: Ending | UnsetType = UNSET
    step_s: Seconds | None = None
    memory: CountedMemory = CountedMemory.ALLOCATED
    reserved: _ReservedDocument | UnsetType = UNSET
    graph_file: str | UnsetType = UNSET
    eager: _EagerDocument | UnsetType = UNSET
    steps: tuple[tuple[_StepKind, Natural], ...]


def plan_to_dict(plan: PlanRecord) -> dict[str, object]:
    """Return `plan` as in a file; raise a FormatError if provenance, settings, versions or a step have no JSON form."""
    summary = build_struct(plan.graph, _SummaryDocument)
    summary.provenance = convert_to_json_object(plan.graph.provenance, "graph.provenance")
    given: dict[str, Any] = {
        "format": PLAN_FORMAT,
        "version": VERSION,
        "graph": summary,
        "status": PlanStatus(plan.status),
        "settings": convert_to_json_object(plan.settings, "settings"),
        "versions": dict(plan.versions),
        "pool_peaks_bytes": dict(plan.pool_peaks_bytes) or UNSET,
        "differs": plan.differs or UNSET,
        "ended": plan.ended or UNSET,
        "reserved": UNSET if plan.reserved is None else build_struct(plan.reserved, _ReservedDocument),
        "eager": UNSET if plan.eager is None else _encode_eager(plan.eager),
        "steps": tuple(map(_encode_step, plan.schedule.steps)),
    }
    same = {name: getattr(plan, name) for name in _PlanDocument.__struct_fields__ if name not in given}
    return list_fields(_PlanDocument(**same, **given))


def record_from_dict(data: Mapping[str, object], *, source: str = "plan") -> PlanRecord:
    """Return the plan in `data`; `source` names it in messages.

    Raises:
        FormatError: `data` is no plan of a version that this planner reads.
        MismatchError: its status and its gap contradict each other.
    """
    check_header(data, PLAN_FORMAT, source)
    read = convert_document(data, _PlanDocument, source)
    recorded = convert_to_json_object(read.graph.provenance, f"{source}: graph.provenance")
    provenance = Provenance.of(recorded, source, "graph.provenance")
    if read.peak_bytes > read.budget_bytes:
        refuse(source, "peak_bytes", read.peak_bytes, f"within budget_bytes, {read.budget_bytes}")
    if read.memory is not CountedMemory.ALLOCATED:
        if read.reserved is UNSET:
            refuse(source, "reserved", None, f"what is reserved, as the budget counts {read.memory} memory")
        counted_bytes = read.reserved.total_bytes + read.reserved.context_bytes
        if counted_bytes > read.budget_bytes:
            refuse(source, "reserved.total_bytes", counted_bytes, f"within budget_bytes, {read.budget_bytes}")
    given = list_arguments(read)
    for name in ("format", "version", "steps", "status"):
        del given[name]
    given |= {
        "graph": GraphSummary(**list_arguments(read.graph) | {"provenance": provenance}),
        "schedule": Schedule(tuple(_step_of(pair, i, read.graph, source) for i, pair in enumerate(read.steps))),
        "settings": _decode_settings(read.settings, source),
        "pool_peaks_bytes": read.pool_peaks_bytes or {},
        "differs": read.differs or (),
        "reserved": None if read.reserved is UNSET else Reserved(**list_arguments(read.reserved)),
        "eager": None if read.eager is UNSET else _decode_comparison(read.eager),
    }
    plan = PlanRecord(**given)
    _check_status(read.status, plan, source)
    return plan


def _decode_settings(recorded: Mapping[str, object], source: str) -> SolveSettings:
    free = convert_to_json_object(recorded, f"{source}: settings")
    typed = {one.name: free.pop(one.name) for one in fields(SolveSettings) if one.name not in _FREE and one.name in free}
    given = convert_document(typed, SolveSettings, source, path="settings")
    options = {name: free.pop(name) for name in RECORDED_OPTIONS if name in free}
    return replace(given, method=free, options=options)


def _check_status(status: PlanStatus, plan: PlanRecord, source: str) -> None:
    """Raise if a file calls a plan solved whose gap is over the tolerance that the file names."""
    tolerance = plan.settings.tolerance
    if Status(status.value) not in SOLVED or plan.status in SOLVED or tolerance is None:
        return
    is_not = "has no lower bound" if plan.gap is None else f"its gap of {plan.gap:.4%} is over the tolerance of {tolerance:.4%}"
    raise MismatchError(f"{source}: the plan says that it is {status.value}, but {is_not}: its file was edited; solve again")


def write_plan(plan: PlanRecord, path: str | os.PathLike[str]) -> None:
    """Write `plan` to the file `path` atomically.

    Raises:
        FormatError: provenance, settings or versions have no JSON form, or a step has none.
        OutputError: the file cannot be written.
    """
    write_text(path, format_json(plan_to_dict(plan)))


def _encode_eager(comparison: EagerComparison) -> _EagerDocument:
    eager = build_struct(comparison, _EagerDocument)
    eager.differences = tuple(build_struct(difference, _DifferenceDocument) for difference in comparison.differences)
    eager.first_op = None if comparison.first_op is None else build_struct(comparison.first_op, _DifferingOpDocument)
    return eager


def _decode_comparison(eager: _EagerDocument) -> EagerComparison:
    differences = tuple(Difference(**list_arguments(difference)) for difference in eager.differences)
    first_op = None if eager.first_op is None else DifferingOp(**list_arguments(eager.first_op))
    return EagerComparison(**list_arguments(eager) | {"differences": differences, "first_op": first_op})


def _encode_step(step: Step) -> tuple[_StepKind, int]:
    match step:
        case Compute(op):
            return _StepKind.COMPUTE, int(op)
        case Free(tensor):
            return _StepKind.FREE, int(tensor)
        case _:
            raise FormatError(f"step {step!r} has no form in a plan of version {VERSION}")


def _step_of(pair: tuple[_StepKind, int], position: int, graph: _SummaryDocument, source: str) -> Step:
    kind, target = pair
    ops, tensors = graph.ops + graph.optional_ops, graph.tensors + graph.optional_tensors
    what, count = ("ops", ops) if kind is _StepKind.COMPUTE else ("tensors", tensors)
    if target >= count:
        refuse(source, f"steps[{position}]", pair, f"one of the {count} {what} of the graph")
    return Compute(target) if kind is _StepKind.COMPUTE else Free(target)
