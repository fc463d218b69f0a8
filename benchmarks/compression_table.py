"""What was seen of curves with compression: the rows, what in them must not be, and the table and figure they make."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from statistics import median

from graphs.units import format_bytes, format_ratio
from planner.report.plots import COLORS, new_figure, save_figure
from planner.report.tables import as_markdown

EXACT = "exact"
BITS = ("8", "4")
OTHER_WEIGHTS = "exact, from other weights"  # what chance comes to
_COLORS = (COLORS["whole"], COLORS["ours"], COLORS["second"], COLORS["third"])
_STYLES = ("-", "-", "-", ":")
WINDOW = 20  # steps that a smoothed loss is the mean of


@dataclass(frozen=True, slots=True)
class Row:
    """One step of one curve, beside the same step of the exact one.

    Attributes:
        model: its name.
        bits: of BITS, in which all that can be is kept compressed, or OTHER_WEIGHTS.
        step: counted from 0.
        loss, exact_loss: before the step.
        time_s, exact_s: of forward and backward pass, in turn.
        predicted_peak_bytes, peak_bytes: of a step, as simulated and as measured; static bytes included.
        exact_peak_bytes: measured, of the step that keeps everything.
        predicted_error, error: of the gradients of the first step, as a part of their norm, as predicted and as measured.
        seed: of weights, batches and random state.
        machine, commit, torch: what it was made on and with.
    """

    model: str
    bits: str
    step: int
    loss: float
    exact_loss: float
    time_s: float
    exact_s: float
    predicted_peak_bytes: int
    peak_bytes: int
    exact_peak_bytes: int
    predicted_error: float
    error: float
    seed: int
    machine: str
    commit: str
    torch: str


def curves_of(rows: Sequence[Row]) -> dict[tuple[str, str], list[Row]]:
    """The steps in their order, by model and bits."""
    found: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        found.setdefault((row.model, row.bits), []).append(row)
    return found


def smoothed(losses: Sequence[float]) -> list[float]:
    """The mean of the last WINDOW losses at each step from which on there are so many; of all where there never are."""
    count = min(WINDOW, len(losses))
    sums = [0.0, *accumulate(losses)]
    return [(sums[end] - sums[end - count]) / count for end in range(count, len(sums))]


def largest_difference(curve: Sequence[Row]) -> float:
    """The most that the smoothed loss is from the smoothed exact one, as a part of that."""
    pairs = zip(smoothed([row.loss for row in curve]), smoothed([row.exact_loss for row in curve]), strict=True)
    return max(abs(loss - exact) / exact for loss, exact in pairs)


def label(bits: str) -> str:
    """What a curve is called."""
    return f"{bits} bits" if bits in BITS else bits


def failures(rows: Sequence[Row]) -> list[str]:
    """What must not be, a line each: a first loss that is not the exact one, and losses that are no finite numbers."""
    said = []
    for (model, bits), curve in curves_of(rows).items():
        first, name = curve[0], f"{model}, {label(bits)}"
        if bits in BITS and first.loss != first.exact_loss:
            said.append(f"{name}: the loss of the first step is {first.loss}, but exactly {first.exact_loss}")
        said += [f"{name}: the loss of step {row.step} is {row.loss}" for row in curve if not math.isfinite(row.loss)]
    return said


_HEAD = f"""\
Each op is executed once, and all that can be kept compressed is, in so many bits, behind its last reader of the forward pass: \
schedules made so (`benchmarks/all_compressed.py`), not plans, which on a CPU would rarely keep anything so. The exact step \
keeps everything. All curves of a model have the same data, initial weights and random state, but for one more exact one that \
begins at other weights: its difference is what chance comes to. Peaks are measured, with parameters, gradients and optimizer \
state. Gradient errors are the norm of the difference of all gradients at the first step, as a part of their norm. Losses are \
means of {WINDOW} steps, with the exact curve's in brackets; the largest difference is that of these means at any step, as a \
part of the exact one. Times are those of forward and backward pass, as multiples of the exact step's in the same turn.
"""


def table(rows: Sequence[Row]) -> str:
    """A line for each model and bits, and what they were made with."""
    steps = max(row.step for row in rows) + 1
    ends = sorted({-(-steps * third // 3) for third in (1, 2, 3)})
    header = (
        *("model", "kept in", "exact peak", "peak", "of exact peak", "gradient error predicted", "measured"),
        *(f"loss after {end}" for end in ends),
        *("largest difference", "time"),
    )
    lines = [_line(curve, ends) for curve in curves_of(rows).values()]
    one = rows[0]
    about = f"{steps} steps of AdamW from seed {one.seed}; {one.machine}; torch {one.torch}; commit {one.commit}.\n"
    return "\n".join((_HEAD, as_markdown([header, *lines]), about))


def _line(curve: Sequence[Row], ends: Sequence[int]) -> tuple[str, ...]:
    one = curve[0]
    until = [curve[:end] for end in ends]
    losses = [(smoothed([row.loss for row in part])[-1], smoothed([row.exact_loss for row in part])[-1]) for part in until]
    errors = (f"{error:.4f}" for error in (one.predicted_error, one.error))
    return (
        one.model,
        label(one.bits),
        format_bytes(one.exact_peak_bytes),
        format_bytes(one.peak_bytes),
        format_ratio(one.peak_bytes / one.exact_peak_bytes),
        *(errors if one.bits in BITS else ("", "")),
        *(f"{loss:.3f} ({exact:.3f})" for loss, exact in losses),
        format_ratio(largest_difference(curve)),
        f"{median(row.time_s / row.exact_s for row in curve):.2f}x",
    )


def plot(rows: Sequence[Row], path: Path) -> None:
    """The smoothed losses of each model, exact and in each number of bits.

    Raises:
        PlannerError: matplotlib is not installed.
    """
    figure = new_figure()
    found = curves_of(rows)
    models = list(dict.fromkeys(model for model, _ in found))
    for model, axes in zip(models, figure.subplots(1, len(models), squeeze=False)[0], strict=True):
        own = {bits: curve for (other, bits), curve in found.items() if other == model}
        losses = {EXACT: [row.exact_loss for row in next(iter(own.values()))]}
        losses |= {label(bits): [row.loss for row in curve] for bits, curve in own.items()}
        for (name, values), color, style in zip(losses.items(), _COLORS, _STYLES, strict=False):
            means, last = smoothed(values), len(values)
            axes.plot(range(last - len(means) + 1, last + 1), means, linewidth=1.2, color=color, linestyle=style, label=name)
        axes.set(title=model, xlabel="steps", ylabel=f"loss, mean of {WINDOW} steps")
        axes.set_ylim(bottom=0)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    save_figure(figure, path)
