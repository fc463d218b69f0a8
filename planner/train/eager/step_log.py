"""A step of an eager loop: its log of ops over storages, and its graph for the solvers. No torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from planner.graphs.ir import Graph, Kind, Op, Phase, Tensor


class LoggedOp(NamedTuple):
    """One op of a step; storages are named by their numbers in the step.

    Attributes:
        target: the operator; ``str`` of it is its name, such as ``aten.mm.default``.
        inputs: storages that it read.
        made: storages that it made.
        written: storages that it wrote in place.
        time_s: measured seconds.
        recomputable: it can be executed again.
        random: it draws random numbers.
        backward: it ran in a backward pass.
        node: sequence number of the autograd node that called it; -1 if there is none.
        workspace_bytes: further bytes that it takes while it runs.
        module: name of the module that was running.
    """

    target: object
    inputs: tuple[int, ...]
    made: tuple[int, ...] = ()
    written: tuple[int, ...] = ()
    time_s: float = 0.0
    recomputable: bool = True
    random: bool = False
    backward: bool = False
    node: int = -1
    workspace_bytes: int = 0
    module: str = ""


class Total(Protocol):
    """Hashes of the first ops of a step: with shapes, and without them; and the bytes that these ops have made."""

    chain: int
    structure: int
    made_bytes: int


class StepLog(Protocol):
    """The ops of a step (``planner/native/step_log.cpp``).

    Two steps have the same structure if they execute the same operators on storages that are connected in the same way. They have
    the same chain if the shapes are the same too. Times, addresses and contents do not matter.

    Attributes:
        held_bytes: bytes in memory when it began.
        total: that of all ops so far.
        ops: the ops so far, each as the values of a ``LoggedOp``.
        sizes_bytes: size of each storage, by number.
        unpacked: storages that autograd has unpacked, with the number of ops before that: all inputs of a function at once.
        released: the storages that the program has released, with the number of ops before that.
        only_saved: the released storages that autograd was the last to hold, unread: the program may have released them earlier.
        evicted: the evicted storages, in order; -1 for one that the step had not used before.
        followed: the step whose plan this one follows, as long as it has its ops; None if there is none.
    """

    held_bytes: int
    total: Total
    ops: list[tuple[Any, ...]]
    sizes_bytes: list[int]
    unpacked: list[tuple[int, int]]
    released: list[tuple[int, int]]
    only_saved: list[int]
    evicted: list[int]
    followed: "StepLog | None"

    def __len__(self) -> int:
        """Return the number of ops so far."""

    def get_total(self, ops: int) -> Total:
        """Return that of the first `ops` ops."""

    def is_begun_as(self, log: "StepLog") -> bool:
        """Return True if its first ops are those of an unfinished step."""


@dataclass(frozen=True, slots=True)
class StepGraph:
    """A step as a graph.

    Attributes:
        graph: the graph, with the ops of the step in order. An in-place write makes a tensor of its own.
        storages: the number of the storage of each tensor.
        released: for each storage that the program releases, the number of ops before that.
    """

    graph: Graph
    storages: tuple[int, ...]
    released: Mapping[int, int]


def build_recorded_step(log: StepLog) -> StepGraph:
    """Return the graph of a step that has ended.

    All memory that was in use when the step began is static. A storage that autograd has unpacked for a node counts as read by
    all further ops of the node, because the node holds it. Ops whose outputs no saved tensor needs, such as gradients, are not
    recomputable, because only saved tensors can be evicted. If the program holds a storage for longer than its readers, the last
    op before the release counts as a reader, unless autograd releases it last. Storages that the program still holds at the end
    are kept.

    Raises:
        GraphError: the step has no ops.
    """
    draft = _Draft(log)
    for index, op in enumerate(draft.logged):
        draft.add(index, op)
    return draft.step()


def _find_needed(log: StepLog, ops: Sequence[LoggedOp]) -> set[int]:
    """Return the storages that autograd has unpacked, and all storages that they are computed from."""
    needed = {storage for storage, _ in log.unpacked}
    for op in reversed(ops):
        if not needed.isdisjoint((*op.made, *op.written)):
            needed.update(op.inputs)
    return needed


class _Draft:
    """The graph of a log, built op by op."""

    def __init__(self, log: StepLog) -> None:
        self.held_bytes, self.sizes_bytes, self.released = log.held_bytes, log.sizes_bytes, dict(log.released)
        self.unpacked: dict[int, list[int]] = {}  # by the number of ops before
        for storage, count in log.unpacked:
            self.unpacked.setdefault(count, []).append(storage)
        self.logged = tuple(map(LoggedOp._make, log.ops))
        self.made = {storage for op in self.logged for storage in op.made}
        self.needed = _find_needed(log, self.logged)
        self.tensors: list[Tensor] = []
        self.storages: list[int] = []
        self.ops: list[Op] = []
        self.current: dict[int, int] = {}  # the tensor with the current contents of each storage
        self.backward = False
        self.names: dict[str, int] = {}
        self.held_by_node: tuple[int, ...] = ()  # what was unpacked for the node that is running
        self.held: dict[int, list[int]] = {}  # by op, the storages that the program still holds then
        last = {storage: i for i, op in enumerate(self.logged) for storage in (*op.inputs, *op.made, *op.written)}
        only_saved = set(log.only_saved)
        for storage, count in self.released.items():
            if storage in self.made and storage not in only_saved and last[storage] < count - 1:
                self.held.setdefault(count - 1, []).append(storage)

    def add(self, index: int, op: LoggedOp) -> None:
        """Add an op and its outputs."""
        self.backward = self.backward or op.backward
        target = str(op.target)
        name = self._name(target)
        is_same_node = index > 0 and op.node >= 0 and op.node == self.logged[index - 1].node
        self.held_by_node = (*(self.held_by_node if is_same_node else ()), *self.unpacked.get(index, ()))
        read = (*self.held_by_node, *op.inputs, *op.written, *self.held.get(index, ()))
        inputs = dict.fromkeys(self._get_tensor(storage) for storage in read)
        rewritten = [storage for storage in op.written if storage in self.made and storage in self.current]
        mutated = [self._get_tensor(storage) for storage in op.written if storage not in self.made]
        outputs: list[int] = []
        overwrites: list[tuple[int, int]] = []
        for storage in (*op.made, *rewritten):
            before = self.current.get(storage)
            t = self._add_tensor(storage, name if not outputs else f"{name}.{len(outputs)}", (index,), Kind.ACTIVATION)
            if before is not None:
                overwrites.append((t, before))
            outputs.append(t)
        self.ops.append(
            Op(
                id=index,
                name=name,
                target=target,
                inputs=tuple(inputs),
                outputs=tuple(outputs),
                time_s=op.time_s,
                workspace_bytes=op.workspace_bytes,
                phase=Phase.BACKWARD if self.backward else Phase.FORWARD,
                recomputable=op.recomputable and not self.needed.isdisjoint((*op.made, *op.written)),
                random=op.random,
                mutates=tuple(mutated),
                overwrites=tuple(overwrites),
                module=op.module,
            )
        )

    def step(self) -> StepGraph:
        """Return the recorded step."""
        static_bytes = sum(t.size_bytes for t in self.tensors if t.static)
        if (others := self.held_bytes - static_bytes) > 0:
            self.tensors.append(Tensor(len(self.tensors), "not read in the step", others, (), Kind.CONSTANT))
            self.storages.append(-1)
        kept = frozenset(t for storage, t in self.current.items() if storage in self.made and storage not in self.released)
        return StepGraph(Graph(tuple(self.ops), tuple(self.tensors), kept), tuple(self.storages), self.released)

    def _get_tensor(self, storage: int) -> int:
        """Return the tensor with the current contents of a storage; it is static if no op has made it."""
        if storage not in self.current:
            self._add_tensor(storage, f"held_{storage}", (), Kind.CONSTANT)
        return self.current[storage]

    def _add_tensor(self, storage: int, name: str, producers: tuple[int, ...], kind: Kind) -> int:
        t = len(self.tensors)
        self.tensors.append(Tensor(t, name, self.sizes_bytes[storage], producers, kind))
        self.storages.append(storage)
        self.current[storage] = t
        return t

    def _name(self, target: str) -> str:
        """Return a name for an op of an operator: ``mm``, ``mm_1`` and so on."""
        parts = target.split(".")
        base = parts[1] if len(parts) > 1 else target
        count = self.names[base] = self.names.get(base, -1) + 1
        return f"{base}_{count}" if count else base
