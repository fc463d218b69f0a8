"""A record of an executed training step: ops, and storages with counted references.

Logs count references, not reads. The added ops let a planner free a tensor after its last reader, while keeping everything has
the memory of the log. Known weakness: logs do not say which ops draw random numbers, so these are known by their names.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from planner.graphs.ir import Graph, Kind, Op, Phase, Tensor
from planner.graphs.provenance import Provenance

_RANDOM = re.compile(r"d?rou?pout|bernoulli|multinomial|randn?(_|$)|normal_$|uniform_$", re.IGNORECASE)


@dataclass(slots=True)
class Storage:
    """One allocation of the step.

    Attributes:
        id: position in ``ExecutionRecord.storages``.
        name: name of the tensor it was made for.
        producer: index of the op that made it, None for a constant from before the first op.
        last_touch: index of the last op so far that made or read it.
        permanent: True if it stays in memory until the end, even if it is released.
        references: number of references in the program.
        released: index of the last op before the last reference was released, None before that.
        view_of: id of its base, if views are ops that make storages of 0 bytes.
    """

    id: int
    name: str
    size_bytes: int
    producer: int | None
    last_touch: int
    permanent: bool = False
    references: int = 1
    released: int | None = None
    view_of: int | None = None


@dataclass(slots=True)
class _ExecutedOp:
    target: str
    inputs: tuple[int, ...]
    outputs: list[int]
    time_ns: int
    phase: Phase
    recomputable: bool = True


@dataclass(slots=True)
class ExecutionRecord:
    """The executed ops so far. Storages live as long as the program refers to them, whichever storages ops read."""

    storages: list[Storage] = field(default_factory=list)
    ops: list[_ExecutedOp] = field(default_factory=list)
    phase: Phase = Phase.FORWARD
    pending_ns: int = 0  # time of views of constants, for the next op

    def add_constant(self, name: str, size_bytes: int) -> Storage:
        """Add memory from outside, which stays until the end of the step."""
        if not self.ops:
            self.storages.append(Storage(len(self.storages), name, size_bytes, None, -1, permanent=True))
            return self.storages[-1]
        self.ops.append(_ExecutedOp("constant", (), [], 0, self.phase, recomputable=False))
        return self._make(name, size_bytes, permanent=True)

    def add_op(
        self, target: str, inputs: Sequence[Storage], outputs: Sequence[tuple[str, int]], time_ns: int
    ) -> tuple[Storage, ...]:
        """Add an op that reads `inputs` and makes a storage for each name and size of `outputs`."""
        read = tuple(dict.fromkeys(storage.id for storage in inputs))
        self.ops.append(_ExecutedOp(target, read, [], time_ns + self.pending_ns, self.phase))
        self.pending_ns = 0
        for storage in inputs:
            storage.last_touch = len(self.ops) - 1
        return tuple(self._make(name, size_bytes) for name, size_bytes in outputs)

    def view(self, bases: Sequence[Storage], time_ns: int) -> None:
        """Add a view of `bases`: its time is added to the op that made the first of them, for a constant to the next op."""
        producer = bases[0].producer
        if producer is None or not self.ops[producer].recomputable:
            self.pending_ns += time_ns
        else:
            self.ops[producer].time_ns += time_ns

    def view_op(
        self, target: str, inputs: Sequence[Storage], views: Sequence[tuple[str, Storage]], time_ns: int
    ) -> tuple[Storage, ...]:
        """Add an op that makes a view for each name and base of `views`; views are released with their bases."""
        made = self.add_op(f"view of {target}", inputs, [(name, 0) for name, _ in views], time_ns)
        for view, (_, base) in zip(made, views, strict=True):
            view.view_of = base.id
            self.release(view)
        return made

    def release(self, storage: Storage) -> None:
        """Remove one reference."""
        storage.references -= 1
        if not storage.references:
            storage.released = len(self.ops) - 1

    def build_graph(self, provenance: Mapping[str, object]) -> Graph:
        """Return the step as a graph; keeping everything, its memory is the recorded one."""
        if self.ops:
            self.ops[-1].time_ns += self.pending_ns
            self.pending_ns = 0
        return _GraphBuilder(self).build(provenance)

    def _make(self, name: str, size_bytes: int, *, permanent: bool = False) -> Storage:
        producer = len(self.ops) - 1
        self.storages.append(Storage(len(self.storages), name, size_bytes, producer, producer, permanent=permanent))
        self.ops[producer].outputs.append(self.storages[-1].id)
        return self.storages[-1]


class _GraphBuilder:
    """Builder of the graph of a record, with ops for references that outlive the last reader of a storage."""

    def __init__(self, record: ExecutionRecord) -> None:
        self.record = record
        self.ops: list[Op] = []
        self.tensors: list[Tensor] = []
        self.number: dict[int, int] = {}  # tensor by storage

    def build(self, provenance: Mapping[str, object]) -> Graph:
        storages = self.record.storages
        for storage in storages:
            if storage.producer is None:
                self.number[storage.id] = self._add_tensor(storage.name, storage.size_bytes, None, Kind.CONSTANT)
        begins, ends = self._find_held_storages()
        held: dict[int, int] = {}
        for index, executed in enumerate(self.record.ops):
            self.add(executed, f"{executed.target}.{index}")
            for storage in ends.get(index, ()):
                self._add_op(f"release.{storage.name}", "release", (held[storage.id],), (), executed.phase)
            for storage in begins.get(index, ()):
                held[storage.id] = t = self._add_tensor(
                    f"{storage.name} held", storage.size_bytes, len(self.ops), Kind.ACTIVATION, held_for=self.number[storage.id]
                )
                self._add_op(f"hold.{storage.name}", "hold", (), (t,), executed.phase)
        kept = [s for s in storages if s.producer is not None and (s.permanent or s.released is None)]
        return Graph(tuple(self.ops), tuple(self.tensors), frozenset(self.number[s.id] for s in kept), Provenance.of(provenance))

    def add(self, executed: _ExecutedOp, name: str) -> None:
        """Add the op as it was executed."""
        for s in executed.outputs:
            storage = self.record.storages[s]
            kept = storage.permanent or storage.released is None
            kind = Kind.CONSTANT if storage.permanent else Kind.OUTPUT if kept else Kind.ACTIVATION
            base = None if storage.view_of is None else self.number[storage.view_of]
            self.number[s] = self._add_tensor(storage.name, storage.size_bytes, len(self.ops), kind, view_of=base)
        self.ops.append(
            Op(
                id=len(self.ops),
                name=name,
                target=executed.target,
                inputs=tuple(self.number[s] for s in executed.inputs),
                outputs=tuple(self.number[s] for s in executed.outputs),
                time_s=executed.time_ns / 1e9,
                phase=executed.phase,
                recomputable=executed.recomputable,
                random=bool(_RANDOM.search(executed.target)) and "backward" not in executed.target,
            )
        )

    def _add_op(self, name: str, target: str, inputs: tuple[int, ...], outputs: tuple[int, ...], phase: Phase) -> None:
        self.ops.append(Op(len(self.ops), name, target, inputs, outputs, time_s=0.0, phase=phase))

    def _add_tensor(
        self,
        name: str,
        size_bytes: int,
        producer: int | None,
        kind: Kind,
        *,
        view_of: int | None = None,
        held_for: int | None = None,
    ) -> int:
        t = len(self.tensors)
        producers = () if producer is None else (producer,)
        self.tensors.append(Tensor(t, name, size_bytes, producers, kind, view_of=view_of, held_for=held_for))
        return t

    def _find_held_storages(self) -> tuple[dict[int, list[Storage]], dict[int, list[Storage]]]:
        """Return the storages that outlive their last reader, by that reader, and by the op before their release."""
        begins: dict[int, list[Storage]] = {}
        ends: dict[int, list[Storage]] = {}
        for s in self.record.storages:
            if s.size_bytes and not s.permanent and s.released is not None and s.released > s.last_touch:
                begins.setdefault(s.last_touch, []).append(s)
                ends.setdefault(s.released, []).append(s)
        return begins, ends
