"""Plans on a CUDA device beside eager PyTorch: what was predicted, what the allocator says, times and bits.

A row for each model, way and budget, written as soon as it is there. The budgets are shares of eager PyTorch's peak. It fails if
a plan takes more than its budget, or has other bits where eager PyTorch repeats its own.
"""

import argparse
import gc
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

import planner
from benchmarks.common import columns_of, exit_code, provenance
from graphs.io.files import write_text
from graphs.units import format_bytes, format_seconds
from planner.capture.signature import call
from planner.capture.step import TrainingStep
from planner.models import Workload, build
from planner.report.tables import as_markdown
from planner.runtime.libraries import warm_up_libraries
from planner.runtime.measure import loss_of, median_times, outcome
from planner.studies.rows import write_csv

EAGER = "eager"
WAYS: Mapping[str, Mapping[str, Any]] = {
    "recompute": {},
    "offload": {"options": ["offload"]},
    "cuda-graph": {"cuda_graph": True},
    "inductor": {"kernels": "inductor"},
}
MODELS: Mapping[str, Callable[..., Workload]] = {
    "gpt2": partial(build, "gpt2", layers=12, width=768, heads=12, batch=8, seq=512),
    "resnet50": partial(build, "resnet50", batch=48),
}
_STEPS = 3  # of training, for the memory of plans
_REPEATS = 5
_SOLVE_S = 10.0


@dataclass(frozen=True, slots=True)
class Row:
    """One way to train a model at one budget.

    Attributes:
        share: of eager PyTorch's peak, as the budget was asked for; "" for eager PyTorch itself.
        allocated_bytes, requested_bytes, reserved_bytes: the most in some steps of training, as PyTorch's allocator counts,
            without what libraries keep.
        library_bytes: that libraries keep beside.
        planning_s: until ``planner.compile`` has returned.
        step_s: median seconds of a step; `slowdown` is beside eager PyTorch, `overhead` predicted beside keeping everything.
        bits: equal to eager PyTorch's; for eager PyTorch, to those of another run.
        gradient_error, eager_error: as in ``planner.plans.eager.EagerComparison``.
        message: why there is no more.
    """

    model: str
    way: str
    share: str = ""
    budget_bytes: int | None = None
    predicted_peak_bytes: int | None = None
    allocated_bytes: int | None = None
    requested_bytes: int | None = None
    reserved_bytes: int | None = None
    library_bytes: int | None = None
    planning_s: float | None = None
    step_s: float | None = None
    slowdown: str = ""
    overhead: float | None = None
    gap: float | None = None
    bits: bool | None = None
    gradient_error: float | None = None
    eager_error: float | None = None
    message: str = ""
    machine: str = ""
    commit: str = ""
    torch: str = ""


def eager_row(row: Row, workload: Workload) -> Row:
    """Return `row` with what eager PyTorch takes, and whether it repeats its bits."""
    step = TrainingStep(workload.model, workload.loss_fn)
    row = replace(row, **memory(step, workload))
    times = median_times({"": step}, workload.batch, parameters=list(workload.model.parameters()), repeats=_REPEATS)
    first, second = (outcome(step, workload.model, workload.batch, seed=0) for _ in range(2))
    same = not first.differences(second)
    return replace(row, step_s=times[""], bits=same, eager_error=None if same else first.gradient_error(second))


def planned_row(row: Row, workload: Workload) -> Row:
    """Return `row` with what a plan of its way and share takes."""
    began = time.perf_counter()
    step = planner.compile(*workload, budget=row.share, time_limit_s=_SOLVE_S, wait=_SOLVE_S, swap="never", **WAYS[row.way])
    plan, eager = step.plan, step.plan.eager
    row = replace(
        row,
        budget_bytes=plan.budget_bytes,
        predicted_peak_bytes=plan.peak_bytes,
        planning_s=time.perf_counter() - began,
        overhead=plan.overhead,
        gap=plan.gap,
        **memory(step, workload),
    )
    if eager is None or eager.failure:
        return replace(row, message="" if eager is None else eager.failure)
    row = replace(row, step_s=eager.planned_time_s, slowdown=eager.slowdown, bits=eager.identical)
    return replace(row, gradient_error=eager.gradient_error, eager_error=eager.eager_error)


def memory(step: Callable[..., Any], workload: Workload) -> dict[str, int]:
    """Return the most that some steps of training take, by the names of the columns."""
    device = next(workload.model.parameters()).device
    library_bytes = warm_up_libraries(device)
    workload.model.zero_grad()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    for _ in range(_STEPS):
        loss_of(call(step, workload.batch)).backward()
        workload.model.zero_grad()
    torch.cuda.synchronize(device)
    peaks = torch.cuda.memory_stats(device)
    return {
        "allocated_bytes": peaks["allocated_bytes.all.peak"] - library_bytes,
        "requested_bytes": peaks["requested_bytes.all.peak"] - library_bytes,
        "reserved_bytes": peaks["reserved_bytes.all.peak"] - library_bytes,
        "library_bytes": library_bytes,
    }


def measured(row: Row) -> Row:
    """Return `row` with all that is measured, or with the error that came in between."""
    gc.collect()  # what the last row has left
    torch.cuda.empty_cache()
    torch.manual_seed(0)
    try:
        workload = MODELS[row.model](device="cuda")
        return (eager_row if row.way == EAGER else planned_row)(row, workload)
    except Exception as error:  # noqa: BLE001  # the other rows are to be made
        return replace(row, message=f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}")


def failures(rows: Sequence[Row]) -> list[str]:
    """Say what plans did that they must not."""
    said = []
    for row in rows:
        name = f"{row.model} {row.way} {row.share}".strip()
        if row.message:
            said.append(f"{name}: {row.message}")
        if row.budget_bytes is not None and row.allocated_bytes is not None and row.allocated_bytes > row.budget_bytes:
            said.append(f"{name}: allocated {row.allocated_bytes} B, {row.allocated_bytes - row.budget_bytes} B over the budget")
        if row.bits is False and row.eager_error is None:
            said.append(f"{name}: other bits than eager PyTorch, which repeats its own")
    return said


def table(rows: Sequence[Row]) -> str:
    """Return the rows as Markdown."""
    header = (
        "model",
        "way",
        "budget",
        "predicted",
        "allocated",
        "requested",
        "reserved",
        "planned in",
        "step",
        "bits",
        "message",
    )
    cells = [
        (
            row.model,
            row.way,
            f"{row.share} = {_bytes(row.budget_bytes)}" if row.share else "",
            *map(_bytes, (row.predicted_peak_bytes, row.allocated_bytes, row.requested_bytes, row.reserved_bytes)),
            _seconds(row.planning_s),
            f"{_seconds(row.step_s)} {row.slowdown}".strip(),
            _bits(row),
            row.message,
        )
        for row in rows
    ]
    last = rows[-1]
    return as_markdown([header, *cells]) + f"\n{last.machine}; torch {last.torch}; commit {last.commit}.\n"


def _bytes(size: int | None) -> str:
    return "" if size is None else format_bytes(size)


def _seconds(time_s: float | None) -> str:
    return "" if time_s is None else format_seconds(time_s)


def _bits(row: Row) -> str:
    if row.bits is None:
        return ""
    if row.bits:
        return "equal"
    errors = (error for error in (row.gradient_error, row.eager_error) if error is not None)
    return "differ: gradient error " + ", eager's own ".join(f"{error:.1e}" for error in errors)


def main(words: Sequence[str] | None = None) -> int:
    """Make all rows; 1 if one is not as it must be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="results/gpu/plans", help="of OUT.csv and OUT.md (default: %(default)s)")
    parser.add_argument("--models", default=",".join(MODELS), help="with commas (default: %(default)s)")
    parser.add_argument("--ways", default="recompute", help=f"with commas, of {', '.join(WAYS)} (default: %(default)s)")
    parser.add_argument("--shares", default="70%,50%", help="of eager PyTorch's peak, with commas (default: %(default)s)")
    arguments = parser.parse_args(words)
    models, ways, shares = (text.split(",") for text in (arguments.models, arguments.ways, arguments.shares))
    for name, known in (*((model, MODELS) for model in models), *((way, WAYS) for way in ways)):
        if name not in known:
            parser.error(f"there is no {name!r}: choose from {', '.join(known)}")
    about = Row("", "", **provenance(torch.device("cuda")))
    wanted = [replace(about, model=model, way=EAGER) for model in models]
    wanted += [replace(about, model=model, way=way, share=share) for way in ways for model in models for share in shares]
    rows: list[Row] = []
    for row in wanted:
        rows.append(measured(row))
        print(table(rows[-1:]).splitlines()[2], flush=True)
        write_csv(
            Path(f"{arguments.out}.csv"), columns_of(Row), map(asdict, rows)
        )  # whole after every row: the next may never end
        write_text(Path(f"{arguments.out}.md"), table(rows))
    return exit_code(failures(rows))


if __name__ == "__main__":
    sys.exit(main())
