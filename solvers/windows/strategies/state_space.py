"""An exact search for small graphs: a shortest path over executed ops and tensors in memory.

It decides small graphs in which the models find neither a schedule nor a proof of infeasibility: the number of states is
exponential in the number of tensors alive at once.
"""

import heapq
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations, count

from solvers.conflicts import Pattern, Residency, Tensors, set_of
from solvers.problem import OBJECTIVE_SCALE, Problem
from solvers.windows.strategies.first_schedules import offer_program
from solvers.windows.strategies.strategy import Strategy

_WORK_PER_STATES = 2e-2  # a thousand of them

_Marks = tuple[int, ...]
_State = tuple[int, int, _Marks]


class StateSpace(Strategy):
    """The search over all states, for graphs without transfers to the host, up to ``BoundParams.max_states`` states."""

    @staticmethod
    def applies(problem: Problem) -> bool:
        """Return True if the problem has neither optional ops nor transfers to the host."""
        return problem.plain

    def step(self, limit: float) -> bool:
        """Search all states, and record the schedule and the proof; return False."""
        search, incumbent, problem = self.search, self.search.incumbent, self.search.problem

        def has_ended() -> bool:
            search.progress.tell("searching all states")
            return search.stopping.is_stopped()

        should_stop = search.stopping.count_polls(_WORK_PER_STATES, has_ended)
        found = find_shortest(problem, search.params.bound.max_states, below_s=incumbent.best_s, should_stop=should_stop)
        offer_program(search, found.computed)
        if found.decided and incumbent.best is None:
            incumbent.prove(math.inf)
        elif problem.base_s > 0:
            incumbent.raise_bound((found.bound_s / problem.base_s - 1) * OBJECTIVE_SCALE)
        return False


@dataclass(frozen=True, slots=True)
class StateSpaceResult:
    """The result of the search.

    Attributes:
        decided: False if the limit on states, or a stop, ended it.
        computed: the fastest order of executions that fits, None if there is none below the limit (or not decided).
        bound_s: lower bound on the time of every order.
    """

    decided: bool
    computed: tuple[int, ...] | None
    bound_s: float


def find_shortest(problem: Problem, max_states: int, *, below_s: float, should_stop: Callable[[], bool]) -> StateSpaceResult:
    """Return the fastest order with first executions in program order (Dijkstra's algorithm).

    A state is (number of ops executed for the first time, set of tensors in memory, how far each conflict has come about).
    Executing an op needs its inputs in memory, and space for its outputs and workspace; a recomputation costs its time, a first
    execution nothing, since it is the same in all orders. Freeing a tensor that is not kept costs nothing. Tensors that no later
    op can use are freed at once.

    Args:
        below_s: only faster orders are searched.
        should_stop: polled; True ends the search undecided.
    """
    moves = _Moves(problem)
    order = count()
    start: _State = (0, 0, moves.watch.start)
    cost = {start: 0.0}
    came: dict[_State, tuple[_State, int]] = {}
    # Ties, which are many, are broken towards later frontiers: one end is enough.
    heap = [(0.0, 0, next(order), start, 0)]
    closed: set[_State] = set()
    while heap:
        spent, _, _, state, live_bytes = heapq.heappop(heap)
        if state in closed:
            continue
        closed.add(state)
        if state[0] == problem.ops:
            return StateSpaceResult(decided=True, computed=_trace(came, state), bound_s=problem.base_s + spent)
        if len(cost) > max_states or (len(closed) % 1000 == 0 and should_stop()):
            return StateSpaceResult(decided=False, computed=None, bound_s=problem.base_s + spent)
        for time_s, reached, size_bytes, i in moves.of(state, live_bytes):
            total = spent + time_s
            if reached not in closed and total < cost.get(reached, below_s - problem.base_s):
                cost[reached] = total
                came[reached] = (state, i)
                heapq.heappush(heap, (total, -reached[0], next(order), reached, size_bytes))
    return StateSpaceResult(decided=True, computed=None, bound_s=below_s)


class _Moves:
    """The moves of ``find_shortest``."""

    def __init__(self, problem: Problem) -> None:
        self.watch = _ConflictWatch(problem)
        self._problem = problem
        self._inputs = [set_of(inputs) for inputs in problem.inputs]
        self._outputs = [set_of(outputs) for outputs in problem.outputs]
        # An op needs memory for its outputs and workspace, except outputs that overwrite inputs, which are then gone.
        self._overwriting_choices = [_list_overwriting_choices(problem, i) for i in range(problem.ops)]
        # For each number of executed ops the tensors that are kept or may still be read.
        self._may_serve = [
            set_of(t for t, last in enumerate(problem.last_use) if problem.kept[t] or last >= done)
            for done in range(problem.ops + 1)
        ]

    def of(self, state: _State, live_bytes: int) -> Iterator[tuple[float, _State, int, int]]:
        """Yield the seconds of each move from `state`, where it leads, the bytes in memory there, and the op (-1: none)."""
        problem, watch, (done, live, marks) = self._problem, self.watch, state
        for i in range(done + 1):
            recomputes = i < done
            if recomputes and (not problem.recomputable[i] or problem.last_worth[i] < done or problem.recompute_before[i] < done):
                continue
            if self._inputs[i] & ~live:
                continue
            reached, there = done if recomputes else done + 1, live | self._outputs[i]
            marked = watch.mark_execution(marks, i, done, live, there)
            if marked is None:
                continue
            for needed_bytes, over in self._overwriting_choices[i]:
                if live_bytes + needed_bytes <= problem.capacity_bytes:
                    after = there & self._may_serve[reached] & ~over
                    following = reached, after, watch.keep_live_marks(marked, reached, after)
                    if following != state:
                        yield recomputes * problem.time_s[i], following, sum(problem.sizes[t] for t in _iterate_members(after)), i
        for t in _iterate_members(live):
            if not problem.kept[t]:
                rest = live - (1 << t)
                yield 0.0, (done, rest, watch.keep_live_marks(marks, done, rest)), live_bytes - problem.sizes[t], -1


def _list_overwriting_choices(problem: Problem, i: int) -> list[tuple[int, int]]:
    """Return the memory that op i needs in addition, for each choice of overwritten inputs, which is returned too."""
    over = [t for t in problem.inputs[i] if problem.may_overwrite(i, t)]
    inside = [t for t in problem.inputs[i] if t not in over]
    needed_bytes = problem.own_bytes[i] - sum(problem.sizes[t] for t in inside)
    subsets = (some for count in range(len(over) + 1) for some in combinations(over, count))
    return [(needed_bytes - sum(problem.sizes[t] for t in some), set_of(some)) for some in subsets]


def _iterate_members(tensors: Tensors) -> Iterator[int]:
    """Yield the tensors of a set."""
    while tensors:
        bit = tensors & -tensors
        tensors -= bit
        yield bit.bit_length() - 1


class _ConflictWatch:
    """How far the conflicts of a problem have come about on the way to a state.

    The mark of a conflict of residency is 1 as long as all its stays have been, and then 0; that of a pattern has a bit for each
    number of its moments that have been.
    """

    def __init__(self, problem: Problem) -> None:
        self.start: _Marks = (1,) * len(problem.conflicts)
        self._conflicts = problem.conflicts
        # By conflict and op: tensors of its stays during the first execution of the op, and between that of the op before and it.
        self._at: list[list[Tensors]] = []
        self._between: list[list[Tensors]] = []
        self._last: list[int] = []
        for conflict in problem.conflicts:
            stays = conflict.stays if isinstance(conflict, Residency) else ()
            ops = range(problem.ops + 1)
            self._at.append([set_of(s.tensor for s in stays if s.first <= i <= s.last) for i in ops])
            self._between.append([set_of(s.tensor for s in stays if s.first < i <= s.last) for i in ops])
            self._last.append(max((s.last for s in stays), default=-1))

    def mark_execution(self, marks: _Marks, op: int, done: int, live: Tensors, there: Tensors) -> _Marks | None:
        """Return the marks with an execution of `op`, while tensors are `there` that were `live` before; None if one occurs."""
        found = []
        for c, (conflict, mark) in enumerate(zip(self._conflicts, marks, strict=True)):
            if isinstance(conflict, Pattern):
                mark = conflict.advance(mark, op, live, there)
                if conflict.is_complete(mark):
                    return None
            elif mark and op == done:
                mark = int(not self._at[c][op] & ~there)
                if mark and op == self._last[c]:
                    return None
            found.append(mark)
        return tuple(found)

    def keep_live_marks(self, marks: _Marks, done: int, live: Tensors) -> _Marks:
        """Return the marks where the tensors `live` are in memory."""
        found = []
        for c, (conflict, mark) in enumerate(zip(self._conflicts, marks, strict=True)):
            if isinstance(conflict, Pattern):
                found.append(conflict.keep_intact(mark, live))
            else:
                found.append(0 if self._between[c][done] & ~live else mark)
        return tuple(found)


def _trace(came: dict[_State, tuple[_State, int]], state: _State) -> tuple[int, ...]:
    computed: list[int] = []
    while state in came:
        state, i = came[state]
        if i >= 0:
            computed.append(i)
    return tuple(reversed(computed))
