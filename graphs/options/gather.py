"""Sharded parameters: each unit of them is gathered before it is read, and its gradients are reduced after the last of them.

A process holds a shard of each parameter. The gather of a unit reads the shards and produces whole parameters, which are
ordinary tensors: a schedule may free them and gather them again. The reduction of a unit reads whole gradients and produces this
process's shards of their average. It runs exactly once. All processes run the same schedule, so their collectives are issued in
one order.

Where whole gradients of several batches are summed before they are reduced, the sums are static tensors. Each gradient is added
to its sum as soon as it is there, and the reduction, if this batch has one, reads the sums. It also reads a tensor of no bytes
from each addition: what reads static tensors alone may run at any time on a channel.

With the option ``OVERLAP`` gathers and reductions are transfers: they run on a channel, in parallel with the computation. A
gather is like a reload whose source is always there, and which has several targets; a reduction is like an offload that must
happen.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from planner.graphs.ir import Graph, Kind, Op, Phase, Tensor
from planner.graphs.options.option import Feature, GraphOption
from planner.graphs.options.surroundings import Surroundings
from planner.graphs.pools import COLLECTIVES, COMPUTE
from planner.graphs.requests import MemoryRequest

GATHER, REDUCE, ADD = "collective.gather", "collective.reduce", "collective.add"  # targets of ops


@dataclass(frozen=True, slots=True)
class Shard:
    """A parameter of a unit.

    Attributes:
        parameter: id of its static tensor in the graph that was captured.
        size_bytes: of the shard that this process holds.
        whole_bytes: of the gathered parameter.
    """

    parameter: int
    size_bytes: int
    whole_bytes: int


@dataclass(frozen=True, slots=True)
class CollectiveCost:
    """Cost of a collective, besides the tensors that it reads and produces.

    Attributes:
        requests: what it asks for; its workspaces are in use at once.
    """

    time_s: float
    requests: tuple[MemoryRequest, ...]


@dataclass(frozen=True, slots=True)
class Sum:
    """The sum of a parameter's gradients of several batches.

    Attributes:
        name: unique among the tensors of a graph.
        gradients: the tensors that the gradient of this batch is read from.
        addition: cost of adding the gradient to it.
    """

    name: str
    gradients: tuple[int, ...]
    size_bytes: int
    addition: CollectiveCost


@dataclass(frozen=True, slots=True)
class Unit:
    """Parameters that are gathered together, and whose gradients are reduced together.

    Attributes:
        name: unique among the units of a graph.
        shards: the parameters that the step reads, at least one.
        gradients: the tensors that their gradients are read from; empty if none is trained.
        reduced_bytes: bytes of the shards of the gradients.
        reduction: its cost; None if no gradients are reduced in this step.
        sums: the sums that their gradients are added to; empty if they are reduced alone.
    """

    name: str
    shards: tuple[Shard, ...]
    gather: CollectiveCost
    gradients: tuple[int, ...] = ()
    reduced_bytes: int = 0
    reduction: CollectiveCost | None = None
    sums: tuple[Sum, ...] = ()


@dataclass(frozen=True, slots=True)
class InsertedUnits:
    """A graph with units, and where its parts come from.

    Attributes:
        graph: the new graph. The id of a parameter is that of the gathered one; other tensors keep their ids.
        sources: for each op its id before, or None for a collective.
        gathers: the op that gathers each unit.
        reductions: the op that reduces the gradients of each unit, None if there is none.
        additions: the ops that add to the sums of each unit.
        shards: the static tensor of each parameter's shard, by the id of the parameter.
    """

    graph: Graph
    sources: tuple[int | None, ...]
    gathers: tuple[int, ...]
    reductions: tuple[int | None, ...]
    additions: tuple[tuple[int, ...], ...]
    shards: Mapping[int, int]


def insert_units(graph: Graph, units: Sequence[Unit], kept: Collection[int]) -> InsertedUnits:
    """Return `graph` with the collectives of `units`.

    Args:
        graph: a captured step with whole parameters as static tensors.
        units: units of parameters that ops of its program read.
        kept: ids of the tensors that the step returns, apart from gradients of these units.
    """
    tensors = list(graph.tensors)
    shards: dict[int, int] = {}
    reduced: list[int] = []
    before: dict[int, list[Op]] = {}
    after: dict[int, list[Op]] = {}
    for unit in units:
        for shard in unit.shards:
            whole = tensors[shard.parameter]
            shards[shard.parameter] = len(tensors)
            tensors.append(replace(whole, id=len(tensors), name=f"{whole.name}.shard", size_bytes=shard.size_bytes, shape=()))
            tensors[whole.id] = replace(whole, kind=Kind.ACTIVATION, size_bytes=shard.whole_bytes)
        first = graph.ops[min(graph.consumers[shard.parameter][0] for shard in unit.shards)]
        gathered = tuple(shard.parameter for shard in unit.shards)
        gather = _build_op(unit, GATHER, unit.name, unit.gather, tuple(map(shards.__getitem__, gathered)), gathered)
        before.setdefault(first.id, []).append(replace(gather, phase=first.phase, recomputable=True))
        sums = tuple(range(len(tensors), len(tensors) + 2 * len(unit.sums)))
        for total in unit.sums:
            tensors.append(Tensor(len(tensors), total.name, total.size_bytes, (), Kind.BUFFER))
            addition = _build_op(unit, ADD, total.name, total.addition, total.gradients, (len(tensors),))
            after.setdefault(_find_last(graph, total.gradients), []).append(replace(addition, mutates=(len(tensors) - 1,)))
            tensors.append(Tensor(len(tensors), f"{total.name}.added", 0, (), Kind.ACTIVATION))
        if unit.reduction is not None:
            reduced.append(len(tensors))
            reduction = _build_op(unit, REDUCE, unit.name, unit.reduction, sums or unit.gradients, (len(tensors),))
            after.setdefault(_find_last(graph, unit.gradients), []).append(reduction)
            tensors.append(Tensor(len(tensors), f"{unit.name}.gradients", unit.reduced_bytes, (), Kind.GRADIENT))
    sources: list[int | None] = []
    ops: list[Op] = []
    for op in graph.ops:
        for added, source in (
            *((o, None) for o in before.get(op.id, ())),
            (op, op.id),
            *((o, None) for o in after.get(op.id, ())),
        ):
            ops.append(replace(added, id=len(ops)))
            sources.append(source)
    places = {source: place for place, source in enumerate(sources) if source is not None}
    ops = [replace(op, replaces=tuple(places[p] for p in op.replaces)) for op in ops]
    all_kept = frozenset({*kept, *reduced})
    named = {op.name: op.id for op in ops}
    return InsertedUnits(
        replace(graph, ops=tuple(ops), tensors=_set_producers(tensors, ops, all_kept), kept=all_kept),
        tuple(sources),
        tuple(named[f"{unit.name}.gather"] for unit in units),
        tuple(named.get(f"{unit.name}.reduce") for unit in units),
        tuple(tuple(named[f"{total.name}.add"] for total in unit.sums) for unit in units),
        shards,
    )


def _build_op(unit: Unit, target: str, what: str, cost: CollectiveCost, inputs: tuple[int, ...], outputs: tuple[int, ...]) -> Op:
    """Return an op of `unit` on `what`, executed once in the backward pass; its id is not known yet."""
    return Op(
        id=-1,
        name=f"{what}.{target.rpartition('.')[2]}",
        target=target,
        inputs=inputs,
        outputs=outputs,
        time_s=cost.time_s,
        workspace_bytes=sum(request.size_bytes for request in cost.requests),
        requests=cost.requests,
        phase=Phase.BACKWARD,
        recomputable=False,
        module=unit.name,
    )


def _explain_refusal(graph: Graph, _: Surroundings) -> str:
    found = _find_collectives(graph)
    if not found:
        return "overlap needs a step with collectives: shard the model with fully_shard"
    if any(graph.ops[op].stream != COMPUTE for op in found):
        return "overlap cannot be added to a graph that already has it"
    return ""


def _add_overlap(graph: Graph, _: Surroundings) -> Graph:
    """Return `graph` with its gathers and reductions on a channel."""
    moved = _find_collectives(graph)
    return replace(graph, ops=tuple(replace(op, stream=COLLECTIVES) if op.id in moved else op for op in graph.ops))


def _find_collectives(graph: Graph) -> frozenset[int]:
    return frozenset(op.id for op in graph.program if op.target in {GATHER, REDUCE})


OVERLAP = GraphOption(
    name="overlap",
    description="parameters are gathered and gradients reduced in parallel with computation",
    offers="a channel",
    refused={
        Feature.ARENA: "collectives end at different times in each step, and addresses are planned for fixed times; leave one "
        "of them out",
        Feature.CUDA_GRAPH: "collectives are issued one by one; leave one of them out",
    },
    accepts=_explain_refusal,
    apply=_add_overlap,
)


def _find_last(graph: Graph, gradients: Sequence[int]) -> int:
    """Return the op of the backward pass after which all `gradients` are there."""
    first = next(op.id for op in graph.program if op.phase is not Phase.FORWARD)
    return max([first, *(graph.tensors[t].producers[0] for t in gradients if graph.tensors[t].producers)])


def _set_producers(tensors: Sequence[Tensor], ops: Sequence[Op], kept: Collection[int]) -> tuple[Tensor, ...]:
    producers: dict[int, list[int]] = {tensor.id: [] for tensor in tensors}
    for op in ops:
        for t in op.outputs:
            producers[t].append(op.id)
    passed_on = {tensor.id for tensor in tensors if tensor.kind is Kind.GRADIENT and tensor.id not in kept}
    return tuple(
        replace(t, producers=tuple(producers[t.id]), kind=Kind.ACTIVATION if t.id in passed_on else t.kind) for t in tensors
    )
