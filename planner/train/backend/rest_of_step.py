"""A joint graph with the rest of the step as one op between its forward and backward passes.

While the loss and later graphs are computed, the saved tensors of this graph stay in memory. The op's workspace is the memory
that the rest needs, and its outputs are the gradients of this graph's outputs.
"""

from collections.abc import Iterable
from dataclasses import replace

from planner.graphs.ir import Graph, Op, Phase
from planner.graphs.options import remove_options
from planner.graphs.reordering import Reordering, permute
from planner.graphs.schedule import Schedule, count_kept_bytes, keep_everything
from planner.graphs.simulate import simulate
from planner.memory.least_budget import find_least_budget
from planner.solvers.clock import WallClock
from planner.solvers.eviction.least_peak import find_least_evicting_schedule

_TRIES = 5  # bisection steps for the bytes that are kept
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


def find_least_schedule(graph: Graph, tangents: Iterable[int]) -> tuple[int, Schedule]:
    """Return the schedule without options that takes least, and the bytes that it takes."""
    bare = add_rest(remove_options(graph), tangents, 0)
    known = find_least_budget(bare.graph, reorders=False)
    return known.found_bytes, bare.map_back(known.schedule)


def find_lean_schedule(graph: Graph, tangents: Iterable[int], budget_bytes: int, *, time_limit_s: float) -> Schedule | None:
    """Return a schedule within the budget, without options, that keeps little between the passes; None if none is found."""
    made = tuple(tangents)
    graph = remove_options(graph)
    end = min(_TRY_S, time_limit_s / _TRIES)

    def solve_keeping(kept_bytes: int) -> Schedule | None:
        roomy = add_rest(graph, made, max(0, budget_bytes - graph.static_bytes - kept_bytes))
        found = find_least_evicting_schedule(roomy.graph, WallClock(end)) or keep_everything(roomy.graph)
        return roomy.map_back(found) if simulate(roomy.graph, found).peak_bytes <= budget_bytes else None

    lean = solve_keeping(budget_bytes)
    if lean is None:  # rules evict greedily: programs get further
        least_bytes, least = find_least_schedule(graph, made)
        return least if least_bytes <= budget_bytes else None
    made_forward = {t for op in graph.ops if op.phase is Phase.FORWARD for t in op.outputs}
    least_bytes, asked_bytes = -1, sum(graph.tensors[t].size_bytes for t in graph.kept & made_forward)  # results stay
    for _ in range(_TRIES):
        kept_bytes = count_kept_bytes(graph, lean)
        if asked_bytes >= kept_bytes:
            break
        if (found := solve_keeping(asked_bytes)) is None:
            least_bytes = asked_bytes
        else:
            lean, kept_bytes = found, count_kept_bytes(graph, found)
        asked_bytes = (least_bytes + kept_bytes) // 2
    return lean
