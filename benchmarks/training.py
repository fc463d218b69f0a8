"""Training by a plan at half of the memory, step by step with eager PyTorch: ``make bench-training``.

Every step trains on another batch. Each loop is run twice from the same start: for the peak of every step, and, in turn with the
other loop, for times. Rows and table are written into a folder of results/training/ named like the device. The benchmark fails if
a step exceeds its budget, or if a loss is not bit-identical to eager's.
"""

import copy
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from statistics import median
from typing import Any

import torch
from torch import nn

import planner
from benchmarks.command import Setting, add_settings, build_parser, carry_out, limit_threads
from benchmarks.solves import find_least_bytes
from benchmarks.training_loop import Loop, Recipe, generate_batches
from benchmarks.zoo_models import CPU_MODELS
from graphs.units import format_bytes, format_ratio, format_seconds
from planner.capture.signature import Batch
from planner.capture.step import TrainingStep
from planner.capture.workload.models import Workload, build
from planner.measure import tracing
from planner.measure.steps import Step
from planner.studies.experiment import Study
from planner.studies.rows import Made, collect_provenance, declare_column, declare_key, declare_text, order_by
from planner.studies.tables import Column, describe_provenance, format_markdown, group_by

SEED = 0
EAGER, PLANNED = "eager", "planned"
_LEAST_LIMIT_S = 10.0
_SOLVE_LIMIT_S = 30.0

_GPT2_SMALL = partial(build, "gpt2", layers=12, width=64, heads=4, vocab=500, batch=8, seq=128)
_GPT2_MEDIUM = partial(build, "gpt2", layers=24, width=1024, heads=16, batch=8)
_RESNET50 = partial(build, "resnet50", batch=128)

# By device: on the CPU sizes of CPU_MODELS.
RECIPES = {
    "cpu": {
        "gpt2": Recipe(_GPT2_SMALL, "adamw", rate=3e-4, clip=1.0),
        "resnet50": Recipe(CPU_MODELS["resnet50"], "momentum", rate=0.05),
    },
    "cuda": {
        "gpt2": Recipe(_GPT2_MEDIUM, "adamw", rate=3e-4, clip=1.0, autocast=True),
        "resnet50": Recipe(_RESNET50, "momentum", rate=0.05),
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRow(Made):
    """One step of one loop. Peaks and times are of two passes from the same beginning: to measure a peak takes time."""

    model: str = declare_key()
    loop: str = declare_key("eager or planned")
    step: int = declare_key("counted from 0")
    seed: int = declare_column("of weights, batches and random state", default=SEED)
    peak_bytes: int = declare_column("measured, of forward and backward pass; static bytes included")
    loss: float = declare_column("in the pass for peaks; loss_again in the pass for times")
    loss_again: float = declare_column()
    time_s: float = declare_column("of forward and backward pass")
    loop_s: float = declare_column("of these, clipping, and the optimizer's step")
    state: str = declare_text("digest of parameters, buffers and random state after the last step of each pass")
    state_again: str = declare_text()
    least_bytes: int = declare_column("the least budget that a schedule was found for")
    budget_bytes: int = declare_column("of the planned loop")
    predicted_peak_bytes: int = declare_column("what the plan says of forward and backward pass, as predicted_s")
    predicted_s: float = declare_column()
    keeping_s: float = declare_column("what it says of one that keeps everything")


def train(name: str, known: Sequence[TrainingRow], *, device: torch.device, steps: int) -> Iterator[TrainingRow]:
    """Yield the rows of one model: first eager's loop alone is run, then the planned one, then both in turn."""
    recipe = RECIPES[device.type][name]
    torch.manual_seed(SEED)
    workload = recipe.make(device=str(device))
    twin = workload._replace(model=copy.deepcopy(workload.model))
    start = copy.deepcopy(workload.model.state_dict())
    data = partial(generate_batches, workload.batch, steps, seed=SEED)

    def build_loop(model: nn.Module, step: Step) -> Loop:
        return Loop(model, step, recipe, start, seed=SEED)

    begin = {EAGER: partial(build_loop, workload.model, TrainingStep(workload.model, workload.loss_fn))}
    alone = run(Loop.measure_step, {EAGER: begin[EAGER]()}, data())
    smallest = find_least(workload, recipe, device)
    budget_bytes = choose_budget(max(peak for _, peak in alone[EAGER].steps), smallest)
    step = plan(twin, recipe, device, budget_bytes)
    begin[PLANNED] = partial(build_loop, twin.model, step)
    alone |= run(Loop.measure_step, {PLANNED: begin[PLANNED]()}, data())
    together = run(Loop.time_step, {way: begun() for way, begun in begin.items()}, data())
    for way in begin:
        seen = zip(alone[way].steps, together[way].steps, strict=True)
        for i, ((loss, peak_bytes), (loss_again, time_s, loop_s)) in enumerate(seen):
            last = i == steps - 1
            yield TrainingRow(
                model=name,
                loop=way,
                step=i,
                peak_bytes=peak_bytes,
                loss=loss,
                loss_again=loss_again,
                time_s=time_s,
                loop_s=loop_s,
                state=alone[way].state if last else "",
                state_again=together[way].state if last else "",
                least_bytes=smallest,
                budget_bytes=budget_bytes,
                predicted_peak_bytes=step.plan.peak_bytes,
                predicted_s=step.plan.time_s,
                keeping_s=step.plan.graph.time_s,
                **collect_provenance(device),
            )


@dataclass(frozen=True, slots=True)
class Seen:
    """The observations of one pass of a loop: loss and measurement of each step, and the final digest."""

    steps: list[tuple[Any, ...]]
    state: str


def run(step: Callable[[Loop, Batch], tuple[Any, ...]], loops: Mapping[str, Loop], data: Iterable[Batch]) -> dict[str, Seen]:
    """Apply `step`, a method of ``Loop``, to every batch in each of `loops` in turn; return the observations by loop."""
    turns = [{way: step(loop, batch) for way, loop in loops.items()} for batch in data]
    return {way: Seen([turn[way] for turn in turns], loop.compute_digest()) for way, loop in loops.items()}


def find_least(workload: Workload, recipe: Recipe, device: torch.device) -> int:
    """Return the least budget at which a schedule is found in some seconds."""
    with recipe.enter_precision(device):
        graph = tracing.trace(*workload, optimizer=recipe.optimizer, passes=1)
    return find_least_bytes(graph, _LEAST_LIMIT_S)


def plan(workload: Workload, recipe: Recipe, device: torch.device, budget_bytes: int) -> planner.PlannedStep:
    """Return the planned step, built as users do."""
    with recipe.enter_precision(device):
        return planner.compile(*workload, budget=budget_bytes, optimizer=recipe.optimizer, time_limit_s=_SOLVE_LIMIT_S)


def make_repeatable() -> None:
    """Set deterministic kernels on CUDA, as far as there are; must be called before any kernel has run."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(mode=True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # it would cost time


def choose_budget(peak_bytes: int, least_bytes: int) -> int:
    """Return half of `peak_bytes` or, if that is below the least budget, half way from the least budget to the peak."""
    half = peak_bytes // 2
    return half if half >= least_bytes else (least_bytes + peak_bytes) // 2


@dataclass(frozen=True, slots=True)
class Pair:
    """The two loops of one model, step by step."""

    model: str
    eager: tuple[TrainingRow, ...]
    planned: tuple[TrainingRow, ...]

    @property
    def peak_bytes(self) -> int:
        """The most that eager PyTorch took."""
        return max(row.peak_bytes for row in self.eager)

    @property
    def over(self) -> list[TrainingRow]:
        """Steps that took more than their budget."""
        return [row for row in self.planned if row.peak_bytes > row.budget_bytes]

    @property
    def losses_equal(self) -> int:
        """Number of steps whose loss is bit-identical to eager's, in both passes."""
        pairs = zip(self.planned, self.eager, strict=True)
        return sum((own.loss, own.loss_again) == (other.loss, other.loss_again) for own, other in pairs)

    @property
    def states_equal(self) -> bool:
        """True if parameters, buffers and random state are bit-identical to eager's at the end."""
        return (self.planned[-1].state, self.planned[-1].state_again) == (self.eager[-1].state, self.eager[-1].state_again)

    @property
    def eager_repeats(self) -> bool:
        """True if eager PyTorch repeats its own results; otherwise no plan can."""
        return all(row.loss == row.loss_again and row.state == row.state_again for row in self.eager)

    @property
    def plan(self) -> TrainingRow:
        """Any step of the planned loop: the columns about the plan are the same in all of them."""
        return self.planned[0]

    @property
    def time_s(self) -> float:
        """Median of the planned steps."""
        return median(row.time_s for row in self.planned)

    def compute_ratio(self, time: str) -> float:
        """Median of the multiples of eager's `time` (a column) in the same turn."""
        of = attrgetter(time)
        return median(of(own) / of(other) for own, other in zip(self.planned, self.eager, strict=True))


def group_pairs(rows: Sequence[TrainingRow]) -> dict[str, Pair]:
    """Return the loops by model."""
    loops = group_by(rows, "model", "loop")
    return {model: Pair(model, *(tuple(loops[model, loop]) for loop in (EAGER, PLANNED))) for model in group_by(rows, "model")}


def list_failures(rows: Sequence[TrainingRow]) -> list[str]:
    """Return a line for each failure: peaks over the budget, losses and parameters that are not eager's."""
    said = []
    for model, pair in group_pairs(rows).items():
        said += [
            f"{model}: step {row.step} took {format_bytes(row.peak_bytes)}, over its budget of {format_bytes(row.budget_bytes)}"
            for row in pair.over
        ]
        equal, steps = pair.losses_equal, len(pair.planned)
        hint = "" if pair.eager_repeats else "; but eager PyTorch does not repeat itself either"
        if equal < steps:
            said.append(f"{model}: the losses of {steps - equal} of {steps} steps are not eager's{hint}")
        if not pair.states_equal:
            said.append(f"{model}: parameters, buffers or random state are not eager's in the end{hint}")
    return said


TABLE = (
    "model",
    Column("eager's peak", "peak_bytes"),
    Column("budget", "plan.budget_bytes"),
    Column("of eager's peak", lambda pair: pair.plan.budget_bytes / pair.peak_bytes, format_ratio),
    Column("highest peak of a step", lambda pair: max(row.peak_bytes for row in pair.planned), format_bytes),
    Column("over budget", lambda pair: f"{len(pair.over)} of {len(pair.planned)}"),
    Column("losses equal", lambda pair: f"{pair.losses_equal} of {len(pair.planned)}"),
    Column("parameters equal", lambda pair: "yes" if pair.states_equal else "NO"),
    Column("eager's step", lambda pair: median(row.time_s for row in pair.eager), format_seconds),
    Column("planned", lambda pair: pair.compute_ratio("time_s"), "{:.3f}x"),
    Column("with optimizer", lambda pair: pair.compute_ratio("loop_s"), "{:.3f}x"),
    Column("predicted", lambda pair: pair.plan.predicted_s / pair.plan.keeping_s, "{:.3f}x"),
    Column("predicted step", "plan.predicted_s"),
    Column("measured / predicted", lambda pair: pair.time_s / pair.plan.predicted_s, "{:.3f}"),
)


def format_table(rows: Sequence[TrainingRow]) -> str:
    """Return a line for each model's loops, with times as multiples of eager PyTorch's, and the provenance."""
    found = group_pairs(rows).values()
    notes = [
        f"Nothing was found for half of {pair.model}'s peak: its budget is half way from the least, "
        f"{format_bytes(pair.plan.least_bytes)}, to the peak.\n"
        for pair in found
        if pair.plan.least_bytes > pair.peak_bytes // 2
    ]
    about = f"{max(row.step for row in rows) + 1} steps from seed {rows[0].seed}; {describe_provenance(rows)}"
    return "\n".join((format_markdown(found, TABLE), *notes, about))


def main(words: Sequence[str] | None = None) -> int:
    """Train the missing models; write rows and table; return 1 on failures."""
    parser = build_parser(__doc__, TrainingRow, models=RECIPES["cpu"], out="results/training")
    best = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=tuple(RECIPES), default=best, help="where to train (default here: %(default)s)")
    add_settings(parser, {"steps": Setting(50, "of each loop")})
    arguments = parser.parse_args(words)
    limit_threads()
    if arguments.device == "cuda":
        make_repeatable()
    arguments.out /= arguments.device
    training = partial(train, device=torch.device(arguments.device), steps=arguments.steps)
    study = Study(
        TrainingRow, training, order=order_by(model=RECIPES["cpu"]), pages={"table.md": format_table}, failures=list_failures
    )
    return carry_out(study, arguments, {(name,): name for name in arguments.models})
