"""A training step as a static graph: ops in program order, and the tensors they make and read.

An op is one kernel call, a tensor is one allocation (a storage). Views are neither: they cost
nothing and are made again from their base. A tensor without a producer (parameter, buffer, input,
optimizer state, ...) is in memory throughout; its bytes are the graph's static bytes.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property

from graphs.errors import GraphError

_TOO_MUCH = 2**63  # bytes, or seconds


class Phase(StrEnum):
    """The part of the step an op belongs to; phases follow each other in program order."""

    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"


class Kind(StrEnum):
    """What a tensor is to the training step."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    INPUT = "input"
    CONSTANT = "constant"
    OPTIMIZER_STATE = "optimizer_state"
    ACCUMULATED_GRADIENT = "accumulated_gradient"
    ACTIVATION = "activation"
    RANDOM_STATE = "random_state"
    OUTPUT = "output"
    GRADIENT = "gradient"


@dataclass(frozen=True, slots=True)
class Tensor:
    """One allocation.

    Attributes:
        id: position in ``Graph.tensors``.
        name: unique, for messages.
        size_bytes: bytes the allocator hands out, at least 0.
        producer: id of the op that makes it, None for what lives throughout.
        kind: what it is to the step.
        shape, dtype: of the tensor as first made, for people to read.
        view_of: id of the tensor that it is a view of, where an imported graph has views as ops.
        held_for: id of the tensor that the program went on to hold, beyond its last reader, where this one stands for it
            from then on: its op reads nothing, and one op reads it.
    """

    id: int
    name: str
    size_bytes: int
    producer: int | None
    kind: Kind = Kind.ACTIVATION
    shape: tuple[int, ...] = ()
    dtype: str = ""
    view_of: int | None = None
    held_for: int | None = None


@dataclass(frozen=True, slots=True)
class Op:
    """One kernel call.

    Attributes:
        id: position in ``Graph.ops``, which is the program order.
        name: unique, for messages.
        target: what is called, e.g. ``aten.mm.default``.
        inputs, outputs: tensor ids, each without repetition.
        time_s: seconds of one execution.
        workspace_bytes: memory held during the execution only, besides inputs and outputs.
        phase: forward, backward or optimizer.
        recomputable: False where a second execution would be wrong.
        random: draws from the generator; random ops keep their order among each other.
        mutates: ids of the static tensors it writes in place; readers keep their side of the write.
        module: path of the module it was called in, "" if unknown.
    """

    id: int
    name: str
    target: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    time_s: float
    workspace_bytes: int = 0
    phase: Phase = Phase.FORWARD
    recomputable: bool = True
    random: bool = False
    mutates: tuple[int, ...] = ()
    module: str = ""


@dataclass(frozen=True)
class Graph:
    """A training step: `ops` in program order, `tensors` by id, and what must be `kept`.

    Attributes:
        ops: in a topological order; every op is executed at least once.
        tensors: each op output has that op as producer; the others are static.
        kept: ids of produced tensors that must be in memory at the end (loss, gradients, outputs).
            They are delivered when first computed and never freed.
        provenance: where the graph comes from (model, inputs, device, dtype, versions, how timed).

    Raises:
        GraphError: when made from parts that do not describe a training step.
    """

    ops: tuple[Op, ...]
    tensors: tuple[Tensor, ...]
    kept: frozenset[int]
    provenance: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_tensors(self)
        _check_ops(self)
        _check_stand_ins(self)
        for t in self.kept:
            if not 0 <= t < len(self.tensors):
                raise GraphError(f"kept tensor {t} does not exist: the graph has {len(self.tensors)} tensors")
            if self.tensors[t].producer is None:
                raise GraphError(f"kept tensor {self.tensors[t].name!r} has no producer: what is static is not listed as kept")

    def holding(self, kind: Kind, name: str, size_bytes: int) -> "Graph":
        """This graph with so much more in memory throughout, which no op reads."""
        tensors = (*self.tensors, Tensor(len(self.tensors), name, size_bytes, None, kind))
        return Graph(self.ops, tensors, self.kept, self.provenance)

    @cached_property
    def static_bytes(self) -> int:
        """Bytes in memory throughout the step."""
        return sum(t.size_bytes for t in self.tensors if t.producer is None)

    @cached_property
    def static_bytes_by_kind(self) -> dict[Kind, int]:
        """Bytes in memory throughout, by kind, largest first."""
        sizes: dict[Kind, int] = {}
        for t in self.tensors:
            if t.producer is None:
                sizes[t.kind] = sizes.get(t.kind, 0) + t.size_bytes
        return dict(sorted(sizes.items(), key=lambda item: -item[1]))

    @cached_property
    def time_s(self) -> float:
        """Seconds of the step when every op is executed once."""
        return math.fsum(op.time_s for op in self.ops)

    @cached_property
    def consumers(self) -> tuple[tuple[int, ...], ...]:
        """For each tensor the ids of the ops that read it, in program order."""
        readers: list[list[int]] = [[] for _ in self.tensors]
        for op in self.ops:
            for t in op.inputs:
                readers[t].append(op.id)
        return tuple(map(tuple, readers))

    @cached_property
    def fingerprint(self) -> str:
        """Hash of structure and sizes; times, workspaces and names are left out."""
        used = sorted(set(self.kept).union(*(op.inputs + op.outputs + op.mutates for op in self.ops)))
        number = {t: i for i, t in enumerate(used)}  # static tensors that no op reads must not shift the others
        structure = {
            "ops": [
                [
                    op.target,
                    *([number[t] for t in tensors] for tensors in (op.inputs, op.outputs, op.mutates)),
                    *(op.phase, op.recomputable, op.random),
                ]
                for op in self.ops
            ],
            "tensors": [[t.size_bytes, t.producer, t.kind] for t in (self.tensors[t] for t in used)],
            "kept": [number[t] for t in sorted(self.kept)],
        }
        return hashlib.sha256(json.dumps(structure, separators=(",", ":")).encode()).hexdigest()[:32]


def check_sums(graph: Graph) -> None:
    """Refuse a graph that cannot be added up: solvers count bytes in 64 bits, and seconds in floating point.

    Raises:
        GraphError: its sizes sum to 2^63 bytes or more, or its times to as many seconds.
    """
    total_bytes = sum(t.size_bytes for t in graph.tensors) + sum(op.workspace_bytes for op in graph.ops)
    if total_bytes >= _TOO_MUCH:
        raise GraphError(f"the sizes of its tensors and workspaces sum to {total_bytes} bytes: must be below 2^63")
    total_s = sum(op.time_s for op in graph.ops)
    if total_s >= _TOO_MUCH:
        raise GraphError(f"the times of its ops sum to {total_s:g} s: must be below 2^63")


def _check_tensors(graph: Graph) -> None:
    names: set[str] = set()
    for position, tensor in enumerate(graph.tensors):
        where = f"tensor {tensor.name!r}"
        if tensor.id != position:
            raise GraphError(f"{where} has id {tensor.id} but stands at position {position}")
        if tensor.name in names:
            raise GraphError(f"{where} appears twice: names must be unique")
        names.add(tensor.name)
        if not isinstance(tensor.size_bytes, int) or tensor.size_bytes < 0:
            raise GraphError(f"{where} has size {tensor.size_bytes!r}: sizes are whole bytes, 0 or more")
        if tensor.producer is not None and not 0 <= tensor.producer < len(graph.ops):
            raise GraphError(f"{where} has producer {tensor.producer}, which is not one of the {len(graph.ops)} ops")


def _check_ops(graph: Graph) -> None:
    if not graph.ops:
        raise GraphError("the graph has no ops")
    names: set[str] = set()
    phases = list(Phase)
    latest_phase = 0
    for position, op in enumerate(graph.ops):
        where = f"op {op.name!r}"
        if op.id != position:
            raise GraphError(f"{where} has id {op.id} but stands at position {position}")
        if op.name in names:
            raise GraphError(f"{where} appears twice: names must be unique")
        names.add(op.name)
        if not math.isfinite(op.time_s) or op.time_s < 0:
            raise GraphError(f"{where} has time {op.time_s!r}: times are finite seconds, 0 or more")
        if not isinstance(op.workspace_bytes, int) or op.workspace_bytes < 0:
            raise GraphError(f"{where} has workspace {op.workspace_bytes!r}: sizes are whole bytes, 0 or more")
        if phases.index(op.phase) < latest_phase:
            raise GraphError(f"{where} is {op.phase} but comes after a {phases[latest_phase]} op: ops must be in program order")
        latest_phase = phases.index(op.phase)
        _check_op_tensors(graph, op)
    _check_producers(graph)


def _check_op_tensors(graph: Graph, op: Op) -> None:
    where = f"op {op.name!r}"
    for t in (*op.inputs, *op.outputs, *op.mutates):
        if not 0 <= t < len(graph.tensors):
            raise GraphError(f"{where} names tensor {t}, which does not exist: the graph has {len(graph.tensors)}")
    if len(set(op.inputs)) < len(op.inputs) or len(set(op.outputs)) < len(op.outputs):
        raise GraphError(f"{where} lists a tensor twice")
    for t in op.inputs:
        producer = graph.tensors[t].producer
        if producer is not None and producer >= op.id:
            raise GraphError(
                f"{where} reads {graph.tensors[t].name!r}, which op {graph.ops[producer].name!r} makes at or after it: "
                "ops must be in a topological order (is there a cycle?)"
            )
    for t in op.mutates:
        if graph.tensors[t].producer is not None:
            raise GraphError(f"{where} mutates {graph.tensors[t].name!r}, which is not static")


def _check_producers(graph: Graph) -> None:
    makers: dict[int, int] = {}
    for op in graph.ops:
        for t in op.outputs:
            if t in makers:
                both = f"{graph.ops[makers[t]].name!r} and {op.name!r}"
                raise GraphError(f"tensor {graph.tensors[t].name!r} is an output of both {both}")
            makers[t] = op.id
    for tensor in graph.tensors:
        if tensor.producer != makers.get(tensor.id):
            raise GraphError(
                f"tensor {tensor.name!r} has producer {tensor.producer}, but the op that lists it is {makers.get(tensor.id)}"
            )


def _check_stand_ins(graph: Graph) -> None:
    for tensor in graph.tensors:
        where = f"tensor {tensor.name!r}"
        for other in (tensor.view_of, tensor.held_for):
            if other is not None and (not 0 <= other < len(graph.tensors) or other == tensor.id or tensor.producer is None):
                raise GraphError(f"{where} stands for tensor {other}: it must be made by an op, and for another that exists")
        if tensor.held_for is None or tensor.producer is None:
            continue
        if graph.ops[tensor.producer].inputs or len(graph.consumers[tensor.id]) != 1:
            raise GraphError(f"{where} stands for one that is held: its op must read nothing, and one op must read it")
