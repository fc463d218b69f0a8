"""Rows of solves: their completion from results, and values derived from the schedule."""

from dataclasses import dataclass, replace
from typing import TypeVar

from graphs.errors import PlannerError
from graphs.units import format_ratio
from planner.studies.rows import Made, column, text, value
from solvers.registry import get_solver
from solvers.request import Request
from solvers.result import Result, Status


@dataclass(frozen=True, slots=True, kw_only=True)
class Solved(Made):
    """One solve."""

    status: str = column("as in solvers.result", default=str(Status.ERROR))
    reason: str = text("as in solvers.result")
    message: str = text("what else there is to say")
    time_s: float | None = value("the step, judged")
    bound_s: float | None = value("proved: no step takes less")
    base_s: float = column("the step that keeps everything")
    peak_bytes: int | None = value("of the schedule")
    budget_bytes: int | None = value("static bytes included")

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
        """The gap of the time over the bound; floating-point errors count as 0."""
        return None if self.time_s is None or not self.bound_s else max(0.0, self.time_s / self.bound_s - 1)

    @property
    def why_none(self) -> str:
        """The reason why there is no schedule, in a word."""
        return self.status if self.status == Status.INFEASIBLE else self.reason or self.status

    @property
    def overhead_text(self) -> str:
        """The overhead, or the reason why there is none."""
        return self.why_none if self.overhead is None else format_ratio(self.overhead)


Row = TypeVar("Row", bound=Solved)


def solved(blank: Row, solver: str, request: Request) -> tuple[Row, Result | None]:
    """Return `blank` with the result of `solver`, and the result; None if the solver refuses."""
    try:
        result = get_solver(solver)(request)
    except PlannerError as error:
        return replace(blank, message=str(error)), None
    row = replace(
        blank,
        status=str(result.status),
        reason=str(result.reason or ""),
        message=" ".join(result.message.split()),
        time_s=result.time_s,
        bound_s=result.bound_s,
        peak_bytes=result.peak_bytes,
        seconds=result.seconds,
    )
    return row, result
