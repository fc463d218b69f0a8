"""What is known of plans over Inductor's kernels beside ``torch.compile``: a row for each method at each budget."""

from dataclasses import dataclass

REFERENCE = "torch.compile"
OURS = "planner inductor"
ATEN = "planner eager"
PEAK_OF = "peak of "  # begins the budget that is what another method was measured to take


@dataclass(frozen=True, slots=True)
class Row:
    """One method at one budget; what is unknown is None.

    Attributes:
        model: its name.
        method: REFERENCE, OURS, ATEN, or a name in ``planner.studies.baselines``.
        budget: as it was asked for: a share of the reference's peak, or ``peak of ...``; empty for what is given none.
        budget_bytes: the same, static bytes included.
        predicted_peak_bytes: of the plan.
        measured_peak_bytes: of tensors and workspaces (CUDA: allocated), static bytes included.
        time_s: median of a forward and backward pass.
        ratio: median of the multiples of the reference's time in the same turn.
        peer_ratio: the same of the method whose peak the budget is.
        variant: of Inductor's kernels, as in ``planner.capture.kernels.variants``.
        gap: of the plan.
        plan_s: seconds to make it, on this machine's caches of compiled kernels.
        compile_s: of these, to capture the step and compile its kernels, of all variants that were tried.
        least_bytes: the least budget that a schedule is known for, where none was found.
        bits: of loss and gradients, as in ``planner.studies.measured.Exactness``: beside eager PyTorch's for ATEN,
            beside the reference's for others; empty for itself.
        error: why there is no plan, or why it does not run.
        repeats: turns that were timed.
        seed: of weights, batch, and random numbers.
        machine, commit, torch: what it was made on and with.
    """

    model: str
    method: str
    budget: str
    budget_bytes: int | None
    predicted_peak_bytes: int | None
    measured_peak_bytes: int | None
    time_s: float | None
    ratio: float | None
    peer_ratio: float | None
    variant: str
    gap: float | None
    plan_s: float | None
    compile_s: float | None
    least_bytes: int | None
    bits: str
    error: str
    repeats: int | None
    seed: int
    machine: str
    commit: str
    torch: str

    @property
    def peer(self) -> str:
        """The method whose peak the budget is; empty where it is none's."""
        return self.budget.removeprefix(PEAK_OF) if self.budget.startswith(PEAK_OF) else ""

    @property
    def misprediction(self) -> float | None:
        """How far the predicted peak is from the measured one, as a fraction of the latter."""
        if self.predicted_peak_bytes is None or self.measured_peak_bytes is None:
            return None
        return abs(self.predicted_peak_bytes / self.measured_peak_bytes - 1)
