"""What is known of a step that may offload: a row for each method at each budget."""

from dataclasses import dataclass

from benchmarks.solved import Solved

RECOMPUTE, OFFLOAD, BOTH = "recompute only", "offload only", "both"
OURS = (RECOMPUTE, OFFLOAD, BOTH)


@dataclass(frozen=True, slots=True)
class Row(Solved):
    """One method at one budget; what is unknown is None.

    Attributes:
        suite, model: their names.
        budget: as it was asked for: a share of the peak, or of what lies between the least budget and the peak.
        method: one of OURS, or a name in ``solvers.registry``.
        status, reason: as in ``solvers.result``; `message` is what else there is to say.
        time_s, bound_s: of the step, judged and proved.
        base_s, base_peak_bytes: of the step that keeps everything.
        least_bytes: the least budget that a schedule which only recomputes is known for; None where no budget is above it.
        seconds: that the solve took.
        host_bytes: most on the host.
        recomputed, copied: executions beyond each op's first, and copies, there and back.
        link: what it carries, and where its figures are from.
        machine, commit, torch: what it was made on and with.
    """

    suite: str
    model: str
    budget: str
    method: str
    status: str
    reason: str
    message: str
    time_s: float | None
    bound_s: float | None
    base_s: float
    peak_bytes: int | None
    budget_bytes: int
    least_bytes: int | None
    base_peak_bytes: int
    seconds: float | None
    host_bytes: int | None
    recomputed: int | None
    copied: int | None
    link: str
    machine: str
    commit: str
    torch: str

    @property
    def key(self) -> tuple[str, str, str, str]:
        """Tells it from other rows."""
        return self.suite, self.model, self.budget, self.method
