"""The overhead of the executor: ``make bench-executor`` writes results/executor/.

The schedule that keeps everything, eager PyTorch, and ``torch.compile(mode="lite")`` (also ATen's ops in program order) take
turns; ratios are medians within a turn, so that noise affects both. In addition: the time to check, before each step, that the
plan still applies, and the measured time of steps as a multiple of the one that plans predict after the first steps, whose ops
are timed, in turns with those.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch

from benchmarks.command import Main, Setting
from graphs.schedule import keep_everything
from graphs.simulate import simulate
from graphs.units import format_seconds
from planner.capture.frontend.preserved_state import preserve_training_state
from planner.capture.signature import Batch, call
from planner.capture.step import TrainingStep
from planner.capture.trace import capture
from planner.capture.workload.models import build
from planner.measure.observation import OpTimer
from planner.measure.steps import Step, compute_ratio, get_loss, turn_times
from planner.measure.timing import compute_typical
from planner.native.library import wait_for_library
from planner.runtime.executor import Executor
from planner.studies.baselines import copy_code
from planner.studies.experiment import Study
from planner.studies.rows import Made, collect_provenance, declare_column, declare_key, order_by
from planner.studies.tables import Column, format_markdown, share_column
from planner.train.compile.improvement import set_times

# Those of results/compare/cpu, and the convolutional ones at sizes whose ops take longer.
MODELS = {
    "gpt2": partial(build, "gpt2", layers=12, width=64, heads=4, vocab=500, batch=8, seq=128, dropout=0),
    "vit": partial(build, "vit", layers=12, width=64, heads=4, size=64, patch=8, classes=10, batch=8),
    "unet": partial(build, "unet", channels=8, size=96, batch=4),
    "resnet50": partial(build, "resnet50", width=8, size=64, classes=10, batch=16),
    "resnet50-wide": partial(build, "resnet50", width=16, size=64, classes=10, batch=16),
    "mobilenet_v2": partial(build, "mobilenet_v2", multiplier=0.25, size=64, classes=10, batch=16, dropout=0),
    "mobilenet_v2-wide": partial(build, "mobilenet_v2", multiplier=0.5, size=96, classes=10, batch=16, dropout=0),
}
_CHECKS = 500
_STEPS = 3  # whose ops are timed, as in training, and as many beside them


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorRow(Made):
    """The measurements of a model."""

    model: str = declare_key()
    ops: int = declare_column("of the captured step")
    eager_s: float = declare_column("a step of eager PyTorch")
    executor_ratio: float = declare_column("steps of the executor, as multiples of eager PyTorch's")
    lite_ratio: float | None = declare_column('the same of torch.compile(mode="lite"); unknown where it fails')
    predicted_ratio: float | None = declare_column("the same, as multiples of what plans predict from ops timed in such steps")
    check_s: float = declare_column("to look, before each step, whether all is as it was planned for")
    repeats: int = declare_column("steps that are timed of each")


def measure(name: str, known: Sequence[ExecutorRow], *, repeats: int) -> Iterator[ExecutorRow]:
    """Yield the row of a model."""
    torch.manual_seed(0)
    model, loss_fn, batch = MODELS[name]()
    wait_for_library()
    captured = capture(model, loss_fn, batch)
    eager = TrainingStep(model, loss_fn)
    executor = Executor(captured, keep_everything(captured.graph), model, loss_fn)
    steps: dict[str, Step] = {"eager": eager, "executor": executor}
    lite = torch.compile(copy_code(eager), mode="lite", dynamic=False, fullgraph=True)
    with preserve_training_state(model, batch):
        if can_run(lite, batch):
            steps["lite"] = lite
        times = turn_times(steps, batch, parameters=list(model.parameters()), repeats=repeats)
        predicted_ratio = compare_with_predicted(executor, batch, turns=max(1, repeats // _STEPS))
    ratios = {step: compute_ratio(times[step], times["eager"])[0] for step in steps}
    yield ExecutorRow(
        model=name,
        ops=len(captured.graph.ops),
        eager_s=median(times["eager"]),
        executor_ratio=ratios["executor"],
        lite_ratio=ratios.get("lite"),
        predicted_ratio=predicted_ratio,
        check_s=check_seconds(executor, batch),
        repeats=repeats,
        **collect_provenance(),
    )


def compare_with_predicted(executor: Executor, batch: Batch, *, turns: int) -> float:
    """Return the time of steps as a multiple of what is predicted from the times of their ops, measured in turns."""
    ratios = []
    take = partial(turn_times, {"executor": executor}, batch, parameters=list(executor.training_step.parameters()))
    for _ in range(turns):
        timer = OpTimer(executor, steps=_STEPS)
        while not timer.done:
            take(repeats=1, warm_up=False)
        times_s = {executor.graph.ops[op].name: seconds for op, seconds in timer.compute_times_s().items()}
        predicted = simulate(set_times(executor.graph, times_s, timer.compute_host_scale()), executor.schedule)
        ratios.append(compute_typical(take(repeats=_STEPS, warm_up=False)["executor"], executor.device) / predicted.step_s)
    return median(ratios)


def check_seconds(executor: Executor, batch: Batch) -> float:
    """Return the median time in which the executor checks guards and batch before a step."""
    times = []
    for _ in range(_CHECKS):
        start = time.perf_counter()
        call(executor.check, batch)
        times.append(time.perf_counter() - start)
    return median(times)


def can_run(step: Step, batch: Batch) -> bool:
    """Return True if PyTorch's own mode completes a step; on ResNet it expects other strides and fails (torch 2.13)."""
    try:
        get_loss(call(step, batch)).backward()
    except AssertionError as error:
        print(f"lite fails: {str(error).splitlines()[0]}")
        return False
    return True


TABLE = (
    *("model", "ops"),
    Column("eager step", "eager_s"),
    share_column("per op", "eager_s", "ops", format_seconds),
    Column("executor", "executor_ratio"),
    Column('torch.compile(mode="lite")', "lite_ratio", missing="fails"),
    Column("measured / predicted", "predicted_ratio"),
    Column("guards, each step", lambda row: row.check_s * 1e6, "{:.0f} µs"),
)


STUDY = Study(ExecutorRow, measure, order=order_by(model=MODELS), pages={"table.md": partial(format_markdown, columns=TABLE)})
main = Main(STUDY, __doc__, models=MODELS, out="results/executor", settings={"repeats": Setting(40, "steps timed of each")})
