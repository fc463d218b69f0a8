"""Host and device times of steps on a CUDA device: a part of ``make gpu``.

Kernels are launched by the host and run later. If the host takes longer than they do, it decides how long a step takes. Each way
to run a step takes turns with eager PyTorch, twice in a turn: once as in training, for the times in which the host has issued the
passes and the step is done; and once behind a kernel that keeps the device busy until all is issued, for the time of the kernels
alone, between events. One plan runs in C++ and in Python; the others differ in where their memory is.
"""

import gc
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise, product
from statistics import median
from typing import Any

import torch

import planner
from benchmarks.command import add_names, build_parser, carry_out
from benchmarks.gpu.plans import ARENA, CUDA_GRAPH, EAGER, MODELS, WAYS as PLANS, measure_memory
from planner.capture.signature import call
from planner.capture.step import TrainingStep
from planner.capture.workload.models import Workload
from planner.graphs.errors import typed_line
from planner.measure.steps import Step, compute_ratio, get_loss
from planner.native.library import wait_for_library
from planner.native.passes import use_python_passes
from planner.studies.baselines import copy_code
from planner.studies.experiment import Study
from planner.studies.rows import Made, collect_provenance, declare_key, declare_text, declare_value
from planner.studies.tables import Column, describe_provenance, format_markdown
from planner.torch_private.cuda import occupy_device

NATIVE, IN_PYTHON, COMPILED = "planned", "planned-python", "torch.compile"
_PLAN_OF = {NATIVE: "recompute", IN_PYTHON: "recompute", "reserved": "reserved", ARENA: ARENA, CUDA_GRAPH: CUDA_GRAPH}
WAYS = (EAGER, *_PLAN_OF, COMPILED)  # the longest to prepare last
_SHARE = "70%"
_SOLVE_S = 1.0
_WARM_UP, _REPEATS = 3, 8
_OCCUPIED = 2.0  # times what the host took before


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuHostRow(Made):
    """The times of one way to run a model."""

    model: str = declare_key()
    way: str = declare_key()
    budget_bytes: int | None = declare_value("of plans")
    allocated_bytes: int | None = declare_value("as in benchmarks.gpu.plans")
    reserved_bytes: int | None = declare_value("as in benchmarks.gpu.plans")
    forward_host_s: float | None = declare_value("until the forward pass is issued")
    forward_device_s: float | None = declare_value("of its kernels, one after another")
    backward_host_s: float | None = declare_value("until the backward pass is issued")
    backward_device_s: float | None = declare_value("of its kernels, one after another")
    step_s: float | None = declare_value("until both are done")
    ratio: float | None = declare_value("of the step to eager PyTorch's, median of turns")
    predicted_s: float | None = declare_value("of a plan's kernels")
    message: str = declare_text("why there is no more")


@dataclass(frozen=True, slots=True)
class _Turn:
    """Seconds of one step."""

    forward_host: float
    backward_host: float
    step: float
    forward_device: float = 0.0
    backward_device: float = 0.0


def measure(row: GpuHostRow, known: Sequence[GpuHostRow]) -> Iterator[GpuHostRow]:
    """Yield `row` with all measurements, or with the error that ended them."""
    gc.collect()  # garbage of the last row
    torch.cuda.empty_cache()
    torch.manual_seed(0)
    try:
        workload = MODELS[row.model](device="cuda")
        with use_python_passes() if row.way == IN_PYTHON else nullcontext():
            yield _measure_way(row, workload)
    except Exception as error:  # noqa: BLE001  # the other rows are to be made
        yield replace(row, message=typed_line(error))


def _measure_way(row: GpuHostRow, workload: Workload) -> GpuHostRow:
    eager = TrainingStep(workload.model, workload.loss_fn)
    step: Step = eager
    if row.way == COMPILED:
        step = torch.compile(copy_code(eager), dynamic=False)
    elif row.way != EAGER:
        if row.way != IN_PYTHON:
            wait_for_library()
        settings: Mapping[str, Any] = PLANS[_PLAN_OF[row.way]]
        planned = planner.compile(
            *workload, budget=_SHARE, wait=_SOLVE_S, time_limit_s=_SOLVE_S, swap="never", compare_eager=False, **settings
        )
        step = planned
        row = replace(row, budget_bytes=planned.plan.budget_bytes, predicted_s=planned.plan.time_s)
    memory = measure_memory(step, workload)
    turns, eager_turns = _take_turns((step, eager), workload)
    return replace(
        row,
        allocated_bytes=memory["allocated_bytes"],
        reserved_bytes=memory["reserved_bytes"],
        forward_host_s=median(turn.forward_host for turn in turns),
        forward_device_s=median(turn.forward_device for turn in turns),
        backward_host_s=median(turn.backward_host for turn in turns),
        backward_device_s=median(turn.backward_device for turn in turns),
        step_s=median(turn.step for turn in turns),
        ratio=compute_ratio([turn.step for turn in turns], [turn.step for turn in eager_turns])[0],
    )


def _take_turns(steps: Sequence[Step], workload: Workload) -> tuple[list[_Turn], ...]:
    """Return the times of steps that take turns."""
    turns: tuple[list[_Turn], ...] = tuple([] for _ in steps)
    for number in range(_WARM_UP + _REPEATS):
        for step, found in zip(steps, turns, strict=True):
            turn = _time_step(step, workload)
            forward, backward = _time_kernels(step, workload, _OCCUPIED * (turn.forward_host + turn.backward_host))
            if number >= _WARM_UP:
                found.append(replace(turn, forward_device=forward, backward_device=backward))
    return turns


def _time_step(step: Step, workload: Workload) -> _Turn:
    """Return the times of a step as in training, of the host and of the whole."""
    workload.model.zero_grad()
    torch.cuda.synchronize()
    start = time.perf_counter()
    loss = get_loss(call(step, workload.batch))
    middle = time.perf_counter()
    loss.backward()
    end = time.perf_counter()
    torch.cuda.synchronize()
    return _Turn(middle - start, end - middle, time.perf_counter() - start)


def _time_kernels(step: Step, workload: Workload, issue_s: float) -> tuple[float, float]:
    """Return the seconds of the kernels of both passes of a step that the host issues in `issue_s`."""
    workload.model.zero_grad()
    torch.cuda.synchronize()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
    occupy_device(issue_s)
    marks[0].record()
    loss = get_loss(call(step, workload.batch))
    marks[1].record()
    loss.backward()
    marks[2].record()
    torch.cuda.synchronize()
    forward, backward = (before.elapsed_time(after) / 1e3 for before, after in pairwise(marks))
    return forward, backward


def list_failures(rows: Sequence[GpuHostRow]) -> Iterator[str]:
    """Yield a line for each way that fails."""
    yield from (f"{row.model} {row.way}: {row.message}" for row in rows if row.message)


TABLE = (
    *("model", "way"),
    *(Column(name, f"{name}_bytes") for name in ("budget", "allocated", "reserved")),
    Column("forward: host", "forward_host_s"),
    Column("kernels", "forward_device_s"),
    Column("backward: host", "backward_host_s"),
    Column("kernels", "backward_device_s"),
    Column("predicted kernels", "predicted_s"),
    Column("step", "step_s"),
    Column("beside eager", "ratio"),
    "message",
)


def format_table(rows: Sequence[GpuHostRow]) -> str:
    """Return the rows as Markdown."""
    return f"{format_markdown(rows, TABLE)}\n{describe_provenance(rows[-1:])}"


def main(words: Sequence[str] | None = None) -> int:
    """Make all rows; return 1 if one has a failure."""
    parser = build_parser(__doc__, GpuHostRow, models=MODELS, out="results/gpu/host")
    add_names(parser, "--ways", WAYS)
    arguments = parser.parse_args(words)
    about = {} if arguments.tables_only else collect_provenance(torch.device("cuda"))
    keys = [(model, way) for way, model in product(arguments.ways, arguments.models)]
    cases = {key: GpuHostRow(model=key[0], way=key[1], **about) for key in keys}
    study = Study(GpuHostRow, measure, pages={"table.md": format_table}, failures=list_failures)
    return carry_out(study, arguments, cases, say=lambda row: format_markdown([row], TABLE).splitlines()[2])
