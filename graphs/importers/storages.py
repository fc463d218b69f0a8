"""A training step recorded as it ran: storages with references that come and go, and the ops between."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from graphs.ir import Graph, Kind, Op, Phase, Tensor

_RANDOM = re.compile(r"d?rou?pout|bernoulli|multinomial|randn?(_|$)|normal_$|uniform_$", re.IGNORECASE)
_VIEW = "view of "  # begins the target of an op that is but a view
_HOLD, _HELD = "hold", " held"  # target of an op that stands for a reference held on, and suffix of what it makes


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
    """

    id: int
    name: str
    size_bytes: int
    maker: int | None
    last_touch: int
    stays: bool = False
    references: int = 1
    released: int | None = None


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


def view_target(target: str) -> str:
    """The target of an op that is but a view."""
    return _VIEW + target


def views(graph: Graph) -> dict[int, int]:
    """For each tensor that is but a view the one that it is a view of."""
    return {t: op.inputs[0] for op in graph.ops if op.target.startswith(_VIEW) for t in op.outputs}


@dataclass(frozen=True, slots=True)
class Held:
    """A reference held beyond the last reader, as it stands in a graph.

    Attributes:
        storage: id of the tensor that the program went on to hold.
        tensor: id of the one that stands for it from then on.
        hold, release: ids of the ops that make and read that one.
    """

    storage: int
    tensor: int
    hold: int
    release: int


def held_storages(graph: Graph) -> tuple[Held, ...]:
    """What the program that `graph` records held beyond the last reader; () for other graphs."""
    if "log_ops" not in graph.provenance:
        return ()
    ids = {t.name: t.id for t in graph.tensors}
    held = []
    for op in graph.ops:
        if op.target == _HOLD:
            (t,) = op.outputs
            (release,) = graph.consumers[t]
            held.append(Held(ids[graph.tensors[t].name.removesuffix(_HELD)], t, op.id, release))
    return tuple(held)


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
                self.number[storage.id] = self.tensor(storage.name, storage.size_bytes, None, Kind.CONSTANT)
        begins, ends = self._held()
        held: dict[int, int] = {}
        for index, executed in enumerate(self.record.ops):
            self.add(executed, f"{executed.target}.{index}")
            for storage in ends.get(index, ()):
                self._op(f"release.{storage.name}", "release", (held[storage.id],), (), executed.phase)
            for storage in begins.get(index, ()):
                held[storage.id] = t = self.tensor(storage.name + _HELD, storage.size_bytes, len(self.ops), Kind.ACTIVATION)
                self._op(f"hold.{storage.name}", _HOLD, (), (t,), executed.phase)
        kept = [s for s in storages if s.maker is not None and (s.stays or s.released is None)]
        return Graph(tuple(self.ops), tuple(self.tensors), frozenset(self.number[s.id] for s in kept), provenance)

    def add(self, executed: _Executed, name: str) -> None:
        """The op as it ran."""
        for s in executed.outputs:
            storage = self.record.storages[s]
            stays = storage.stays or storage.released is None
            kind = Kind.CONSTANT if storage.stays else Kind.OUTPUT if stays else Kind.ACTIVATION
            self.number[s] = self.tensor(storage.name, storage.size_bytes, len(self.ops), kind)
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

    def tensor(self, name: str, size_bytes: int, producer: int | None, kind: Kind) -> int:
        """A new tensor; returns its id."""
        self.tensors.append(Tensor(len(self.tensors), name, size_bytes, producer, kind))
        return len(self.tensors) - 1

    def _held(self) -> tuple[dict[int, list[Storage]], dict[int, list[Storage]]]:
        """By op: storages that it touches last and that are held on, and those whose last reference goes after it."""
        begins: dict[int, list[Storage]] = {}
        ends: dict[int, list[Storage]] = {}
        for s in self.record.storages:
            if s.size_bytes and not s.stays and s.released is not None and s.released > s.last_touch:
                begins.setdefault(s.last_touch, []).append(s)
                ends.setdefault(s.released, []).append(s)
        return begins, ends
