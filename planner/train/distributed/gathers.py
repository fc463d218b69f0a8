"""The collectives of units as ops of a captured step, with their calls."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import torch

from graphs.errors import TraceError
from graphs.ir import Kind
from graphs.optimizers import get_optimizer_memory
from graphs.options.gather import CollectiveCost, InsertedUnits, Shard, Sum, Unit, insert_units
from planner.capture.lowering.lower import Capture
from planner.capture.lowering.statics import compute_allocated_bytes
from planner.capture.program.program import Argument, Call, OpCalls, Program, Ref, Source, call_of, read_by
from planner.settings.plan import PlanSettings
from planner.train.distributed.collectives import Addition, Gather, Reduction
from planner.train.distributed.units import ConstantsAndSums, ShardedParameter, ShardedUnit

_TIMED = 5
Collective = Gather | Reduction | Addition


class _PlacedUnit:
    """A unit in a captured step.

    Attributes:
        gathered: the parameters that the step reads, by the id of their tensors.
        trained: those of them that have a gradient, with its value.
    """

    def __init__(self, unit: ShardedUnit, captured: Capture, ids: Mapping[str, int]) -> None:
        gradients = dict(captured.program.gradients)
        read = captured.graph.consumers
        self.unit = unit
        self.unread = {ids[p.name]: p for p in unit.parameters if not read[ids[p.name]]}
        self.gathered: dict[int, ShardedParameter] = {ids[p.name]: p for p in unit.parameters if read[ids[p.name]]}
        self.trained = {t: gradients[t] for t in self.gathered if t in gradients}
        self.gather = unit.build_gather(list(self.gathered.values())) if self.gathered else None
        trained = [self.gathered[t] for t in self.trained]
        self.reduction = unit.build_reduction(trained) if trained and unit.reduces else None
        self.additions = {p.sum_name: unit.build_addition(p) for p in trained} if unit.adds else {}

    def list_unused(self) -> list[str]:
        """Return the names of parameters that are not frozen and have no gradient."""
        found = (self.unread | self.gathered).items()
        return [p.name for t, p in found if t not in self.trained and p.sharded.requires_grad]

    def describe(self, measure: Callable[[Collective], CollectiveCost], device: torch.device) -> Unit:
        """Return the unit as data, with measured costs."""
        assert self.gather is not None
        world, reduction = self.gather.group.size(), self.reduction
        reads = [tuple(read_by(value)) for value in self.trained.values()]

        def describe_shard(tensor: int, parameter: ShardedParameter) -> Shard:
            packed = parameter.packed
            whole_bytes = world * packed.elements * packed.dtype.itemsize
            return Shard(tensor, *(compute_allocated_bytes(size, device) for size in (parameter.shard_bytes, whole_bytes)))

        return Unit(
            self.unit.name,
            tuple(describe_shard(t, p) for t, p in self.gathered.items()),
            tuple(dict.fromkeys(t for read in reads for t in read)),
            0 if reduction is None else compute_allocated_bytes(reduction.shard_bytes, device),
            measure(self.gather),
            None if reduction is None else measure(reduction),
            tuple(
                Sum(name, read, compute_allocated_bytes(addition.sum_bytes, device), measure(addition))
                for (name, addition), read in zip(self.additions.items(), reads, strict=bool(self.additions))
            ),
        )


def add_units(captured: Capture, units: Iterable[ShardedUnit], measure: Callable[[Collective], CollectiveCost]) -> Capture:
    """Return `captured`, a step on whole parameters, with the collectives of `units`.

    Args:
        measure: returns the cost of a collective.

    Raises:
        TraceError: the step returns a parameter, or a unit cannot be reduced.
    """
    graph, program = captured.graph, captured.program
    ids = {source.name: source.tensor for source in program.sources if source.kind is Kind.PARAMETER}
    ids = {name.removeprefix("model."): tensor for name, tensor in ids.items()}
    placed = [_PlacedUnit(unit, captured, ids) for unit in units]
    used = [unit for unit in placed if unit.gathered]
    reduced = {t for unit in used for t in unit.trained}
    others = [(t, value) for t, value in program.gradients if t not in reduced]  # of inputs, and of parameters outside of units
    kept = {t for value in (program.loss, *program.extras, *(value for _, value in others)) for t in read_by(value)}
    own = kept.union(t for t, _ in others)
    for unit in placed:
        if returned := [p.name for t, p in (*unit.unread.items(), *unit.gathered.items()) if t in own]:
            raise TraceError(f"the step returns the parameter {returned[0]} itself, which is sharded: return a copy (clone())")
        if unit.unit.reduces_unused and (unused := unit.list_unused()):
            raise TraceError(
                f"set_reduce_scatter_unused_params(True) on {unit.unit.name}, but the step does not train {unused[0]}, whose "
                "gradient would be None and not zeros: freeze it, or leave the setting out"
            )
    device = torch.device(graph.device)
    unread = {t: p for unit in placed for t, p in unit.unread.items()}
    tensors = tuple(
        replace(t, size_bytes=compute_allocated_bytes(unread[t.id].shard_bytes, device)) if t.id in unread else t
        for t in graph.tensors
    )
    described = [unit.describe(measure, device) for unit in used]
    produced = {t for t in kept if not graph.tensors[t].static}
    inserted = insert_units(replace(graph, tensors=tensors), described, produced)
    nodes = tuple(None if op is None else captured.nodes[op] for op in inserted.sources)
    return replace(captured, graph=inserted.graph, program=_extend_program(program, used, inserted), nodes=nodes)


def _extend_program(program: Program, units: Sequence[_PlacedUnit], inserted: InsertedUnits) -> Program:
    """Return `program` with the calls of the collectives."""
    added: dict[int, OpCalls] = {}
    gradients: dict[int, Argument] = {}
    sources, ops = list(program.sources), inserted.graph.ops
    for unit, gather, reduction, additions in zip(units, inserted.gathers, inserted.reductions, inserted.additions, strict=True):
        assert unit.gather is not None
        shards = [Ref(inserted.shards[t]) for t in unit.gathered]
        added[gather] = call_of(Call(unit.gather, (shards,)), [(t, (i,)) for i, t in enumerate(unit.gathered)])
        values = list(unit.trained.values())
        for i, (op, (name, addition)) in enumerate(zip(additions, unit.additions.items(), strict=True)):
            (total,) = ops[op].mutates
            sources.append(Source(total, Kind.CONSTANT, name))
            added[op] = call_of(Call(addition, ([Ref(total), values[i]],)), [])
            values[i] = Ref(total)
        gradients |= dict.fromkeys(unit.trained)
        if reduction is not None and unit.reduction is not None:
            (reduced,) = ops[reduction].outputs
            added[reduction] = call_of(Call(unit.reduction, (values,)), [(reduced, ())])
            for t, (shape, strides, offset) in zip(unit.trained, unit.reduction.split(unit.unit.rank), strict=True):
                gradients[t] = Call(torch.ops.aten.as_strided.default, (Ref(reduced), list(shape), list(strides), offset))
    calls = tuple(added[place] if op is None else program.calls[op] for place, op in enumerate(inserted.sources))
    shard_of = inserted.shards
    return replace(
        program,
        calls=calls,
        sources=tuple(replace(source, tensor=shard_of.get(source.tensor, source.tensor)) for source in sources),
        gradients=tuple((shard_of.get(t, t), gradients.get(t, value)) for t, value in program.gradients),
        constants=ConstantsAndSums(program.constants, (unit.unit for unit in units)),
    )


def set_state_of_shards(captured: Capture, trained_bytes: Sequence[int], settings: PlanSettings) -> Capture:
    """Return `captured` with the optimizer state and the accumulated gradients of shards, and not of whole parameters."""
    graph = captured.graph
    device = torch.device(graph.device)
    state = get_optimizer_memory(settings.optimizer).list_state_sizes(trained_bytes, is_cpu=device.type == "cpu")
    sizes = {Kind.OPTIMIZER_STATE: state, Kind.ACCUMULATED_GRADIENT: trained_bytes}
    tensors = tuple(
        replace(t, size_bytes=sum(compute_allocated_bytes(size, device) for size in sizes[t.kind])) if t.kind in sizes else t
        for t in graph.tensors
    )
    return replace(captured, graph=replace(graph, tensors=tensors))


def measure_time(collective: Collective, device: torch.device) -> float:
    """Return the seconds of a collective; all its processes call this together."""
    times = []
    for _ in range(_TIMED):
        given = collective.build_inputs(device)
        begin = time.perf_counter()
        made = collective(given)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - begin)
        del made, given
    return min(times)
