"""A training step as a static graph: ops in program order, and the tensors they make and read.

An op is one kernel call, a tensor is one allocation (a storage). Views are neither: they cost
nothing and are made again from their base. A tensor without a producer (parameter, buffer, input,
optimizer state, ...) is in memory throughout; on the device, its bytes are the graph's static bytes.

Behind the ops of the program there may be optional ones: other ways to make the same bytes, in other
memories (pools), on other queues (streams). A graph without them has one pool and one stream, the defaults.
"""

import hashlib
import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property

from graphs.checks import check_graph
from graphs.pools import COMPUTE, DEVICE, TRANSFER, Pool

TANGENT = "tangent"  # name of the gradient of the loss among the inputs

_ROUNDING = 1e-9  # of a sum of what is used


class Phase(StrEnum):
    """The part of the step an op belongs to; phases follow each other in program order."""

    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"

    @property
    def place(self) -> int:
        """Position among the phases."""
        return list(Phase).index(self)


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
        producers: ids of the ops that make it, the same bytes each, in ascending order: first the program's, then
            optional ones. None for what lives throughout, which is static.
        kind: what it is to the step.
        shape, dtype: of the tensor as first made, for people to read.
        view_of: id of the tensor that it is a view of, where an imported graph has views as ops.
        held_for: id of the tensor that the program went on to hold, beyond its last reader, where this one stands for it
            from then on: its op reads nothing, and one op reads it.
        pool: name of the memory it is in.
    """

    id: int
    name: str
    size_bytes: int
    producers: tuple[int, ...]
    kind: Kind = Kind.ACTIVATION
    shape: tuple[int, ...] = ()
    dtype: str = ""
    view_of: int | None = None
    held_for: int | None = None
    pool: str = DEVICE

    @property
    def static(self) -> bool:
        """Whether it is in memory throughout."""
        return not self.producers


@dataclass(frozen=True, slots=True)
class Op:
    """One kernel call.

    Attributes:
        id: position in ``Graph.ops``, which is the program order.
        name: unique, for messages.
        target: what is called, e.g. ``aten.mm.default``.
        inputs, outputs: tensor ids, each without repetition.
        time_s: seconds of one execution.
        workspace_bytes: memory held during the execution only, besides inputs and outputs, in the first pool that
            its stream owns.
        phase: forward, backward or optimizer.
        recomputable: False where a second execution would be wrong.
        random: draws from the generator; random ops keep their order among each other.
        mutates: ids of the static tensors it writes in place; readers keep their side of the write.
        module: path of the module it was called in, "" if unknown.
        stream: name of the queue it runs on: ops on one stream run in the order of issue, streams side by side.
        optional: not an op of the program: may be executed any number of times from none, anywhere.
        replaces: ids of the program's ops that an optional op may be executed in place of, all at once.
        differs: what may differ from the program when it is executed (rounding, a lossy value), "" for not a bit.
        overwrites: pairs of an output and an input: where a schedule frees the input right behind the op, and no other stream
            has read it since it came, the output takes its memory. Of ops of the program only.
        uses: pairs of a resource, by name, and how much of it is used if the op is executed at all, however often. Of optional
            ops only.
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
    stream: str = COMPUTE
    optional: bool = False
    replaces: tuple[int, ...] = ()
    differs: str = ""
    overwrites: tuple[tuple[int, int], ...] = ()
    uses: tuple[tuple[str, float], ...] = ()

    @property
    def exact(self) -> bool:
        """Whether it makes the bits that the program would."""
        return not self.differs

    def used(self, resource: str) -> float:
        """Return how much of `resource` it uses if it is executed at all."""
        return dict(self.uses).get(resource, 0.0)

    def using(self, resource: str, amount: float) -> "Op":
        """Return this op with another `amount` of `resource`."""
        others = (pair for pair in self.uses if pair[0] != resource)
        return replace(self, uses=(*others, *(((resource, amount),) if amount else ())))

    @property
    def is_transfer(self) -> bool:
        """True if it is optional and copies a tensor from one pool to another, on a channel."""
        return self.optional and self.target == TRANSFER


_DEVICE_POOL = Pool(DEVICE, COMPUTE)


@dataclass(frozen=True)
class Graph:
    """A training step: `ops` in program order, `tensors` by id, and what must be `kept`.

    Attributes:
        ops: the program's, in a topological order, each executed at least once or stood for; then optional ones.
        tensors: each op output has that op among its producers; the others are static.
        kept: ids of produced tensors that must be in memory at the end (loss, gradients, outputs).
            They are delivered when first computed and never freed.
        provenance: where the graph comes from (model, inputs, device, dtype, versions, how timed).
        pools: the memories, the device first.
        limits: pairs of a resource and how much the ops that a schedule executes may use of it, each counted once; the others
            have no limit.

    Raises:
        GraphError: when made from parts that do not describe a training step.
    """

    ops: tuple[Op, ...]
    tensors: tuple[Tensor, ...]
    kept: frozenset[int]
    provenance: Mapping[str, object] = field(default_factory=dict)
    pools: tuple[Pool, ...] = (_DEVICE_POOL,)
    limits: tuple[tuple[str, float], ...] = ()

    def __post_init__(self) -> None:
        check_graph(self)

    def holding(self, kind: Kind, name: str, size_bytes: int) -> "Graph":
        """This graph with so much more on the device throughout, which no op reads."""
        tensors = (*self.tensors, Tensor(len(self.tensors), name, size_bytes, (), kind))
        return replace(self, tensors=tensors)

    def out_of_place(self) -> "Graph":
        """This graph where no output takes the memory of an input: the program as eager PyTorch runs it."""
        if not self.writes_over_inputs:
            return self
        ops = tuple(replace(op, overwrites=()) for op in self.ops)
        return replace(self, ops=ops)

    @cached_property
    def writes_over_inputs(self) -> bool:
        """Whether an output may take the memory of an input."""
        return any(op.overwrites for op in self.ops)

    @cached_property
    def plain(self) -> bool:
        """Whether there is nothing to choose but when to execute the program's ops: one pool, one stream."""
        return len(self.pools) == 1 and len(self.streams) == 1 and not self.ops[-1].optional

    @cached_property
    def streams(self) -> tuple[str, ...]:
        """Names of the streams: ``COMPUTE``, the other owners of pools, then the others that ops run on."""
        return tuple(dict.fromkeys((*(pool.owner for pool in self.pools), *(op.stream for op in self.ops))))

    @cached_property
    def program(self) -> tuple[Op, ...]:
        """The ops that are not optional."""
        return tuple(op for op in self.ops if not op.optional)

    @cached_property
    def static_bytes(self) -> int:
        """Bytes on the device throughout the step."""
        return self.static_bytes_by_pool[DEVICE]

    @cached_property
    def static_bytes_by_pool(self) -> dict[str, int]:
        """Bytes in each pool throughout the step."""
        sizes = {pool.name: 0 for pool in self.pools}
        for t in self.tensors:
            if t.static:
                sizes[t.pool] += t.size_bytes
        return sizes

    @cached_property
    def static_bytes_by_kind(self) -> dict[Kind, int]:
        """Bytes on the device throughout, by kind, largest first."""
        sizes: dict[Kind, int] = {}
        for t in self.tensors:
            if t.static and t.pool == DEVICE:
                sizes[t.kind] = sizes.get(t.kind, 0) + t.size_bytes
        return dict(sorted(sizes.items(), key=lambda item: -item[1]))

    @cached_property
    def time_s(self) -> float:
        """Seconds of the program's ops, each executed once, one after the other."""
        return math.fsum(op.time_s for op in self.program)

    @cached_property
    def consumers(self) -> tuple[tuple[int, ...], ...]:
        """For each tensor the ids of the ops that read it, in program order."""
        readers: list[list[int]] = [[] for _ in self.tensors]
        for op in self.ops:
            for t in op.inputs:
                readers[t].append(op.id)
        return tuple(map(tuple, readers))

    @cached_property
    def _amounts(self) -> dict[str, dict[int, float]]:
        """What is used of each resource, by op."""
        found: dict[str, dict[int, float]] = {}
        for op in self.ops:
            for resource, amount in op.uses:
                found.setdefault(resource, {})[op.id] = amount
        return found

    def ends(self, transfer: Op) -> tuple[str, str]:
        """Return the names of the pools that a transfer goes from and to."""
        (source,), (target,) = transfer.inputs, transfer.outputs
        return self.tensors[source].pool, self.tensors[target].pool

    def used(self, resource: str, computed: Collection[int]) -> float:
        """Return how much of `resource` is used where the ops `computed` are executed, each counted once."""
        amounts = self._amounts.get(resource, {})
        return math.fsum(amounts.get(op, 0.0) for op in set(computed))

    def allows(self, computed: Collection[int]) -> bool:
        """Return True if the ops `computed` use no more of any resource than its limit, but for rounding in the sum."""
        return all(self.used(resource, computed) <= limit * (1 + _ROUNDING) for resource, limit in self.limits)

    @cached_property
    def fingerprint(self) -> str:
        """Hash of structure and sizes.

        Left out are times, workspaces, capacities, the names of ops and tensors, and what differs by optional ops, and how much:
        like times it is found out by running them.
        """
        used = sorted(set(self.kept).union(*(op.inputs + op.outputs + op.mutates for op in self.ops)))
        number = {t: i for i, t in enumerate(used)}  # static tensors that no op reads must not shift the others
        structure: dict[str, object] = {
            "ops": [
                [
                    op.target,
                    *([number[t] for t in tensors] for tensors in (op.inputs, op.outputs, op.mutates)),
                    *(op.phase, op.recomputable, op.random),
                ]
                for op in self.ops
            ],
            "tensors": [[t.size_bytes, t.producers[0] if t.producers else None, t.kind] for t in (self.tensors[t] for t in used)],
            "kept": [number[t] for t in sorted(self.kept)],
        }
        if not self.plain:
            structure["pools"] = [[pool.name, pool.owner] for pool in self.pools]
            structure["places"] = [self.tensors[t].pool for t in used]
            structure["choices"] = [[op.stream, op.optional, op.replaces] for op in self.ops]
        if self.writes_over_inputs:
            structure["overwrites"] = [[[number[t] for t in pair] for pair in op.overwrites] for op in self.ops]
        return hashlib.sha256(json.dumps(structure, separators=(",", ":")).encode()).hexdigest()[:32]
