"""The exact solver: windows, refined where memory is tight.

A coarse version of Checkmate's 0-1 program (Jain et al., MLSys 2020) is a relaxation: its optimum is a
bound, and its solution expands to a real schedule. Where that schedule is over the budget the program
is refined, and solved again. See docs/formulation.md for the program and ``driver.py`` for the loop.
"""

from collections.abc import Callable
from importlib.metadata import version

from graphs.ir import Graph
from graphs.units import format_bytes, format_seconds
from solvers import highs
from solvers.bounds import WAY_OUT, least_budget_bound, too_small_message
from solvers.result import Progress, Reason, Result, Status
from solvers.tolerance import Tolerance
from solvers.windows.driver import run
from solvers.windows.incumbent import Search


def solve(
    graph: Graph,
    budget_bytes: int,
    *,
    tolerance: float | Tolerance = 1e-3,
    time_limit_s: float = 3600.0,
    on_progress: Callable[[Progress], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> Result:
    """The fastest schedule of `graph` within `budget_bytes`, as ``solvers.registry.Solver``.

    The bound holds for every schedule whose first executions come in program order. The tolerance in `settings` is the
    one that was settled for: the least of those up to the end that the gap is within, or the last where it is within none.
    """
    search = Search(graph, budget_bytes, tolerance, time_limit_s, on_progress, should_stop)
    least = least_budget_bound(graph)
    settled = Tolerance.of(tolerance).first
    if budget_bytes < least.budget_bytes:
        status, message = Status.INFEASIBLE, too_small_message(graph, budget_bytes, least)
    else:
        run(search)
        settled = search.settled_for()
        status, message = _verdict(search, settled, least.budget_bytes, time_limit_s)
    return Result(
        graph,
        budget_bytes=budget_bytes,
        status=status,
        schedule=search.best.schedule if search.best else None,
        bound_s=None if status is Status.INFEASIBLE else search.bound_s,
        solver="windows",
        seconds=search.seconds,
        settings={"tolerance": settled, "time_limit_s": time_limit_s},
        versions={"highs": highs.version(), "scipy": version("scipy"), "numpy": version("numpy")},
        message=message,
        reason=Reason.TIME if status is Status.LIMIT else None,
        model_rows=search.largest[0],
        model_columns=search.largest[1],
    )


def _verdict(search: Search, settled: float, least_bytes: int, time_limit_s: float) -> tuple[Status, str]:
    budget_bytes = search.budget_bytes
    if search.failure:
        return (Status.FEASIBLE if search.best is not None else Status.ERROR), search.failure
    if search.infeasible:
        return Status.INFEASIBLE, (
            f"budget {format_bytes(budget_bytes)} is proved too small, though every op by itself fits within "
            f"{format_bytes(least_bytes)}: what must be in memory between them does not, if they are first executed in the order "
            "that was tried. "
            f"{_bracket(search, budget_bytes + 1)} {WAY_OUT}"
        )
    if search.best is not None:
        return (Status.OPTIMAL if search.within(settled) else Status.FEASIBLE), ""
    return Status.LIMIT, (
        f"no schedule within {format_bytes(budget_bytes)} was found in {format_seconds(search.seconds)} (limit "
        f"{format_seconds(time_limit_s)}), nor proved not to exist in the order of the ops that was tried. "
        f"{_bracket(search, least_bytes)} Raise --time-limit or --budget."
    )


def _bracket(search: Search, proved_bytes: int) -> str:
    """What is known of the least feasible budget; its lower end is proved for one order of the first executions."""
    what = "In that order, the least feasible budget is"
    if search.least is None:
        return f"{what} at least {format_bytes(proved_bytes)}."
    found_bytes = search.least.peak_bytes
    if found_bytes == proved_bytes:
        return f"{what} {format_bytes(proved_bytes)}."
    return f"{what} between {format_bytes(proved_bytes)} and {format_bytes(found_bytes)}."
