"""Every method at every budget, judged by one simulator. Never imports torch.

All methods are judged by ``planner.graphs.simulate`` on one graph in program order, so that one bound holds for all rows.
Published programs that could not end within their time limit took all of it before; their size is counted first now, each gets
what it needs at least, and the others are refused at no cost.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path

from planner.graphs.errors import BudgetError, PlannerError
from planner.graphs.escape import escape_text
from planner.graphs.ir import Graph
from planner.graphs.options import remove_options
from planner.graphs.reordering import keep_program_order
from planner.graphs.schedule import Schedule
from planner.measure.machine import commit, describe_machine
from planner.memory.reserved import choose_memory, predict_eager_bytes, predict_reserved_at
from planner.plans.select_attributes import select_attributes
from planner.plans.summary import summarize
from planner.settings.budget import read_budget
from planner.settings.counted_memory import CountedMemory
from planner.solvers.clock import Clock, WallClock, measure_rest
from planner.solvers.registry import SOLVERS, check_solver, estimate_program_time_s, get_solver
from planner.solvers.request import Start
from planner.solvers.result import SOLVED, Reason, decide_status
from planner.studies.comparison_rows import OPTIMUM, ComparisonRow, Key, RunBy, find_missing, open_rows, record_memory
from planner.studies.jobs import run
from planner.studies.settings import StudySettings
from planner.studies.solves import solve_in_order
from planner.studies.workers import return_false

_DEFAULTS = StudySettings()
_SHORTEST_S = 1.0  # seconds for a row after the total time has run out
_NOT_IN_ROWS = frozenset({"params", "reordered"})  # of the settings: all rows are in program order


@dataclass(frozen=True, slots=True)
class Task:
    """One method at one budget, its executor, and its time limit (None: that of the study).

    Attributes:
        known: what a shorter solve has found, from which this one goes on.
    """

    run_by: RunBy
    method: str
    budget: str
    budget_bytes: int
    time_limit_s: float | None = None
    known: "Solved | None" = None

    @property
    def key(self) -> Key:
        """The key of its row."""
        return self.run_by, self.method, self.budget


@dataclass(frozen=True, slots=True)
class Solved:
    """The result of a task: its row, and the schedule that was found."""

    row: ComparisonRow
    schedule: Schedule | None


@dataclass(frozen=True, slots=True)
class SolveRow:
    """Solver of tasks, as a job for ``planner.studies.jobs``.

    Attributes:
        settings: name of the model, settings of each solve, and seed of the weights and the batch.
        memory: kind of memory that budgets count.
        base_peak_bytes: peak of the step without recomputation.
        commit, machine: provenance of the rows; None for the machine that solves them.
        recorded: settings of the graph's options and of the memory that budgets count, for the rows.
    """

    graph: Graph
    settings: StudySettings
    memory: CountedMemory
    base_peak_bytes: int
    commit: str
    machine: str | None
    recorded: Mapping[str, object]

    def __call__(self, task: Task, should_stop: Callable[[], bool]) -> Solved:
        """Return the row of `task`; an error of a method is recorded as its reason."""
        limit_s = self.settings.time_limit_s if task.time_limit_s is None else task.time_limit_s
        row = replace(
            self.build_row(task.run_by, task.method, task.budget, task.budget_bytes, status="error"), time_limit_s=limit_s
        )
        try:
            graph = self._get_graph(task)
            asked = keep_program_order(graph), task.budget_bytes, self.memory, WallClock(limit_s), task.method
            start = None if task.known is None or task.known.schedule is None else Start(task.known.schedule)
            result = solve_in_order(*asked, tolerance=self.settings.tolerance, must_stop=should_stop, start=start)
        except PlannerError as error:
            return Solved(replace(row, message=_join_lines(str(error))), None)
        row = replace(
            row,
            **select_attributes(result, "status", "time_s", "peak_bytes", "bound_s", "seconds"),
            reserved_bytes=predict_reserved_at(graph, result.schedule, self.memory, task.budget_bytes),
            reason=result.reason or "",
            settings=self._format_settings(result.settings if result.schedule is not None else {}),
            message=_join_lines(result.message),
            versions=self._format_versions(result.versions),
        )
        return _add_up(task.known, Solved(row, result.schedule), limit_s)

    def estimate_program_time_s(self, task: Task) -> float:
        """Return about the least seconds in which the program of a task can have a solution; 0 if that is not known."""
        return estimate_program_time_s(task.method, keep_program_order(self._get_graph(task)).graph, task.budget_bytes)

    def _get_graph(self, task: Task) -> Graph:
        """Return the graph that a method solves: those that only recompute solve the program alone, for schedules of both."""
        return self.graph if SOLVERS[task.method].transfers else remove_options(self.graph)

    def build_row(self, run_by: RunBy, method: str, budget: str, budget_bytes: int | None, *, status: str) -> ComparisonRow:
        """Return a row before anything is solved or measured."""
        return ComparisonRow(
            model=escape_text(self.settings.model),
            fingerprint=self.graph.fingerprint,
            run_by=str(run_by),
            method=method,
            budget=budget,
            budget_bytes=budget_bytes,
            status=status,
            settings=self._format_settings({}),
            base_s=self.graph.time_s,
            **select_attributes(self, "base_peak_bytes", "commit"),
            **select_attributes(self.settings, "tolerance", "time_limit_s", "seed"),
            machine=self.machine or describe_machine(),
            versions=self._format_versions({}),
        )

    def _format_settings(self, found: Mapping[str, object]) -> str:
        settings = {**self.recorded, **{name: value for name, value in found.items() if name not in _NOT_IN_ROWS}}
        return json.dumps(settings) if settings else ""

    def _format_versions(self, solver: Mapping[str, str]) -> str:
        traced = {"torch": torch} if (torch := self.graph.provenance.torch) else {}
        versions = {"remat-planner": version("remat-planner"), **solver, **traced}
        return ", ".join(f"{name} {number}" for name, number in versions.items())


def judge_of(graph: Graph, settings: StudySettings, memory: CountedMemory, machine_name: str | None = None) -> SolveRow:
    """Return the judge of `graph`, which has the options of `settings`.

    Args:
        memory: kind of memory that budgets count.
        machine_name: name of the machine in the rows; None for the machine that solves them.
    """
    return SolveRow(
        graph=graph,
        settings=settings,
        memory=memory,
        base_peak_bytes=summarize(graph).keep_everything_peak_bytes,
        commit=commit(),
        machine=machine_name,
        recorded={**settings.options.record(graph), **record_memory(memory)},
    )


def parse_methods(text: str, *, offload: bool = False) -> tuple[str, ...]:
    """Return methods from ``all`` or comma-separated names; the optimum comes first, for its bound.

    ``all`` means the methods that recompute and, with `offload`, those that only offload; methods that place ops on other devices
    are excluded.

    Raises:
        UsageError: no such method.
    """
    every = tuple(name for name, entry in SOLVERS.items() if (offload or not entry.only_transfers) and not entry.only_devices)
    names = every if text == "all" else tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        check_solver(name)
    return tuple(sorted(names, key=lambda name: name != OPTIMUM))


def compare(
    graph: Graph,
    budgets: Sequence[str | int],
    methods: Sequence[str],
    folder: Path,
    settings: StudySettings = _DEFAULTS,
    *,
    on_row: Callable[[ComparisonRow, int, int], None] | None = None,
    should_stop: Callable[[], bool] = return_false,
) -> list[ComparisonRow]:
    """Solve `graph` by every method at every budget, and keep the rows in ``rows.csv`` in `folder`.

    All methods execute ops for the first time in program order, so that the bound of ``windows`` holds for all.

    Args:
        budgets: in bytes or as text, as in ``planner.plans.solve.solve``.
        methods: names in ``planner.solvers.registry``.
        folder: created if missing; rows in its CSV are not computed again.
        settings: settings of all solves. The optimum comes first, then fast methods; methods that solve large programs share the
            remaining time. The optimum goes on in what they leave, if it was cut short. Methods that only recompute ignore the
            options of the graph.
        on_row: called with each new row, the number of finished rows, and the number of all rows.
        should_stop: polled; once True, no solve is started, and unfinished rows are dropped.

    Returns:
        The requested rows that are known, including those of the CSV.

    Raises:
        BudgetError: a budget cannot be read, or there is none.
        OutputError: the CSV is of another graph, other options, other memory, or another version.
        UsageError: no such method, options out of range, or reserved memory on the CPU.
    """
    graph = settings.options.apply(graph)
    judge = judge_of(graph, settings, choose_memory(graph, settings.memory))
    tasks = list_tasks(judge, budgets, methods, RunBy.SIMULATOR)
    places = {task.key: place for place, task in enumerate(tasks)}
    kept = open_rows(folder, graph, judge.recorded, order=lambda row: places.get(row.key, -1))  # other rows come first
    absent = set(find_missing(kept, places, graph.time_s))
    waiting = [task for task in tasks if task.key in absent]
    done = len(tasks) - len(waiting)
    clock = WallClock(settings.total_time_limit_s)
    shared = Shares(waiting, clock, settings.time_limit_s, settings.jobs, needs=judge.estimate_program_time_s)
    start = partial(run, judge, should_stop=should_stop, jobs=min(settings.jobs, max(1, len(waiting))), cluster=settings.cluster)
    unfinished = []
    for solved in start(shared.take):
        if should_stop():
            continue
        kept.add(solved.row)
        done += 1
        if on_row is not None:
            on_row(solved.row, done, len(tasks))
        if solved.row.method == OPTIMUM and cut_short(solved.row):
            unfinished.append(replace(tasks[places[solved.row.key]], known=solved))
    for solved in start(Shares(unfinished, clock, math.inf, settings.jobs, needs=lambda _: 0.0).take_rest):
        kept.add(solved.row)
    return [row for row in kept if row.key in places]


def list_tasks(judge: SolveRow, budgets: Sequence[str | int], methods: Sequence[str], run_by: RunBy) -> list[Task]:
    """Return a task for every method at every budget, without duplicates.

    Raises:
        BudgetError: a budget cannot be read, or there is none.
        UsageError: no such method.
    """
    if not budgets:
        raise BudgetError("there is no budget to compare at: name at least one")
    for method in methods:
        get_solver(method)
    whole_bytes = predict_eager_bytes(judge.graph, judge.memory)
    sizes = {str(budget): read_budget(budget).resolve(whole_bytes) for budget in budgets}
    return [Task(run_by, method, budget, size) for budget, size in sizes.items() for method in dict.fromkeys(methods)]


class Shares:
    """A queue of tasks with shares of a common time limit: the optimum, fast methods, then solvers of large programs.

    Of the large programs, those that need least come first. Each gets what it needs to have a solution, and an equal part of what
    is left when all have that. Those for which that is too little are refused by their solvers, at no cost for the others.

    Args:
        needs: seconds that the program of a task needs at least; 0 if that is not known.
    """

    def __init__(
        self, tasks: Sequence[Task], clock: Clock, time_limit_s: float, jobs: int, *, needs: Callable[[Task], float]
    ) -> None:
        self._needed_s = {task.key: math.ceil(needs(task)) if _may_share(task) else 0 for task in tasks}
        self._waiting = sorted(
            tasks, key=lambda task: (task.method != OPTIMUM, SOLVERS[task.method].large_programs, self._needed_s[task.key])
        )
        self._clock = clock
        self._time_limit_s = time_limit_s
        self._jobs = jobs

    def take(self) -> Task | None:
        """Return the next task with its time limit, a share rounded to whole seconds; None if there is none left."""
        if not self._waiting:
            return None
        task = self._waiting.pop(0)
        if not _may_share(task):
            return replace(task, time_limit_s=self._time_limit_s)
        left_s = measure_rest(self._clock)
        share_s = min(left_s, self._share_s(task, left_s * self._jobs))
        if share_s < self._time_limit_s:
            share_s = max(_SHORTEST_S, math.floor(share_s))
        return replace(task, time_limit_s=min(self._time_limit_s, share_s))

    def take_rest(self) -> Task | None:
        """Return the next task with its share of the time that other tasks have left; None if that is too little, or endless."""
        return self.take() if _SHORTEST_S <= measure_rest(self._clock) < math.inf else None

    def _share_s(self, task: Task, left_s: float) -> float:
        """Return the share of `task`, the next one, in what is left for all that share it."""
        sharing = [task, *filter(_may_share, self._waiting)]
        if task.method == OPTIMUM:  # whose bound is for all
            return left_s / len(sharing)
        most_s, spare_s, served = min(left_s / self._jobs, self._time_limit_s), left_s, 0
        for other in sharing:
            needed_s = self._needed_s[other.key]
            if needed_s > min(most_s, spare_s):
                break
            spare_s, served = spare_s - needed_s, served + 1
        return self._needed_s[task.key] + spare_s / served if served else left_s


def _add_up(known: Solved | None, found: Solved, limit_s: float) -> Solved:
    """Return the better of two solves of one task, the second of which went on, with the bound and the time of both."""
    if known is None:
        return found
    before, now = known.row, found.row
    best = found if before.time_s is None or (now.time_s is not None and now.time_s <= before.time_s) else known
    bound_s = max(filter(None, (before.bound_s, now.bound_s)), default=None)
    status = now.status if best.row.time_s is None else decide_status(best.row.time_s, bound_s, now.tolerance)
    seconds = None if before.seconds is None or now.seconds is None else before.seconds + now.seconds
    row = replace(best.row, status=status, bound_s=bound_s, seconds=seconds, time_limit_s=before.time_limit_s + limit_s)
    return replace(best, row=row)


def _may_share(task: Task) -> bool:
    """Return True if a task may use all the time it is given."""
    return task.method == OPTIMUM or SOLVERS[task.method].large_programs


def cut_short(row: ComparisonRow) -> bool:
    """Return True if a method was stopped by its time limit before it finished, or not begun because that is too short."""
    return is_not_begun(row) or (row.seconds is not None and row.seconds >= row.time_limit_s and row.status not in SOLVED)


def is_not_begun(row: ComparisonRow) -> bool:
    """Return True if a method did not begin, since its time limit is too short for its program."""
    return row.reason == Reason.TIME and row.seconds is not None and row.seconds < row.time_limit_s


def _join_lines(message: str) -> str:
    return " ".join(message.split())
