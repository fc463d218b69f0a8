"""What is known of a step that is given options: what each offers, and a row for each set of them at each budget."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from benchmarks.solved import Solved
from graphs.ir import Op

NONE = "none"  # the set without an option
LEAST = "least"  # the budget that is asked for where the least one is looked for
_ROUNDING = "rounding"  # how ``Op.differs`` begins where nothing but rounding does


class Bits(StrEnum):
    """What differs from the program by optional ops, the least first."""

    EXACT = "exact"
    ROUNDING = "rounding"
    LOSSY = "lossy"


def bits_of(ops: Iterable[Op]) -> Bits:
    """The most that any of `ops` may differ from the program."""
    said = [op.differs for op in ops if op.differs]
    if all(differs.startswith(_ROUNDING) for differs in said):
        return Bits.ROUNDING if said else Bits.EXACT
    return Bits.LOSSY


def set_name(options: Sequence[str]) -> str:
    """Of a set of options, in rows."""
    return "+".join(options) or NONE


@dataclass(frozen=True, slots=True)
class Offer:
    """What one option offers on one graph.

    Attributes:
        model, option: their names.
        ops: optional ops that it adds, or that may write over an input.
        bits: the most that one of them may differ from the program.
        machine, commit, torch: what it was made on and with.
    """

    model: str
    option: str
    ops: int
    bits: Bits
    machine: str
    commit: str
    torch: str


@dataclass(frozen=True, slots=True)
class Row(Solved):
    """One set of options at one budget; what is unknown is None.

    Attributes:
        model: its name.
        options: the set, as ``set_name`` has it: of those that offer something on this graph.
        budget: a share of the program's peak, or LEAST.
        status, reason: as in ``solvers.result``; `message` is what else there is to say.
        time_s, bound_s: of the step, judged and proved.
        base_s, base_peak_bytes: of the step that keeps everything.
        peak_bytes: of the schedule.
        budget_bytes: what was asked for; of LEAST the least that a schedule was found for.
        proved_bytes: of LEAST: no schedule needs less; otherwise None.
        seconds: that the solve took.
        limit: what it might have taken, seconds or units of work.
        link: what it carries, and where its figures are from; "" where nothing is copied.
        machine, commit, torch: what it was made on and with.
    """

    model: str
    options: str
    budget: str
    status: str
    reason: str
    message: str
    time_s: float | None
    bound_s: float | None
    base_s: float
    peak_bytes: int | None
    budget_bytes: int | None
    proved_bytes: int | None
    base_peak_bytes: int
    seconds: float | None
    limit: str
    link: str
    machine: str
    commit: str
    torch: str

    @property
    def key(self) -> tuple[str, str, str]:
        """Tells it from other rows."""
        return self.model, self.options, self.budget

    @property
    def names(self) -> frozenset[str]:
        """The options of the set."""
        return frozenset() if self.options == NONE else frozenset(self.options.split("+"))


@dataclass(frozen=True, slots=True)
class ErrorRow:
    """One plan with an option beside the step that keeps everything; what is unknown is None.

    Attributes:
        model, option: their names.
        bits: the most that an op which the option offers may differ; EXACT with no budget where nothing else is to be said.
        budget: a share of what lies between the least budget with the option and the peak; "" where none was asked for.
        differing: executions of ops that may differ.
        budget_bytes, predicted_peak_bytes, measured_peak_bytes: of the plan.
        base_peak_bytes: predicted, of the step that keeps everything.
        loss_error: distance of the losses, over the absolute value.
        gradient_error: Euclidean distance of all gradients in one vector, over its length.
        largest_error: the most that an element of a gradient differs, over the largest of that gradient; the largest of all.
        predicted_ratio, measured_ratio: time over that of the step that keeps everything; measured in turn.
        error: why there is no plan, or it did not run.
        seed: of parameters, batch and the random state of the step.
        machine, commit, torch: what it was made on and with.
    """

    model: str
    option: str
    bits: Bits
    budget: str
    differing: int | None
    budget_bytes: int | None
    predicted_peak_bytes: int | None
    measured_peak_bytes: int | None
    base_peak_bytes: int | None
    loss_error: float | None
    gradient_error: float | None
    largest_error: float | None
    predicted_ratio: float | None
    measured_ratio: float | None
    error: str
    seed: int
    machine: str
    commit: str
    torch: str

    @property
    def key(self) -> tuple[str, str]:
        """What is measured together."""
        return self.model, self.option
