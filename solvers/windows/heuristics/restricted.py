"""The model that looks for schedules in a narrow space: a window wherever memory is tight, few choices in each.

With a window for every tight op the full model has millions of choices, nearly all of them idle: an op is
executed again where something near wants it, or not at all. So the choices are taken from solutions of coarse
models, which show what is worth executing again at all, and from the best schedules so far: in a window may be
executed again

    what its new ops want, and what that wants in turn, as far as some solution executes it again anywhere;
    what a schedule did execute again there.

The second makes the best schedule a solution of the model, to start from. Few choices also leave most tensors
with one column for all the windows between two uses, see ``Builder.add_variables``.
"""

from collections.abc import Iterable
from heapq import heapify, heappop, heappush

from solvers.problem import Problem
from solvers.windows.formulation.granularity import Discretization, Frame
from solvers.windows.formulation.in_stage import InStageBuilder
from solvers.windows.solution.decode import Choice, Order, Trial

_TIGHT = 0.85  # of the budget
_CHOICES = 2_000  # of what one op may want to be executed again before it, times windows
_FEW_CHOICES = 15  # what it may want in any case


class Known:
    """What solutions and schedules have executed again."""

    def __init__(self) -> None:
        self.ops: set[int] = set()
        self.pairs: set[tuple[int, int]] = set()  # (new op, op executed again just before it)
        self.factor = 1

    def more_choices(self, ops: int) -> bool:
        """Allow twice as many ops to be executed again for the sake of one; False if all `ops` are already."""
        self.factor *= 2
        return self.factor < 2 * ops

    def learn(self, choice: Choice) -> None:
        """Take note of a solution."""
        self.ops.update(*choice.again)

    def learn_order(self, order: Order) -> None:
        """Take note of a schedule."""
        again: list[int] = []
        for op, first in zip(order.computed, order.first, strict=True):
            if first:
                self.pairs.update((op, x) for x in again)
                again = []
            else:
                again.append(op)


class RestrictedBuilder(InStageBuilder):
    """The model that looks for schedules, with the choices that are `known`."""

    def __init__(self, problem: Problem, detail: Discretization, known: Known, frame: Frame | None = None) -> None:
        super().__init__(problem, detail, frame)
        self.known = known
        self.totals: dict[int, tuple[int, dict[int, float]]] = {}
        self.pairs: dict[int, set[int]] = {}
        for v, x in known.pairs:
            self.pairs.setdefault(detail.window_of(v), set()).add(x)

    def choices(self, k: int) -> Iterable[int]:
        """Ops that may be executed again in window k, in program order."""
        start, end = self.starts[k], self.detail.ends[k]
        near: set[int] = set()
        for v in range(start, end + 1):
            near |= self.lacking(v, start)
        near.update(i for i in range(start, end) if i in self.known.ops)
        near.update(self.pairs.get(k, ()))
        return sorted(near)

    def lacking(self, v: int, start: int) -> set[int]:
        """What v may want of what was executed before op `start`: the nearest of it."""
        most = self.known.factor * max(_FEW_CHOICES, _CHOICES // self.windows)
        found: set[int] = set()
        nearest_first = [-self.problem.producers[t] for t in self.problem.inputs[v]]
        heapify(nearest_first)
        while nearest_first and len(found) < most:
            i = -heappop(nearest_first)
            if 0 <= i < start and i in self.known.ops and i not in found:
                found.add(i)
                for t in self.problem.inputs[i]:
                    heappush(nearest_first, -self.problem.producers[t])
        return found

    def add_spans(self) -> None:
        """None: they make bounds, and the model larger."""

    def add_memory(self, k: int, columns: list[int], values: list[float], taken: int) -> None:
        """The row of a memory, told as what differs from U_k: most tensors are in both."""
        total, parts = self.total(k)
        row = dict.fromkeys(columns, 0.0)
        for column, value in zip(columns, values, strict=True):
            row[column] += value
        for column, value in parts.items():
            row[column] = row.get(column, 0.0) - value
        terms = {column: value for column, value in row.items() if value} | {total: self.memory_unit}
        super().add_memory(k, list(terms), list(terms.values()), taken)

    def total(self, k: int) -> tuple[int, dict[int, float]]:
        """Column of U_k, in units of memory: what is handed over at the end of window k; and what that sums up.

        U_k = U_(k-1) + what is handed over at the end of k only - what is at the end of k - 1 only. With dense rows
        instead, models with a thousand windows are too large to solve.
        """
        if k not in self.totals:
            parts = {
                self.handed[k + 1, t]: float(size)
                for t, size in enumerate(self.problem.sizes)
                if size and (k + 1, t) in self.handed
            }
            column = self.column(integer=False, upper=2 * self.problem.capacity_bytes / self.memory_unit)
            terms = {column: self.memory_unit}
            before: dict[int, float] = {}
            if k - 1 in self.totals:
                previous, before = self.totals[k - 1]
                terms[previous] = -self.memory_unit
            for other in parts.keys() ^ before.keys():
                terms[other] = before[other] if other in before else -parts[other]
            unit = self.memory_unit
            self.rows.add(list(terms), [value / unit for value in terms.values()], 0.0, 0.0)
            self.totals[k] = column, parts
        return self.totals[k]


def tight_windows(problem: Problem, trials: Iterable[Trial], budget_bytes: int, limit: int) -> Discretization:
    """A window for each new op that takes nearly the budget in one of `trials`, or before which something does.

    Args:
        limit: of windows, about; of ops that follow each other the one that takes most.
    """
    most = [0] * problem.ops
    for trial in trials:
        before = 0
        for op, first, taken in zip(trial.order.computed, trial.order.first, trial.memory_bytes, strict=True):
            before = max(before, taken)
            if first:
                most[op] = max(most[op], before)
                before = 0
    tight = [op for op in range(problem.ops) if most[op] > _TIGHT * budget_bytes]
    length = max(1, -(-2 * len(tight) // limit))
    worst = [max(tight[i : i + length], key=lambda op: most[op]) for i in range(0, len(tight), length)]
    ends = {op - before for op in worst for before in (0, 1) if op >= before}
    return Discretization(tuple(sorted({*ends, problem.ops - 1})))
