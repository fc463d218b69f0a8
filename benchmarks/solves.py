"""Graphs and solves of benchmarks, and rows of solves."""

from dataclasses import dataclass, replace
from typing import Any, TypeVar

from planner.capture.workload.workload import parse_spec
from planner.graphs.errors import PlannerError
from planner.graphs.ir import Graph
from planner.graphs.units import format_ratio
from planner.plans.select_attributes import select_attributes
from planner.plans.solve import order_for
from planner.settings.plan import PlanSettings
from planner.solvers.clock import Clock, WallClock
from planner.solvers.least import bracket_least_budget
from planner.solvers.result import Result, Status, compute_gap
from planner.studies.rows import Made, declare_column, declare_text, declare_value
from planner.studies.solves import solve_allocated
from planner.studies.workload_tracing import Tracing

TOLERANCE = 1e-3


def build_graph(spec: str, device: str = "h200", **settings: Any) -> Graph:
    """Return the step of a model that is named in one line, with times of the roofline of `device`.

    Args:
        spec: as in ``planner.capture.workload``, such as ``zoo:unet,batch=4``.
        device: a name in ``planner.settings.devices``.
        settings: further ones of the trace.
    """
    return Tracing(PlanSettings(roofline=device, **settings)).trace_graph(parse_spec(spec))


def find_least_bytes(graph: Graph, limit_s: float) -> int:
    """Return the least budget that a schedule is found for, in an order of the ops that needs less memory, if there is one.

    Args:
        limit_s: seconds of the search for schedules.
    """
    return bracket_least_budget(order_for(graph, "windows", reorder=None).graph, clock=WallClock(limit_s)).found_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Solved(Made):
    """One solve."""

    status: str = declare_column("as in planner.solvers.result", default=str(Status.ERROR))
    reason: str = declare_text("as in planner.solvers.result")
    message: str = declare_text("what else there is to say")
    time_s: float | None = declare_value("the step, judged")
    bound_s: float | None = declare_value("proved: no step takes less")
    base_s: float = declare_column("the step that keeps everything")
    peak_bytes: int | None = declare_value("of the schedule")
    budget_bytes: int | None = declare_value("static bytes included")

    @property
    def overhead(self) -> float | None:
        """Over the step that keeps everything."""
        return None if self.time_s is None else self.time_s / self.base_s - 1

    @property
    def bound_overhead(self) -> float | None:
        """No step has less."""
        return None if self.bound_s is None else self.bound_s / self.base_s - 1

    @property
    def gap(self) -> float | None:
        """The gap of the time over the bound."""
        return compute_gap(self.time_s, self.bound_s)

    @property
    def overhead_text(self) -> str:
        """The overhead, or the reason why there is no schedule, in a word."""
        if self.overhead is not None:
            return format_ratio(self.overhead)
        return self.status if self.status == Status.INFEASIBLE else self.reason or self.status


Row = TypeVar("Row", bound=Solved)


def solve_row(blank: Row, graph: Graph, clock: Clock, solver: str = "windows") -> tuple[Row, Result | None]:
    """Return `blank` with the result of `solver` within its budget, and the result; None if the solver refuses."""
    assert blank.budget_bytes is not None
    try:
        result = solve_allocated(graph, blank.budget_bytes, clock, solver, tolerance=TOLERANCE)
    except PlannerError as error:
        return replace(blank, message=str(error)), None
    found = select_attributes(result, "status", "time_s", "bound_s", "peak_bytes", "seconds")
    return replace(blank, **found, reason=result.reason or "", message=" ".join(result.message.split())), result
