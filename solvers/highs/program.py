"""A program for HiGHS, its answer, and callbacks during its solution."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Self

import numpy as np
from numpy.typing import NDArray

from planner.graphs.errors import PlannerError

Floats = NDArray[np.float64]
Indices = NDArray[np.int32]
Option = bool | int | float | str


class Outcome(StrEnum):
    """The way in which a HiGHS run ended."""

    OPTIMAL = "optimal"  # within the requested gap
    INFEASIBLE = "infeasible"
    STOPPED = "stopped"  # by a limit or by the caller; there may be values
    FAILED = "failed"  # HiGHS failed; there may be no values


class HighsError(PlannerError):
    """A model or an option that HiGHS refused."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """A sparse matrix by rows, not SciPy's: its import takes 20 MB of each training process, and a third of a second.

    Attributes:
        shape: numbers of rows and columns.
        starts: position of the first entry of each row, and the number of entries.
        columns, values: of the entries. No column is twice in a row: HiGHS has then run past its time limit without an answer.
    """

    shape: tuple[int, int]
    starts: Indices
    columns: Indices
    values: Floats

    @classmethod
    def of(cls, shape: tuple[int, int], rows: Sequence[int], columns: Sequence[int], values: Sequence[float]) -> Self:
        """Return the matrix of these entries; those of the same row and column are added up."""
        places = np.array(rows, dtype=np.int64) * shape[1] + np.array(columns, dtype=np.int64)
        found, entry = np.unique(places, return_inverse=True)
        row, column = np.divmod(found, shape[1])
        starts = np.searchsorted(row, np.arange(shape[0] + 1))
        total = np.zeros(len(found))
        np.add.at(total, entry, values)
        return cls(shape, starts.astype(np.int32), column.astype(np.int32), total)


@dataclass(frozen=True, slots=True)
class Milp:
    """The program: minimise cost . x over lower <= x <= upper and row_lower <= matrix x <= row_upper.

    Attributes:
        integer: for each variable, True if it must be integer. All bounds on variables are finite.
        matrix: one row per constraint.
    """

    cost: Floats
    lower: Floats
    upper: Floats
    integer: NDArray[np.bool_]
    matrix: Matrix
    row_lower: Floats
    row_upper: Floats

    def __post_init__(self) -> None:
        if not (np.isfinite(self.lower).all() and np.isfinite(self.upper).all()):
            raise HighsError("a variable has no finite bounds: give each a lower and an upper one")
        if self.matrix.shape != (len(self.row_lower), len(self.cost)):
            raise HighsError(f"the matrix is {self.matrix.shape} for {len(self.row_lower)} rows and {len(self.cost)} variables")


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of a HiGHS run.

    Attributes:
        values: the best x, None if there is none.
        objective: of `values`, None without.
        bound: lower bound on the objective (inf: proved infeasible, -inf: unknown).
        detail: HiGHS's own word for the status.
    """

    outcome: Outcome
    values: Floats | None
    objective: float | None
    bound: float
    detail: str


@dataclass(slots=True)
class SolveCallbacks:
    """Callbacks of the caller's thread while HiGHS runs, each optional.

    Attributes:
        should_stop: polled; True ends the solve with the best so far.
        on_incumbent: gets (values, objective) of each better x; True ends the solve.
        on_bound: gets the bound about ten times a second; with a clock of work, whenever the run is watched.
        interrupted: polled at any time when work is counted, whereas `should_stop` is polled at points that do not depend on
            time; True ends the solve at once.
    """

    should_stop: Callable[[], bool] | None = None
    on_incumbent: Callable[[Floats, float], bool] | None = None
    on_bound: Callable[[float], None] | None = None
    interrupted: Callable[[], bool] | None = None
