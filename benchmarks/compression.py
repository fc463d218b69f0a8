"""Training with all compressible tensors in 8 and in 4 bits compared with exact training: ``make bench-compression``.

Plans rarely compress on a CPU, where recomputation is faster, so schedules that do are built (``benchmarks.all_compressed``). All
curves of a model have the same data, initial weights and random state, and take turns step by step; another exact one starts from
other weights, to show the effect of chance. The benchmark fails if the loss of a first step is not bit-identical to the exact
one, or a loss is not finite.
"""

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from statistics import median

import torch

from benchmarks.all_compressed import compress_all
from benchmarks.command import Main, Setting
from benchmarks.training_loop import Loop, Recipe
from planner.capture.lowering.lower import Capture
from planner.capture.options import apply_options
from planner.capture.signature import Batch
from planner.capture.step import TrainingStep
from planner.capture.workload.models import Workload, build
from planner.graphs.options import remove_options
from planner.graphs.options.compress import VARIANCE
from planner.graphs.schedule import Schedule, keep_everything
from planner.graphs.simulate import simulate
from planner.graphs.units import format_ratio
from planner.measure import steps as measure, tracing
from planner.measure.pool_memory import measure_peak
from planner.plans.select_attributes import select_attributes
from planner.runtime.executor import Executor
from planner.settings.option_settings import OptionSettings
from planner.settings.plan import PlanSettings
from planner.show.views.figures import COLORS, create_figure, save_figure
from planner.studies.experiment import Study
from planner.studies.rows import Made, collect_provenance, declare_column, declare_key, order_by
from planner.studies.tables import ALL, Column, SideBySide, describe_provenance, format_markdown, group_by, group_side_by_side

EXACT = "exact"
BITS = ("8", "4")
OTHER_WEIGHTS = "exact, from other weights"  # shows the effect of chance
_COLORS = (COLORS["whole"], COLORS["ours"], COLORS["second"], COLORS["third"])
_STYLES = ("-", "-", "-", ":")
WINDOW = 20  # steps that a smoothed loss is the mean of
_VOCAB, _PERIOD = 64, 4
_CLASSES, _NOISE = 10, 3.0


@dataclass(frozen=True, slots=True)
class LearningCase:
    """A model and its task.

    Attributes:
        recipe: training recipe; its `make` is called without arguments.
        data: called with a batch, a number of batches and a seed; yields so many batches of the same shapes.
    """

    recipe: Recipe
    data: Callable[[Batch, int, int], Iterator[Batch]]


def generate_patterns(like: Batch, count: int, seed: int) -> Iterator[Batch]:
    """Yield sequences that repeat _PERIOD random tokens, with the next tokens as targets, which are known after one period."""
    size, seq = like[0].shape
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        pattern = torch.randint(_VOCAB, (size, _PERIOD), generator=generator)
        tokens = pattern[:, torch.arange(seq + 1) % _PERIOD]
        yield tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def generate_noisy_classes(like: Batch, count: int, seed: int) -> Iterator[Batch]:
    """Yield images with their classes: an image of each class plus normal noise, _NOISE times as strong."""
    images, classes = like
    generator = torch.Generator().manual_seed(seed)
    centers = torch.randn(_CLASSES, *images.shape[1:], generator=generator)
    for _ in range(count):
        target = torch.randint(_CLASSES, classes.shape, generator=generator)
        yield centers[target] + _NOISE * torch.randn(images.shape, generator=generator), target


# So small that 300 steps of all curves take one to two minutes, with most activations above the 2048 elements from which on a
# tensor can be kept compressed.
CASES = {
    "gpt2": LearningCase(
        Recipe(partial(build, "gpt2", layers=2, width=64, heads=4, vocab=_VOCAB, batch=8, seq=32), "adamw", rate=1e-3),
        generate_patterns,
    ),
    "resnet18": LearningCase(
        Recipe(partial(build, "resnet18", width=8, size=32, classes=_CLASSES, batch=32), "adamw", rate=3e-3),
        generate_noisy_classes,
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveRow(Made):
    """One step of a curve, with the same step of the exact one."""

    model: str = declare_key()
    bits: str = declare_key("in which all that can be is kept compressed, or: exact, from other weights")
    step: int = declare_key("counted from 0")
    loss: float = declare_column("before the step, as exact_loss")
    exact_loss: float = declare_column()
    time_s: float = declare_column("of forward and backward pass, in turn with exact_s")
    exact_s: float = declare_column()
    predicted_peak_bytes: int = declare_column("of a step, as simulated; static bytes included")
    peak_bytes: int = declare_column("as measured")
    exact_peak_bytes: int = declare_column("measured, of the step that keeps everything")
    predicted_error: float = declare_column("of the gradients of the first step, as a part of their norm")
    error: float = declare_column("as measured")
    seed: int = declare_column("of weights, batches and random state")


@dataclass(frozen=True, slots=True)
class Curve:
    """One way to store saved tensors: the loop at its start, and values that all its rows share."""

    loop: Loop
    predicted_peak_bytes: int
    peak_bytes: int
    predicted_error: float
    error: float


def train(name: str, known: Sequence[CurveRow], *, steps: int, seed: int) -> Iterator[CurveRow]:
    """Yield the rows of one model, `steps` for each of BITS and OTHER_WEIGHTS."""
    learned = CASES[name]
    torch.manual_seed(seed)
    workload = learned.recipe.make()
    data = list(learned.data(workload.batch, steps, seed))
    begun = begin(workload._replace(batch=data[0]), learned.recipe, seed)
    turns = [{bits: curve.loop.time_step(batch) for bits, curve in begun.items()} for batch in data]
    for bits in (*BITS, OTHER_WEIGHTS):
        curve = begun[bits]
        for step, turn in enumerate(turns):
            (loss, time_s, _), (exact_loss, exact_s, _) = turn[bits], turn[EXACT]
            yield CurveRow(
                model=name,
                bits=bits,
                step=step,
                loss=loss,
                exact_loss=exact_loss,
                time_s=time_s,
                exact_s=exact_s,
                **select_attributes(curve, "predicted_peak_bytes", "peak_bytes", "predicted_error", "error"),
                exact_peak_bytes=begun[EXACT].peak_bytes,
                seed=seed,
                **collect_provenance(),
            )


def begin(workload: Workload, recipe: Recipe, seed: int) -> dict[str, Curve]:
    """Return the curves of BITS, EXACT and OTHER_WEIGHTS, each with a model of its own; `workload` has the first batch."""
    settings = PlanSettings(optimizer=recipe.optimizer, passes=1, options=OptionSettings(("compress",)))
    captured = tracing.capture_profiled(workload, settings)
    program = remove_options(captured.graph)
    offered = apply_options(captured.graph, ["compress:1"])  # the loosest limit: each form is within it
    keeping = replace(captured, graph=program), keep_everything(program)
    wanted = measure.measure_outcome(build_executor(*keeping, workload), workload.model, workload.batch, seed=seed)
    ways = {EXACT: keeping, OTHER_WEIGHTS: keeping} | {
        bits: (replace(captured, graph=offered), compress_all(offered, bits)) for bits in BITS
    }
    start = copy.deepcopy(workload.model.state_dict())
    torch.manual_seed(seed + 1)
    other_start = recipe.make().model.state_dict()
    begun = {}
    for bits, (capture, schedule) in ways.items():
        own = workload._replace(model=copy.deepcopy(workload.model))
        step = build_executor(capture, schedule, own)
        peak_bytes = measure_peak(capture, step, TrainingStep(own.model, own.loss_fn), own.batch).peak_bytes
        found = measure.measure_outcome(step, own.model, own.batch, seed=seed)
        begun[bits] = Curve(
            loop=Loop(own.model, step, recipe, other_start if bits == OTHER_WEIGHTS else start, seed=seed),
            predicted_peak_bytes=simulate(capture.graph, schedule).peak_bytes,
            peak_bytes=peak_bytes,
            predicted_error=math.sqrt(capture.graph.used(VARIANCE, schedule.computed)),
            error=wanted.compute_gradient_error(found),
        )
    return begun


def build_executor(capture: Capture, schedule: Schedule, workload: Workload) -> Executor:
    """Return an executor of `schedule` with the model of `workload`."""
    return Executor(capture, schedule, workload.model, workload.loss_fn)


def smooth(losses: Sequence[float]) -> list[float]:
    """Return the mean of the last WINDOW losses at each step that has so many; of all if there are fewer."""
    count = min(WINDOW, len(losses))
    sums = [0.0, *accumulate(losses)]
    return [(sums[end] - sums[end - count]) / count for end in range(count, len(sums))]


def compute_largest_difference(curve: Sequence[CurveRow]) -> float:
    """Return the largest relative difference of the smoothed loss from the smoothed exact one."""
    pairs = zip(smooth([row.loss for row in curve]), smooth([row.exact_loss for row in curve]), strict=True)
    return max(abs(loss - exact) / exact for loss, exact in pairs)


def format_label(bits: str) -> str:
    """Return the label of a curve."""
    return f"{bits} bits" if bits in BITS else bits


def list_failures(rows: Sequence[CurveRow]) -> list[str]:
    """Return a line for each failure: a first loss that is not the exact one, or losses that are not finite."""
    said = []
    for (model, bits), curve in group_by(rows, "model", "bits").items():
        first, name = curve[0], f"{model}, {format_label(bits)}"
        if bits in BITS and first.loss != first.exact_loss:
            said.append(f"{name}: the loss of the first step is {first.loss}, but exactly {first.exact_loss}")
        said += [f"{name}: the loss of step {row.step} is {row.loss}" for row in curve if not math.isfinite(row.loss)]
    return said


_HEAD = f"""\
Each op is executed once, and every compressible tensor is compressed to the given number of bits after its last reader of the \
forward pass. These schedules come from `benchmarks/all_compressed.py`; plans on a CPU would rarely compress anything. The exact \
step keeps everything. All curves of a model have the same data, initial weights and random state, except one more exact curve \
with other initial weights, which shows the effect of chance. Peaks are measured, with parameters, gradients and optimizer \
state. Gradient errors are the norm of the difference of all gradients at the first step, divided by their norm. Losses are \
means of {WINDOW} steps, with the exact curve's in brackets; the largest difference is that of these means at any step, divided \
by the exact mean. Times are those of forward and backward pass, as multiples of the exact step's, measured alternately.
"""


def format_table(rows: Sequence[CurveRow]) -> str:
    """Return a table with a line for each model and bits, and the provenance of its rows."""
    steps = max(row.step for row in rows) + 1
    ends = sorted({-(-steps * third // 3) for third in (1, 2, 3)})
    columns = (
        "model",
        Column("kept in", lambda row: format_label(row.bits)),
        Column("exact peak", "exact_peak_bytes"),
        Column("peak", "peak_bytes"),
        Column("of exact peak", lambda row: row.peak_bytes / row.exact_peak_bytes, format_ratio),
        Column("gradient error predicted", lambda row: row.predicted_error if row.bits in BITS else None, "{:.4f}"),
        Column("measured", lambda row: row.error if row.bits in BITS else None, "{:.4f}"),
        *(Column(f"loss after {end}", partial(_format_loss_after, end), at=ALL) for end in ends),
        Column("largest difference", lambda curve: compute_largest_difference(list(curve.values())), format_ratio, at=ALL),
        Column("time", lambda curve: median(row.time_s / row.exact_s for row in curve.values()), "{:.2f}x", at=ALL),
    )
    about = f"{steps} steps of AdamW from seed {rows[0].seed}; {describe_provenance(rows)}"
    return "\n".join((_HEAD, format_markdown(group_side_by_side(rows, "step", "model", "bits"), columns), about))


def _format_loss_after(end: int, curve: SideBySide[CurveRow]) -> str:
    part = list(curve.values())[:end]
    loss, exact = (smooth([getattr(row, name) for row in part])[-1] for name in ("loss", "exact_loss"))
    return f"{loss:.3f} ({exact:.3f})"


def plot(rows: Sequence[CurveRow], path: Path) -> None:
    """Draw the smoothed losses of each model, exact and in each number of bits."""
    figure = create_figure()
    models = group_by(rows, "model")
    for (model, own_rows), axes in zip(models.items(), figure.subplots(1, len(models), squeeze=False)[0], strict=True):
        own = group_by(own_rows, "bits")
        losses = {EXACT: [row.exact_loss for row in next(iter(own.values()))]}
        losses |= {format_label(bits): [row.loss for row in curve] for bits, curve in own.items()}
        for (name, values), color, style in zip(losses.items(), _COLORS, _STYLES, strict=False):
            means, last = smooth(values), len(values)
            axes.plot(range(last - len(means) + 1, last + 1), means, linewidth=1.2, color=color, linestyle=style, label=name)
        axes.set(title=model, xlabel="steps", ylabel=f"loss, mean of {WINDOW} steps")
        axes.set_ylim(bottom=0)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    save_figure(figure, path)


STUDY = Study(
    CurveRow,
    train,
    order=order_by(model=CASES),
    pages={"table.md": format_table},
    figures={"curves.png": plot},
    failures=list_failures,
)
main = Main(
    STUDY,
    CASES,
    settings={"steps": Setting(300, "of each curve"), "seed": Setting(0, "of weights, data and random state", int)},
)
