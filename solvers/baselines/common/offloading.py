"""What baselines that offload share: what they may send, steps from where copies stand, and steps issued one by one.

A copy is issued between two executions. Memory on the device is taken where a copy-in is issued, and goes with a ``Free``, at
which the computation waits for the copy-out. So *when to free* is what says how long a copy-out may take beside the
computation; where the source of a rule leaves that open, what suits it is chosen. A copy-out begins once its tensor is made
and the channel is free, even where a rule issues it later: the judge knows no other reason to wait.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from graphs.ir import Graph, Phase
from graphs.options.offload import RoundTrip, without_copies
from graphs.schedule import Compute, Free, Schedule, Step, schedule_of
from solvers.baselines.common.answers import Candidate, answer, failure
from solvers.baselines.common.blocks import blockings
from solvers.request import Request
from solvers.result import Reason, Result


@dataclass(frozen=True, slots=True)
class Offer:
    """A graph that offers round trips to the host.

    Attributes:
        whole: with them.
        program: without, the same ids.
        trips: by tensor.
        host_bytes: what the host holds at most, None where all of them together fit.
    """

    whole: Graph
    program: Graph
    trips: Mapping[int, RoundTrip]
    host_bytes: int | None

    def size_bytes(self, t: int) -> int:
        """Of tensor `t`."""
        return self.program.tensors[t].size_bytes

    def made_at(self, t: int) -> int:
        """The op that makes tensor `t`."""
        return self.program.tensors[t].producers[0]

    def readers(self, t: int, *, forward: bool) -> list[int]:
        """The ops that read tensor `t` in the forward pass, or after it."""
        return [r for r in self.program.consumers[t] if (self.program.ops[r].phase is Phase.FORWARD) == forward]

    def saved(self) -> list[int]:
        """What autograd saves, as far as a trip is offered: made in the forward pass and read after it; in order of making."""
        ops = self.program.ops
        made = [t for t in self.trips if ops[self.made_at(t)].phase is Phase.FORWARD and self.readers(t, forward=False)]
        return sorted(made, key=lambda t: (self.made_at(t), t))

    def fitting(self, tensors: Iterable[int]) -> list[int]:
        """Those of `tensors` that the host has room for together, the first first; what is too large is passed over."""
        fit: list[int] = []
        taken = 0
        for t in tensors:
            if self.host_bytes is None or taken + self.size_bytes(t) <= self.host_bytes:
                fit.append(t)
                taken += self.size_bytes(t)
        return fit


def offer_of(graph: Graph) -> Offer | None:
    """What `graph` offers; None if no round trips.

    Raises:
        GraphError: it has other choices.
    """
    program, copies = without_copies(graph)
    return None if copies is None else Offer(graph, program, copies.trips, copies.host_bytes)


def offloading_answer(
    request: Request,
    solver: str,
    trials: Callable[[Offer], Iterable[Candidate]],
    *,
    what: str,
    settings: Mapping[str, object],
    by_blocks: bool = False,
) -> Result:
    """As ``answers.answer``, for methods that need round trips to the host, and blocks if they go `by_blocks`."""
    offer = offer_of(request.graph)
    if offer is None:
        why = f"{what} does not apply: the graph offers no round trips to the host; solve with the option offload"
        return failure(request, solver, why, Reason.INAPPLICABLE, settings=settings)
    if by_blocks and not blockings(request.graph):
        why = f"{what} does not apply: the graph has no blocks, for no op belongs to a module inside the model"
        return failure(request, solver, why, Reason.INAPPLICABLE, settings=settings)
    return answer(request, solver, trials(offer), what=what, settings=settings)


@dataclass(frozen=True, slots=True)
class Fetch:
    """Tensor `tensor` comes back for the read at position `read`; asked for before `begin`, or once it is gone if later."""

    tensor: int
    begin: int
    read: int


@dataclass(slots=True)
class Moves:
    """Copies among executions, by positions in a list of these.

    Attributes:
        sent: (tensor, position): copied out after that execution.
        fetches: what comes back.
        held: (tensor, position): stays on the device until that execution is done.
    """

    sent: list[tuple[int, int]] = field(default_factory=list)
    fetches: list[Fetch] = field(default_factory=list)
    held: list[tuple[int, int]] = field(default_factory=list)


def schedule_with(offer: Offer, computed: Sequence[int], moves: Moves) -> Schedule:
    """The steps that execute `computed` with `moves`: tensors go after their last use before they come back."""
    out: dict[int, list[int]] = {}
    back: dict[int, list[int]] = {}
    held: dict[int, list[int]] = {}
    touched: dict[int, list[int]] = {t: [] for t in offer.trips}
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
        order += [offer.trips[t].in_op for t in back.get(position, ())]
        if position in held:
            stays[len(order)] = held[position]
        order.append(op)
        order += [offer.trips[t].out_op for t in out.get(position, ())]
    return schedule_of(offer.whole, order, stays)


def runs(readers: Sequence[int]) -> Iterator[int]:
    """The first of each run of `readers` that follow each other: as one node of autograd they read one copy."""
    for place, reader in enumerate(readers):
        if not place or readers[place - 1] != reader - 1:
            yield reader


class Layers:
    """Executions of a step by layers: blocks in the order of the forward pass, which is the beginning of `computed`.

    Attributes:
        of_op: by op of the forward pass its layer, for those in one.
        inside: by tensor that is read in its own layer only, as far as the forward pass goes, that layer.
        last_op: by layer its last op in the forward pass.
        last: the last layer.
        begin_backward: position of the first execution after the forward pass.
        first_backward: by layer the first position at which some of it is made again, or what is inside it is read.
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
        """What stays from the forward pass and may be sent, made in any layer but the last; with one layer also in that."""
        again = frozenset(self.computed[self.begin_backward :])
        made = [(op, layer) for op, layer in self.of_op.items() if op not in again and (layer < self.last or not self.last)]
        reads = self._first_reads()
        outputs = self.offer.program.ops
        return [t for op, _ in made for t in outputs[op].outputs if t in reads and t in self.offer.trips]

    def moves(self, tensors: Iterable[int]) -> Moves:
        """How `tensors` are sent, of those that may be: out when made, gone a layer after the last one that reads them.

        They are asked for before the backward pass of the layer after their own.
        """
        reads = self._first_reads()
        moves = Moves()
        for t in tensors:
            layer = self.of_op[self.offer.made_at(t)]
            readers = [self.of_op[r] for r in self.offer.readers(t, forward=True) if r in self.of_op]
            asked = self.first_backward.get(min(layer + 1, self.last), reads[t])
            made = self.offer.made_at(t)
            goes = self.last_op[min(max((layer, *readers)) + 1, self.last)]
            moves.sent.append((t, made))
            moves.held.append((t, max(made, goes)))  # parts of layers may stand among those of others
            moves.fetches.append(Fetch(t, min(asked, reads[t]), reads[t]))
        return moves

    def _first_reads(self) -> dict[int, int]:
        """By tensor the position at which it is first read after the forward pass."""
        reads: dict[int, int] = {}
        for position in range(self.begin_backward, len(self.computed)):
            for t in self.offer.program.ops[self.computed[position]].inputs:
                reads.setdefault(t, position)
        return reads


class Device:
    """The device and its two channels while steps are issued, with memory and clocks as the judge will have them.

    A tensor that is sent stays in memory while it is copied out: it *leaves*. It is freed once its copy is done, or when
    room is wanted, which the computation then waits for; if it is read before, it has not left.

    Copies on the host stay: what has one already is sent in no time. They are freed where the host has no more room, those
    of tensors that are on the device first.

    Attributes:
        now_s: when the computation has done what was issued so far.
        live: produced tensors in memory, those that leave included.
        leaving: by tensor when its copy out is done.
        host: tensors that have a copy there, or will have.
        memory_bytes: taken on the device, static bytes included.
    """

    def __init__(self, offer: Offer, budget_bytes: int) -> None:
        self.offer, self.budget_bytes = offer, budget_bytes
        self.steps: list[Step] = []
        self.now_s = self.out_s = self.in_s = 0.0
        self.live: set[int] = set()
        self.leaving: dict[int, float] = {}
        self.host: dict[int, float] = {}  # when the copy is there
        self.read_s: dict[int, float] = {}  # when the last copy-in of it ends
        self.ready_s: dict[int, float] = {}
        self.host_bytes = 0
        self.memory_bytes = offer.program.static_bytes

    @property
    def schedule(self) -> Schedule:
        """All steps so far."""
        return Schedule(tuple(self.steps))

    def has(self, t: int) -> bool:
        """Whether tensor `t` is in memory to stay."""
        return t in self.live and t not in self.leaving

    def recall(self, t: int) -> None:
        """Tensor `t`, if it leaves, stays after all."""
        self.leaving.pop(t, None)

    def fits(self, size_bytes: int) -> bool:
        """Whether there is room for so much now, without waiting."""
        for t in [t for t, done_s in self.leaving.items() if done_s <= self.now_s]:
            self._gone(t)
        return self.memory_bytes + size_bytes <= self.budget_bytes

    def make_room(self, size_bytes: int) -> bool:
        """Wait for what leaves, the first first, until there is room for so much; False if that is not enough."""
        while not self.fits(size_bytes) and self.leaving:
            self._gone(min(self.leaving, key=lambda t: self.leaving[t]))
        return self.fits(size_bytes)

    def _gone(self, t: int) -> None:
        self.now_s = max(self.now_s, self.leaving.pop(t))
        self.free(t)

    def free(self, t: int) -> None:
        """Tensor `t` goes at once; its copy out, if there is one, is waited for."""
        self.now_s = max(self.now_s, self.host.get(t, 0.0), self.ready_s.get(t, 0.0))
        self.leaving.pop(t, None)
        self.live.remove(t)
        self.memory_bytes -= self.offer.size_bytes(t)
        self.steps.append(Free(t))

    def compute(self, op_id: int) -> None:
        """Execute an op of the program."""
        op = self.offer.program.ops[op_id]
        self.now_s = max((self.now_s, *(self.ready_s.get(t, 0.0) for t in op.inputs))) + op.time_s
        self.steps.append(Compute(op_id))
        for t in op.outputs:
            if t not in self.live:
                self.live.add(t)
                self.ready_s[t] = self.now_s
                self.memory_bytes += self.offer.size_bytes(t)

    def can_send(self, t: int) -> bool:
        """Whether tensor `t` may go to the host, and there is or can be room for it."""
        if t not in self.offer.trips:
            return False
        limit = self.offer.host_bytes
        idle_bytes = sum(self.offer.size_bytes(u) for u in self.host if self.has(u))
        return t in self.host or limit is None or self.host_bytes - idle_bytes + self.offer.size_bytes(t) <= limit

    def send(self, t: int) -> None:
        """Tensor `t`, for which there is or can be room on the host, leaves."""
        if t not in self.host:
            limit = self.offer.host_bytes
            for other in [u for u in self.host if self.has(u)]:
                if limit is None or self.host_bytes + self.offer.size_bytes(t) <= limit:
                    break
                self.out_s = max(self.out_s, self.host.pop(other), self.read_s.get(other, 0.0))
                self.host_bytes -= self.offer.size_bytes(other)
                self.steps.append(Free(self.offer.trips[other].host_tensor))
            self.out_s = self.host[t] = max(self.out_s, self.ready_s[t]) + self.offer.trips[t].out_s
            self.host_bytes += self.offer.size_bytes(t)
            self.steps.append(Compute(self.offer.trips[t].out_op))
        self.leaving[t] = max(self.host[t], self.ready_s[t])

    def fetch(self, t: int) -> None:
        """Tensor `t`, which has a copy on the host and is not in memory, is asked for."""
        begins_s = max(self.in_s, self.now_s, self.host[t])
        self.in_s = self.ready_s[t] = self.read_s[t] = begins_s + self.offer.trips[t].in_s
        self.live.add(t)
        self.memory_bytes += self.offer.size_bytes(t)
        self.steps.append(Compute(self.offer.trips[t].in_op))
