"""What was seen in training loops: the rows, what in them must not be, and the table they make."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from statistics import median

from graphs.units import format_bytes, format_ratio, format_seconds
from planner.report.tables import as_markdown

EAGER, PLANNED = "eager", "planned"


@dataclass(frozen=True, slots=True)
class Row:
    """One step of one loop.

    Peaks and times are of two passes from the same beginning: to measure a peak takes time.

    Attributes:
        model: its name.
        loop: EAGER or PLANNED.
        step: counted from 0.
        seed: of weights, batches and random state.
        peak_bytes: measured, of forward and backward pass; static bytes included.
        loss, loss_again: in the pass for peaks, and in the pass for times.
        time_s: of forward and backward pass.
        loop_s: of these, clipping, and the optimizer's step.
        state, state_again: digest of parameters, buffers and random state after the last step of each pass; else empty.
        least_bytes: the least budget that a schedule was found for.
        budget_bytes: of the planned loop.
        predicted_peak_bytes, predicted_s: what the plan says of forward and backward pass.
        keeping_s: what it says of one that keeps everything.
        machine, commit, torch: what it was made on and with.
    """

    model: str
    loop: str
    step: int
    seed: int
    peak_bytes: int
    loss: float
    loss_again: float
    time_s: float
    loop_s: float
    state: str
    state_again: str
    least_bytes: int
    budget_bytes: int
    predicted_peak_bytes: int
    predicted_s: float
    keeping_s: float
    machine: str
    commit: str
    torch: str


def half_or_half_way(peak_bytes: int, least_bytes: int) -> int:
    """Half of `peak_bytes` or, where nothing is known to fit that, half way from the least budget."""
    half = peak_bytes // 2
    return half if half >= least_bytes else (least_bytes + peak_bytes) // 2


@dataclass(frozen=True, slots=True)
class Pair:
    """The two loops of one model, step by step."""

    eager: tuple[Row, ...]
    planned: tuple[Row, ...]

    @property
    def peak_bytes(self) -> int:
        """The most that eager PyTorch took."""
        return max(row.peak_bytes for row in self.eager)

    @property
    def over(self) -> list[Row]:
        """Steps that took more than their budget."""
        return [row for row in self.planned if row.peak_bytes > row.budget_bytes]

    @property
    def losses_equal(self) -> int:
        """How many steps have eager's loss to the last bit, in both passes."""
        pairs = zip(self.planned, self.eager, strict=True)
        return sum((own.loss, own.loss_again) == (other.loss, other.loss_again) for own, other in pairs)

    @property
    def states_equal(self) -> bool:
        """Whether all bits of parameters, buffers and random state are eager's in the end."""
        return (self.planned[-1].state, self.planned[-1].state_again) == (self.eager[-1].state, self.eager[-1].state_again)

    @property
    def eager_repeats(self) -> bool:
        """Whether eager PyTorch does the same twice; what it does not, no plan can."""
        return all(row.loss == row.loss_again and row.state == row.state_again for row in self.eager)

    def ratio(self, time: str) -> float:
        """Median of the multiples of eager's `time` (a column) in the same turn."""
        of = attrgetter(time)
        return median(of(own) / of(other) for own, other in zip(self.planned, self.eager, strict=True))


def pairs(rows: Sequence[Row]) -> dict[str, Pair]:
    """The loops by model; those of one model lie together."""
    found = {}
    for model, group in groupby(rows, key=attrgetter("model")):
        there = list(group)
        found[model] = Pair(*(tuple(row for row in there if row.loop == loop) for loop in (EAGER, PLANNED)))
    return found


def failures(rows: Sequence[Row]) -> list[str]:
    """What must not be, a line each: peaks over the budget, losses and parameters that are not eager's."""
    said = []
    for model, pair in pairs(rows).items():
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


HEADER = (
    "model",
    "eager's peak",
    "budget",
    "of eager's peak",
    "highest peak of a step",
    "over budget",
    "losses equal",
    "parameters equal",
    "eager's step",
    "planned",
    "with optimizer",
    "predicted",
    "predicted step",
    "measured / predicted",
)


def table(rows: Sequence[Row]) -> str:
    """The loops of each model in a line, and what they were made with; times as multiples of eager PyTorch's."""
    lines = [_line(model, pair) for model, pair in pairs(rows).items()]
    notes = [
        f"Nothing was found for half of {model}'s peak: its budget is half way from the least, "
        f"{format_bytes(pair.planned[0].least_bytes)}, to the peak.\n"
        for model, pair in pairs(rows).items()
        if pair.planned[0].least_bytes > pair.peak_bytes // 2
    ]
    one = rows[0]
    steps = max(row.step for row in rows) + 1
    about = f"{steps} steps from seed {one.seed}; {one.machine}; torch {one.torch}; commit {one.commit}.\n"
    return "\n".join((as_markdown([HEADER, *lines]), *notes, about))


def _line(model: str, pair: Pair) -> tuple[str, ...]:
    one, steps = pair.planned[0], len(pair.planned)
    time_s = median(row.time_s for row in pair.planned)
    return (
        model,
        format_bytes(pair.peak_bytes),
        format_bytes(one.budget_bytes),
        format_ratio(one.budget_bytes / pair.peak_bytes),
        format_bytes(max(row.peak_bytes for row in pair.planned)),
        f"{len(pair.over)} of {steps}",
        f"{pair.losses_equal} of {steps}",
        "yes" if pair.states_equal else "NO",
        format_seconds(median(row.time_s for row in pair.eager)),
        f"{pair.ratio('time_s'):.3f}x",
        f"{pair.ratio('loop_s'):.3f}x",
        f"{one.predicted_s / one.keeping_s:.3f}x",
        format_seconds(one.predicted_s),
        f"{time_s / one.predicted_s:.3f}",
    )
