"""torchtitan's ``sac_and_offload``: selective checkpointing, and what it saves goes to the host as far as that has room.

Of each block of the model a list of ops is saved, as in ``solvers.policies.sac``, and the rest is made again when it is needed.
What stays in memory from the forward pass, in any block but the last, is sent: the largest first, within a share of it and
what the host holds. A tensor is copied out right when it is made, and goes at the end of the block after the last one that
reads it. It is asked for before the first op of the backward pass of the block after its own, and stays until its last
reader.

The user chooses blocks, list and budget on the host: all lists and blocks are tried, with several shares, and the fastest
schedule that fits is taken.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial

from graphs.ir import Phase
from solvers.policies.checkpoint_blocks import blockings
from solvers.policies.offload.moves import Fetch, Moves, Offer, offloading_answer, schedule_with
from solvers.policies.replay import Candidate, failure, recompute_groups
from solvers.policies.sac import ops_on, save_lists
from solvers.request import Request
from solvers.result import Reason, Result


@dataclass(frozen=True, slots=True)
class SacAndOffloadParams:
    """What is tried.

    Attributes:
        shares: of the bytes that may be sent, as budgets on the host; from 0 to 1.
    """

    shares: tuple[float, ...] = (1.0, 0.75, 0.5, 0.25)


def solve(request: Request) -> Result:
    """As ``solvers.registry.Solver``; LIMIT when nothing that is tried fits. The parameters are ``SacAndOffloadParams``."""
    params = request.params_of(SacAndOffloadParams())
    what = "selective checkpointing with offload"
    if not request.graph.plain and not blockings(request.graph):
        why = f"{what} does not apply: the graph has no blocks, for no op belongs to a module inside the model"
        return failure(request, "sac-and-offload", why, Reason.INAPPLICABLE, settings=asdict(params))
    return offloading_answer(
        request, "sac-and-offload", partial(_trials, shares=params.shares), what=what, settings=asdict(params)
    )


def _trials(offer: Offer, shares: Sequence[float]) -> Iterator[Candidate]:
    """Every list with every choice of blocks and every share; lists that save the same ops once."""
    graph = offer.program
    tried: set[frozenset[int]] = set()
    for save_list in save_lists([op.target for op in graph.ops if op.phase is Phase.FORWARD]):
        saved = frozenset(t for op in ops_on(save_list, graph) for t in op.outputs)
        if saved in tried:
            continue
        tried.add(saved)
        for way in blockings(graph):
            computed = recompute_groups(graph, way.blocks, saved=saved, at_once=False).computed
            layers = Layers(offer, computed, way.blocks)
            for share in shares:
                settings = {"saves": save_list.name, **way.settings, "share": share}
                yield Candidate(schedule_with(offer, computed, layers.moves(share)), settings)


class Layers:
    """Executions of a step by layers: blocks in the order of the forward pass, which is the beginning of `computed`."""

    def __init__(self, offer: Offer, computed: Sequence[int], blocks: Sequence[str | None]) -> None:
        self.offer, self.computed = offer, computed
        forward = [op.id for op in offer.program.ops if op.phase is Phase.FORWARD]
        number: dict[str, int] = {}
        self.of_op = {op: number.setdefault(block, len(number)) for op in forward if (block := blocks[op]) is not None}
        self.last_op = {layer: op for op, layer in self.of_op.items()}
        self.last = max(self.last_op)
        self.begin_backward = len(forward)
        self.first_backward = self._first_backward()

    def _first_backward(self) -> dict[int, int]:
        """By layer the first position at which some of it is made again, or what is inside it is read."""
        first: dict[int, int] = {}
        inside: dict[int, int] = {}
        for op, layer in self.of_op.items():
            for t in self.offer.program.ops[op].outputs:
                if all(self.of_op.get(r) == layer for r in self.offer.program.consumers[t] if r < self.begin_backward):
                    inside[t] = layer
        for position in range(self.begin_backward, len(self.computed)):
            op = self.computed[position]
            touched = [self.of_op[op]] if op in self.of_op else []
            touched += [inside[t] for t in self.offer.program.ops[op].inputs if t in inside]
            for layer in touched:
                first.setdefault(layer, position)
        return first

    def moves(self, share: float) -> Moves:
        """What is sent, within `share` of what may be."""
        offer, again = self.offer, frozenset(self.computed[self.begin_backward :])
        reads: dict[int, int] = {}
        for position in range(self.begin_backward, len(self.computed)):
            for t in offer.program.ops[self.computed[position]].inputs:
                reads.setdefault(t, position)
        # With a single layer none is the last.
        layer = {t: self.of_op[op] for t in reads if t in offer.trips and (op := offer.made_at(t)) in self.of_op}
        may_go = [t for t, of in layer.items() if offer.made_at(t) not in again and (of < self.last or not self.last)]
        may_go.sort(key=lambda t: (-offer.size_bytes(t), offer.made_at(t), t))
        room = int(share * sum(map(offer.size_bytes, may_go)))
        capacity = room if offer.host_bytes is None else min(room, offer.host_bytes)
        moves = Moves()
        for t in replace(offer, host_bytes=capacity).fitting(may_go):
            readers = [self.of_op[r] for r in offer.readers(t, forward=True) if r in self.of_op]
            goes_in = min(max((layer[t], *readers)) + 1, self.last)
            asked_in = min(layer[t] + 1, self.last)
            moves.sent.append((t, offer.made_at(t)))
            moves.held.append((t, self.last_op[goes_in]))
            moves.fetches.append(Fetch(t, min(self.first_backward.get(asked_in, reads[t]), reads[t]), reads[t]))
        return moves
