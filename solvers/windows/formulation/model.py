"""The 0-1 model of a graph split into windows: rows 1 to 7, each a relaxation.

Ops are numbered in program order, which is the order of their first executions. Windows split them
into runs; op e_k is the last one of window k. Window k lasts from the end of the first execution of
e_(k-1) to the end of that of e_k. With an op per window this is Checkmate's formulation (Jain et
al., MLSys 2020); with fewer windows it is smaller, and its optimum is a lower bound all the same.

Variables, with "old" for an op or tensor of an earlier window and "new" for one of window k:

    R[k,i]  old op i is executed again in window k
    Q[k,i]  op i, new in window k and not its last, is executed once more in that window
    S[k,t]  tensor t, made before window k, is handed over: it is in memory when e_(k-1) executes
            and stays until window k begins; kept tensors have S = 1 and no variable
    H[k,t]  at least S[k+1,t] - R[k,p(t)] (or - Q): t, made before the step in question, is there in
            all the window because it is handed on and not made again

    U[w,i]  op i, old in the first window of the span w (consecutive windows), is executed again in it

Objective: minimise the sum of c_i over R and Q.

Rows 1 to 7 are a relaxation window by window. Row 8 repeats rows 1 to 3 for spans of windows: it follows from
them for whole numbers, but not for fractions, where half a tensor could serve again in every window.
"""

from collections.abc import Callable, Iterable

import numpy as np
from scipy.sparse import csr_array

from solvers.highs import Program
from solvers.problem import Problem
from solvers.windows.formulation.granularity import Discretization, Frame, Model, Rows, halves

_MEMORY_SCALE = 1e3  # the memory for produced tensors, in the units of the memory rows


class Builder:
    """Collects columns and rows of the relaxation of `problem` that `detail` describes; a method per family."""

    def __init__(
        self, problem: Problem, detail: Discretization, frame: Frame | None = None, should_stop: Callable[[], bool] | None = None
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
        self.spans: dict[tuple[int, int, int], int | None] = {}
        self.cost: list[float] = []
        self.lower: list[float] = []
        self.upper: list[float] = []
        self.integer: list[bool] = []
        self.rows = Rows(should_stop)
        self.memory_unit = max(1.0, problem.capacity_bytes / _MEMORY_SCALE)

    def build(self) -> Model:
        """The model."""
        self.add_rows()
        return Model(self.problem, self.detail, self.again, self.handed, self.twice, self.program())

    def add_rows(self) -> None:
        """All variables and rows."""
        self.add_variables()
        for k in range(self.first_window, self.windows):
            self.add_inputs_of_new(k)
            self.add_inputs_of_repeated(k)
            self.add_hand_over(k)
            self.add_memory_at_end(k)
        self.add_spans()
        for v in sorted(self.detail.firsts):
            self.add_memory_inside(v)
        for end, x in sorted(self.detail.repeats):
            self.add_memory_of_repeat(self.detail.window_of(end), x)

    def program(self) -> Program:
        """What has been collected, as arrays."""
        rows, n = self.rows, len(self.cost)
        matrix = csr_array((rows.value, (rows.row, rows.column)), shape=(len(rows.lower), n))
        return Program(
            cost=np.array(self.cost),
            lower=np.array(self.lower),
            upper=np.array(self.upper),
            integer=np.array(self.integer, dtype=bool),
            matrix=matrix,
            row_lower=np.array(rows.lower),
            row_upper=np.array(rows.upper),
        )

    # Variables.

    def column(self, cost: float = 0.0, *, integer: bool = True, lower: float = 0.0, upper: float = 1.0) -> int:
        """A new variable."""
        self.cost.append(cost)
        self.integer.append(integer)
        self.lower.append(lower)
        self.upper.append(upper)
        return len(self.cost) - 1

    def add_variables(self) -> None:
        """R[k,i]: i old in k and worth executing in k or later; Q[k,i]: i new in k, i < e_k.

        Neither where what i reads has been written over by then.

        S[k,t]: p(t) < a_k, t not kept, and wanted in window k or later. From one window to the next it is the
        same variable if nothing can happen to t in between.
        """
        problem = self.problem
        for k in range(self.first_window, self.windows):
            start = self.starts[k]
            for i in self.choices(k):
                # A new op is worth executing once more only for the sake of what comes between.
                worth = problem.last_worth[i] >= (start if i < start else i + 2)
                if worth and problem.recomputable[i] and problem.last_again[i] >= start:
                    self.again[k, i] = self.column(cost=problem.units(problem.time_s[i]))
            for i in range(start):
                for t in problem.outputs[i]:
                    if not problem.kept[t] and problem.last_use[t] >= start:
                        same = self.handed.get((k - 1, t)) if self.is_idle(k - 1, t) else None
                        self.handed[k, t] = self.column() if same is None else same
        if self.frame.entering is not None:
            for (k, t), column in self.handed.items():
                if k == self.first_window:
                    self.lower[column] = self.upper[column] = float(t in self.frame.entering)
        for t in sorted(self.frame.leaving or ()):
            self.handed[self.windows, t] = self.column(lower=1.0)

    def choices(self, k: int) -> Iterable[int]:
        """Ops that may be executed again in window k, in program order."""
        return range(self.detail.ends[k])

    def is_idle(self, k: int, t: int) -> bool:
        """Whether old t is neither made nor read in window k: handed into it, it is handed on, or was for nothing."""
        if k <= self.first_window or (k, self.problem.producers[t]) in self.again:
            return False  # what enters the first window may be settled, wanted or not
        start, end = self.starts[k], self.detail.ends[k]
        return not any(start <= c <= end or (k, c) in self.again for c in self.problem.graph.consumers[t])

    # Rows 1 to 4: what an execution needs is there.

    def add_inputs_of_new(self, k: int) -> None:
        """Row 1: S[k,t] + R[k,p(t)] >= 1 for old t read by a new op of window k."""
        start = self.starts[k]
        read = {t for v in range(start, self.detail.ends[k] + 1) for t in self.problem.inputs[v]}
        for t in sorted(read):
            if self.problem.producers[t] < start and not self.problem.kept[t]:
                columns = [self.handed[k, t], *self.repeat(k, t)]
                self.rows.add(columns, [1.0] * len(columns), 1.0, np.inf)

    def add_inputs_of_repeated(self, k: int) -> None:
        """Row 2: R[k,i] <= S[k,t] + R[k,p(t)] for old t in in(i), kept ones apart; Q[k,i] likewise."""
        start = self.starts[k]
        for i in range(self.detail.ends[k]):
            column = self.again.get((k, i))
            if column is None:
                continue
            for t in self.problem.inputs[i]:
                if self.problem.producers[t] < start and not self.problem.kept[t]:
                    sources = [self.handed[k, t], *self.repeat(k, t)]
                    self.rows.add([column, *sources], [-1.0] + [1.0] * len(sources), 0.0, np.inf)

    def add_hand_over(self, k: int) -> None:
        """Rows 3 and 4: S[k+1,t] <= S[k,t] + R[k,p(t)] for old t. Kept tensors are there from the first."""
        start = self.starts[k]
        for i in range(start):
            for t in self.problem.outputs[i]:
                column = self.handed.get((k + 1, t))
                if column is not None and column != self.handed[k, t]:
                    sources = [self.handed[k, t], *self.repeat(k, t)]
                    self.rows.add([column, *sources], [-1.0] + [1.0] * len(sources), 0.0, np.inf)

    def repeat(self, k: int, t: int) -> list[int]:
        """Column of the further execution of p(t) in window k, if there is one."""
        column = self.again.get((k, self.problem.producers[t]))
        return [] if column is None else [column]

    # Row 8: spans of windows.

    def add_spans(self) -> None:
        """Row 8 for spans of half the windows, a quarter of them, and so on, and for windows that have been split.

        Without the latter the linear relaxation of a finer model may be the weaker one.
        """
        begin = max(1, self.first_window)
        spans = {(self.detail.window_of(start), self.detail.window_of(end)) for start, end in self.detail.spans}
        for first, last in sorted({*spans, *halves(begin, self.windows - 1)}):
            if first >= begin:
                self.add_span(first, last)

    def add_span(self, first: int, last: int) -> None:
        """Rows 1 to 3 for windows first..last as if they were one, with U <= sum of R over them.

        S[first,t] + U[p(t)] >= 1              old t read by a new op of the span
        U[i] <= S[first,t] + U[p(t)]           old t in in(i); R and Q of new i likewise
        S[last+1,t] <= S[first,t] + U[p(t)]    old t
        """
        problem, start, end = self.problem, self.starts[first], self.detail.ends[last]
        read = {t for v in range(start, end + 1) for t in problem.inputs[v]}
        for t in sorted(read):
            if problem.producers[t] < start and not problem.kept[t]:
                columns = self.sources(first, last, t)
                self.rows.add(columns, [1.0] * len(columns), 1.0, np.inf)
        for i in range(end):
            again = [self.spanned(first, last, i)] if i < start else [self.again.get((self.detail.window_of(i), i))]
            for column in again:
                if column is None:
                    continue
                for t in problem.inputs[i]:
                    if problem.producers[t] < start and not problem.kept[t]:
                        columns = self.sources(first, last, t)
                        self.rows.add([column, *columns], [-1.0] + [1.0] * len(columns), 0.0, np.inf)
        for i in range(start):
            for t in problem.outputs[i]:
                column = self.handed.get((last + 1, t))
                if column is not None:
                    columns = self.sources(first, last, t)
                    self.rows.add([column, *columns], [-1.0] + [1.0] * len(columns), 0.0, np.inf)

    def sources(self, first: int, last: int, t: int) -> list[int]:
        """Columns of S[first,t] and, where p(t) may be executed again in the span, of U[p(t)]."""
        column = self.spanned(first, last, self.problem.producers[t])
        return [self.handed[first, t]] if column is None else [self.handed[first, t], column]

    def spanned(self, first: int, last: int, i: int) -> int | None:
        """Column of U for the windows first..last, None where i cannot be executed again there."""
        key = (first, last, i)
        if key not in self.spans:
            again = [self.again[k, i] for k in range(first, last + 1) if (k, i) in self.again]
            self.spans[key] = None
            if again:
                column = self.spans[key] = self.column(integer=False)
                self.rows.add([column, *again], [-1.0] + [1.0] * len(again), 0.0, np.inf)
        return self.spans[key]

    # Rows 5 to 7: memory.

    def add_memory_at_end(self, k: int) -> None:
        """Row 5: bytes(io(e_k)) + w + sum over other t, p(t) < e_k, of b_t S[k+1,t] <= M. Exact."""
        problem, end = self.problem, self.detail.ends[k]
        own = {*problem.inputs[end], *problem.outputs[end]}
        columns: list[int] = []
        values: list[float] = []
        taken = problem.own_bytes[end]
        for i in range(end):
            for t in problem.outputs[i]:
                if t in own or not problem.sizes[t]:
                    continue
                if problem.kept[t]:
                    taken += problem.sizes[t]
                elif (column := self.handed.get((k + 1, t))) is not None:
                    columns.append(column)
                    values.append(problem.sizes[t])
        self.add_memory(k, columns, values, taken)

    def add_memory_inside(self, v: int) -> None:
        """Row 6: bytes(io(v)) + w_v + sum over other t, p(t) < v, of b_t h_t <= M for v inside window k.

        t has a consumer c, v < c <= e_k:  h_t = 1 - R[k,p(t)], or 1 - Q[k,p(t)] if t is new:
            t is there unless it is made again;
        otherwise, if t can be handed on:  h_t = H[k,t].
        """
        k = self.detail.window_of(v)
        if not self.first_window <= k < self.windows or v == self.detail.ends[k]:
            return  # settled, or row 5 is exact there
        problem, end = self.problem, self.detail.ends[k]
        own = {*problem.inputs[v], *problem.outputs[v]}
        columns: list[int] = []
        values: list[float] = []
        taken = problem.own_bytes[v]
        for i in range(v):
            for t in problem.outputs[i]:
                if t in own or not problem.sizes[t]:
                    continue
                size = problem.sizes[t]
                if problem.kept[t]:
                    taken += size
                elif any(v < c <= end for c in problem.graph.consumers[t]):
                    taken += size
                    columns += (repeat := self.repeat(k, t))
                    values += [-size] * len(repeat)
                elif (k + 1, t) in self.handed:
                    columns.append(self.lasts(k, t))
                    values.append(size)
        self.add_memory(k, columns, values, taken)

    def add_memory_of_repeat(self, k: int, x: int) -> None:
        """Row 7: (bytes(io(x)) + w_x) R[k,x] + sum over old t outside io(x) of b_t h_t <= M.

        h_t = 1 for kept t; h_t = 1 - R[k,p(t)] in a window {v} for t that v reads; else h_t = H[k,t].
        Kept outputs of x are in memory already and made a second time.
        """
        if (k, x) in self.again:
            self.add_memory(k, *self.memory_of_repeat(k, x))

    def memory_of_repeat(self, k: int, x: int) -> tuple[list[int], list[float], int]:
        """Columns and bytes of row 7, and the bytes taken in any case."""
        column = self.again[k, x]
        problem, start = self.problem, self.starts[k]
        own = {*problem.inputs[x], *problem.outputs[x]}
        single = set(problem.inputs[start]) if self.detail.is_single(k) else set()
        columns, values = [column], [float(problem.again_bytes[x])]
        taken = 0
        for i in range(start):
            for t in problem.outputs[i]:
                if t in own or not problem.sizes[t]:
                    continue
                size = problem.sizes[t]
                if problem.kept[t]:
                    taken += size
                elif t in single:
                    taken += size
                    columns += (repeat := self.repeat(k, t))
                    values += [-size] * len(repeat)
                elif (k + 1, t) in self.handed:
                    columns.append(self.lasts(k, t))
                    values.append(size)
        return columns, values, taken

    def add_memory(self, k: int, columns: list[int], values: list[float], taken: int) -> None:
        """The row sum of values * columns <= M - taken of window k, all in bytes."""
        unit = self.memory_unit
        self.rows.add(columns, [value / unit for value in values], -np.inf, (self.problem.capacity_bytes - taken) / unit)

    def lasts(self, k: int, t: int) -> int:
        """Column of H[k,t] >= S[k+1,t] - R[k,p(t)]: S itself where p(t) is not executed again."""
        repeat = self.repeat(k, t)
        if not repeat:
            return self.handed[k + 1, t]
        if (k, t) not in self.lasting:
            column = self.lasting[k, t] = self.column(integer=False)
            self.rows.add([column, self.handed[k + 1, t], repeat[0]], [1.0, -1.0, 1.0], 0.0, np.inf)
        return self.lasting[k, t]
