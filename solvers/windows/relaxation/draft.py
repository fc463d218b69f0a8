"""A builder of programs: columns and rows, and the meaning of the columns."""

from collections.abc import Callable, Iterable, Mapping

import numpy as np

from planner.solvers.highs.builder import ProgramBuilder
from planner.solvers.problem import Problem
from planner.solvers.windows.relaxation.discretization import Discretization, Model

_MEMORY_SCALE = 1e3  # the memory for produced tensors, in the units of the memory rows

Family = Callable[["ModelDraft"], None]  # adds rows of one kind to a draft, and their own columns
Terms = tuple[list[int], list[float]]  # columns, and for each its value in a row
Sum = tuple[float, list[int], list[float]]  # a constant and terms
NONE: Sum = (0.0, [], [])
Wording = Callable[["ModelDraft", int, list[int], list[float]], Terms]  # rewrites a memory row of a window


def keep_dense(draft: "ModelDraft", k: int, columns: list[int], values: list[float]) -> Terms:
    """Return a memory row unchanged, as in the equations."""
    return columns, values


def _list_found(columns: Mapping[tuple[int, int], int], key: tuple[int, int]) -> list[int]:
    column = columns.get(key)
    return [] if column is None else [column]


class ModelDraft(ProgramBuilder):
    """The columns and rows of a program of `problem` with the windows of `discretization`; families of rows add to it.

    Attributes:
        starts: for each window its first op.
        instead: columns of z.
        recomputed, handed, lasting: columns of R and Q, of S and of H, see ``variables.py``.
        used: columns of u, see ``executed.py``.
        taken, fetched, valid, stored, hosted: columns of A, Y, V, X and W, see ``transfers.py``; empty without offloading.
        memory_unit: bytes, the unit of the memory rows.
    """

    def __init__(
        self,
        problem: Problem,
        discretization: Discretization,
        *,
        should_stop: Callable[[], bool] | None = None,
        wording: Wording = keep_dense,
    ) -> None:
        super().__init__(should_stop)
        self.problem = problem
        self.discretization = discretization
        self.windows = len(discretization.ends)
        self.starts = [discretization.start_of(k) for k in range(self.windows)]
        self.instead: dict[int, int] = {}
        self.recomputed: dict[tuple[int, int], int] = {}
        self.handed: dict[tuple[int, int], int] = {}
        self.lasting: dict[tuple[int, int], int] = {}
        self.used: dict[int, int] = {}
        self.taken: dict[tuple[int, int], int] = {}
        self.fetched: dict[tuple[int, int], int] = {}
        self.valid: dict[tuple[int, int], int] = {}
        self.stored: dict[tuple[int, int], int] = {}
        self.hosted: dict[tuple[int, int], int] = {}
        self.memory_unit = max(1.0, problem.capacity_bytes / _MEMORY_SCALE)
        self._wording = wording

    def get_execution(self, i: int) -> Sum:
        """Return the execution of i in its place, as a sum of columns.

        It is z of an alternative; for an op of the program, 1 less the z of those that replace it.
        """
        if i in self.instead:
            return 0.0, [self.instead[i]], [1.0]
        columns = [self.instead[b] for b in self.problem.places.replaced_by[i]]
        return float(not self.problem.places.optional[i]), columns, [-1.0] * len(columns)

    def sum_executions(self, ops: Iterable[int]) -> Sum:
        """Return the number of these ops that are executed in their places."""
        total, terms = 0.0, dict[int, float]()
        for i in ops:
            constant, columns, values = self.get_execution(i)
            total += constant
            for column, value in zip(columns, values, strict=True):
                terms[column] = terms.get(column, 0.0) + value
        terms = {column: value for column, value in terms.items() if value}
        return total, list(terms), list(terms.values())

    def sum_productions(self, k: int, t: int, before: int) -> Sum:
        """Return the number of producers of t in window k before op `before` that are executed in their places."""
        producers, start = self.problem.producers[t], self.starts[k]
        return NONE if producers[-1] < start else self.sum_executions(p for p in producers if start <= p < before)

    def list_recomputing(self, k: int, t: int) -> list[int]:
        """Return the columns of executions outside their places of producers of t in window k."""
        return [self.recomputed[k, p] for p in self.problem.producers[t] if (k, p) in self.recomputed]

    def list_sources(self, k: int, t: int) -> list[int]:
        """Return the columns that allow reading t in window k: S[k,t] or V[k,t], and R[k,p] and Y[k,t] if they exist."""
        return [*(_list_found(self.valid, (k, t)) or _list_found(self.handed, (k, t))), *self.list_arrivals(k, t)]

    def list_arrivals(self, k: int, t: int) -> list[int]:
        """Return the columns of R[k,p] and Y[k,t], if they exist: t becomes readable in window k."""
        return [*self.list_recomputing(k, t), *_list_found(self.fetched, (k, t))]

    def list_memory_columns(self, k: int, t: int) -> list[int]:
        """Return the columns that give t its memory in window k: S[k,t], and those of ``list_allocations``."""
        return [*_list_found(self.handed, (k, t)), *self.list_allocations(k, t)]

    def list_allocations(self, k: int, t: int) -> list[int]:
        """Return the columns of R[k,p] and A[k,t], if they exist: memory is allocated for t in window k."""
        return [*self.list_recomputing(k, t), *_list_found(self.taken, (k, t))]

    def list_held(self, k: int, t: int) -> list[int]:
        """Return the columns of S[k,t] and Y[k,t], if they exist: t is readable in window k although no op produces it there."""
        return [*_list_found(self.handed, (k, t)), *_list_found(self.fetched, (k, t))]

    def is_settled(self, k: int, t: int) -> bool:
        """Return True if t is kept, and has certainly been produced before window k."""
        return self.problem.kept[t] and self.problem.settled[t] < self.starts[k]

    def is_made(self, k: int, t: int) -> bool:
        """Return True if t is certainly available to its readers in window k, by rows 1 to 3: it is settled, or new."""
        producer = self.problem.producer[t]
        return (producer >= self.starts[k] and self.problem.places.sure[producer]) or self.is_settled(k, t)

    def is_handed(self, k: int, t: int) -> bool:
        """Return True if t must be handed over into window k or recomputed to be read there: it is old, and not settled."""
        return self.problem.producer[t] < self.starts[k] and not self.is_settled(k, t)

    def add_only_with(self, column: int, sources: list[int], also: Sum = NONE) -> None:
        """Add the row column <= sum of sources + `also`, unless it is redundant."""
        if also is NONE:
            self.add_row([column, *sources], [-1.0] + [1.0] * len(sources), 0.0, np.inf)
        else:
            self.add_at_most((0.0, [column], [1.0]), sources, also)

    def add_at_most(self, wanted: Sum, sources: list[int], also: Sum) -> None:
        """Add the row wanted <= sum of sources + `also`, unless it is redundant."""
        if also[0] + sum(min(0.0, value) for value in also[2]) < 1.0:
            columns = [*wanted[1], *sources, *also[1]]
            values = [*(-value for value in wanted[2]), *[1.0] * len(sources), *also[2]]
            self.add_row(columns, values, wanted[0] - also[0], np.inf)

    def add_memory(self, k: int, columns: list[int], values: list[float], taken: int) -> None:
        """Add the row sum of values * columns <= M - taken of window k, all in bytes."""
        unit = self.memory_unit
        columns, values = self._wording(self, k, columns, values)
        self.add_row(columns, [value / unit for value in values], -np.inf, (self.problem.capacity_bytes - taken) / unit)

    def model(self) -> Model:
        """Return the finished model."""
        return Model(
            self.problem,
            self.discretization,
            self.recomputed,
            self.handed,
            self.build_milp(),
            self.taken,
            self.instead,
        )
