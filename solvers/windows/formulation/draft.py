"""A program in the making: its columns and rows as they come, and what the columns mean."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from scipy.sparse import csr_array

from solvers.highs.program import Milp
from solvers.problem import Problem
from solvers.windows.formulation.granularity import Discretization, Frame, Model

_MEMORY_SCALE = 1e3  # the memory for produced tensors, in the units of the memory rows
POLL_EVERY = 2000  # entries of a matrix, a row counting as ten

Family = Callable[["ModelDraft"], None]  # adds rows of one kind to a draft, and the columns that only they need
WindowFamily = Callable[["ModelDraft", int], None]  # the same for one window
Terms = tuple[list[int], list[float]]  # columns, and for each its value in a row
Wording = Callable[["ModelDraft", int, list[int], list[float]], Terms]  # a memory row of a window in other terms


class StoppedError(Exception):
    """A model was to be built no further."""


@dataclass(slots=True)
class Rows:
    """Rows of a sparse matrix as they come.

    Attributes:
        should_stop: polled now and then; once True, ``add`` raises ``StoppedError``.
    """

    should_stop: Callable[[], bool] | None = None
    row: list[int] = field(default_factory=list)
    column: list[int] = field(default_factory=list)
    value: list[float] = field(default_factory=list)
    lower: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)
    polled_at: int = 0

    def add(self, columns: Sequence[int], values: Sequence[float], lower: float, upper: float) -> None:
        """Add the row lower <= sum of values * columns <= upper."""
        self.row.extend([len(self.lower)] * len(columns))
        self.column.extend(columns)
        self.value.extend(values)
        self.lower.append(lower)
        self.upper.append(upper)
        if self.should_stop is not None and len(self.value) + 10 * len(self.upper) > self.polled_at + POLL_EVERY:
            self.polled_at = len(self.value) + 10 * len(self.upper)
            if self.should_stop():
                raise StoppedError


def dense(draft: "ModelDraft", k: int, columns: list[int], values: list[float]) -> Terms:
    """Memory rows as the equations have them."""
    return columns, values


def _found(columns: Mapping[tuple[int, int], int], key: tuple[int, int]) -> list[int]:
    column = columns.get(key)
    return [] if column is None else [column]


class ModelDraft:
    """Columns and rows of a program of `problem`, at the windows of `detail`. Families of rows add to it.

    Attributes:
        first_window: the first that is modelled.
        starts: for each window its first op.
        again, handed, twice, lasting: columns of R and Q, of S, of D and of H, see ``variables.py``.
        taken, fetched, valid, stored, hosted: columns of A, Y, V, X and W, see ``copies.py``; none without round trips.
        memory_unit: bytes, the unit of the memory rows.
    """

    def __init__(
        self,
        problem: Problem,
        detail: Discretization,
        *,
        frame: Frame | None = None,
        should_stop: Callable[[], bool] | None = None,
        wording: Wording = dense,
    ) -> None:
        self.problem = problem
        self.detail = detail
        self.frame = frame or Frame()
        self.first_window = 0 if self.frame.entering is None else 1
        self.windows = len(detail.ends)
        self.starts = [detail.start_of(k) for k in range(self.windows)]
        self.again: dict[tuple[int, int], int] = {}
        self.handed: dict[tuple[int, int], int] = {}
        self.twice: dict[tuple[int, int], int] = {}
        self.lasting: dict[tuple[int, int], int] = {}
        self.taken: dict[tuple[int, int], int] = {}
        self.fetched: dict[tuple[int, int], int] = {}
        self.valid: dict[tuple[int, int], int] = {}
        self.stored: dict[tuple[int, int], int] = {}
        self.hosted: dict[tuple[int, int], int] = {}
        self.cost: list[float] = []
        self.lower: list[float] = []
        self.upper: list[float] = []
        self.integer: list[bool] = []
        self.rows = Rows(should_stop)
        self.memory_unit = max(1.0, problem.capacity_bytes / _MEMORY_SCALE)
        self._wording = wording

    def column(self, cost: float = 0.0, *, integer: bool = True, lower: float = 0.0, upper: float = 1.0) -> int:
        """A new variable."""
        self.cost.append(cost)
        self.integer.append(integer)
        self.lower.append(lower)
        self.upper.append(upper)
        return len(self.cost) - 1

    def repeat(self, k: int, t: int) -> list[int]:
        """Column of the further execution of p(t) in window k, if there is one."""
        return _found(self.again, (k, self.problem.producers[t]))

    def sources(self, k: int, t: int) -> list[int]:
        """Columns of what lets old t be read in window k: S[k,t] or V[k,t], and R[k,p(t)] and Y[k,t] where there are."""
        return [self.valid.get((k, t), self.handed[k, t]), *self.brought(k, t)]

    def brought(self, k: int, t: int) -> list[int]:
        """Columns of R[k,p(t)] and Y[k,t], where there are: what makes t readable in window k that was not."""
        return [*self.repeat(k, t), *_found(self.fetched, (k, t))]

    def room(self, k: int, t: int) -> list[int]:
        """Columns of what gives old t its memory in window k: S[k,t], and those of ``made_anew``."""
        return [self.handed[k, t], *self.made_anew(k, t)]

    def made_anew(self, k: int, t: int) -> list[int]:
        """Columns of R[k,p(t)] and A[k,t], where there are: what takes memory for t in window k that was free."""
        return [*self.repeat(k, t), *_found(self.taken, (k, t))]

    def is_handed(self, k: int, t: int) -> bool:
        """Whether t, wanted in window k, must come from before it or be made again: it is old, and not kept."""
        return self.problem.producers[t] < self.starts[k] and not self.problem.kept[t]

    def add_one_of(self, sources: list[int]) -> None:
        """The row sum of sources >= 1."""
        self.rows.add(sources, [1.0] * len(sources), 1.0, np.inf)

    def add_only_with(self, column: int, sources: list[int]) -> None:
        """The row column <= sum of sources."""
        self.rows.add([column, *sources], [-1.0] + [1.0] * len(sources), 0.0, np.inf)

    def add_memory(self, k: int, columns: list[int], values: list[float], taken: int) -> None:
        """The row sum of values * columns <= M - taken of window k, all in bytes."""
        unit = self.memory_unit
        columns, values = self._wording(self, k, columns, values)
        self.rows.add(columns, [value / unit for value in values], -np.inf, (self.problem.capacity_bytes - taken) / unit)

    def model(self) -> Model:
        """What has been collected."""
        return Model(self.problem, self.detail, self.again, self.handed, self.twice, self.program(), self.taken)

    def program(self) -> Milp:
        """The same as arrays."""
        rows, n = self.rows, len(self.cost)
        matrix = csr_array((rows.value, (rows.row, rows.column)), shape=(len(rows.lower), n))
        return Milp(
            cost=np.array(self.cost),
            lower=np.array(self.lower),
            upper=np.array(self.upper),
            integer=np.array(self.integer, dtype=bool),
            matrix=matrix,
            row_lower=np.array(rows.lower),
            row_upper=np.array(rows.upper),
        )
