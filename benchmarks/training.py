"""Training by a plan at half of the memory, step by step beside eager PyTorch: ``make bench-training``.

Every step trains on another batch. Each loop is run twice from the same beginning: for the peak of every step, and, in turn
with the other loop, for times. Rows and table are written into a folder of results/training/ that is named like the device.
It fails if a step takes more than its budget, or if a loss is not eager's to the last bit.
"""

import copy
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

import planner
from benchmarks.common import columns_of, command_line, exit_code, one_thread, provenance, write
from benchmarks.training_loop import Loop, Recipe, batches
from benchmarks.training_table import EAGER, PLANNED, Row, failures, half_or_half_way, table
from planner import options, tracing
from planner.capture.signature import Batch
from planner.capture.step import TrainingStep
from planner.models import Workload, build
from planner.runtime.measure import Step
from planner.solving import order_for
from solvers.clock import WallClock
from solvers.least import least_budget

SEED = 0
_LEAST_LIMIT_S = 10.0
_SOLVE_LIMIT_S = 30.0

_GPT2_SMALL = partial(build, "gpt2", layers=12, width=64, heads=4, vocab=500, batch=8, seq=128)
_GPT2_MEDIUM = partial(build, "gpt2", layers=24, width=1024, heads=16, batch=8)
_RESNET50_SMALL = partial(build, "resnet50", width=8, size=64, classes=10, batch=16)
_RESNET50 = partial(build, "resnet50", batch=128)

# By device: on the CPU sizes of executor.py.
RECIPES = {
    "cpu": {
        "gpt2": Recipe(_GPT2_SMALL, "adamw", rate=3e-4, clip=1.0),
        "resnet50": Recipe(_RESNET50_SMALL, "momentum", rate=0.05),
    },
    "cuda": {
        "gpt2": Recipe(_GPT2_MEDIUM, "adamw", rate=3e-4, clip=1.0, autocast=True),
        "resnet50": Recipe(_RESNET50, "momentum", rate=0.05),
    },
}


def train(name: str, recipe: Recipe, device: torch.device, steps: int) -> list[Row]:
    """The rows of one model: first eager's loop alone, then the planned one, then both in turn."""
    torch.manual_seed(SEED)
    workload = recipe.make(device=str(device))
    twin = workload._replace(model=copy.deepcopy(workload.model))
    start = copy.deepcopy(workload.model.state_dict())
    data = partial(batches, workload.batch, steps, seed=SEED)

    def loop(model: nn.Module, step: Step) -> Loop:
        return Loop(model, step, recipe, start, seed=SEED)

    begin = {EAGER: partial(loop, workload.model, TrainingStep(workload.model, workload.loss_fn))}
    alone = {EAGER: peaks(begin[EAGER](), data())}
    least_bytes = least(workload, recipe, device)
    budget_bytes = half_or_half_way(max(peak for _, peak in alone[EAGER].steps), least_bytes)
    step = plan(twin, recipe, device, budget_bytes)
    begin[PLANNED] = partial(loop, twin.model, step)
    alone[PLANNED] = peaks(begin[PLANNED](), data())
    together = times({way: begun() for way, begun in begin.items()}, data())
    about = {
        "model": name,
        "seed": SEED,
        "least_bytes": least_bytes,
        "budget_bytes": budget_bytes,
        "predicted_peak_bytes": step.plan.peak_bytes,
        "predicted_s": step.plan.time_s,
        "keeping_s": step.plan.graph.time_s,
        **provenance(device),
    }
    return [row for way in begin for row in rows_of(way, alone[way], together[way], about)]


@dataclass(frozen=True, slots=True)
class Seen:
    """What was seen in one pass of a loop: of each step its loss and what was measured; in the end its digest."""

    steps: list[tuple[Any, ...]]
    state: str


def peaks(loop: Loop, data: Iterable[Batch]) -> Seen:
    """Losses and peaks of every step."""
    return Seen([loop.measured(batch) for batch in data], loop.digest())


def times(loops: Mapping[str, Loop], data: Iterable[Batch]) -> dict[str, Seen]:
    """Losses and times of every step of loops that take turns."""
    turns = [{way: loop.timed(batch) for way, loop in loops.items()} for batch in data]
    return {way: Seen([turn[way] for turn in turns], loop.digest()) for way, loop in loops.items()}


def rows_of(way: str, alone: Seen, together: Seen, about: Mapping[str, Any]) -> Iterator[Row]:
    """The rows of one loop; `about` is what is the same in all rows of its model."""
    last = len(alone.steps) - 1
    for i, ((loss, peak_bytes), (loss_again, time_s, loop_s)) in enumerate(zip(alone.steps, together.steps, strict=True)):
        yield Row(
            loop=way,
            step=i,
            peak_bytes=peak_bytes,
            loss=loss,
            loss_again=loss_again,
            time_s=time_s,
            loop_s=loop_s,
            state=alone.state if i == last else "",
            state_again=together.state if i == last else "",
            **about,
        )


def least(workload: Workload, recipe: Recipe, device: torch.device) -> int:
    """The least budget that a schedule is found for in some seconds."""
    with recipe.precision(device):
        graph = tracing.trace(*workload, optimizer=recipe.optimizer, passes=1)
    order = order_for(graph, "windows", reorder=None)
    return least_budget(order.graph, clock=WallClock(_LEAST_LIMIT_S)).found_bytes


def plan(workload: Workload, recipe: Recipe, device: torch.device, budget_bytes: int) -> planner.PlannedStep:
    """The planned step, as a user makes it."""
    with recipe.precision(device):
        return planner.compile(*workload, budget=budget_bytes, optimizer=recipe.optimizer, time_limit_s=_SOLVE_LIMIT_S)


def repeatable() -> None:
    """Have CUDA's kernels compute the same bits every time, as far as they can; called before any has run."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(mode=True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # it would cost time


def main(words: Sequence[str] | None = None) -> int:
    """Train all models; write rows and table. 1 if a step did what it must not."""
    parser = command_line(__doc__, models=RECIPES["cpu"], out="results/training")
    best = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=tuple(RECIPES), default=best, help="where to train (default here: %(default)s)")
    parser.add_argument("--steps", type=options.count, default=50, help="of each loop (default: %(default)s)")
    arguments = parser.parse_args(words)
    one_thread()
    if arguments.device == "cuda":
        repeatable()
    device = torch.device(arguments.device)
    rows = []
    for name in arguments.models:
        rows += train(name, RECIPES[arguments.device][name], device, arguments.steps)
    write(arguments.out / arguments.device, columns_of(Row), map(asdict, rows), table(rows))
    return exit_code(failures(rows))


if __name__ == "__main__":
    sys.exit(main())
