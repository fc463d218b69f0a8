"""A training step as a static graph: ops in program order, and the tensors that they produce and read.

An op is one kernel call, a tensor is one allocation (a storage). Views are neither: they cost nothing and are created from their
base when needed. A tensor without a producer (parameter, buffer, input, optimizer state, ...) is static: it is in memory
throughout the step. Those on the device are the graph's static memory.

Optional ops may follow the ops of the program: alternatives that produce the same tensors, also in other pools or on other
streams. A graph without optional ops has one pool and one stream, the defaults.
"""

import hashlib
import json
import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from html import escape

from planner.graphs.checks import check_graph
from planner.graphs.errors import UsageError, quote
from planner.graphs.escape import escape_text
from planner.graphs.pools import COMPUTE, DEVICE, Pool, is_channel
from planner.graphs.provenance import Provenance
from planner.graphs.requests import MemoryRequest
from planner.graphs.units import format_bytes, format_seconds

TANGENT = "tangent"  # name of the gradient of the loss among the inputs

_ROUNDING = 1e-9  # relative, of a sum of used amounts
_LARGEST = 5  # tensors and ops in the text of a graph


class Phase(StrEnum):
    """A part of the training step; phases follow each other in program order."""

    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"

    @property
    def place(self) -> int:
        """Position among the phases."""
        return list(Phase).index(self)


class Kind(StrEnum):
    """The role of a tensor in the training step."""

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
        size_bytes: bytes that the allocator reserves, at least 0.
        producers: ids of the ops that produce it, with the same bytes each, in ascending order: first the program's, then
            optional ones. Empty for static tensors.
        kind: its role in the step.
        shape, dtype: of the tensor when first produced, for people to read.
        view_of: id of its base, where an imported graph has views as ops.
        held_for: id of the tensor that this one represents after its last reader, where the program holds it longer than that.
            The op of this tensor reads nothing, and one op reads it.
        pool: name of the pool that it is in.
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
        """True if the tensor is in memory throughout the step."""
        return not self.producers


@dataclass(frozen=True, slots=True)
class Op:
    """One kernel call.

    Attributes:
        id: position in ``Graph.ops``, which is the program order.
        name: unique, for messages.
        target: the called function, e.g. ``aten.mm.default``.
        inputs, outputs: tensor ids, each without repetition.
        time_s: seconds of one execution.
        workspace_bytes: memory held besides inputs and outputs: during the execution only, in the first pool that its stream
            owns. A channel without a pool takes it from the device, from the issue of the op until the computation waits for it.
        phase: forward, backward or optimizer.
        recomputable: False if a second execution would be wrong.
        random: True if it draws random numbers; random ops keep their order.
        mutates: ids of the static tensors that it writes in place, in its first execution only; readers stay before or after the
            write, as in the program.
        module: path of the module that called it, "" if unknown.
        stream: name of the stream that it runs on; ops of one stream run in the order of issue, streams run in parallel.
        optional: True if it is not an op of the program: a schedule may execute it anywhere, any number of times or never.
        replaces: ids of the program's ops that an optional op may replace, all at once.
        differs: how its results may differ from the program's (rounding, a lossy value), "" if they are bit-identical.
        overwrites: pairs of an output and an input: the output takes the input's memory if the schedule frees the input directly
            after the op, and no other stream has read it since it was produced. Empty for optional ops.
        uses: pairs of a resource name and the amount used if the op is executed at all, counted once. Empty for ops of the
            program.
        requests: all requests for memory in their order, as recorded on a device: what its allocator reserves memory by, and what
            addresses are planned for. Empty if unknown: first the outputs, then one workspace.
        host_s: seconds that the host takes to issue one execution, on devices that run it later; 0 if that is not known, or a
            part of `time_s`.
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
    requests: tuple[MemoryRequest, ...] = ()
    host_s: float = 0.0

    @property
    def exact(self) -> bool:
        """True if its results are bit-identical to the program's."""
        return not self.differs

    def used(self, resource: str) -> float:
        """Return the amount of `resource` that the op uses if it is executed at all."""
        return dict(self.uses).get(resource, 0.0)

    def using(self, resource: str, amount: float) -> "Op":
        """Return this op with the given `amount` of `resource`."""
        others = (pair for pair in self.uses if pair[0] != resource)
        return replace(self, uses=(*others, *(((resource, amount),) if amount else ())))

    @property
    def is_transfer(self) -> bool:
        """True if it runs on a channel: a copy from one pool to another, or a collective of several processes."""
        return is_channel(self.stream)


_DEVICE_POOL = Pool(DEVICE, COMPUTE)


@dataclass(frozen=True)
class Graph:
    """A training step: `ops` in program order, `tensors` by id, and the tensors that must be `kept`.

    Attributes:
        ops: the program's in a topological order, each executed or replaced at least once; then optional ones.
        tensors: each output of an op has that op among its producers; the others are static.
        kept: ids of produced tensors that must be in memory at the end (loss, gradients, outputs). They are delivered when first
            computed and never freed.
        provenance: origin of the graph; also any mapping with such entries.
        pools: the memory pools, the device's first.
        limits: pairs of a resource name and the amount that the executed ops may use of it, each op counted once; other resources
            are unlimited.
        around_s: seconds that the host takes for a step besides its ops, whatever the schedule; 0 if that is not known.

    Raises:
        GraphError: the parts do not describe a training step.
    """

    ops: tuple[Op, ...]
    tensors: tuple[Tensor, ...]
    kept: frozenset[int]
    provenance: Provenance = field(default_factory=Provenance)
    pools: tuple[Pool, ...] = (_DEVICE_POOL,)
    limits: tuple[tuple[str, float], ...] = ()
    around_s: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "provenance", Provenance.of(self.provenance))
        check_graph(self)

    def __repr__(self) -> str:
        return f"Graph({len(self.ops):,} ops, {len(self.tensors):,} tensors, {format_bytes(self.static_bytes)} static)"

    def __str__(self) -> str:
        """Return a summary of one screen."""
        return _format(self)

    @property
    def device(self) -> str:
        """Device of the step, as torch or ``planner.settings.devices`` names it; "" if the provenance has none."""
        return self.provenance.device

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"

    def holding(self, kind: Kind, name: str, size_bytes: int) -> "Graph":
        """Return this graph with another static tensor on the device, which no op reads."""
        tensors = (*self.tensors, Tensor(len(self.tensors), name, size_bytes, (), kind))
        return replace(self, tensors=tensors)

    def out_of_place(self) -> "Graph":
        """Return this graph without overwriting: the program as eager PyTorch runs it."""
        if not self.writes_over_inputs:
            return self
        ops = tuple(replace(op, overwrites=()) for op in self.ops)
        return replace(self, ops=ops)

    @cached_property
    def writes_over_inputs(self) -> bool:
        """True if an op may overwrite an input with an output."""
        return any(op.overwrites for op in self.ops)

    @cached_property
    def plain(self) -> bool:
        """True if the graph has one memory pool, one stream and no optional ops."""
        return len(self.pools) == 1 and len(self.streams) == 1 and not self.ops[-1].optional

    @cached_property
    def streams(self) -> tuple[str, ...]:
        """Names of the streams: ``COMPUTE``, the other owners of pools, then the other streams of ops."""
        return tuple(dict.fromkeys((*(pool.owner for pool in self.pools), *(op.stream for op in self.ops))))

    @cached_property
    def program(self) -> tuple[Op, ...]:
        """The ops that are not optional."""
        return tuple(op for op in self.ops if not op.optional)

    @cached_property
    def static_bytes(self) -> int:
        """Static memory on the device, in bytes."""
        return self.static_bytes_by_pool[DEVICE]

    @cached_property
    def static_bytes_by_pool(self) -> dict[str, int]:
        """Static memory of each pool, in bytes."""
        sizes = {pool.name: 0 for pool in self.pools}
        for t in self.tensors:
            if t.static:
                sizes[t.pool] += t.size_bytes
        return sizes

    @cached_property
    def static_bytes_by_kind(self) -> dict[Kind, int]:
        """Static memory on the device by kind of tensor, in bytes, largest first."""
        sizes: dict[Kind, int] = {}
        for t in self.tensors:
            if t.static and t.pool == DEVICE:
                sizes[t.kind] = sizes.get(t.kind, 0) + t.size_bytes
        return dict(sorted(sizes.items(), key=lambda item: -item[1]))

    @cached_property
    def time_s(self) -> float:
        """Seconds of the program's ops, each executed once, one after the other."""
        return math.fsum(op.time_s for op in self.program)

    @property
    def step_s(self) -> float:
        """Seconds of a step that keeps everything: `time_s`, and what the host takes around the ops."""
        return self.time_s + self.around_s

    @cached_property
    def compute_s(self) -> float:
        """Seconds of those of the program's ops that run on the main device."""
        return math.fsum(op.time_s for op in self.program if op.stream == COMPUTE)

    @cached_property
    def has_host_times(self) -> bool:
        """True if it is known how long the host takes to issue ops."""
        return any(op.host_s for op in self.ops)

    @cached_property
    def consumers(self) -> tuple[tuple[int, ...], ...]:
        """For each tensor, the ids of the ops that read it, in program order."""
        readers: list[list[int]] = [[] for _ in self.tensors]
        for op in self.ops:
            for t in op.inputs:
                readers[t].append(op.id)
        return tuple(map(tuple, readers))

    @cached_property
    def _amounts(self) -> dict[str, dict[int, float]]:
        """The amounts used, by resource and op."""
        found: dict[str, dict[int, float]] = {}
        for op in self.ops:
            for resource, amount in op.uses:
                found.setdefault(resource, {})[op.id] = amount
        return found

    def ends(self, transfer: Op) -> tuple[str, str]:
        """Return the names of the source and target pools of a transfer; they are the same for a collective."""
        return self.tensors[transfer.inputs[0]].pool, self.tensors[transfer.outputs[0]].pool

    def crosses_pools(self, op: Op) -> bool:
        """Return True if `op` carries a tensor from one pool to another."""
        return op.is_transfer and len({*self.ends(op)}) > 1

    def used(self, resource: str, computed: Collection[int]) -> float:
        """Return the amount of `resource` that the executed ops `computed` use, each counted once."""
        amounts = self._amounts.get(resource, {})
        return math.fsum(amounts.get(op, 0.0) for op in set(computed))

    def allows(self, computed: Collection[int]) -> bool:
        """Return True if the executed ops `computed` respect the limits of all resources, up to rounding."""
        return all(self.used(resource, computed) <= limit * (1 + _ROUNDING) for resource, limit in self.limits)

    @cached_property
    def fingerprint(self) -> str:
        """Hash of structure and sizes.

        It does not depend on times, workspaces, capacities, names of ops and tensors, nor on the differences and resources of
        optional ops: these are measured, as times are.
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


def check_is_graph(value: object) -> None:
    """Raise a UsageError unless `value` is a graph."""
    if not isinstance(value, Graph):
        raise UsageError(
            f"the graph is {quote(value)}: must be one that planner.trace returns, or planner.graphs.io.formats.read_graph reads "
            "from a file"
        )


def _format(graph: Graph) -> str:
    """Return what `graph` takes: its ops, memory and time, and its largest tensors and slowest ops."""
    lines = list(_iterate_facts(graph))
    width = max(len(name) for name, _ in lines)
    largest = sorted(graph.tensors, key=lambda t: -t.size_bytes)[:_LARGEST]
    slowest = sorted(graph.ops, key=lambda op: -op.time_s)[:_LARGEST] if graph.time_s else []
    return "\n".join(
        (
            *(f"{name:<{width}}  {value}" for name, value in lines),
            "largest tensors",
            *(
                f"  {format_bytes(t.size_bytes):>10}  {escape_text(t.name)} {escape_text(t.dtype)}{list(t.shape)}"
                for t in largest
            ),
            *(["slowest ops"] if slowest else []),
            *(f"  {format_seconds(op.time_s):>10}  {escape_text(op.name)} ({escape_text(op.target)})" for op in slowest),
        )
    )


def _iterate_facts(graph: Graph) -> Iterator[tuple[str, str]]:
    for key in ("model", "device", "inputs"):
        if key in graph.provenance:
            value = graph.provenance[key]
            yield key, escape_text(", ".join(map(str, value)) if isinstance(value, list | tuple) else value)
    program, optional = graph.program, len(graph.ops) - len(graph.program)
    phases = tuple(dict.fromkeys(op.phase for op in program))
    counts = ", ".join(f"{sum(op.phase is phase for op in program):,} {phase}" for phase in phases)
    yield "ops", f"{len(program):,} ({counts})" + (f", and {optional:,} optional ones" if optional else "")
    yield "tensors", f"{len(graph.tensors):,}"
    times = ", ".join(f"{phase} {format_seconds(_time_s(program, phase))}" for phase in phases if _time_s(program, phase))
    yield "step time", f"{format_seconds(graph.time_s)} ({times})" if times else "not measured yet"
    kinds = ", ".join(f"{kind} {format_bytes(size)}" for kind, size in graph.static_bytes_by_kind.items() if size)
    yield "static memory", f"{format_bytes(graph.static_bytes)}" + (f" ({kinds})" if kinds else "")


def _time_s(ops: tuple[Op, ...], phase: Phase) -> float:
    return sum(op.time_s for op in ops if op.phase is phase)
