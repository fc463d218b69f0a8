"""The collectives of units as ops of a captured step, with their calls."""

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby

import torch

from planner.capture.lowering.lower import Capture, count_module_calls
from planner.capture.lowering.statics import compute_allocated_bytes
from planner.capture.program.program import Argument, Call, OpCalls, Program, Ref, Source, call_of, read_by
from planner.graphs.errors import TraceError
from planner.graphs.ir import Kind
from planner.graphs.optimizers import get_optimizer_memory
from planner.graphs.options.gather import CollectiveCost, InsertedUnits, Shard, Sum, Unit, insert_units
from planner.settings.plan import PlanSettings
from planner.train.distributed.collectives import Addition, Gather, Reduction
from planner.train.distributed.units import ConstantsAndSums, ShardedParameter, ShardedUnit

_TIMED = 5
_LEAST_PART_BYTES = 1 << 17  # below, the latency of a collective is most of its time
Collective = Gather | Reduction | Addition


class _PlacedUnit:
    """A unit in a captured step.

    Attributes:
        gathered: the parameters that the step reads, by the id of their tensors.
        trained: those of them that have a gradient, with its value.
        gathers: each with the tensors that it makes, in the order in which they are read.
    """

    def __init__(self, unit: ShardedUnit, captured: Capture, ids: Mapping[str, int]) -> None:
        gradients = dict(captured.program.gradients)
        read = captured.graph.consumers
        self.unit = unit
        self.unread = {ids[p.name]: p for p in unit.parameters if not read[ids[p.name]]}
        self.gathered: dict[int, ShardedParameter] = {ids[p.name]: p for p in unit.parameters if read[ids[p.name]]}
        self.trained = {t: gradients[t] for t in self.gathered if t in gradients}
        self.gathers: list[tuple[tuple[int, ...], Gather]] = []
        trained = [self.gathered[t] for t in self.trained]
        self.reduction = unit.build_reduction(trained) if trained and unit.reduces else None
        self.additions = {p.sum_name: unit.build_addition(p) for p in trained} if unit.adds else {}

    def split(self, first_reads: Mapping[int, int], others: Collection[int]) -> None:
        """Set the gathers: parameters apart that are first read before and after another unit is, at one of the ops `others`.

        An embedding and a head in the root unit, say, are then not in memory together. With both frozen, in a model of six blocks
        at 16 tokens, the least budget fell by a quarter; with both trained it is that of their reduction, and steps near it took
        1 to 3% less time. Elsewhere it costs the latency of a collective.
        """
        ordered = sorted(self.gathered, key=first_reads.__getitem__)
        parts: list[list[int]] = []
        for _, group in groupby(ordered, lambda t: sum(op < first_reads[t] for op in others)):
            part = list(group)
            if parts and min(map(self._count_bytes, (parts[-1], part))) < _LEAST_PART_BYTES:
                parts[-1] += part
            else:
                parts.append(part)
        chosen = [tuple(t for t in self.gathered if t in part) for part in parts]
        self.gathers = [(part, self.unit.build_gather([self.gathered[t] for t in part])) for part in chosen]

    def _count_bytes(self, part: Iterable[int]) -> int:
        packed = (self.gathered[t].packed for t in part)
        return self.unit.world * sum(p.elements * p.dtype.itemsize for p in packed)

    def list_unused(self) -> list[str]:
        """Return the names of parameters that are not frozen and have no gradient."""
        found = (self.unread | self.gathered).items()
        return [p.name for t, p in found if t not in self.trained and p.sharded.requires_grad]

    def describe(self, measure: Callable[[Collective], CollectiveCost], device: torch.device) -> list[Unit]:
        """Return its parts as data, with measured costs; the first one has the gradients of all."""
        reduction, reads = self.reduction, [tuple(read_by(value)) for value in self.trained.values()]
        first = Unit(
            self.unit.name,
            *self._describe_part(*self.gathers[0], measure, device),
            gradients=tuple(dict.fromkeys(t for read in reads for t in read)),
            reduced_bytes=0 if reduction is None else compute_allocated_bytes(reduction.shard_bytes, device),
            reduction=None if reduction is None else measure(reduction),
            sums=tuple(
                Sum(name, read, compute_allocated_bytes(addition.sum_bytes, device), measure(addition))
                for (name, addition), read in zip(self.additions.items(), reads, strict=bool(self.additions))
            ),
        )
        others = (self._describe_part(*part, measure, device) for part in self.gathers[1:])
        return [first, *(Unit(f"{self.unit.name}[{i}]", *part) for i, part in enumerate(others, 1))]

    def _describe_part(
        self, part: Sequence[int], gather: Gather, measure: Callable[[Collective], CollectiveCost], device: torch.device
    ) -> tuple[tuple[Shard, ...], CollectiveCost]:
        sizes = ((t, self.gathered[t].shard_bytes, self._count_bytes((t,))) for t in part)
        shards = (Shard(t, *(compute_allocated_bytes(size, device) for size in both)) for t, *both in sizes)
        return tuple(shards), measure(gather)


def add_units(captured: Capture, units: Iterable[ShardedUnit], measure: Callable[[Collective], CollectiveCost]) -> Capture:
    """Return `captured`, a step on whole parameters, with the collectives of `units`.

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
    if sums := [unit.unit for unit in placed if unit.reduction and unit.additions]:
        _check_calls(sums, count_module_calls(captured.nodes))
    device = torch.device(graph.device)
    unread = {t: p for unit in placed for t, p in unit.unread.items()}
    tensors = tuple(
        replace(t, size_bytes=compute_allocated_bytes(unread[t.id].shard_bytes, device)) if t.id in unread else t
        for t in graph.tensors
    )
    first_reads = {t: graph.consumers[t][0] for unit in used for t in unit.gathered}
    begun = {unit: min(map(first_reads.__getitem__, unit.gathered)) for unit in used}
    for unit in used:
        unit.split(first_reads, [op for other, op in begun.items() if other is not unit])
    described = [part for unit in used for part in unit.describe(measure, device)]
    produced = {t for t in kept if not graph.tensors[t].static}
    inserted = insert_units(replace(graph, tensors=tensors), described, produced)
    nodes = tuple(None if op is None else captured.nodes[op] for op in inserted.sources)
    return replace(captured, graph=inserted.graph, program=_extend_program(program, used, inserted), nodes=nodes)


def _check_calls(units: Iterable[ShardedUnit], calls: Mapping[str, int]) -> None:
    """Raise TraceError if a step `calls` one of `units`, which have sums of earlier gradients, more than once."""
    for unit in units:
        times = max(sum(calls[f"model.{path}"] for path in paths) for paths in unit.modules)
        if times > 1:
            raise TraceError(
                f"{unit.name} is called {times} times in the step, and there are sums of its earlier gradients: FSDP2 "
                "reduces these apart from the gradients of this step, a plan together, with other bits: leave out "
                "set_requires_gradient_sync(False) for it, or call fully_shard on the module that calls it"
            )


def _extend_program(program: Program, units: Sequence[_PlacedUnit], inserted: InsertedUnits) -> Program:
    """Return `program` with the calls of the collectives."""
    added: dict[int, OpCalls] = {}
    gradients: dict[int, Argument] = {}
    sources, ops = list(program.sources), inserted.graph.ops
    parts = iter(zip(inserted.gathers, inserted.reductions, inserted.additions, strict=True))
    for unit in units:
        first, *others = [next(parts) for _ in unit.gathers]
        for (op, _, _), (part, gather) in zip((first, *others), unit.gathers, strict=True):
            call = Call(gather, ([Ref(inserted.shards[t]) for t in part],))
            added[op] = call_of(call, [(t, (i,)) for i, t in enumerate(part)])
        _, reduction, additions = first
        values = list(unit.trained.values())
        for i, (op, (name, addition)) in enumerate(zip(additions, unit.additions.items(), strict=True)):
            (total,), (done,) = ops[op].mutates, ops[op].outputs
            sources.append(Source(total, Kind.CONSTANT, name))
            added[op] = call_of(Call(addition, ([Ref(total), values[i]],)), [(done, ())])
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
