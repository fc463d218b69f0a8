"""A joint graph with the rest of the step as one op between its forward and backward passes.

While the loss and later graphs are computed, the saved tensors of this graph stay in memory. The op's workspace is the memory
that the rest needs, and its outputs are the gradients of this graph's outputs.
"""

from collections.abc import Iterable
from dataclasses import replace

from graphs.ir import Graph, Op, Phase
from graphs.options import remove_options
from graphs.reordering import Reordering, permute
from graphs.schedule import Schedule, keep_everything
from graphs.simulate import simulate
from planner.memory.fit import find_largest
from planner.memory.least_budget import find_least_budget
from solvers.clock import WallClock
from solvers.eviction.least_peak import find_least_evicting_schedule

_TRIES = 5  # bisection steps for the bytes that are left to the rest
_TRY_S = 2.0


def add_rest(graph: Graph, tangents: Iterable[int], rest_bytes: int) -> Reordering:
    """Return `graph` with an op between the passes that needs `rest_bytes` and makes the `tangents`, its static gradients."""
    made = tuple(tangents)
    cut = next((op.id for op in graph.ops if op.phase is not Phase.FORWARD), len(graph.ops))
    outputs = sorted(t for t in graph.kept if any(p < cut for p in graph.tensors[t].producers))
    rest = Op(cut, "rest_of_the_step", "rest", tuple(outputs), made, 0.0, rest_bytes, Phase.BACKWARD, recomputable=False)
    found = permute(graph, [*range(cut), rest, *range(cut, len(graph.ops))])
    return replace(found, graph=replace(found.graph, kept=graph.kept.union(made)))


def build_keep_everything(graph: Graph) -> Schedule:
    """Return the schedule that keeps everything and uses no options of `graph`."""
    return keep_everything(remove_options(graph))


def find_lean_schedule(graph: Graph, tangents: Iterable[int], budget_bytes: int, *, time_limit_s: float) -> Schedule | None:
    """Return a schedule within the budget, without options, that keeps little between the passes; None if none is found."""
    made = tuple(tangents)
    graph = remove_options(graph)
    end = min(_TRY_S, time_limit_s / _TRIES)

    def solve_leaving(rest_bytes: float) -> Schedule | None:
        roomy = add_rest(graph, made, int(rest_bytes))
        found = find_least_evicting_schedule(roomy.graph, WallClock(end)) or keep_everything(roomy.graph)
        return roomy.map_back(found) if simulate(roomy.graph, found).peak_bytes <= budget_bytes else None

    least = solve_leaving(0)
    if least is None:  # rules evict greedily: programs get further
        bare = add_rest(graph, made, 0)
        known = find_least_budget(bare.graph, reorders=False)
        return bare.map_back(known.schedule) if known.found_bytes <= budget_bytes else None
    return find_largest(solve_leaving, 0, max(0, budget_bytes - graph.static_bytes), halvings=_TRIES) or least
