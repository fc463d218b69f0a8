"""A joint graph with the rest of the step as one op between its forward and backward passes.

While the loss and later graphs are computed, the saved tensors of this graph stay in memory. The op's workspace is the memory
that the rest needs, and its outputs are the gradients of this graph's outputs.
"""

from collections.abc import Iterable
from dataclasses import replace

from graphs.ir import Graph, Op, Phase
from graphs.options import remove_options
from graphs.schedule import Compute, Schedule, Step, keep_everything, schedule_of
from graphs.simulate import simulate
from planner.memory.fit import find_largest
from planner.memory.least_budget import find_least_budget
from solvers.clock import WallClock
from solvers.eviction.least_peak import find_least_evicting_schedule

_TRIES = 5  # bisection steps for the bytes that are left to the rest
_TRY_S = 2.0


def add_rest(graph: Graph, tangents: Iterable[int], rest_bytes: int) -> Graph:
    """Return `graph` with an op between the passes that needs `rest_bytes` and makes the `tangents`, its static gradients."""
    made = tuple(tangents)
    cut = _find_first_backward(graph)

    def shift_producers(producers: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(op if op < cut else op + 1 for op in producers)

    outputs = sorted(t for t in graph.kept if any(p < cut for p in graph.tensors[t].producers))
    rest = Op(cut, "rest_of_the_step", "rest", tuple(outputs), made, 0.0, rest_bytes, Phase.BACKWARD, recomputable=False)
    behind = (replace(op, id=op.id + 1, replaces=shift_producers(op.replaces)) for op in graph.ops[cut:])
    ops = (*graph.ops[:cut], rest, *behind)
    tensors = tuple(replace(t, producers=(cut,) if t.id in made else shift_producers(t.producers)) for t in graph.tensors)
    return replace(graph, ops=ops, tensors=tensors, kept=graph.kept.union(made))


def map_back_rest(graph: Graph, schedule: Schedule) -> Schedule:
    """Return the schedule of `graph` that corresponds to a schedule of ``add_rest(graph, ...)``."""
    cut = _find_first_backward(graph)
    steps: list[Step] = []
    for step in schedule.steps:
        if not isinstance(step, Compute):
            steps.append(step)
        elif step.op != cut:
            steps.append(Compute(step.op - (step.op > cut)))
    return Schedule(tuple(steps))


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
        found = find_least_evicting_schedule(roomy, WallClock(end)) or schedule_of(roomy, range(len(roomy.ops)))
        return map_back_rest(graph, found) if simulate(roomy, found).peak_bytes <= budget_bytes else None

    least = solve_leaving(0)
    if least is None:  # rules evict greedily: programs get further
        known = find_least_budget(add_rest(graph, made, 0), reorders=False)
        return map_back_rest(graph, known.schedule) if known.found_bytes <= budget_bytes else None
    return find_largest(solve_leaving, 0, max(0, budget_bytes - graph.static_bytes), halvings=_TRIES) or least


def _find_first_backward(graph: Graph) -> int:
    return next((op.id for op in graph.ops if op.phase is not Phase.FORWARD), len(graph.ops))
