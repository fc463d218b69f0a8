"""Plans over Inductor's and ATen's kernels compared with ``torch.compile`` and PyTorch's Memory Budget API, with real tensors.

At each budget ``torch.compile`` and all methods that fit take turns. The measured peak of each setting of the Memory Budget API
is a budget too.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

import planner
from benchmarks.kept_captures import KeptCaptures
from benchmarks.solves import find_least_bytes
from planner.capture.options.in_place import IN_PLACE
from planner.capture.options.traced import add_traced
from planner.capture.workload.models import Workload
from planner.graphs.errors import BudgetError, LimitError, PlannerError
from planner.graphs.units import format_bytes
from planner.measure import tracing
from planner.measure.steps import compute_ratio
from planner.settings.plan import PlanSettings
from planner.studies.baselines import Method, build_memory_budget, build_torch_compile
from planner.studies.measured import Benchmark, Measured
from planner.studies.rows import Made, collect_provenance, declare_column, declare_key, declare_text, declare_value

REFERENCE = "torch.compile"
OURS = "planner inductor"
IN_ARENA = "planner inductor in an arena"
ATEN = "planner eager"
PEAK_OF = "peak of "  # prefix of a budget that is the measured peak of another method
_LEAST_S = 5.0  # for finding the least budget that would do, of each graph


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledRow(Made):
    """One method at one budget."""

    model: str = declare_key()
    method: str = declare_key(
        "torch.compile, planner inductor (in an arena), planner eager, or a name in planner.studies.baselines"
    )
    budget: str = declare_key("a share of the reference's peak, or the peak of a method; empty for what is given none")
    budget_bytes: int | None = declare_value("the same, static bytes included")
    predicted_peak_bytes: int | None = declare_value("of the plan")
    measured_peak_bytes: int | None = declare_value(
        "of tensors and workspaces (CUDA: allocated), or the slab and what is outside, and static bytes"
    )
    time_s: float | None = declare_value("median of a forward and backward pass")
    ratio: float | None = declare_value("median of the multiples of the reference's time in the same turn")
    peer_ratio: float | None = declare_value("the same of the method whose peak the budget is")
    variant: str = declare_text("of Inductor's kernels")
    gap: float | None = declare_value("of the plan")
    plan_s: float | None = declare_value("to make it, on this machine's caches of compiled kernels")
    compile_s: float | None = declare_value(
        "of these, to capture the step and compile its kernels, of all variants that were tried"
    )
    least_bytes: int | None = declare_value("the least budget that a schedule is known for, where none was found")
    bits: str = declare_text("of loss and gradients: beside eager PyTorch's for ATen's ops, beside the reference's for others")
    error: str = declare_text("why there is no plan, or why it does not run")
    repeats: int | None = declare_value("turns that were timed")
    seed: int = declare_column("of weights, batch, and random numbers")

    @property
    def peer(self) -> str:
        """The method whose peak the budget is; empty where it is none's."""
        return self.budget.removeprefix(PEAK_OF) if self.budget.startswith(PEAK_OF) else ""

    @property
    def misprediction(self) -> float | None:
        """The error of the predicted peak, relative to the measured one."""
        if self.predicted_peak_bytes is None or self.measured_peak_bytes is None:
            return None
        return abs(self.predicted_peak_bytes / self.measured_peak_bytes - 1)


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of a comparison.

    Attributes:
        shares: of the reference's peak, that are budgets.
        fractions: of the Memory Budget API.
        repeats: turns that are timed.
        seed: of random numbers.
    """

    shares: Sequence[float] = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)
    fractions: Sequence[float] = (1.0, 0.75, 0.5, 0.25, 0.0)
    time_limit_s: float = 20.0
    repeats: int = 31
    seed: int = 0


def compare_compiled(
    workload: Workload, name: str, settings: Settings, *, on_row: Callable[[CompiledRow], None]
) -> list[CompiledRow]:
    """Return the rows of one model; the reference alone, with its error, where ``torch.compile`` does not run.

    Args:
        workload: real tensors; its model in the mode it is trained in.
        on_row: told each row as soon as all but its time is known.
    """
    comparison = _Comparison(workload, name, settings, on_row)
    reference = comparison.enter(build_torch_compile())
    if reference.measured_peak_bytes is None:
        return comparison.time_rows()
    budgets = {f"{share:.0%}": int(share * reference.measured_peak_bytes) for share in settings.shares}
    for budget, size in budgets.items():
        comparison.plan(ATEN, budget, size)
    comparison.set_reference(reference)
    if comparison.on_cuda:
        comparison.enter(build_torch_compile("reduce-overhead"))
    baselines = [comparison.enter(build_memory_budget(f, "inductor", eager_random=False)) for f in settings.fractions]
    peaks = {f"{PEAK_OF}{row.method}": row.measured_peak_bytes for row in baselines if row.measured_peak_bytes is not None}
    for budget, size in (budgets | peaks).items():
        comparison.plan(OURS, budget, size)
    if not comparison.on_cuda:
        for budget, size in budgets.items():
            comparison.plan(IN_ARENA, budget, size)
    return comparison.time_rows()


class _Comparison:
    """The methods for one model, and their rows."""

    def __init__(self, workload: Workload, name: str, settings: Settings, on_row: Callable[[CompiledRow], None]) -> None:
        self._workload = workload
        self._settings = settings
        self._on_row = on_row
        self._benchmark = Benchmark(workload, seed=settings.seed)
        of_inductor = KeptCaptures(workload.model)
        self._models = {ATEN: KeptCaptures(workload.model), OURS: of_inductor, IN_ARENA: of_inductor}
        self._rows: list[tuple[CompiledRow, str]] = []  # with the name under which each is timed
        self._planned: dict[tuple[str, int], tuple[CompiledRow, str]] = {}
        self._least: dict[str, int] = {}
        device = next(workload.model.parameters()).device
        self.on_cuda = device.type == "cuda"
        self._blank = CompiledRow(model=name, method="", budget="", seed=settings.seed, **collect_provenance(device))

    def enter(self, method: Method) -> CompiledRow:
        """Run a method of PyTorch and return its row."""
        row = _add_measured(replace(self._blank, method=method.name), self._benchmark.enter(method))
        return self._add(row, method.name)

    def set_reference(self, row: CompiledRow) -> None:
        """Compare the methods entered from here on with that of `row`."""
        self._benchmark.compare_with(row.method)
        self._rows = [(replace(r, bits="") if r == row else r, name) for r, name in self._rows]

    def plan(self, method: str, budget: str, budget_bytes: int) -> None:
        """Plan for a budget, and run the plan; plans for the same number of bytes are reused."""
        if (method, budget_bytes) not in self._planned:
            self._planned[method, budget_bytes] = self._plan(method, budget_bytes)
        row, name = self._planned[method, budget_bytes]
        self._add(replace(row, budget=budget), name)

    def time_rows(self) -> list[CompiledRow]:
        """Return all rows, with the times of those that run: the reference and the methods of one budget take turns."""
        rows = [row for row, _ in self._rows]
        groups: dict[str, list[int]] = {}
        for i, row in enumerate(rows):
            if row.measured_peak_bytes is not None:
                groups.setdefault(row.peer or row.budget or row.method, []).append(i)
        for group in groups.values():
            names = dict.fromkeys((REFERENCE, *(self._rows[i][1] for i in group)))
            times = self._benchmark.measure_times(list(names), repeats=self._settings.repeats)
            for i in group:
                rows[i] = _add_times(rows[i], times[self._rows[i][1]], times)
        return rows

    def _add(self, row: CompiledRow, name: str) -> CompiledRow:
        self._rows.append((row, name))
        self._on_row(row)
        return row

    def _plan(self, method: str, budget_bytes: int) -> tuple[CompiledRow, str]:
        model, limit_s = self._models[method], self._settings.time_limit_s
        row = replace(self._blank, method=method, budget_bytes=budget_bytes)
        name = f"{method} {format_bytes(budget_bytes)}"
        begin, asked_s, kept_s = time.perf_counter(), model.asked_s, model.kept_s
        try:
            step = planner.compile(
                model,
                *self._workload[1:],
                budget=budget_bytes,
                kernels=method.split()[1],
                arena=method == IN_ARENA,
                time_limit_s=limit_s,
            )
        except PlannerError as error:
            least = self._find_least_bytes(method) if isinstance(error, (BudgetError, LimitError)) else None
            return replace(row, error=str(error), least_bytes=least), name
        plan_s = time.perf_counter() - begin + model.kept_s - kept_s
        row = replace(
            row,
            predicted_peak_bytes=step.plan.peak_bytes,
            variant=step.plan.graph.provenance.variant,
            gap=step.plan.gap,
            plan_s=plan_s,
            compile_s=model.asked_s - asked_s,
        )
        row = _add_measured(row, self._benchmark.enter(Method(name, lambda *_: step)))
        if row.measured_peak_bytes is not None and step.plan.arena_bytes is not None:
            row = replace(row, measured_peak_bytes=row.measured_peak_bytes + step.plan.arena_bytes)  # not PyTorch's allocator's
        return row, name

    def _find_least_bytes(self, method: str) -> int:
        """Return the least budget at which a schedule of any graph of `method` is found in some seconds."""
        if method not in self._least:
            captures = self._models[method].captures.values()
            timed = (tracing.profile_capture(captured, self._workload, PlanSettings(passes=1)) for captured in captures)
            graphs = [(captured if method == ATEN else add_traced(captured, (IN_PLACE.name,))).graph for captured in timed]
            self._least[method] = min(find_least_bytes(graph, _LEAST_S) for graph in graphs)
        return self._least[method]


def _add_times(row: CompiledRow, own: Sequence[float], times: Mapping[str, Sequence[float]]) -> CompiledRow:
    """Return `row` with its `own` times, and their ratios to the reference's and its peer's."""
    ratio, peer_ratio = (compute_ratio(own, times[other])[0] if other else None for other in (REFERENCE, row.peer))
    return replace(row, time_s=median(own), ratio=ratio, peer_ratio=peer_ratio, repeats=len(own))


def _add_measured(row: CompiledRow, measured: Measured) -> CompiledRow:
    if measured.error is not None:
        return replace(row, error=measured.error)
    return replace(row, measured_peak_bytes=measured.peak_bytes, bits=str(measured.exactness))
