"""The data of plans."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from planner.graphs.ir import Graph
from planner.graphs.provenance import Provenance, Times
from planner.graphs.schedule import Schedule
from planner.graphs.units import format_bytes, format_ratio, format_seconds
from planner.memory.reserved_prediction import Reserved
from planner.plans.eager import EagerComparison, describe_slower
from planner.settings.counted_memory import CountedMemory
from planner.solvers.result import SOLVED, Ending, SolveSettings, Status, compute_gap, decide_status

# Why a solve ended with a gap above the tolerance, and what would help.
_ENDINGS = {
    Ending.LIMIT: "the limit was reached: a longer one may lower the gap",
    Ending.STOPPED: "it was stopped early: a longer solve may lower the gap",
    Ending.EXHAUSTED: "nothing was left to try: more time is of no use, but a larger budget, another order or an option may be",
    Ending.MEMORY: "its programs reached the limit on memory (most_bytes in BoundParams): a higher one may lower the gap",
}
_HOST_SHARE = 0.01  # of the kernels' time: what the host may add to a step that is not called host-bound
_COSTS = {
    None: "",
    Times.MEASURED: " for the costs measured alone",
    Times.IN_STEPS: " for the costs measured in training steps",
    Times.MODELLED: " for modelled costs",
}


@dataclass(frozen=True, slots=True)
class GraphSummary:
    """A summary of a graph, sufficient to tell how two graphs differ.

    Attributes:
        fingerprint: ``Graph.fingerprint``.
        ops, tensors: how many the program has.
        static_bytes: bytes of static memory.
        keep_everything_peak_bytes: peak without recomputation.
        time_s: seconds of the step without recomputation.
        provenance: ``Graph.provenance``.
        optional_ops, optional_tensors: number of ops and tensors besides the program's.
        step_s: `time_s` with the host's times, to issue ops and around them; None if these are not known.
        around_s: ``Graph.around_s``.
    """

    fingerprint: str
    ops: int
    tensors: int
    static_bytes: int
    keep_everything_peak_bytes: int
    time_s: float
    provenance: Provenance = field(default_factory=Provenance)
    optional_ops: int = 0
    optional_tensors: int = 0
    step_s: float | None = None
    around_s: float = 0.0

    @property
    def predicted_s(self) -> float:
        """Predicted seconds of a step without recomputation: `time_s` if nothing is known of the host."""
        return self.time_s if self.step_s is None else self.step_s

    def compute_overhead(self, time_s: float | None) -> float | None:
        """Return the time of a schedule, or a bound on it, as an overhead over no recomputation; None if it is unknown."""
        if time_s is None:
            return None
        step_s = self.time_s + self.around_s
        return (time_s - self.time_s) / step_s if step_s else 0.0

    @property
    def host_bound(self) -> str:
        """The time that the host adds to a step without recomputation, in words; "" if it is next to nothing, or not known."""
        return _describe_host_bound(self.time_s, self.predicted_s, self.around_s)


@dataclass(frozen=True, slots=True)
class PlanRecord:
    """The schedule for one graph and one budget, with predictions: the content of a ``Plan``'s file.

    Attributes:
        budget_bytes: the user's budget, static memory included.
        memory: kind of memory that the budget counts: ``allocated`` bytes, or on CUDA those that are ``reserved`` by PyTorch's
            allocator with default settings, or with expandable segments (``reserved-expandable``), and with CUDA's context
            (``device``, ``device-expandable``).
        peak_bytes, time_s: predicted for the schedule (``simulate``).
        bound_s: no schedule within the budget is faster than this, of those that first execute the ops in the same order
            (or of the narrower class that `settings` name as ``schedules``); None if unknown.
        solver, seconds, settings, versions: the solver, the seconds of the whole solve, its settings, and versions of packages.
        measured_peak_bytes: measured peak of one step; None if none was run.
        arena_bytes: the block of memory that the step runs in, predicted until a step was run; None for steps that run in none.
        outside_arena_bytes: the most bytes that it takes outside of it at once; None likewise.
        graph_file: path of the graph, relative to the folder of the plan's file; None if it is in no file.
        eager: comparison of a step by this plan with plain eager PyTorch; None if that was not tried.
        pool_peaks_bytes: predicted peaks of the other pools, by name.
        differs: results that may differ from the program, by options that the user has named; empty if bit-identical.
        reserved: predicted memory that PyTorch reserves for the plan on CUDA; None on the CPU.
        gradient_error: predicted error for lossy options: the root of the gradients' variance over their squared norm; else None.
        ended: why a solve ended with a gap above the tolerance; None for others, and if that is not known.
        step_s: `time_s` with the host's times, to issue ops and around them; None if these are not known. Bounds and gaps are of
            `time_s`.
        corrected_s: seconds of a step at costs measured since, as `step_s`; None if there are none. Bound, gap and overhead stay
            those that were proved together, until a solve has proved as much for the new costs. Not part of files.
        source: the graph itself, if it is in memory; not part of files, of pickles and of comparisons.
    """

    graph: GraphSummary
    schedule: Schedule
    budget_bytes: int
    peak_bytes: int
    time_s: float
    bound_s: float | None
    solver: str
    seconds: float
    settings: SolveSettings = field(default_factory=SolveSettings)
    versions: Mapping[str, str] = field(default_factory=dict)
    measured_peak_bytes: int | None = None
    arena_bytes: int | None = None
    outside_arena_bytes: int | None = None
    graph_file: str | None = None
    eager: EagerComparison | None = None
    pool_peaks_bytes: Mapping[str, int] = field(default_factory=dict)
    differs: tuple[str, ...] = ()
    gradient_error: float | None = None
    memory: CountedMemory = CountedMemory.ALLOCATED
    reserved: Reserved | None = None
    ended: Ending | None = None
    step_s: float | None = None
    corrected_s: float | None = field(default=None, compare=False)
    source: Graph | None = field(default=None, compare=False, repr=False)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(budget {format_bytes(self.budget_bytes)}, peak {format_bytes(self.peak_bytes)}, "
            f"overhead {format_ratio(self.overhead)}, {self.status})"
        )

    def __str__(self) -> str:
        measured = (
            "not measured yet" if self.measured_peak_bytes is None else f"{format_bytes(self.measured_peak_bytes)} measured"
        )
        whole = format_bytes(self.graph.keep_everything_peak_bytes)
        budget = f"budget {format_bytes(self.budget_bytes)}{'' if self.memory is CountedMemory.ALLOCATED else f' {self.memory}'}"
        peaks = f"{budget}, peak {format_bytes(self.peak_bytes)} predicted"
        lines = (
            f"{peaks}, {measured} (keeping everything: {whole})",
            *(() if self.reserved is None else (f"{name} {value}" for name, value in self.reserved.list_lines())),
            f"step time {self._step_time()}, {self.status}, {self.proof}",
            "" if self.ended is None or self.status in SOLVED else f"solved for {format_seconds(self.seconds)}: {self.ending}",
            "" if self.eager is None else str(self.eager),
            f"allowed to differ by {'; '.join(self.differs)}" if self.differs else "",
            f"host-bound: {self.host_bound}" if self.host_bound else "",
            self.arena or self.no_arena,
            self.lossy,
            self._format_kernels(),
        )
        return "\n".join(line for line in lines if line)

    def __getstate__(self) -> list[object]:
        """Return the fields without the graph, which other processes have or do not need."""
        return [None if one.name == "source" else getattr(self, one.name) for one in fields(self)]

    @property
    def status(self) -> Status:
        """``OPTIMAL``, ``WITHIN`` or ``FEASIBLE``: what the gap is by the tolerance at which the solve ended."""
        return decide_status(self.time_s, self.bound_s, self.settings.tolerance)

    @property
    def ending(self) -> str:
        """Why the solve ended, in words; "" if that is not known."""
        if self.status in SOLVED:
            return "the gap is within the tolerance"
        return "" if self.ended is None else describe_ending(self.ended)

    @property
    def lossy(self) -> str:
        """Predicted and measured error of the gradients in words; "" if no option is lossy."""
        if self.gradient_error is None:
            return ""
        found = None if self.eager is None else self.eager.gradient_error
        return f"gradient error {self.gradient_error:.2e} predicted, {'not' if found is None else f'{found:.2e}'} measured"

    @property
    def host_bound(self) -> str:
        """The time that the host adds to the predicted one, in words; "" if it is next to nothing, or not known."""
        return _describe_host_bound(self.time_s, self._solved_s, self.graph.around_s)

    @property
    def arena(self) -> str:
        """The arena in words; "" if the step runs in none."""
        if self.arena_bytes is None or self.outside_arena_bytes is None:
            return ""
        return f"arena: {format_bytes(self.arena_bytes)}, {format_bytes(self.outside_arena_bytes)} outside"

    @property
    def no_arena(self) -> str:
        """Why the step runs in no arena although memory is tight, in words; "" if it runs in one, or memory is not tight."""
        if self.arena:
            return ""
        if self.settings.arena_bytes is not None:
            return "no arena yet: no step has run in it, or its C++ library is not compiled"
        return f"no arena: {self.settings.no_arena}" if self.settings.no_arena else ""

    @property
    def arena_offsets(self) -> tuple[int, ...]:
        """The offsets of the buffers in an arena on the CPU, in the order of ``ArenaRules.divide_buffers``; empty if unknown."""
        return self.settings.arena_offsets or ()

    def _step_time(self) -> str:
        """Return the predicted overhead over keeping everything as text, with the measured one over eager PyTorch if known."""
        predicted = f"predicted {describe_slower('keeping everything', self.overhead)}"
        measured = "" if self.eager is None else self.eager.slowdown
        return f"measured {measured} ({predicted})" if measured else predicted

    @property
    def proof(self) -> str:
        """The gap, and the costs that it holds for, in words."""
        if self.gap is None:
            return "gap unknown"
        return f"gap {format_ratio(self.gap)}{_COSTS[self.graph.provenance.times]}"

    def _format_kernels(self) -> str:
        """Return the variant of Inductor's kernels and the time of their compilation as text; "" for kernels of eager PyTorch."""
        found = self.graph.provenance
        return f"Inductor's kernels ({found.variant}), compiled in {found.compile_seconds} s" if found.variant else ""

    @property
    def reserved_bytes(self) -> int | None:
        """Predicted bytes that PyTorch reserves on the device, with CUDA's context if the budget counts it; None on the CPU."""
        return None if self.reserved is None else self.reserved.device_bytes

    @property
    def eager_bytes(self) -> int:
        """Bytes that plain eager PyTorch needs of the memory that the budget counts: budgets in percent are shares of it."""
        if self.memory is CountedMemory.ALLOCATED or self.reserved is None:
            return self.graph.keep_everything_peak_bytes
        return self.reserved.eager_bytes

    @property
    def predicted_bytes(self) -> int:
        """Bytes that the plan needs of the memory that the budget counts."""
        return self.compute_needed_bytes(self._taken_bytes)

    @property
    def _taken_bytes(self) -> int:
        """Predicted peak of the step, with all of the arena or the pool of CUDA graphs that it runs in, if it runs in one."""
        if self.reserved is not None and self.reserved.pool_bytes:
            return self.graph.static_bytes + self.reserved.pool_bytes
        if self.arena_bytes is None or self.outside_arena_bytes is None:
            return self.peak_bytes
        return self.graph.static_bytes + self.arena_bytes + self.outside_arena_bytes

    def compute_needed_bytes(self, measured_peak_bytes: int) -> int:
        """Return the memory of the kind that the budget counts, corrected by a measured peak of allocated bytes.

        What is allocated beyond the prediction is reserved beyond it as well.
        """
        if self.memory is CountedMemory.ALLOCATED or self.reserved is None:
            return measured_peak_bytes
        return self.reserved.device_bytes + max(0, measured_peak_bytes - self._taken_bytes)

    @property
    def gap(self) -> float | None:
        """(time - bound) / bound of the whole step; None without a bound."""
        return compute_gap(self.time_s, self.bound_s)

    @property
    def recomputed(self) -> int:
        """Executions of the program's ops beyond the first of each."""
        program = [op for op in self.schedule.computed if op < self.graph.ops]
        return len(program) - len(set(program))

    @property
    def copied(self) -> int:
        """Executions of optional ops: transfers to and from other pools, and alternatives to the program's ops."""
        return sum(op >= self.graph.ops for op in self.schedule.computed)

    @property
    def predicted_s(self) -> float:
        """Predicted seconds of a step, at the latest costs; without the host's times if these are not known."""
        return self._solved_s if self.corrected_s is None else self.corrected_s

    @property
    def _solved_s(self) -> float:
        """Predicted seconds of a step at the costs that the bound holds for."""
        return self.time_s if self.step_s is None else self.step_s

    @property
    def step_bound_s(self) -> float | None:
        """`bound_s` with what the host takes around the ops, whatever the schedule."""
        return None if self.bound_s is None else self.bound_s + self.graph.around_s

    @property
    def overhead(self) -> float:
        """Predicted time of recomputation as a fraction of the step without any."""
        return self._solved_s / self.graph.predicted_s - 1 if self.graph.predicted_s else 0.0


def describe_ending(ended: Ending) -> str:
    """Return why a solve ended with a gap above the tolerance, and what would help, in words."""
    return _ENDINGS[ended]


def plan_line(plan: PlanRecord) -> str:
    """Return the memory and the overhead of a plan, in one line."""
    return describe_saved(plan.peak_bytes, plan.graph.keep_everything_peak_bytes, plan.overhead, plan.gap)


def describe_saved(peak_bytes: int, keep_everything_peak_bytes: int, overhead: float, gap: float | None) -> str:
    """Return the memory and the overhead of a schedule against keeping everything, in one line; `gap` is None without a bound."""
    if gap is None:
        proof = ""
    elif gap < 5e-5:
        proof = " (proved optimal)"
    else:
        proof = f" (proved within {100 * gap:{'.2g' if gap < 0.99 else '.0f'}}%)"
    memory = f"{format_bytes(peak_bytes)} of {format_bytes(keep_everything_peak_bytes)}"
    return f"planned: {memory}, predicted {describe_slower('keeping everything', overhead)}{proof}"


def _describe_host_bound(time_s: float, step_s: float, around_s: float) -> str:
    """Return in words by how much a step takes longer than its kernels, `time_s`, because of the host."""
    if step_s <= time_s * (1 + _HOST_SHARE):
        return ""
    way_out = "a larger batch gives each more to do"
    if step_s > time_s + around_s:
        way_out = f"cuda_graph=True issues all at once, {way_out}"
    around = f", {format_seconds(around_s)} of it around them" if around_s else ""
    return f"kernels take {format_seconds(time_s)}, but with the host a step takes {format_seconds(step_s)}{around}: {way_out}"
