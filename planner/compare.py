"""Every method at every budget, judged by one simulator. Never imports torch.

Rows are in a CSV as soon as they are known: what is there is not computed again.
"""

import csv
import io
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from importlib.metadata import version
from pathlib import Path

from graphs.errors import BudgetError, OutputError, PlannerError
from graphs.ir import Graph
from graphs.jsonfile import write_text
from graphs.plan import relative_gap
from planner.jobs import run_here, run_in_processes
from planner.machine import commit, machine
from planner.solving import budget_in_bytes, summarize
from solvers.registry import SOLVERS, get_solver

OPTIMUM = "windows"  # the method whose bound holds for all


@dataclass(frozen=True, slots=True)
class Row:
    """One method at one budget; what is unknown is None.

    Attributes:
        model: the graph's name.
        fingerprint: the graph's.
        method: a name in ``solvers.registry``.
        budget: as it was asked for.
        budget_bytes: static bytes included.
        status: as in ``solvers.result.Status``; ``error`` if the method failed.
        time_s, peak_bytes: of the schedule.
        bound_s: what the method proves.
        base_s, base_peak_bytes: of the step without recomputation.
        seconds: that the method took.
        tolerance, time_limit_s: that it was given.
        seed: of methods that draw at random.
        message: why there is no schedule.
        commit, machine, versions: what it was made with and on.
    """

    model: str
    fingerprint: str
    method: str
    budget: str
    budget_bytes: int
    status: str
    time_s: float | None
    peak_bytes: int | None
    bound_s: float | None
    base_s: float
    base_peak_bytes: int
    seconds: float
    tolerance: float
    time_limit_s: float
    seed: int
    message: str
    commit: str
    machine: str
    versions: str

    @property
    def overhead(self) -> float | None:
        """Of the schedule, as a part of the step without recomputation."""
        return None if self.time_s is None else relative_gap(self.time_s, self.base_s)


COLUMNS = tuple(field.name for field in fields(Row))
_NUMBERS: dict[str, Callable[[str], object]] = {
    "budget_bytes": int,
    "time_s": float,
    "peak_bytes": int,
    "bound_s": float,
    "base_s": float,
    "base_peak_bytes": int,
    "seconds": float,
    "tolerance": float,
    "time_limit_s": float,
    "seed": int,
}


@dataclass(frozen=True, slots=True)
class Task:
    """One method at one budget."""

    method: str
    budget: str
    budget_bytes: int


@dataclass(frozen=True, slots=True)
class _Judge:
    """The job: makes the row of a task."""

    graph: Graph
    model: str
    base_peak_bytes: int
    tolerance: float
    time_limit_s: float
    commit: str
    machine: str

    def __call__(self, task: Task, should_stop: Callable[[], bool]) -> Row:
        graph = self.graph
        solve = get_solver(task.method)
        status, message, seconds = "error", "", 0.0
        time_s = bound_s = None
        peak_bytes = None
        versions = {"remat-planner": version("remat-planner")}
        try:
            result = solve(
                graph, task.budget_bytes, tolerance=self.tolerance, time_limit_s=self.time_limit_s, should_stop=should_stop
            )
            status, message, seconds = str(result.status), result.message, result.seconds
            time_s, peak_bytes, bound_s = result.time_s, result.peak_bytes, result.bound_s
            versions |= result.versions
        except PlannerError as error:  # one method that cannot cope does not end the others
            message = str(error)
        return Row(
            model=self.model,
            fingerprint=graph.fingerprint,
            method=task.method,
            budget=task.budget,
            budget_bytes=task.budget_bytes,
            status=status,
            time_s=time_s,
            peak_bytes=peak_bytes,
            bound_s=bound_s,
            base_s=graph.time_s,
            base_peak_bytes=self.base_peak_bytes,
            seconds=seconds,
            tolerance=self.tolerance,
            time_limit_s=self.time_limit_s,
            seed=0,
            message=" ".join(message.split()),
            commit=self.commit,
            machine=self.machine,
            versions=", ".join(f"{name} {number}" for name, number in versions.items()),
        )


def methods_named(text: str) -> tuple[str, ...]:
    """Methods from ``all`` or names separated by commas; the optimum comes first, for its bound.

    Raises:
        PlannerError: no such method.
    """
    names = tuple(SOLVERS) if text == "all" else tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        if name not in SOLVERS:
            raise PlannerError(f"there is no method {name!r}: choose of {', '.join(SOLVERS)}, or all")
    return tuple(sorted(names, key=lambda name: name != OPTIMUM))


def compare(
    graph: Graph,
    budgets: Sequence[str | int],
    methods: Sequence[str],
    folder: Path,
    *,
    model: str = "",
    jobs: int = 1,
    tolerance: float = 1e-3,
    time_limit_s: float = 60.0,
    on_row: Callable[[Row, int, int], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> list[Row]:
    """Solve `graph` by every method at every budget, and keep the rows in ``rows.csv`` in `folder`.

    All methods execute ops for the first time in program order, so that the bound of ``windows`` holds for all.

    Args:
        budgets: in bytes or as text, as in ``planner.solving.solve``.
        methods: names in ``solvers.registry``.
        folder: is made; rows that are in its CSV are not computed again.
        model: what the graph is called.
        jobs: processes that solve at the same time.
        tolerance: on gaps, relative to the whole step.
        time_limit_s: seconds for each row.
        on_row: told each new row, how many are done, and of how many.
        should_stop: polled; once True, no more is begun, and rows under way are not kept.

    Returns:
        The rows asked for that are known, those of the CSV included.

    Raises:
        BudgetError: a budget cannot be read, or there is none.
        OutputError: the CSV is of another graph, or of another make.
        PlannerError: no such method, or options out of range.
    """
    if not budgets:
        raise BudgetError("there is no budget to compare at: name at least one")
    for method in methods:
        get_solver(method)
    if jobs < 1:
        raise PlannerError(f"jobs is {jobs!r}: must be at least 1")
    summary = summarize(graph)
    peak_bytes = summary.store_all_peak_bytes
    tasks = [Task(method, str(budget), budget_in_bytes(budget, peak_bytes)) for budget in budgets for method in methods]
    path = folder / "rows.csv"
    rows = read_rows(path) if path.exists() else []
    if any(row.fingerprint != graph.fingerprint for row in rows):
        raise OutputError(f"{path} holds rows of another graph: choose another folder, or delete it")
    known = {(row.method, row.budget_bytes) for row in rows}
    open_tasks = iter([task for task in tasks if (task.method, task.budget_bytes) not in known])
    wanted = {(task.method, task.budget_bytes) for task in tasks}
    judge = _Judge(graph, model, peak_bytes, tolerance, time_limit_s, commit(), machine())
    stop = should_stop or (lambda: False)
    run = (
        run_here(judge, lambda: next(open_tasks, None), stop)
        if jobs == 1
        else run_in_processes(judge, lambda: next(open_tasks, None), stop, jobs)
    )
    for row in run:
        if stop():
            continue
        rows.append(row)
        write_rows(path, rows)
        if on_row is not None:
            on_row(row, len(wanted & {(r.method, r.budget_bytes) for r in rows}), len(wanted))
    return [row for row in rows if (row.method, row.budget_bytes) in wanted]


def read_rows(path: Path) -> list[Row]:
    """The rows of a CSV.

    Raises:
        OutputError: it is no such CSV.
    """
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        columns = tuple(reader.fieldnames or ())
        lines = list(reader)
    if columns != COLUMNS:
        raise OutputError(f"{path} has other columns than rows of a comparison: choose another folder, or delete it")
    try:
        return [
            Row(**{name: (_NUMBERS[name](text) if text else None) if name in _NUMBERS else text for name, text in line.items()})  # type: ignore[arg-type]
            for line in lines
        ]
    except (TypeError, ValueError) as error:
        raise OutputError(f"{path} is damaged ({error}): delete it") from None


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Write the CSV, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: "" if value is None else value for name, value in asdict(row).items()} for row in rows)
    write_text(path, text.getvalue())


def bound_of(rows: Sequence[Row], budget_bytes: int) -> float | None:
    """The best proved bound on the step's time at `budget_bytes`: one found at a larger budget holds too."""
    proofs = [row for row in rows if row.method == OPTIMUM and row.budget_bytes >= budget_bytes]
    bounds = [row.bound_s for row in proofs if row.bound_s is not None]
    return max(bounds, default=None)
