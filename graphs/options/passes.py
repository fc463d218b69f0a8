"""Splitting of a schedule into a forward pass, which ends with its results, and a backward pass."""

from planner.graphs.errors import ScheduleError
from planner.graphs.ir import TANGENT, Graph, Kind, Op, Phase
from planner.graphs.schedule import Compute, Free, Schedule, Step, find_boundary

_TANGENT = f"{Kind.INPUT}_{TANGENT}"  # the gradient of the loss, as graphs name it


def order_by_passes(graph: Graph, schedule: Schedule) -> Schedule:
    """Return `schedule` reordered into passes by ``split_into_passes``. Results may stay in memory longer: simulate it again."""
    forward, backward = split_into_passes(graph, schedule)
    return Schedule((*forward, *backward))


def split_into_passes(graph: Graph, schedule: Schedule) -> tuple[tuple[Step, ...], tuple[Step, ...]]:
    """Return the steps of the forward and of the backward pass, in the order of `schedule` except for some transfers.

    A kept tensor of the forward pass that is transferred to the main device later is transferred at the end of that pass, where
    the caller receives it. Copies of the gradient of the loss, which is an input of the backward pass, are made at its start.

    Args:
        graph: any; only transfers between devices are moved.
        schedule: valid on it.

    Raises:
        ScheduleError: a result of the forward pass is not in memory at its end.
    """
    results = {t for t in graph.kept if graph.ops[graph.tensors[t].producers[0]].phase is Phase.FORWARD}
    cut = _end_of_forward(graph, schedule, results)
    tangents = {t.id for t in graph.tensors if t.static and t.name == _TANGENT}
    forward: list[Step] = []
    late: list[Step] = []
    there: set[int] = set()
    for step in schedule.steps[:cut]:
        if isinstance(step, Compute):
            op = graph.ops[step.op]
            is_late = not tangents.isdisjoint(op.inputs)
            tangents.update(op.outputs if is_late else ())
            there.update(op.outputs)
        else:
            is_late = step.tensor in tangents
            there.discard(step.tensor)
        (late if is_late else forward).append(step)
    copies = [_copy_of(graph, t, there) for t in sorted(results - there)]
    copying = {op.id for early in copies for t in graph.ops[early].outputs for op in _list_copies(graph, t)}
    rest = [step for step in schedule.steps[cut:] if not (isinstance(step, Compute) and step.op in copying)]
    frees = next((i for i, step in enumerate(rest) if not isinstance(step, Free) or step.tensor in tangents), len(rest))
    return (*forward, *map(Compute, copies), *rest[:frees]), (*late, *rest[frees:])


def _end_of_forward(graph: Graph, schedule: Schedule, results: set[int]) -> int:
    """Return the number of steps of the forward pass: until all its ops have been executed and its results are in some memory.

    A result that was produced and freed on another device may be recomputed here before the backward pass begins.
    """
    cut, there = find_boundary(graph, schedule), set[int]()
    places = {t: {t, *(s for op in _list_copies(graph, t) for s in op.inputs)} for t in results}
    for place, step in enumerate(schedule.steps):
        if place >= cut and all(not there.isdisjoint(of_result) for of_result in places.values()):
            return place
        if isinstance(step, Compute):
            if place >= cut and graph.ops[step.op].phase is not Phase.FORWARD:
                break
            there.update(graph.ops[step.op].outputs)
        else:
            there.discard(step.tensor)
    return cut


def find_due(graph: Graph) -> dict[int, int]:
    """Return for each kept tensor of a plain graph the last op of its pass, after which the caller receives the tensor."""
    forward = [op.id for op in graph.ops if op.phase is Phase.FORWARD]
    producers = {x: graph.tensors[x].producers[0] for x in sorted(graph.kept)}
    return {x: forward[-1] if producer in forward else len(graph.ops) - 1 for x, producer in producers.items()}


def _copy_of(graph: Graph, t: int, there: set[int]) -> int:
    """Return the op that transfers the kept tensor `t` to the main device from a pool that holds it."""
    for op in _list_copies(graph, t):
        if there.issuperset(op.inputs):
            return op.id
    raise ScheduleError(f"at the end of the forward pass {graph.tensors[t].name!r}, which the step returns, is not in memory")


def _list_copies(graph: Graph, t: int) -> list[Op]:
    """Return the transfers that produce tensor `t` from a copy of it."""
    return [op for op in map(graph.ops.__getitem__, graph.tensors[t].producers) if graph.crosses_pools(op)]
