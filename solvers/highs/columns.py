"""A builder of programs for HiGHS, column by column and row by row."""

from collections.abc import Sequence

import numpy as np
from scipy.sparse import csr_array

from solvers.highs.program import Floats, Milp

ONE = 0  # the column of the constant 1
Term = int | None  # a column; None for the constant 0
Weighted = tuple[Term, float]


class Columns:
    """The columns and rows so far; the first column is the constant 1.

    Attributes:
        cost, upper, integer: of each column.
        rows: columns and weights, lower and upper limit of each.
    """

    def __init__(self) -> None:
        self.cost: list[float] = []
        self.upper: list[float] = []
        self.integer: list[bool] = []
        self.rows: list[tuple[list[tuple[int, float]], float, float]] = []
        self.column(upper=1.0)

    def column(self, *, cost: float = 0.0, upper: float = 1.0, integer: bool = False) -> int:
        """Add a variable between 0 and `upper` and return its column."""
        self.cost.append(cost)
        self.upper.append(upper)
        self.integer.append(integer)
        return len(self.cost) - 1

    def at_most(self, terms: Sequence[Weighted], limit: float) -> None:
        """Add the row: sum of `terms` <= `limit`."""
        self.row(terms, -np.inf, limit)

    def row(self, terms: Sequence[Weighted], lower: float, upper: float) -> None:
        """Add the row: `lower` <= sum of `terms` <= `upper`."""
        self.rows.append(([(column, weight) for column, weight in terms if column is not None], lower, upper))

    def milp(self) -> Milp:
        """Return the program."""
        entries = [(place, column, weight) for place, (terms, _, _) in enumerate(self.rows) for column, weight in terms]
        places, columns, weights = zip(*entries, strict=True) if entries else ((), (), ())
        lower: Floats = np.zeros(len(self.cost))
        lower[ONE] = 1.0
        return Milp(
            cost=np.array(self.cost),
            lower=lower,
            upper=np.array(self.upper),
            integer=np.array(self.integer),
            matrix=csr_array((weights, (places, columns)), shape=(len(self.rows), len(self.cost))),
            row_lower=np.array([lower for _, lower, _ in self.rows]),
            row_upper=np.array([upper for _, _, upper in self.rows]),
        )
