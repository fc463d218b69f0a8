"""From a solution of the model to a real order of executions, and what of it is over the budget."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from graphs.schedule import Compute, Schedule, schedule_of
from graphs.simulate import simulate
from solvers.highs.program import Floats
from solvers.problem import Problem
from solvers.windows.formulation.granularity import Discretization, Model


@dataclass(frozen=True, slots=True)
class Choice:
    """What a solution of the model says, window by window.

    Attributes:
        again: for each window the ops executed again in it (R and Q).
        handed: for each window the tensors handed over into it (S; kept ones are not listed), and after the
            last one those handed on to what follows.
        twice: (window, op) for ops executed more than once more (D).
    """

    again: tuple[frozenset[int], ...]
    handed: tuple[frozenset[int], ...]
    twice: frozenset[tuple[int, int]] = frozenset()


@dataclass(frozen=True, slots=True)
class Order:
    """Ops in order of execution; for each the window it belongs to, and whether it is the first time."""

    computed: tuple[int, ...]
    windows: tuple[int, ...]
    first: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class Trial:
    """An order, its schedule, and what that takes.

    Attributes:
        memory_bytes: for each execution the memory during it, static bytes included.
    """

    order: Order
    schedule: Schedule
    time_s: float
    peak_bytes: int
    memory_bytes: tuple[int, ...]


def read_choice(model: Model, values: Floats) -> Choice:
    """Binaries of a solution, read at one half (HiGHS has checked that they are whole)."""
    again: list[set[int]] = [set() for _ in model.detail.ends]
    handed: list[set[int]] = [set() for _ in range(len(model.detail.ends) + 1)]
    for (k, i), column in model.again.items():
        if values[column] > 0.5:
            again[k].add(i)
    for (k, t), column in model.handed.items():
        if values[column] > 0.5:
            handed[k].add(t)
    return Choice(tuple(map(frozenset, again)), tuple(map(frozenset, handed)))


def try_out(problem: Problem, order: Order) -> Trial:
    """The schedule with the shortest lives that executes in this order, judged."""
    schedule = schedule_of(problem.graph, order.computed)
    simulation = simulate(problem.graph, schedule)
    memory = tuple(
        taken for step, taken in zip(schedule.steps, simulation.memory_bytes, strict=True) if isinstance(step, Compute)
    )
    return Trial(order, schedule, simulation.time_s, simulation.peak_bytes, memory)


def late_writers(problem: Problem, order: Order) -> set[int]:
    """Ops that write in place what another op, executed again after them, reads."""
    late: set[int] = set()
    done = 0
    for op, first in zip(order.computed, order.first, strict=True):
        if not first and problem.last_again[op] < done:
            late.add(problem.last_again[op])
        done += first
    return late


def order_of(detail: Discretization, computed: Sequence[int]) -> Order:
    """`computed` with the windows of `detail` marked; first executions come in program order."""
    windows: list[int] = []
    first: list[bool] = []
    done = 0
    for op in computed:
        first.append(op == done)
        windows.append(detail.window_of(done))
        done += op == done
    return Order(tuple(computed), tuple(windows), tuple(first))


def expand(problem: Problem, detail: Discretization, choice: Choice, *, first_window: int = 0) -> tuple[int, ...]:
    """Ops in order of execution, from `first_window` on.

    Window by window: what a new op lacks is executed again just before it, in program order. Before the last
    op of a window comes also what is to be handed on and is not there.
    """
    return _Expansion(problem, detail, choice).run(first_window)


class _Expansion:
    def __init__(self, problem: Problem, detail: Discretization, choice: Choice) -> None:
        self.problem = problem
        self.detail = detail
        self.choice = choice
        self.computed: list[int] = []
        self.there: set[int] = set()
        self.pending: set[int] = set()
        self.kept = [t for outputs in problem.outputs for t in outputs if problem.kept[t]]

    def run(self, first_window: int) -> tuple[int, ...]:
        for k in range(first_window, len(self.detail.ends)):
            self.window(k)
        return tuple(self.computed)

    def window(self, k: int) -> None:
        start, end = self.detail.start_of(k), self.detail.ends[k]
        self.there = {t for t in self.kept if self.problem.producers[t] < start} | self.choice.handed[k]
        self.pending = set(self.choice.again[k])
        wanted_on = self.choice.handed[k + 1]
        gone = self.gaps(k)
        self.there.difference_update(gone.get(start - 1, ()))
        for v in range(start, end + 1):
            wanted: Iterable[int] = self.problem.inputs[v]
            if v == end:
                wanted = (*wanted, *(t for t in wanted_on if self.problem.producers[t] < end))
            for i in sorted(self.lacking(wanted)):
                self.execute(i)
            self.execute(v)
            self.there.difference_update(gone.get(v, ()))

    def execute(self, i: int) -> None:
        self.computed.append(i)
        self.there.update(self.problem.outputs[i])
        self.pending.discard(i)

    def lacking(self, wanted: Iterable[int]) -> set[int]:
        """Ops to execute again so that `wanted` is there, as far as the solution has them."""
        ops: set[int] = set()
        stack = list(wanted)
        while stack:
            t = stack.pop()
            i = self.problem.producers[t]
            if t in self.there or i in ops or i not in self.pending:
                continue
            ops.add(i)
            stack.extend(self.problem.inputs[i])
        return ops

    def gaps(self, k: int) -> dict[int, list[int]]:
        """For ops executed again though their outputs are there: after which new op each output goes.

        It goes for the longest stretch of window k in which it has no reader.
        """
        start, end = self.detail.start_of(k), self.detail.ends[k]
        gone: dict[int, list[int]] = {}
        for i in self.pending:
            for t in self.problem.outputs[i]:
                if self.problem.kept[t] or (i < start and t not in self.there):
                    continue
                readers = self.problem.graph.consumers[t]
                stops = [max(i, start - 1), *readers[bisect_right(readers, max(i, start - 1)) : bisect_right(readers, end)]]
                if t in self.choice.handed[k + 1] and stops[-1] != end:
                    stops.append(end)
                if len(stops) > 1:
                    _, since = max((b - a, a) for a, b in pairwise(stops))
                    gone.setdefault(since, []).append(t)
        return gone
