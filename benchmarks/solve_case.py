"""One solve of the benchmark, made and measured in a process of its own: nothing here imports torch or pandas."""

import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from graphs.io.formats import read_graph, write_graph
from graphs.ir import Graph
from planner.runtime.machine import commit, machine
from solvers.clock import WallClock
from solvers.problem import problem_of
from solvers.registry import get_solver
from solvers.request import Request
from solvers.result import SolveProgress
from solvers.tolerance import Tolerance

TOLERANCE = 1e-3


@dataclass(frozen=True, slots=True)
class Case:
    """One solve: of graph `graph` of `suite` at the budget called `budget`, by `solver`, for the `run`-th time.

    `reference_time_s` is the step that somebody else reached at this budget, and `reference_seconds` how long
    that took.
    """

    suite: str
    graph: str
    budget: str
    solver: str
    run: int
    budget_bytes: int
    time_limit_s: float
    reference_time_s: float | None
    reference_seconds: float | None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a solve; what is unknown is None.

    Times of the step are seconds, as is `seconds`, how long the solve took; `first_s` is when it had its first
    schedule. `writing_s` is, for the reference, the part of `seconds` that PuLP takes to write the program.
    """

    ops: int
    status: str
    base_s: float
    time_s: float | None
    bound_s: float | None
    gap: float | None
    first_s: float | None
    seconds: float
    writing_s: float | None
    model_rows: int | None
    model_columns: int | None
    resident_mb: int | None
    commit: str
    machine: str
    versions: str


def make_graph(make: Callable[[], Graph], file: Path) -> None:
    """Write the graph of an instance."""
    write_graph(make(), file)


def solve_case(case: Case, file: Path) -> Outcome:
    """Solve `case`, whose graph is in `file`; in a process of its own."""
    graph = read_graph(file)
    first_s: float | None = None

    def on_progress(progress: SolveProgress) -> None:
        nonlocal first_s
        if first_s is None and progress.best_s is not None:
            first_s = progress.seconds

    solve = get_solver(case.solver)
    clock = WallClock(case.time_limit_s)
    result = solve(Request(graph, case.budget_bytes, Tolerance.of(TOLERANCE), clock, on_progress))
    resident_mb = peak_resident_mb()  # before the program is written once more
    traced = {"torch": graph.provenance["torch"]} if "torch" in graph.provenance else {}
    versions = {**result.versions, **traced, "Python": platform.python_version()}
    return Outcome(
        ops=len(graph.ops),
        status=str(result.status),
        base_s=graph.time_s,
        time_s=result.time_s,
        bound_s=result.bound_s,
        gap=result.gap,
        first_s=result.seconds if first_s is None and result.schedule is not None else first_s,
        seconds=result.seconds,
        writing_s=writing_seconds(graph, case.budget_bytes) if case.solver == "checkmate" else None,
        model_rows=result.model_rows,
        model_columns=result.model_columns,
        resident_mb=resident_mb,
        commit=commit(),
        machine=machine(),
        versions=", ".join(f"{name} {number}" for name, number in versions.items()),
    )


def writing_seconds(graph: Graph, budget_bytes: int) -> float:
    """How long PuLP takes to write the reference's program."""
    from solvers.baselines.common.checkmate_program import CheckmateModel

    began = time.perf_counter()
    CheckmateModel(problem_of(graph, budget_bytes)).build()
    return time.perf_counter() - began


def peak_resident_mb() -> int | None:
    """Of this process since it began, in units of 10^6 bytes; known on Linux only.

    ``getrusage`` would tell the peak of the process that started this one, if that was larger.
    """
    file = Path("/proc/self/status")
    sizes = [line.split()[1] for line in file.read_text().splitlines() if line.startswith("VmHWM:")] if file.exists() else []
    return int(sizes[0]) * 1024 // 10**6 if sizes else None
