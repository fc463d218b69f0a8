"""From a solution of the model to a real order of executions, and what of it is over the budget."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from graphs.schedule import Compute, Schedule, schedule_of
from graphs.simulate import simulate
from solvers.highs.program import Floats
from solvers.problem import Problem
from solvers.windows.formulation.granularity import Discretization, Model
from solvers.windows.solution.copies import timed


@dataclass(frozen=True, slots=True)
class Choice:
    """What a solution of the model says, window by window.

    Attributes:
        again: for each window the ops executed again in it (R and Q).
        handed: for each window the tensors handed over into it (S; kept ones are not listed), and after the
            last one those handed on to what follows.
        twice: (window, op) for ops executed more than once more (D).
        taken: for each window the tensors that come from the host in it (A); empty without round trips.
    """

    again: tuple[frozenset[int], ...]
    handed: tuple[frozenset[int], ...]
    twice: frozenset[tuple[int, int]] = frozenset()
    taken: tuple[frozenset[int], ...] = ()


@dataclass(frozen=True, slots=True)
class Order:
    """Ops in order of execution; for each the window it belongs to, and whether it is the first time.

    Attributes:
        away: (tensor, position) where a tensor comes back from the host before that execution reads it.
    """

    computed: tuple[int, ...]
    windows: tuple[int, ...]
    first: tuple[bool, ...]
    away: frozenset[tuple[int, int]] = frozenset()


@dataclass(frozen=True, slots=True)
class Trial:
    """An order, its schedule, and what that takes.

    Attributes:
        memory_bytes: for each execution the memory during it, static bytes included; copies are no executions.
        waits_s: for each execution what the computation waits before it; empty where it never does.
        ends: for each execution the number of steps until what goes after it at once is gone; empty likewise.
    """

    order: Order
    schedule: Schedule
    time_s: float
    peak_bytes: int
    memory_bytes: tuple[int, ...]
    waits_s: tuple[float, ...] = ()
    ends: tuple[int, ...] = ()


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
    if model.problem.copies is None:
        return Choice(tuple(map(frozenset, again)), tuple(map(frozenset, handed)))
    taken: list[set[int]] = [set() for _ in model.detail.ends]
    for (k, t), column in model.taken.items():
        if values[column] > 0.5:
            taken[k].add(t)
    return Choice(tuple(map(frozenset, again)), tuple(map(frozenset, handed)), taken=tuple(map(frozenset, taken)))


def try_out(problem: Problem, order: Order) -> Trial:
    """The schedule with the shortest lives that executes in this order, judged.

    With round trips, tensors live longer than that while they go to the host, and are there before they are read.
    """
    if problem.copies is not None:
        found = timed(problem, order.computed, order.away)
        order, schedule = replace(order, away=found.away), Schedule(tuple(found.steps))
        simulation = simulate(problem.whole, schedule)
        memory = tuple(taken + problem.graph.static_bytes for taken in found.memory_bytes)
        return Trial(order, schedule, simulation.time_s, simulation.peak_bytes, memory, tuple(found.waits_s), tuple(found.ends))
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


def order_of(detail: Discretization, computed: Sequence[int], away: frozenset[tuple[int, int]] = frozenset()) -> Order:
    """`computed` with the windows of `detail` marked; first executions come in program order."""
    windows: list[int] = []
    first: list[bool] = []
    done = 0
    for op in computed:
        first.append(op == done)
        windows.append(detail.window_of(done))
        done += op == done
    return Order(tuple(computed), tuple(windows), tuple(first), away)


def decoded(problem: Problem, detail: Discretization, choice: Choice) -> Order:
    """The order that a solution of a model says, with what is away meanwhile."""
    order = order_of(detail, expand(problem, detail, choice))
    return order if problem.copies is None else replace(order, away=_away(problem, choice, order))


def _away(problem: Problem, choice: Choice, order: Order) -> frozenset[tuple[int, int]]:
    """What comes back from the host: where it is read, but was not handed over all the time since it was read before.

    What comes back though it was handed over is away for the longest time that it is not read.
    """
    assert problem.copies is not None
    away: set[tuple[int, int]] = set()
    seconds = list(accumulate((problem.time_s[op] for op in order.computed), initial=0.0))
    gaps: dict[tuple[int, int], list[tuple[float, int]]] = {}
    last: dict[int, int] = {}
    for place, op in enumerate(order.computed):
        window = order.windows[place]
        for t in problem.inputs[op]:
            if t in problem.copies.trips and t in last:
                since = order.windows[last[t]]
                if not all(t in choice.handed[k] for k in range(since + 1, window + 1)):
                    away.add((t, place))
                for k in range(since, window + 1):
                    gaps.setdefault((k, t), []).append((seconds[place] - seconds[last[t]], place))
            last[t] = place
        last.update((t, place) for t in problem.outputs[op])
    for k, taken in enumerate(choice.taken):
        for t in taken:
            found = gaps.get((k, t), [])
            if found and not any((t, place) in away for _, place in found):
                away.add((t, max(found)[1]))
    return frozenset(away)


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
        if self.choice.taken:
            self.there.update(t for t in self.choice.taken[k] if self.problem.producers[t] < start)
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
