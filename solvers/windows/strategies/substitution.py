"""Choices of alternatives without solving a model: simple ones, and the one of least peak."""

from collections.abc import Callable, Iterable, Sequence

from planner.solvers.clock import Clock
from planner.solvers.eviction.least_peak import find_least_evicting_schedule
from planner.solvers.problem import Problem
from planner.solvers.windows.decoding.decode import Order, decode, is_possible, order_of
from planner.solvers.windows.decoding.expand import Solution
from planner.solvers.windows.decoding.plain_graph import build_plain_graph
from planner.solvers.windows.relaxation.discretization import Discretization


def substitute(problem: Problem, instead: frozenset[int]) -> Order | None:
    """Return the order that executes each op once, with `instead` in place of others; None if it is impossible.

    Only missing inputs are recomputed.
    """
    solution = Solution((frozenset(),), (frozenset(), frozenset()), instead=instead)
    order = decode(problem, Discretization.whole(problem), solution)
    return order if is_possible(problem, order) else None


def find_least_substitution(problem: Problem, clock: Clock, should_stop: Callable[[], bool] | None) -> Order | None:
    """Return the order of least peak that eviction rules find with the alternatives of least memory.

    Return None if there is none. The problem must not have transfers to the host.
    """
    instead = _choose_least_memory(problem)
    if not instead or (order := substitute(problem, instead)) is None:
        return None
    plain = build_plain_graph(problem, order.computed)
    found = find_least_evicting_schedule(plain.graph, clock, should_stop=should_stop)
    if found is None:
        return order
    evicting = order_of(problem, [plain.ops[op] for op in found.computed], instead=instead)
    return evicting if is_possible(problem, evicting) else None


def list_simple_substitutions(problem: Problem) -> list[frozenset[int]]:
    """Return the alternatives of least memory wherever that saves memory, and those of least time wherever that saves time."""
    places = problem.places
    gains_s = {b: sum(problem.time_s[i] for i in group) - problem.time_s[b] for b, group in enumerate(places.replaces) if group}
    fast = sorted((b for b, gain_s in gains_s.items() if gain_s > 0), key=lambda b: (-gains_s[b], b))
    return [_choose_least_memory(problem), _select_disjoint(places.replaces, fast)]


def _choose_least_memory(problem: Problem) -> frozenset[int]:
    """Return the alternatives of least memory, wherever one needs less memory than the ops that it replaces."""
    groups = problem.places.replaces
    own_bytes = problem.own_bytes
    smaller = (b for b, group in enumerate(groups) if group and own_bytes[b] < max(own_bytes[i] for i in group))
    return _select_disjoint(groups, sorted(smaller, key=lambda b: (problem.own_bytes[b], b)))


def _select_disjoint(groups: Sequence[Sequence[int]], ranked: Iterable[int]) -> frozenset[int]:
    """Return the first of `ranked` whose groups are disjoint."""
    chosen: set[int] = set()
    replaced: set[int] = set()
    for b in ranked:
        if replaced.isdisjoint(groups[b]):
            chosen.add(b)
            replaced.update(groups[b])
    return frozenset(chosen)
