"""What policies share that send tensors to the host: what they may send, and steps from where copies stand.

A copy is issued between two executions. Memory on the device is taken where a copy-in is issued, and goes with a ``Free``, at
which the computation waits for the copy-out. So *when to free* is what says how long a copy-out may take beside the
computation; where the source of a rule leaves that open, what suits it is chosen. A copy-out begins once its tensor is made
and the channel is free, even where a rule issues it later: the judge knows no other reason to wait.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from graphs.ir import Graph, Phase
from graphs.options.offload import RoundTrip, without_copies
from graphs.schedule import Schedule, schedule_of
from solvers.policies.checkpoint_blocks import blockings
from solvers.policies.replay import Candidate, answer, failure
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
    """As ``solvers.policies.replay.answer``, for methods that need round trips to the host, and blocks if they go `by_blocks`."""
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
