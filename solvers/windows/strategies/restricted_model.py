"""The restricted model, which finds schedules: a window wherever memory is tight, few variables in each.

With a window for every tight op the full model has millions of variables, nearly all of them idle: an op is recomputed near its
readers, or not at all. So candidates are taken from solutions of coarse models, which show which recomputations are useful at
all, and from the best schedules so far. In a window may be recomputed

    the missing inputs of its new ops, and their ancestors, if some solution recomputes them anywhere;
    the ops that a schedule did recompute there.

The second makes the best schedule a solution of the model, to start from. With few candidates, most tensors also have one column
for all the windows between two uses, see ``variables.py``.

Tried and removed: Checkmate's memory rows inside stages. No cost and no bound of 443 solves depended on them by equal work.
"""

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from heapq import heapify, heappop, heappush

from planner.solvers.problem import Problem
from planner.solvers.windows.decoding.decode import Order, Trial
from planner.solvers.windows.decoding.expand import Solution
from planner.solvers.windows.relaxation.devices import add_makespan
from planner.solvers.windows.relaxation.discretization import Discretization, Model
from planner.solvers.windows.relaxation.draft import Family, ModelDraft, Terms
from planner.solvers.windows.relaxation.memory import add_memory_inside, add_memory_of_recomputations
from planner.solvers.windows.relaxation.models import compose, write_window_rows
from planner.solvers.windows.relaxation.transfers import add_channels, add_offloads
from planner.solvers.windows.relaxation.variables import write_variables

_CANDIDATES, _FEW_CANDIDATES = 2_000, 15  # recomputations that may be needed before an op, times windows; at least


class CandidateSet:
    """The ops that solutions and schedules have recomputed, and the tensors that they have offloaded."""

    def __init__(self) -> None:
        self.ops: set[int] = set()
        self.tensors: set[int] = set()
        self.pairs: set[tuple[int, int]] = set()  # (new op, op executed again just before it)
        self.factor = 1

    def allow_more_candidates(self, ops: int) -> bool:
        """Allow twice as many recomputations for one op; return False if all `ops` are allowed already."""
        self.factor *= 2
        return self.factor < 2 * ops

    def learn(self, solution: Solution) -> None:
        """Add the candidates of a solution."""
        self.ops.update(*solution.recomputed)
        self.tensors.update(*solution.taken)

    def learn_order(self, order: Order) -> None:
        """Add the candidates of a schedule."""
        self.tensors.update(t for t, _ in order.reloads)
        recomputed: list[int] = []
        for op, first in zip(order.computed, order.first, strict=True):
            if first:
                self.pairs.update((op, x) for x in recomputed)
                recomputed = []
            else:
                recomputed.append(op)


def build_restricted(problem: Problem, discretization: Discretization, known: CandidateSet) -> Model:
    """Build the restricted model, with the candidates `known`."""
    problem = replace(problem, round_trips={t: trip for t, trip in problem.round_trips.items() if t in known.tensors})
    return compose(ModelDraft(problem, discretization, wording=_RunningTotals()), *list_restricted_families(known))


def list_restricted_families(known: CandidateSet) -> tuple[Family, ...]:
    """Return the families of its rows, without merged windows, which serve bounds and enlarge the model."""
    return (
        *(partial(write_variables, _Near(known)), add_offloads, write_window_rows),
        *(add_memory_inside, add_memory_of_recomputations, add_channels, add_makespan),
    )


class _Near:
    """The recomputations of a window: candidates near their readers."""

    def __init__(self, known: CandidateSet) -> None:
        self.known = known
        self.recomputed_before: dict[int, list[int]] = {}
        for v, x in known.pairs:
            self.recomputed_before.setdefault(v, []).append(x)

    def __call__(self, draft: ModelDraft, k: int) -> Iterable[int]:
        start, end = draft.starts[k], draft.discretization.ends[k]
        near: set[int] = set()
        for v in range(start, end + 1):
            near |= self.find_lacking(draft, v, start)
            near.update(self.recomputed_before.get(v, ()))
        near.update(i for i in range(start, end) if i in self.known.ops)
        return sorted(near)

    def find_lacking(self, draft: ModelDraft, v: int, start: int) -> set[int]:
        """Return the nearest ancestors of v, executed before op `start`, that are candidates."""
        problem = draft.problem
        most = self.known.factor * max(_FEW_CANDIDATES, _CANDIDATES // draft.windows)
        found: set[int] = set()
        producers = problem.producers
        nearest_first = [-p for t in problem.inputs[v] for p in producers[t]]
        heapify(nearest_first)
        while nearest_first and len(found) < most:
            i = -heappop(nearest_first)
            if 0 <= i < start and i in self.known.ops and i not in found:
                found.add(i)
                for t in problem.inputs[i]:
                    for p in producers[t]:
                        heappush(nearest_first, -p)
        return found


class _RunningTotals:
    """Memory rows as differences from T_k, the size of the tensors handed over at the end of window k, which most tensors share.

    T_k = T_(k-1) + tensors handed over only at the end of k - tensors only at the end of k - 1. With dense rows instead, models
    with a thousand windows are too large to solve.
    """

    def __init__(self) -> None:
        self.totals: dict[int, tuple[int, dict[int, float]]] = {}

    def __call__(self, draft: ModelDraft, k: int, columns: list[int], values: list[float]) -> Terms:
        total, parts = self.require_total(draft, k)
        row = dict.fromkeys(columns, 0.0)
        for column, value in zip(columns, values, strict=True):
            row[column] += value
        for column, value in parts.items():
            row[column] = row.get(column, 0.0) - value
        terms = {column: value for column, value in row.items() if value} | {total: draft.memory_unit}
        return list(terms), list(terms.values())

    def require_total(self, draft: ModelDraft, k: int) -> tuple[int, dict[int, float]]:
        """Return the column of T_k, in units of memory, and its terms."""
        if k not in self.totals:
            unit = draft.memory_unit
            parts = {
                draft.handed[k + 1, t]: float(size)
                for t, size in enumerate(draft.problem.sizes)
                if size and (k + 1, t) in draft.handed
            }
            column = draft.add_column(upper=2 * draft.problem.capacity_bytes / unit)
            terms = {column: unit}
            before: dict[int, float] = {}
            if k - 1 in self.totals:
                previous, before = self.totals[k - 1]
                terms[previous] = -unit
            for other in parts.keys() ^ before.keys():
                terms[other] = before[other] if other in before else -parts[other]
            draft.add_row(list(terms), [value / unit for value in terms.values()], 0.0, 0.0)
            self.totals[k] = column, parts
        return self.totals[k]


def find_tight_windows(problem: Problem, trials: Iterable[Trial], tight_bytes: float, limit: int) -> Discretization:
    """Return windows for each new op that needs more than `tight_bytes` in one of `trials`, or has such recomputations before it.

    Args:
        limit: approximate number of windows; of consecutive ops the one that needs most has one.
    """
    most = [0] * problem.ops
    for trial in trials:
        before = 0
        for op, first, taken in zip(trial.order.computed, trial.order.first, trial.memory_bytes, strict=True):
            before = max(before, taken)
            if first:
                most[op] = max(most[op], before)
                before = 0
    tight = [op for op in range(problem.ops) if most[op] > tight_bytes]
    length = max(1, -(-2 * len(tight) // limit))
    worst = [max(tight[i : i + length], key=lambda op: most[op]) for i in range(0, len(tight), length)]
    ends = {op - before for op in worst for before in (0, 1) if op >= before}
    return Discretization(tuple(sorted({*ends, problem.ops - 1})))
