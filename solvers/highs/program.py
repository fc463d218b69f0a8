"""A program for HiGHS, its answer, and what the caller wants to know meanwhile."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

from graphs.errors import PlannerError

Floats = NDArray[np.float64]
Option = bool | int | float | str


class Outcome(StrEnum):
    """How HiGHS ended."""

    OPTIMAL = "optimal"  # within the gap asked for
    INFEASIBLE = "infeasible"
    STOPPED = "stopped"  # by a limit or by the caller; there may be values
    FAILED = "failed"  # HiGHS could not cope; there may be nothing


class HighsError(PlannerError):
    """HiGHS refused a model or an option."""


@dataclass(frozen=True, slots=True)
class Milp:
    """Minimise cost . x over lower <= x <= upper and row_lower <= matrix x <= row_upper.

    Attributes:
        integer: for each variable whether it must be whole. All bounds on variables are finite.
        matrix: one row per constraint, no column twice in a row.
    """

    cost: Floats
    lower: Floats
    upper: Floats
    integer: NDArray[np.bool_]
    matrix: csr_array
    row_lower: Floats
    row_upper: Floats

    def __post_init__(self) -> None:
        if not (np.isfinite(self.lower).all() and np.isfinite(self.upper).all()):
            raise HighsError("a variable has no finite bounds: give each a lower and an upper one")
        if self.matrix.shape != (len(self.row_lower), len(self.cost)):
            raise HighsError(f"the matrix is {self.matrix.shape} for {len(self.row_lower)} rows and {len(self.cost)} variables")
        # With a column twice in a row HiGHS has run past its time limit without an answer.
        self.matrix.sum_duplicates()


@dataclass(frozen=True, slots=True)
class Answer:
    """What HiGHS found.

    Attributes:
        values: the best x, None if there is none.
        objective: of `values`, None without.
        bound: no x has a lower objective (inf: proved infeasible, -inf: nothing known).
        detail: HiGHS's own word for how it ended.
        row_duals: of a linear program solved to the end, else None.
    """

    outcome: Outcome
    values: Floats | None
    objective: float | None
    bound: float
    detail: str
    row_duals: Floats | None = None


@dataclass(slots=True)
class Watch:
    """What the caller's thread does while HiGHS runs; each may be left out.

    Attributes:
        should_stop: polled; True ends the solve with the best so far.
        on_incumbent: gets (values, objective) of each better x; True ends the solve.
        on_bound: gets the bound about ten times a second, or where work is counted whenever it is looked at.
        interrupted: polled where work is counted, beside `should_stop`, which is polled only at places that do not depend
            on time; True ends the solve wherever it is.
    """

    should_stop: Callable[[], bool] | None = None
    on_incumbent: Callable[[Floats, float], bool] | None = None
    on_bound: Callable[[float], None] | None = None
    interrupted: Callable[[], bool] | None = None
