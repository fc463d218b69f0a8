"""A schedule together with what it is for and what is promised about it: what ``planner solve`` writes."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from graphs.eager import EagerComparison, slower_than
from graphs.schedule import Schedule
from graphs.units import format_bytes, format_ratio


@dataclass(frozen=True, slots=True)
class GraphSummary:
    """Enough of a graph to say, when a plan meets another one, what differs.

    Attributes:
        fingerprint: ``Graph.fingerprint``.
        ops, tensors: how many the program has.
        static_bytes: bytes in memory throughout.
        keep_everything_peak_bytes: peak without recomputation.
        time_s: seconds of the step without recomputation.
        provenance: ``Graph.provenance``.
        optional_ops, optional_tensors: how many it has besides the program's.
    """

    fingerprint: str
    ops: int
    tensors: int
    static_bytes: int
    keep_everything_peak_bytes: int
    time_s: float
    provenance: Mapping[str, object] = field(default_factory=dict)
    optional_ops: int = 0
    optional_tensors: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """The schedule for one graph and one budget.

    Attributes:
        graph: the graph it is for.
        schedule: what to do.
        budget_bytes: what the user allowed, static bytes included.
        peak_bytes, time_s: predicted for the schedule (``simulate``).
        bound_s: no schedule within the budget is faster than this, of those that first execute the ops in the same order
            (or of the narrower class that `settings` name as ``schedules``); None if unknown.
        status: ``OPTIMAL`` or ``FEASIBLE``, as in ``solvers.result.Status``.
        solver, seconds, settings, versions: how it was found.
        measured_peak_bytes: of one step with real tensors; None if none was run.
        graph_file: where the graph is, relative to the folder of the plan's file; None if it is in no file.
        eager: how a step by this plan compares with plain eager PyTorch; None if that was not tried.
        pool_peaks_bytes: predicted for each other pool than the device, by name; empty where there is none.
        differs: what may differ from the program, by the options that the user has named; empty for not a bit.
        gradient_error: predicted, where an option is lossy: the root of the gradients' variance over their squared norm. None
            where none is.
    """

    graph: GraphSummary
    schedule: Schedule
    budget_bytes: int
    peak_bytes: int
    time_s: float
    bound_s: float | None
    status: str
    solver: str
    seconds: float
    settings: Mapping[str, object] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    measured_peak_bytes: int | None = None
    graph_file: str | None = None
    eager: EagerComparison | None = None
    pool_peaks_bytes: Mapping[str, int] = field(default_factory=dict)
    differs: tuple[str, ...] = ()
    gradient_error: float | None = None

    def __str__(self) -> str:
        unknown = "unknown"
        measured = unknown if self.measured_peak_bytes is None else format_bytes(self.measured_peak_bytes)
        compared = "" if self.eager is None else f"; {self.eager}"
        compared += f"; allowed to differ by {'; '.join(self.differs)}" if self.differs else ""
        compared += f"; {self.lossy}" if self.lossy else ""
        return (
            f"budget {format_bytes(self.budget_bytes)}, peak {format_bytes(self.peak_bytes)} predicted, {measured} measured "
            f"(keeping everything: {format_bytes(self.graph.keep_everything_peak_bytes)}); step time {self._step_time()}, "
            f"{self.status}, gap {unknown if self.gap is None else format_ratio(self.gap)}{compared}{self._kernels()}"
        )

    @property
    def lossy(self) -> str:
        """Predicted and measured error of the gradients in words; "" where no option is lossy."""
        if self.gradient_error is None:
            return ""
        found = None if self.eager is None else self.eager.gradient_error
        return f"gradient error {self.gradient_error:.2e} predicted, {'not' if found is None else f'{found:.2e}'} measured"

    def _step_time(self) -> str:
        """Return how it compares with eager PyTorch where that was measured, and with keeping everything."""
        predicted = f"predicted {slower_than('keeping everything', self.overhead)}"
        measured = "" if self.eager is None else self.eager.slowdown
        return f"measured {measured} ({predicted})" if measured else predicted

    def _kernels(self) -> str:
        """Which were compiled, and for how long, where they are none of eager PyTorch's."""
        found = self.graph.provenance
        if "variant" not in found:
            return ""
        return f"; Inductor's kernels ({found['variant']}), compiled in {found.get('compile_seconds')} s"

    @property
    def gap(self) -> float | None:
        """(time - bound) / bound of the whole step; None without a bound."""
        return relative_gap(self.time_s, self.bound_s)

    @property
    def recomputed(self) -> int:
        """Executions of the program's ops beyond the first of each."""
        program = [op for op in self.schedule.computed if op < self.graph.ops]
        return len(program) - len(set(program))

    @property
    def copied(self) -> int:
        """Executions of optional ops: copies to other pools and back, and ops in place of the program's."""
        return sum(op >= self.graph.ops for op in self.schedule.computed)

    @property
    def overhead(self) -> float:
        """Predicted time of recomputation as a fraction of the step without any."""
        return self.time_s / self.graph.time_s - 1 if self.graph.time_s else 0.0


def relative_gap(time_s: float | None, bound_s: float | None) -> float | None:
    """(time - bound) / bound, 0 where both are 0, None where one is unknown."""
    if time_s is None or bound_s is None:
        return None
    if bound_s > 0:
        return max(0.0, (time_s - bound_s) / bound_s)
    return 0.0 if time_s <= 0 else None
