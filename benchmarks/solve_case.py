"""One solve of the benchmark, measured in its own process: nothing here imports torch or pandas."""

import platform
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.process_memory import read_status_bytes
from planner.graphs.io.formats import read_graph, write_graph
from planner.graphs.ir import Graph
from planner.measure.machine import commit, describe_machine
from planner.memory.allocated_budget import REORDERED
from planner.plans.select_attributes import select_attributes
from planner.solvers.clock import WallClock
from planner.solvers.order.solve import solve_in_best_order
from planner.solvers.registry import get_solver
from planner.solvers.request import Request
from planner.solvers.result import SolveProgress
from planner.solvers.tolerance import Tolerance
from planner.studies.rows import declare_column, declare_key, declare_text, declare_value

TOLERANCE = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class SolverRow:
    """One solve."""

    suite: str = declare_key()
    graph: str = declare_key()
    budget: str = declare_key()
    solver: str = declare_key()
    run: int = declare_key("times are medians of several", summary="max")
    budget_bytes: int = declare_column("static bytes included")
    time_limit_s: float = declare_column("of the solve")
    reference_time_s: float | None = declare_value("the step that somebody else reached at this budget")
    reference_seconds: float | None = declare_value("that this took them")
    ops: int = declare_column("of the graph", default=0)
    status: str = declare_text("as in planner.solvers.result")
    base_s: float = declare_column("the step that keeps everything", default=0.0)
    time_s: float | None = declare_value("the step")
    bound_s: float | None = declare_value("proved: no step takes less")
    gap: float | None = declare_value()
    first_s: float | None = declare_value("until the first schedule", summary="median")
    seconds: float = declare_column("that the solve took", default=0.0, summary="median")
    writing_s: float | None = declare_value("the part of it that writing the reference's program takes", summary="median")
    model_rows: int | None = declare_value("of the largest program that was solved, as model_columns")
    model_columns: int | None = declare_value()
    resident_mb: int | None = declare_value("the most of the process, in units of 10^6 bytes", summary="max")
    commit: str = declare_text()
    machine: str = declare_text()
    versions: str = declare_text()


def make_graph(make: Callable[[], Graph], file: Path) -> Iterator[None]:
    """Write the graph of an instance; yield when it is done."""
    write_graph(make(), file)
    yield


def solve_case(case: SolverRow, file: Path) -> Iterator[SolverRow]:
    """Solve `case`, whose graph is in `file`, and yield it with the result; in its own process."""
    graph = read_graph(file)
    first_s: float | None = None

    def note_progress(progress: SolveProgress) -> None:
        nonlocal first_s
        if first_s is None and progress.best_s is not None:
            first_s = clock.seconds

    solve, clock = get_solver(case.solver), WallClock(case.time_limit_s)
    request = Request(graph, case.budget_bytes, Tolerance.of(TOLERANCE), clock, note_progress)
    # As users get it: the other solvers are baselines, in program order.
    result = solve_in_best_order(solve, request).result if case.solver in REORDERED else solve(request)
    seconds = clock.seconds  # of all orders
    resident_mb = read_peak_resident_mb()  # before the program is written once more
    traced = {"torch": version} if (version := graph.provenance.torch) else {}
    versions = {**result.versions, **traced, "Python": platform.python_version()}
    yield replace(
        case,
        ops=len(graph.ops),
        base_s=graph.time_s,
        **select_attributes(result, "status", "time_s", "bound_s", "gap", "model_rows", "model_columns"),
        seconds=seconds,
        first_s=seconds if first_s is None and result.schedule is not None else first_s,
        writing_s=measure_writing_seconds(graph, case.budget_bytes) if case.solver == "checkmate" else None,
        resident_mb=resident_mb,
        commit=commit(),
        machine=describe_machine(),
        versions=", ".join(f"{name} {number}" for name, number in versions.items()),
    )


def measure_writing_seconds(graph: Graph, budget_bytes: int) -> float:
    """Return the seconds that the program of the reference, Checkmate, takes to be built."""
    # It imports PuLP, which the memory of other solves shall not hold.
    from planner.solvers.baselines.checkmate import CheckmateProgram

    began = time.perf_counter()
    CheckmateProgram(graph, budget_bytes - graph.static_bytes).build()
    return time.perf_counter() - began


def read_peak_resident_mb() -> int | None:
    """Return the peak of this process since it began, in units of 10^6 bytes; known on Linux only.

    ``getrusage`` would tell the peak of the process that started this one, if that was larger.
    """
    return read_status_bytes("VmHWM") // 10**6 if sys.platform == "linux" else None
