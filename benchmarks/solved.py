"""What rows of solves share: how they are filled, and what they say of the schedule that was found."""

from dataclasses import replace
from typing import TypeVar

from graphs.errors import PlannerError
from solvers.registry import get_solver
from solvers.request import Request
from solvers.result import Result


class Solved:
    """A row of one solve; what is unknown is None.

    Attributes:
        time_s, bound_s: of the step, judged and proved.
        base_s: of the step that keeps everything.
    """

    __slots__ = ()
    time_s: float | None
    bound_s: float | None
    base_s: float

    @property
    def overhead(self) -> float | None:
        """Over the step that keeps everything."""
        return None if self.time_s is None else self.time_s / self.base_s - 1

    @property
    def gap(self) -> float | None:
        """Of the time over the bound; what floating point makes of none is 0."""
        return None if self.time_s is None or not self.bound_s else max(0.0, self.time_s / self.bound_s - 1)


Row = TypeVar("Row", bound=Solved)


def solved(blank: Row, solver: str, request: Request) -> tuple[Row, Result | None]:
    """`blank` with what `solver` has found, and that; None where it refuses."""
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
