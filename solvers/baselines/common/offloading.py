"""Offloading for baselines: offloadable tensors, schedules with given transfers, and schedules issued step by step.

A transfer is issued between two executions. Device memory is allocated where a reload is issued, and released by a ``Free``, at
which the computation waits for the offload. So the position of the free determines how long an offload may take in parallel with
the computation; where the source of a method leaves it open, a suitable one is chosen. An offload starts once its tensor is ready
and the channel is free, even if the method issues it later: the simulation has no other reason to wait.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from planner.graphs.ir import Graph, Phase
from planner.graphs.options.offload import RoundTrip, remove_offload
from planner.graphs.schedule import Compute, Free, Schedule, Step, schedule_of
from planner.solvers.baselines.common.blocks import find_blockings
from planner.solvers.baselines.common.verdicts import Candidate, answer, build_failure
from planner.solvers.request import Request
from planner.solvers.result import Reason, Result


@dataclass(frozen=True, slots=True)
class Offer:
    """A graph with transfers to the host.

    Attributes:
        program: the graph without them, with the same ids.
        host_bytes: capacity of the host's pool, None if all tensors fit together.
    """

    whole: Graph
    program: Graph
    by_tensor: Mapping[int, RoundTrip]
    host_bytes: int | None

    def get_size_bytes(self, t: int) -> int:
        """Return the size of tensor `t`."""
        return self.program.tensors[t].size_bytes

    def get_producer(self, t: int) -> int:
        """Return the op that produces tensor `t`."""
        return self.program.tensors[t].producers[0]

    def list_readers(self, t: int, *, forward: bool) -> list[int]:
        """Return the ops that read tensor `t` in the forward pass, or after it."""
        return [r for r in self.program.consumers[t] if (self.program.ops[r].phase is Phase.FORWARD) == forward]

    def list_saved(self) -> list[int]:
        """Return the offloadable saved tensors: produced in the forward pass and read after it, in order of production."""
        ops = self.program.ops
        made = [
            t for t in self.by_tensor if ops[self.get_producer(t)].phase is Phase.FORWARD and self.list_readers(t, forward=False)
        ]
        return sorted(made, key=lambda t: (self.get_producer(t), t))

    def select_fitting(self, tensors: Iterable[int]) -> list[int]:
        """Return the first of `tensors` that fit on the host together; those that are too large are skipped."""
        fit: list[int] = []
        taken = 0
        for t in tensors:
            if self.host_bytes is None or taken + self.get_size_bytes(t) <= self.host_bytes:
                fit.append(t)
                taken += self.get_size_bytes(t)
        return fit


def offer_of(graph: Graph) -> Offer | None:
    """Return the transfers that `graph` offers; None if there are none.

    Raises:
        GraphError: the graph has other options.
    """
    program, offloads = remove_offload(graph)
    return Offer(graph, program, offloads.by_tensor, offloads.host_bytes) if offloads else None


def answer_by_offloading(
    request: Request,
    solver: str,
    trials: Callable[[Offer], Iterable[Candidate]],
    *,
    what: str,
    by_blocks: bool = False,
) -> Result:
    """Return ``verdicts.answer`` for methods that need transfers to the host, and blocks if `by_blocks`; LIMIT without these."""
    offer = offer_of(request.graph)
    if offer is None:
        why = f"{what} does not apply: the graph offers no transfers to the host; solve with the option offload"
        return build_failure(request, solver, why, Reason.INAPPLICABLE)
    if by_blocks and not find_blockings(request.graph):
        why = f"{what} does not apply: the graph has no blocks, for no op belongs to a module inside the model"
        return build_failure(request, solver, why, Reason.INAPPLICABLE)
    return answer(request, solver, trials(offer), what=what)


@dataclass(frozen=True, slots=True)
class Fetch:
    """A reload of `tensor` for the read at position `read`, issued before `begin`, or after its free if that is later."""

    tensor: int
    begin: int
    read: int


@dataclass(slots=True)
class Moves:
    """Transfers, by positions in a list of executions.

    Attributes:
        sent: (tensor, position): offloaded after that execution.
        held: (tensor, position): stays on the device until that execution is done.
    """

    sent: list[tuple[int, int]] = field(default_factory=list)
    fetches: list[Fetch] = field(default_factory=list)
    held: list[tuple[int, int]] = field(default_factory=list)


def schedule_with(offer: Offer, computed: Sequence[int], moves: Moves) -> Schedule:
    """Return the schedule of `computed` with `moves`: tensors are freed after their last use before they are reloaded."""
    out: dict[int, list[int]] = {}
    back: dict[int, list[int]] = {}
    held: dict[int, list[int]] = {}
    touched: dict[int, list[int]] = {t: [] for t in offer.by_tensor}
    for position, op in enumerate(computed):
        for t in (*offer.program.ops[op].inputs, *offer.program.ops[op].outputs):
            if t in touched:
                touched[t].append(position)
    for places, pairs in ((out, moves.sent), (held, moves.held)):
        for t, position in pairs:
            touched[t].append(position)
            places.setdefault(position, []).append(t)
    for fetch in sorted(moves.fetches, key=lambda fetch: fetch.read):
        gone = max(position for position in touched[fetch.tensor] if position < fetch.read) + 1
        back.setdefault(max(fetch.begin, gone), []).append(fetch.tensor)
    order: list[int] = []
    stays: dict[int, list[int]] = {}
    for position, op in enumerate(computed):
        order += [offer.by_tensor[t].back.op for t in back.get(position, ())]
        if position in held:
            stays[len(order)] = held[position]
        order.append(op)
        order += [offer.by_tensor[t].out.op for t in out.get(position, ())]
    return schedule_of(offer.whole, order, stays)


def iterate_run_starts(readers: Sequence[int]) -> Iterator[int]:
    """Yield the first of each run of consecutive `readers`: one autograd node reads one copy."""
    for place, reader in enumerate(readers):
        if not place or readers[place - 1] != reader - 1:
            yield reader


class Layers:
    """Executions of a step by layers: blocks in the order of the forward pass, which is the start of `computed`.

    Attributes:
        of_op: by op of the forward pass its layer, for those in one.
        inside: by tensor that only its own layer reads in the forward pass, that layer.
        last_op: by layer its last op in the forward pass.
        begin_backward: position of the first execution after the forward pass.
        first_backward: by layer the first position at which one of its ops is recomputed, or a tensor inside it is read.
    """

    def __init__(self, offer: Offer, computed: Sequence[int], blocks: Sequence[str | None]) -> None:
        self.offer, self.computed = offer, computed
        forward = [op.id for op in offer.program.ops if op.phase is Phase.FORWARD]
        number: dict[str, int] = {}
        self.of_op = {op: number.setdefault(block, len(number)) for op in forward if (block := blocks[op]) is not None}
        self.last_op = {layer: op for op, layer in self.of_op.items()}
        self.last = len(number) - 1
        self.begin_backward = len(forward)
        self.inside = {
            t: layer
            for op, layer in self.of_op.items()
            for t in offer.program.ops[op].outputs
            if all(self.of_op.get(r) == layer for r in offer.program.consumers[t] if r < self.begin_backward)
        }
        self.first_backward: dict[int, int] = {}
        for position in range(self.begin_backward, len(computed)):
            op = computed[position]
            touched = [self.of_op[op]] if op in self.of_op else []
            touched += [self.inside[t] for t in offer.program.ops[op].inputs if t in self.inside]
            for layer in touched:
                self.first_backward.setdefault(layer, position)

    def may_go(self) -> list[int]:
        """Return the saved tensors that may be offloaded, of all layers but the last; with one layer also of that."""
        again = frozenset(self.computed[self.begin_backward :])
        made = [(op, layer) for op, layer in self.of_op.items() if op not in again and (layer < self.last or not self.last)]
        reads = self._find_first_reads()
        outputs = self.offer.program.ops
        return [t for op, _ in made for t in outputs[op].outputs if t in reads and t in self.offer.by_tensor]

    def plan_moves(self, tensors: Iterable[int]) -> Moves:
        """Return the transfers of `tensors`: offloaded when produced, freed a layer after the last layer that reads them.

        They are reloaded before the backward pass of the layer after their own.
        """
        reads = self._find_first_reads()
        moves = Moves()
        for t in tensors:
            layer = self.of_op[self.offer.get_producer(t)]
            readers = [self.of_op[r] for r in self.offer.list_readers(t, forward=True) if r in self.of_op]
            asked = self.first_backward.get(min(layer + 1, self.last), reads[t])
            made = self.offer.get_producer(t)
            goes = self.last_op[min(max((layer, *readers)) + 1, self.last)]
            moves.sent.append((t, made))
            moves.held.append((t, max(made, goes)))  # ops of layers may be interleaved
            moves.fetches.append(Fetch(t, min(asked, reads[t]), reads[t]))
        return moves

    def _find_first_reads(self) -> dict[int, int]:
        """Return by tensor the position at which it is first read after the forward pass."""
        reads: dict[int, int] = {}
        for position in range(self.begin_backward, len(self.computed)):
            for t in self.offer.program.ops[self.computed[position]].inputs:
                reads.setdefault(t, position)
        return reads


class Device:
    """The device and its two channels while steps are issued, with the memory and clocks of the simulation.

    A tensor that is offloaded stays in memory during the transfer: it is *leaving*. It is freed once the transfer is done, or
    when memory is needed, and then the computation waits; if it is read before, it stays.

    Copies on the host stay: offloading such a tensor again takes no time. They are freed when the host is full, those of tensors
    on the device first.

    Attributes:
        now_s: end of the computation issued so far.
        live: produced tensors in memory, including leaving ones.
        leaving: by tensor the end of its offload.
        host: tensors with a copy on the host, present or on its way.
        memory_bytes: used on the device, including static memory.
    """

    def __init__(self, offer: Offer, budget_bytes: int) -> None:
        self.offer, self.budget_bytes = offer, budget_bytes
        self.steps: list[Step] = []
        self.now_s = self.out_s = self.in_s = 0.0
        self.live: set[int] = set()
        self.leaving: dict[int, float] = {}
        self.host: dict[int, float] = {}  # arrival of the copy
        self.read_s: dict[int, float] = {}  # end of its last reload
        self.ready_s: dict[int, float] = {}
        self.host_bytes = 0
        self.memory_bytes = offer.program.static_bytes

    @property
    def schedule(self) -> Schedule:
        """The schedule of all steps so far."""
        return Schedule(tuple(self.steps))

    def has(self, t: int) -> bool:
        """Return True if tensor `t` is in memory and not leaving."""
        return t in self.live and t not in self.leaving

    def recall(self, t: int) -> None:
        """Keep tensor `t` in memory if it is leaving."""
        self.leaving.pop(t, None)

    def fits(self, size_bytes: int) -> bool:
        """Return True if there is space for `size_bytes` now, without waiting."""
        for t in [t for t, done_s in self.leaving.items() if done_s <= self.now_s]:
            self._finish_leaving(t)
        return self.memory_bytes + size_bytes <= self.budget_bytes

    def make_room(self, size_bytes: int) -> bool:
        """Wait for leaving tensors, the first first, until `size_bytes` fit; return False if that is not enough."""
        while not self.fits(size_bytes) and self.leaving:
            self._finish_leaving(min(self.leaving, key=lambda t: self.leaving[t]))
        return self.fits(size_bytes)

    def _finish_leaving(self, t: int) -> None:
        self.now_s = max(self.now_s, self.leaving.pop(t))
        self.free(t)

    def free(self, t: int) -> None:
        """Free tensor `t` at once, after its offload, if there is one."""
        self.now_s = max(self.now_s, self.host.get(t, 0.0), self.ready_s.get(t, 0.0))
        self.leaving.pop(t, None)
        self.live.remove(t)
        self.memory_bytes -= self.offer.get_size_bytes(t)
        self.steps.append(Free(t))

    def let_go(self, t: int) -> None:
        """Send tensor `t` if it has a copy on the host, and free it otherwise."""
        if t in self.host:
            self.send(t)
        else:
            self.free(t)

    def compute(self, op_id: int) -> None:
        """Execute an op of the program."""
        op = self.offer.program.ops[op_id]
        self.now_s = max((self.now_s, *(self.ready_s.get(t, 0.0) for t in op.inputs))) + op.time_s
        self.steps.append(Compute(op_id))
        for t in op.outputs:
            if t not in self.live:
                self.live.add(t)
                self.ready_s[t] = self.now_s
                self.memory_bytes += self.offer.get_size_bytes(t)

    def can_send(self, t: int) -> bool:
        """Return True if tensor `t` may be offloaded, and the host has or can make space for it."""
        if t not in self.offer.by_tensor:
            return False
        limit = self.offer.host_bytes
        idle_bytes = sum(self.offer.get_size_bytes(u) for u in self.host if self.has(u))
        return t in self.host or limit is None or self.host_bytes - idle_bytes + self.offer.get_size_bytes(t) <= limit

    def send(self, t: int) -> None:
        """Offload tensor `t`, for which the host has or can make space."""
        if t not in self.host:
            limit = self.offer.host_bytes
            for other in [u for u in self.host if self.has(u)]:
                if limit is None or self.host_bytes + self.offer.get_size_bytes(t) <= limit:
                    break
                self.out_s = max(self.out_s, self.host.pop(other), self.read_s.get(other, 0.0))
                self.host_bytes -= self.offer.get_size_bytes(other)
                self.steps.append(Free(self.offer.by_tensor[other].host_tensor))
            self.out_s = self.host[t] = max(self.out_s, self.ready_s[t]) + self.offer.by_tensor[t].out.time_s
            self.host_bytes += self.offer.get_size_bytes(t)
            self.steps.append(Compute(self.offer.by_tensor[t].out.op))
        self.leaving[t] = max(self.host[t], self.ready_s[t])

    def fetch(self, t: int) -> None:
        """Reload tensor `t`, which has a copy on the host and is not in memory."""
        begins_s = max(self.in_s, self.now_s, self.host[t])
        self.in_s = self.ready_s[t] = self.read_s[t] = begins_s + self.offer.by_tensor[t].back.time_s
        self.live.add(t)
        self.memory_bytes += self.offer.get_size_bytes(t)
        self.steps.append(Compute(self.offer.by_tensor[t].back.op))
