"""An exact search for small graphs: a shortest path over executed ops and tensors in memory.

It decides small graphs in which the models find neither a schedule nor a proof of infeasibility: the number of states is
exponential in the number of tensors alive at once.
"""

import heapq
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import combinations, count

from planner.solvers.problem import OBJECTIVE_SCALE, Problem
from planner.solvers.windows.strategies.first_schedules import offer_program
from planner.solvers.windows.strategies.strategy import Strategy

_WORK_PER_STATES = 2e-2  # a thousand of them

_State = tuple[int, int]


class StateSpace(Strategy):
    """The search over all states, for graphs without transfers to the host, up to ``BoundParams.max_states`` states."""

    @staticmethod
    def applies(problem: Problem) -> bool:
        """Return True if the problem has neither optional ops nor transfers to the host."""
        return problem.plain

    def step(self, limit: float) -> bool:
        """Search all states, and record the schedule and the proof; return False."""
        search, incumbent, problem = self.search, self.search.incumbent, self.search.problem
        should_stop = search.stopping.count_polls(_WORK_PER_STATES, self._has_ended)
        found = find_shortest(problem, search.params.bound.max_states, below_s=incumbent.best_s, should_stop=should_stop)
        offer_program(search, found.computed)
        if found.decided and incumbent.best is None:
            incumbent.prove(math.inf)
        elif problem.base_s > 0:
            incumbent.raise_bound((found.bound_s / problem.base_s - 1) * OBJECTIVE_SCALE)
        return False

    def _has_ended(self) -> bool:
        self.search.progress.tell("searching all states")
        return self.search.stopping.poll_stop()


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

    A state is (number of ops executed for the first time, set of tensors in memory: bit t for tensor t).
    Executing an op needs its inputs in memory, and space for its outputs and workspace; a recomputation costs its time, a first
    execution nothing, since it is the same in all orders. Freeing a tensor that is not kept costs nothing. Tensors that no later
    op can use are freed at once.

    Args:
        below_s: only faster orders are searched.
        should_stop: polled; True ends the search undecided.
    """
    moves = _Moves(problem)
    order = count()
    start: _State = (0, 0)
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
        # States come in the order of their costs, so that the present one bounds all schedules, though the search is given up.
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
        self._problem = problem
        self._inputs = [_set_of(inputs) for inputs in problem.inputs]
        self._outputs = [_set_of(outputs) for outputs in problem.outputs]
        # An op needs memory for its outputs and workspace, except outputs that overwrite inputs, which are then gone.
        self._overwriting_choices = [_list_overwriting_choices(problem, i) for i in range(problem.ops)]
        # For each number of executed ops the tensors that are kept or may still be read.
        self._may_serve = [
            _set_of(t for t, last in enumerate(problem.last_use) if problem.kept[t] or last >= done)
            for done in range(problem.ops + 1)
        ]

    def of(self, state: _State, live_bytes: int) -> Iterator[tuple[float, _State, int, int]]:
        """Yield the seconds of each move from `state`, where it leads, the bytes in memory there, and the op (-1: none)."""
        problem, (done, live) = self._problem, state
        for i in range(done + 1):
            recomputes = i < done
            if recomputes and (not problem.recomputable[i] or problem.last_worth[i] < done or problem.recompute_before[i] < done):
                continue
            if self._inputs[i] & ~live:
                continue
            reached, there = done if recomputes else done + 1, live | self._outputs[i]
            for needed_bytes, over in self._overwriting_choices[i]:
                if live_bytes + needed_bytes <= problem.capacity_bytes:
                    after = there & self._may_serve[reached] & ~over
                    following = reached, after
                    if following != state:
                        yield recomputes * problem.time_s[i], following, sum(problem.sizes[t] for t in _iterate_members(after)), i
        for t in _iterate_members(live):
            if not problem.kept[t]:
                yield 0.0, (done, live - (1 << t)), live_bytes - problem.sizes[t], -1


def _list_overwriting_choices(problem: Problem, i: int) -> list[tuple[int, int]]:
    """Return the memory that op i needs in addition, for each choice of overwritten inputs, which is returned too."""
    over = [t for t in problem.inputs[i] if problem.may_overwrite(i, t)]
    inside = [t for t in problem.inputs[i] if t not in over]
    needed_bytes = problem.own_bytes[i] - sum(problem.sizes[t] for t in inside)
    subsets = (some for count in range(len(over) + 1) for some in combinations(over, count))
    return [(needed_bytes - sum(problem.sizes[t] for t in some), _set_of(some)) for some in subsets]


def _set_of(tensors: Iterable[int]) -> int:
    return sum(1 << t for t in set(tensors))


def _iterate_members(tensors: int) -> Iterator[int]:
    while tensors:
        bit = tensors & -tensors
        tensors -= bit
        yield bit.bit_length() - 1


def _trace(came: dict[_State, tuple[_State, int]], state: _State) -> tuple[int, ...]:
    computed: list[int] = []
    while state in came:
        state, i = came[state]
        if i >= 0:
            computed.append(i)
    return tuple(reversed(computed))
