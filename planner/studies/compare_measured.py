"""Every method at every budget with real tensors, compared with PyTorch's own methods.

Each step is timed in turn with plain PyTorch's. PyTorch's own methods, DTR and MegEngine choose their memory themselves. Those
that no method of the same kind dominates in time and memory are compared, again in turns, with the optimal schedule for their
measured peak: PyTorch's methods by measurements, the heuristics of DTR and MegEngine by the fastest simulated schedule at each
budget.
"""

from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass, field, replace
from pathlib import Path
from statistics import median

from planner.capture.lowering.lower import Capture
from planner.capture.options.traced import replace_graph
from planner.capture.workload.models import Workload
from planner.graphs.io.formats import read_graph, write_graph
from planner.graphs.ir import Kind
from planner.measure import tracing
from planner.measure.steps import compute_ratio, describe_device
from planner.plans.select_attributes import select_attributes
from planner.plans.summary import check_same_graph, summarize
from planner.runtime.executor import Executor
from planner.runtime.transfers.channels import HostChannels
from planner.settings.counted_memory import CountedMemory
from planner.settings.plan import PlanSettings
from planner.solvers.registry import SOLVERS
from planner.solvers.result import Reason
from planner.studies.baselines import Method, build_eager
from planner.studies.best_rows import HEURISTICS, find_undominated
from planner.studies.compare import Solved, SolveRow, Task, judge_of, list_tasks
from planner.studies.comparison_rows import OPTIMUM, PEAK_OF, ComparisonRow, RunBy, find_missing, open_rows
from planner.studies.jobs import run
from planner.studies.measured import Benchmark, Measured
from planner.studies.rows import KeptRows
from planner.studies.settings import StudySettings

_TOGETHER = 8  # of PyTorch's methods are prepared before they are timed and compared with the optimum
_EAGER = build_eager().name


def load_or_profile(workload: Workload, folder: Path, settings: PlanSettings) -> Capture:
    """Return the captured step with the times in ``graph.json`` of `folder`; without that file, measure and write it.

    A resumed comparison uses the same times, and the same link to the host if one was measured.

    Raises:
        MismatchError: the graph in the folder is another.
        TraceError: the step cannot be captured as one static graph.
    """
    path = folder / "graph.json"
    if not path.exists():
        captured = tracing.capture_profiled(workload, settings)
        folder.mkdir(parents=True, exist_ok=True)
        write_graph(captured.graph, path)
        return captured
    known = read_graph(path)
    captured = tracing.capture_step(workload, settings)
    captured = tracing.restore_recorded(captured, known.provenance, ())
    check_same_graph(summarize(known), summarize(captured.graph))
    return replace(captured, graph=known)


def compare_measured(  # noqa: PLR0913  # what is compared, where it is kept, who is told
    workload: Workload,
    captured: Capture,
    budgets: Sequence[str | int],
    methods: Sequence[str],
    stock: Sequence[Method],
    folder: Path,
    settings: StudySettings,
    *,
    channels: HostChannels | None = None,
    on_activity: Callable[[str], None],
    should_stop: Callable[[], bool],
) -> list[ComparisonRow]:
    """Measure every method at every budget, and PyTorch's; keep the rows in ``rows.csv`` in `folder`.

    Schedules are found by several processes at a time; then one step runs at a time.

    Args:
        workload: the training step.
        captured: its step, with the times that schedules are found for; see ``load_or_profile``.
        budgets, methods: as in ``planner.studies.compare``.
        stock: PyTorch's own, as in ``planner.studies.baselines``.
        folder: created if missing; rows in its CSV are not made again.
        settings: settings of all solves and measurements.
        channels: channels for transfers of schedules and `stock`; they count the host memory.
        should_stop: polled; once True, nothing is started, and unfinished rows are dropped.

    Returns:
        The known rows, including those of the CSV.

    Raises:
        BudgetError, OutputError, PlannerError: as in ``planner.studies.compare``.
    """
    offered = replace_graph(captured, settings.options.apply(captured.graph))
    name = describe_device(next(workload.model.parameters()).device)
    judge = judge_of(offered.graph, settings, CountedMemory.ALLOCATED, name)  # as the peaks that are measured
    tasks = list_tasks(judge, budgets, methods, RunBy.EXECUTOR)
    kept = open_rows(folder, offered.graph, judge.recorded)
    keys = [*(task.key for task in tasks), *((RunBy.TORCH, method.name, "") for method in stock)]
    find_missing(kept, keys, offered.graph.time_s)
    comparison = _Comparison(workload, captured, offered, judge, kept, channels, on_activity, should_stop)
    for budget in dict.fromkeys(task.budget for task in tasks):
        comparison.compare_at_budget([task for task in tasks if task.budget == budget and task.key not in kept])
    untried = [method for method in stock if (RunBy.TORCH, method.name, "") not in kept]
    for start in range(0, len(untried), _TOGETHER):
        comparison.measure_stock(untried[start : start + _TOGETHER])
    met = {m.name for m in stock if m not in untried and (RunBy.EXECUTOR, OPTIMUM, f"{PEAK_OF}{m.name}") in kept}
    # Timed again with the optimum, another one may turn out to be the fastest.
    while True:
        best = {row.method for row in find_undominated([row for row in kept if row.run_by == RunBy.TORCH])}
        if not (baselines := [m for m in stock if m.name in best - met][:_TOGETHER]):
            return list(kept)
        comparison.compare_at_equal_memory(baselines)
        met.update(m.name for m in baselines)


@dataclass(slots=True)
class _Comparison:
    """A comparison whose steps run one at a time; the attributes are those of ``compare_measured``."""

    workload: InitVar[Workload]
    captured: Capture
    offered: Capture
    judge: SolveRow
    kept: KeptRows[ComparisonRow]
    channels: HostChannels | None
    say: Callable[[str], None]
    should_stop: Callable[[], bool]
    _benchmark: Benchmark = field(init=False)
    _entered: dict[str, ComparisonRow] = field(init=False, default_factory=dict)  # PyTorch's methods, by name

    def __post_init__(self, workload: Workload) -> None:
        reserved = (Kind.OPTIMIZER_STATE, Kind.ACCUMULATED_GRADIENT)
        extra_bytes = sum(tensor.size_bytes for tensor in self.captured.graph.tensors if tensor.kind in reserved)
        host = None if self.channels is None else self.channels.memory
        self._benchmark = Benchmark(workload, extra_bytes=extra_bytes, host=host)
        self._benchmark.enter(build_eager())

    def compare_at_budget(self, tasks: Sequence[Task]) -> None:
        """Solve and measure the missing rows at one budget, all in one round; baselines in rounds of their own."""
        rows = [self._enter_schedule(solved) for solved in self._solve(tasks)]
        baselines = self._find_best_heuristics(rows)
        self._round([row for row in rows if row.name not in baselines])
        self._time_at_equal_memory([row for row in rows if row.name in baselines])

    def _find_best_heuristics(self, rows: Sequence[ComparisonRow]) -> set[str]:
        """Return the names of the fastest schedule of each eviction system."""
        found = [row for row in rows if row.ran and row.time_s is not None]
        kinds = {kind: [row for row in found if row.method in members] for kind, members in HEURISTICS.items()}
        return {min(kind, key=lambda row: row.time_s or 0.0).name for kind in kinds.values() if kind}

    def measure_stock(self, methods: Sequence[Method]) -> None:
        """Measure PyTorch's own methods."""
        self._round([self._enter_stock(method) for method in methods if not self.should_stop()])

    def compare_at_equal_memory(self, methods: Sequence[Method]) -> None:
        """Measure PyTorch's own methods, each compared with the optimal schedule for its measured peak."""
        self._time_at_equal_memory([self._enter_stock(method) for method in methods if not self.should_stop()])

    def _time_at_equal_memory(self, baselines: Sequence[ComparisonRow]) -> None:
        """Time each of `baselines` in turns with the optimal schedule for its measured peak."""
        peaks = {f"{PEAK_OF}{baseline.name}": baseline.measured_peak_bytes or 0 for baseline in baselines if baseline.ran}
        solved = self._solve([Task(RunBy.EXECUTOR, OPTIMUM, budget, peak) for budget, peak in peaks.items()])
        opponents = {row.budget: row for row in map(self._enter_schedule, solved)}
        for baseline in baselines:
            opponent = opponents.get(f"{PEAK_OF}{baseline.name}")
            if opponent is not None:
                self._round([baseline, opponent])
            elif not baseline.ran:
                self._round([baseline])

    def _solve(self, tasks: Sequence[Task]) -> list[Solved]:
        solved: list[Solved] = []
        waiting = iter(tasks)
        jobs = min(self.judge.settings.jobs, max(1, len(tasks)))
        for one in run(self.judge, lambda: next(waiting, None), self.should_stop, jobs=jobs):
            solved.append(one)
            self.say(f"solved {one.row.method} at {one.row.budget}")
        return [] if self.should_stop() else solved  # results of stopped solves are dropped

    def _enter_schedule(self, solved: Solved) -> ComparisonRow:
        """Return the row of a schedule with all measurements but its time."""
        row, schedule = solved.row, solved.schedule
        if schedule is None:
            return row
        self.say(f"running {row.name}")
        if self.channels is not None and SOLVERS[row.method].transfers:
            method = Method(row.name, lambda model, loss_fn: Executor(self.offered, schedule, model, loss_fn, self.channels))
        else:
            method = Method(row.name, lambda model, loss_fn: Executor(self.captured, schedule, model, loss_fn))
        return _add_measured(row, self._benchmark.enter(method))

    def _enter_stock(self, method: Method) -> ComparisonRow:
        """Return the row of one of PyTorch's own methods with all measurements but its time."""
        if method.name not in self._entered:
            self.say(f"running {method.name}")
            measured = self._benchmark.enter(method)
            row = self.judge.build_row(RunBy.TORCH, method.name, "", None, status="error" if measured.error else "ran")
            if not measured.applies:
                row = replace(row, reason=str(Reason.INAPPLICABLE))
            self._entered[method.name] = _add_measured(row, measured)
        return self._entered[method.name]

    def _round(self, rows: Sequence[ComparisonRow]) -> None:
        """Time the steps of `rows` in turn with plain PyTorch, and keep the rows."""
        if self.should_stop() or not rows:
            return
        names = [row.name for row in rows if row.ran]
        self.say(f"timing {', '.join(names) or 'nothing'}")
        times = self._benchmark.measure_times([_EAGER, *names], repeats=self.judge.settings.repeats) if names else {}
        self.kept.add(*(_add_times(row, times[row.name], times[_EAGER]) if row.ran else row for row in rows))


def _add_measured(row: ComparisonRow, measured: Measured) -> ComparisonRow:
    if measured.error is not None:
        return replace(row, message=measured.error)
    return replace(
        row,
        measured_peak_bytes=measured.peak_bytes,
        measured_host_bytes=measured.host_bytes,
        **select_attributes(measured, "reserved_bytes", "exactness", "gradient_error"),
    )


def _add_times(row: ComparisonRow, times: Sequence[float], eager_times: Sequence[float]) -> ComparisonRow:
    ratio, _ = compute_ratio(times, eager_times)
    return replace(row, measured_s=median(times), eager_s=median(eager_times), measured_ratio=ratio, repeats=len(times))
