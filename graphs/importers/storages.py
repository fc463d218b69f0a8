"""A training step recorded as it ran: storages with references that come and go, and the ops between."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from graphs.ir import Graph, Kind, Op, Phase, Tensor

_RANDOM = re.compile(r"d?rou?pout|bernoulli|multinomial|randn?(_|$)|normal_$|uniform_$", re.IGNORECASE)


@dataclass(slots=True)
class Storage:
    """One allocation.

    Attributes:
        id: position in ``Record.storages``.
        name: of the tensor it was made for.
        size_bytes: bytes.
        maker: index of the op that made it, None for a constant that was there before the first op.
        last_touch: index of the last op so far that made or read it.
        stays: whether it is in memory to the end whatever is released.
        references: how many the program holds.
        released: index of the last op before the last reference went, None while one is held.
        view_of: id of the storage that it is a view of, where views are ops that make storages of no bytes.
    """

    id: int
    name: str
    size_bytes: int
    maker: int | None
    last_touch: int
    stays: bool = False
    references: int = 1
    released: int | None = None
    view_of: int | None = None


@dataclass(slots=True)
class _Executed:
    target: str
    inputs: tuple[int, ...]
    outputs: list[int]
    time_ns: int
    phase: Phase
    repeatable: bool = True


@dataclass(slots=True)
class Record:
    """What has run so far. Memory is tracked as the program's references say, whatever ops read."""

    storages: list[Storage] = field(default_factory=list)
    ops: list[_Executed] = field(default_factory=list)
    phase: Phase = Phase.FORWARD
    owed_ns: int = 0  # time of views of constants, for the next op

    def constant(self, name: str, size_bytes: int) -> Storage:
        """Memory from outside; it stays to the end."""
        if not self.ops:
            self.storages.append(Storage(len(self.storages), name, size_bytes, None, -1, stays=True))
            return self.storages[-1]
        self.ops.append(_Executed("constant", (), [], 0, self.phase, repeatable=False))
        return self._make(name, size_bytes, stays=True)

    def op(self, target: str, inputs: Sequence[Storage], outputs: Sequence[tuple[str, int]], time_ns: int) -> tuple[Storage, ...]:
        """An op that reads `inputs` and makes a storage for each name and size of `outputs`."""
        read = tuple(dict.fromkeys(storage.id for storage in inputs))
        self.ops.append(_Executed(target, read, [], time_ns + self.owed_ns, self.phase))
        self.owed_ns = 0
        for storage in inputs:
            storage.last_touch = len(self.ops) - 1
        return tuple(self._make(name, size_bytes) for name, size_bytes in outputs)

    def view(self, bases: Sequence[Storage], time_ns: int) -> None:
        """A view of `bases`: its time goes to the op that made the first of them, of a constant to the next op."""
        maker = bases[0].maker
        if maker is None or not self.ops[maker].repeatable:
            self.owed_ns += time_ns
        else:
            self.ops[maker].time_ns += time_ns

    def view_op(
        self, target: str, inputs: Sequence[Storage], views: Sequence[tuple[str, Storage]], time_ns: int
    ) -> tuple[Storage, ...]:
        """An op that reads `inputs` and makes a view for each name and base of `views`; they go with their bases."""
        made = self.op(f"view of {target}", inputs, [(name, 0) for name, _ in views], time_ns)
        for view, (_, base) in zip(made, views, strict=True):
            view.view_of = base.id
            self.release(view)
        return made

    def release(self, storage: Storage) -> None:
        """One reference less."""
        storage.references -= 1
        if not storage.references:
            storage.released = len(self.ops) - 1

    def graph(self, provenance: Mapping[str, object]) -> Graph:
        """The step as a graph whose memory, keeping everything, is what was tracked."""
        if self.ops:
            self.ops[-1].time_ns += self.owed_ns
            self.owed_ns = 0
        return _Draft(self).graph(provenance)

    def _make(self, name: str, size_bytes: int, *, stays: bool = False) -> Storage:
        maker = len(self.ops) - 1
        self.storages.append(Storage(len(self.storages), name, size_bytes, maker, maker, stays=stays))
        self.ops[maker].outputs.append(self.storages[-1].id)
        return self.storages[-1]


class _Draft:
    """The ops of a record, with those between that stand for references held beyond the last reader."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self.ops: list[Op] = []
        self.tensors: list[Tensor] = []
        self.number: dict[int, int] = {}  # of a storage its tensor

    def graph(self, provenance: Mapping[str, object]) -> Graph:
        storages = self.record.storages
        for storage in storages:
            if storage.maker is None:
                self.number[storage.id] = self._tensor(storage.name, storage.size_bytes, None, Kind.CONSTANT)
        begins, ends = self._held()
        held: dict[int, int] = {}
        for index, executed in enumerate(self.record.ops):
            self.add(executed, f"{executed.target}.{index}")
            for storage in ends.get(index, ()):
                self._op(f"release.{storage.name}", "release", (held[storage.id],), (), executed.phase)
            for storage in begins.get(index, ()):
                held[storage.id] = t = self._tensor(
                    f"{storage.name} held", storage.size_bytes, len(self.ops), Kind.ACTIVATION, held_for=self.number[storage.id]
                )
                self._op(f"hold.{storage.name}", "hold", (), (t,), executed.phase)
        kept = [s for s in storages if s.maker is not None and (s.stays or s.released is None)]
        return Graph(tuple(self.ops), tuple(self.tensors), frozenset(self.number[s.id] for s in kept), provenance)

    def add(self, executed: _Executed, name: str) -> None:
        """The op as it ran."""
        for s in executed.outputs:
            storage = self.record.storages[s]
            stays = storage.stays or storage.released is None
            kind = Kind.CONSTANT if storage.stays else Kind.OUTPUT if stays else Kind.ACTIVATION
            base = None if storage.view_of is None else self.number[storage.view_of]
            self.number[s] = self._tensor(storage.name, storage.size_bytes, len(self.ops), kind, view_of=base)
        self.ops.append(
            Op(
                id=len(self.ops),
                name=name,
                target=executed.target,
                inputs=tuple(self.number[s] for s in executed.inputs),
                outputs=tuple(self.number[s] for s in executed.outputs),
                time_s=executed.time_ns / 1e9,
                phase=executed.phase,
                recomputable=executed.repeatable,
                random=bool(_RANDOM.search(executed.target)) and "backward" not in executed.target,
            )
        )

    def _op(self, name: str, target: str, inputs: tuple[int, ...], outputs: tuple[int, ...], phase: Phase) -> None:
        self.ops.append(Op(len(self.ops), name, target, inputs, outputs, time_s=0.0, phase=phase))

    def _tensor(
        self,
        name: str,
        size_bytes: int,
        producer: int | None,
        kind: Kind,
        *,
        view_of: int | None = None,
        held_for: int | None = None,
    ) -> int:
        """A new tensor; returns its id."""
        t = len(self.tensors)
        makers = () if producer is None else (producer,)
        self.tensors.append(Tensor(t, name, size_bytes, makers, kind, view_of=view_of, held_for=held_for))
        return t

    def _held(self) -> tuple[dict[int, list[Storage]], dict[int, list[Storage]]]:
        """By op: storages that it touches last and that are held on, and those whose last reference goes after it."""
        begins: dict[int, list[Storage]] = {}
        ends: dict[int, list[Storage]] = {}
        for s in self.record.storages:
            if s.size_bytes and not s.stays and s.released is not None and s.released > s.last_touch:
                begins.setdefault(s.last_touch, []).append(s)
                ends.setdefault(s.released, []).append(s)
        return begins, ends
