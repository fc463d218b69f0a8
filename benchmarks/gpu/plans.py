"""Plans on a CUDA device compared with eager PyTorch: predicted and allocated memory, times and bits.

Each model, kind of plan and budget gives a row, written as soon as it is measured. Budgets are fractions of eager PyTorch's
peak. The run fails if a plan exceeds its budget, or has other bits where eager PyTorch repeats its own.
"""

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import torch

import planner
from benchmarks.command import add_names, build_parser, carry_out
from planner.capture.signature import call
from planner.capture.step import TrainingStep
from planner.capture.workload.models import Workload, build
from planner.graphs.errors import typed_line
from planner.graphs.units import format_bytes, format_seconds
from planner.measure.steps import get_loss, measure_median_times, measure_outcome
from planner.plans.select_attributes import select_attributes
from planner.runtime.libraries import warm_up_libraries
from planner.studies.experiment import Study
from planner.studies.rows import Made, collect_provenance, declare_key, declare_text, declare_value
from planner.studies.tables import Column, describe_provenance, format_markdown
from planner.torch_private.core import clear_cublas_workspaces
from planner.torch_private.cuda import set_allocator_settings

EAGER, DEVICE, EXPANDABLE, ARENA, CUDA_GRAPH = "eager", "device", "expandable", "arena", "cuda-graph"
WAYS: Mapping[str, Mapping[str, Any]] = {
    "recompute": {"memory": "allocated"},
    "reserved": {"memory": "reserved", "arena": False},
    EXPANDABLE: {"memory": "reserved-expandable"},
    DEVICE: {"memory": "device", "arena": False},
    ARENA: {"memory": "reserved", "arena": True},
    "offload": {"options": ["offload"], "memory": "allocated"},
    CUDA_GRAPH: {"cuda_graph": True},
    "inductor": {"kernels": "inductor", "memory": "allocated"},
}
MODELS: Mapping[str, Callable[..., Workload]] = {
    "gpt2": partial(build, "gpt2", layers=12, width=768, heads=12, batch=8, seq=512),
    "resnet50": partial(build, "resnet50", batch=48),
    "unet": partial(build, "unet", batch=4),
}
_STEPS = 3  # training steps in which the memory of plans is measured
_REPEATS = 5
_SOLVE_S = 6.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRow(Made):
    """One way to train a model at one budget."""

    model: str = declare_key()
    way: str = declare_key()
    share: str = declare_key("the budget, as it was asked for; empty for eager PyTorch itself")
    budget_bytes: int | None = declare_value()
    predicted_peak_bytes: int | None = declare_value()
    predicted_reserved_bytes: int | None = declare_value("of all that PyTorch reserves, libraries included")
    allocated_bytes: int | None = declare_value(
        "the most in some steps of training, as PyTorch's allocator counts, without libraries'"
    )
    requested_bytes: int | None = declare_value("the same that is asked for")
    reserved_bytes: int | None = declare_value("the same that is reserved")
    library_bytes: int | None = declare_value("that libraries keep beside")
    predicted_device_bytes: int | None = declare_value("of all that the process takes of the device, if its budget counts that")
    device_bytes: int | None = declare_value("the same, in use after the steps: other processes' count too")
    planning_s: float | None = declare_value("until planner.compile has returned")
    step_s: float | None = declare_value("median of a step")
    slowdown: str = declare_text("beside eager PyTorch")
    overhead: float | None = declare_value("predicted beside keeping everything")
    gap: float | None = declare_value()
    bits: bool | None = declare_value("equal to eager PyTorch's; for eager PyTorch, to those of another run")
    gradient_error: float | None = declare_value("as in planner.plans.eager.EagerComparison")
    eager_error: float | None = declare_value("as in planner.plans.eager.EagerComparison")
    message: str = declare_text("why there is no more")


def measure_eager(row: PlanRow, workload: Workload) -> PlanRow:
    """Return `row` with the measurements of eager PyTorch, including a check that its bits repeat."""
    step = TrainingStep(workload.model, workload.loss_fn)
    row = replace(row, **measure_memory(step, workload))
    times = measure_median_times({"": step}, workload.batch, parameters=list(workload.model.parameters()), repeats=_REPEATS)
    first, second = (measure_outcome(step, workload.model, workload.batch, seed=0) for _ in range(2))
    same = not first.list_differences(second)
    return replace(row, step_s=times[""], bits=same, eager_error=None if same else first.compute_gradient_error(second))


def measure_plan(row: PlanRow, workload: Workload) -> PlanRow:
    """Return `row` with the measurements of a plan of its kind and share."""
    began = time.perf_counter()
    step = planner.compile(*workload, budget=row.share, time_limit_s=_SOLVE_S, wait=_SOLVE_S, swap="never", **WAYS[row.way])
    plan, eager = step.plan, step.plan.eager
    row = replace(
        row,
        **select_attributes(plan, "budget_bytes", "overhead", "gap"),
        predicted_peak_bytes=plan.peak_bytes,
        predicted_reserved_bytes=None if plan.reserved is None else plan.reserved.total_bytes,
        predicted_device_bytes=plan.reserved_bytes if row.way == DEVICE else None,
        planning_s=time.perf_counter() - began,
        **measure_memory(step, workload),
    )
    if eager is None or eager.failure:
        return replace(row, message="" if eager is None else eager.failure)
    errors = select_attributes(eager, "slowdown", "gradient_error", "eager_error")
    return replace(row, step_s=eager.planned_time_s, bits=eager.identical, **errors)


def measure_memory(step: Callable[..., Any], workload: Workload) -> dict[str, int]:
    """Return the peaks of some steps of training, by the names of the columns."""
    device = next(workload.model.parameters()).device
    get_loss(call(step, workload.batch)).backward()  # libraries allocate their workspaces, before what is measured
    workload.model.zero_grad()
    torch.cuda.synchronize(device)
    allocated_bytes = torch.cuda.memory_allocated(device)
    clear_cublas_workspaces()
    library_bytes = allocated_bytes - torch.cuda.memory_allocated(device)
    if library_bytes:
        library_bytes = warm_up_libraries(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    for _ in range(_STEPS):
        get_loss(call(step, workload.batch)).backward()
        workload.model.zero_grad()
    torch.cuda.synchronize(device)
    stats, counted = torch.cuda.memory_stats(device), ("allocated_bytes", "requested_bytes", "reserved_bytes")
    peaks = {name: stats[f"{name}.all.peak"] - library_bytes for name in counted}
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return peaks | {"library_bytes": library_bytes, "device_bytes": total_bytes - free_bytes}


def measure(row: PlanRow, known: Sequence[PlanRow]) -> Iterator[PlanRow]:
    """Yield `row` with all measurements, or with the error that ended them."""
    gc.collect()  # garbage of the last row
    torch.cuda.empty_cache()
    torch.manual_seed(0)
    if row.way == EXPANDABLE:
        _switch_segments(expandable=True)
    try:
        workload = MODELS[row.model](device="cuda")
        yield (measure_eager if row.way == EAGER else measure_plan)(row, workload)
    except Exception as error:  # noqa: BLE001  # the other rows are to be made
        yield replace(row, message=typed_line(error))
    finally:
        if row.way == EXPANDABLE:
            _switch_segments(expandable=False)


def _switch_segments(*, expandable: bool) -> None:
    """Switch expandable segments on or off, and release workspaces of libraries, which are then allocated in such segments."""
    clear_cublas_workspaces()
    torch.cuda.empty_cache()
    set_allocator_settings(f"expandable_segments:{expandable}")


def list_failures(rows: Sequence[PlanRow]) -> Iterator[str]:
    """Yield a line for each plan that exceeds its budget, has other bits, or fails."""
    for row in rows:
        name = f"{row.model} {row.way} {row.share}".strip()
        if row.message:
            yield f"{name}: {row.message}"
        if row.budget_bytes is not None and row.requested_bytes is not None and row.requested_bytes > row.budget_bytes:
            yield f"{name}: {row.requested_bytes} B of tensors, {row.requested_bytes - row.budget_bytes} B over the budget"
        if (
            row.way in ("reserved", EXPANDABLE, ARENA, CUDA_GRAPH)
            and row.reserved_bytes is not None
            and row.budget_bytes is not None
        ):
            held_bytes = row.reserved_bytes + (row.library_bytes or 0)
            if held_bytes > row.budget_bytes:
                yield f"{name}: reserved {held_bytes} B, {held_bytes - row.budget_bytes} B over the budget"
        if row.way == DEVICE and row.budget_bytes is not None and (row.device_bytes or 0) > row.budget_bytes:
            yield f"{name}: {row.device_bytes} B of the device taken, budget {row.budget_bytes} B"
        if row.bits is False and row.eager_error is None:
            yield f"{name}: other bits than eager PyTorch, which repeats its own"


def _format_bits(row: PlanRow) -> str | None:
    if row.bits is None or row.bits:
        return "equal" if row.bits else None
    errors = (error for error in (row.gradient_error, row.eager_error) if error is not None)
    return "differ: gradient error " + ", eager's own ".join(f"{error:.1e}" for error in errors)


TABLE = (
    *("model", "way"),
    Column("budget", lambda row: f"{row.share} = {format_bytes(row.budget_bytes or 0)}" if row.share else None),
    Column("predicted", "predicted_peak_bytes"),
    *(Column(name, f"{name}_bytes") for name in ("allocated", "requested", "reserved", "device")),
    Column("planned in", "planning_s"),
    Column("step", lambda row: f"{'' if row.step_s is None else format_seconds(row.step_s)} {row.slowdown}".strip()),
    Column("bits", _format_bits),
    "message",
)


def format_table(rows: Sequence[PlanRow]) -> str:
    """Return the rows as Markdown."""
    return f"{format_markdown(rows, TABLE)}\n{describe_provenance(rows[-1:])}"


def main(words: Sequence[str] | None = None) -> int:
    """Make all rows; return 1 if one has a failure."""
    parser = build_parser(__doc__, PlanRow, models=MODELS, out="results/gpu/plans")
    add_names(parser, "--ways", WAYS, "recompute")
    parser.add_argument("--shares", default="70%,60%", help="budgets, with commas (default: %(default)s)")
    arguments = parser.parse_args(words)
    pairs = [(EAGER, ""), *product(arguments.ways, arguments.shares.split(","))]
    keys = [(model, way, share) for (way, share), model in product(pairs, arguments.models)]
    about = {} if arguments.tables_only else collect_provenance(torch.device("cuda"))
    cases = {key: PlanRow(model=key[0], way=key[1], share=key[2], **about) for key in keys}
    study = Study(PlanRow, measure, pages={"table.md": format_table}, failures=list_failures)
    return carry_out(study, arguments, cases, say=lambda row: format_markdown([row], TABLE).splitlines()[2])
