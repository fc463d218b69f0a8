"""Builders of programs for HiGHS, column by column and row by row."""

from collections.abc import Callable, Sequence

import numpy as np

from planner.solvers.highs.program import Matrix, Milp

POLL_EVERY = 2000  # entries of a matrix, a row counting as ten

ONE = 0  # the column of the constant 1 in a ``TermProgram``
Term = int | None  # a column; None for the constant 0
Weighted = tuple[Term, float]


class BuildStoppedError(Exception):
    """A request to stop during the construction of a program."""


class ProgramBuilder:
    """The columns and rows of a program so far.

    Attributes:
        cost, lower, upper, integer: of each column.
    """

    def __init__(self, should_stop: Callable[[], bool] | None = None) -> None:
        """Begin a program.

        Args:
            should_stop: polled regularly; once True, ``add_row`` raises ``BuildStoppedError``.
        """
        self.cost: list[float] = []
        self.lower: list[float] = []
        self.upper: list[float] = []
        self.integer: list[bool] = []
        self._should_stop = should_stop
        self._polled_at = 0
        self._row: list[int] = []
        self._column: list[int] = []
        self._value: list[float] = []
        self._row_lower: list[float] = []
        self._row_upper: list[float] = []

    def add_column(self, cost: float = 0.0, *, integer: bool = False, lower: float = 0.0, upper: float = 1.0) -> int:
        """Add a variable and return its column."""
        self.cost.append(cost)
        self.lower.append(lower)
        self.upper.append(upper)
        self.integer.append(integer)
        return len(self.cost) - 1

    def add_row(self, columns: Sequence[int], values: Sequence[float], lower: float, upper: float) -> None:
        """Add the row lower <= sum of values * columns <= upper."""
        self._row.extend([len(self._row_lower)] * len(columns))
        self._column.extend(columns)
        self._value.extend(values)
        self._row_lower.append(lower)
        self._row_upper.append(upper)
        if self._should_stop is not None and len(self._value) + 10 * len(self._row_upper) > self._polled_at + POLL_EVERY:
            self._polled_at = len(self._value) + 10 * len(self._row_upper)
            if self._should_stop():
                raise BuildStoppedError

    def build_milp(self) -> Milp:
        """Return the program as arrays."""
        shape = len(self._row_lower), len(self.cost)
        return Milp(
            cost=np.array(self.cost),
            lower=np.array(self.lower),
            upper=np.array(self.upper),
            integer=np.array(self.integer, dtype=bool),
            matrix=Matrix.of(shape, self._row, self._column, self._value),
            row_lower=np.array(self._row_lower),
            row_upper=np.array(self._row_upper),
        )


class TermProgram(ProgramBuilder):
    """A program whose first column is the constant 1, with rows over terms that may be constants."""

    def __init__(self) -> None:
        super().__init__()
        self.add_column(lower=1.0)

    def add_at_most(self, terms: Sequence[Weighted], limit: float) -> None:
        """Add the row: sum of `terms` <= `limit`."""
        self.add_terms(terms, -np.inf, limit)

    def add_terms(self, terms: Sequence[Weighted], lower: float, upper: float) -> None:
        """Add the row: `lower` <= sum of `terms` <= `upper`, with constants in its limits."""
        known = [(column, weight) for column, weight in terms if column]
        constant = sum(weight for column, weight in terms if column == ONE)
        self.add_row([column for column, _ in known], [weight for _, weight in known], lower - constant, upper - constant)
