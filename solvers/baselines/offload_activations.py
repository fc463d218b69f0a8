"""torchtune's ``OffloadActivations``: all that is saved for the backward pass goes to the host, beside the computation.

A tensor is copied out right when it is made. The last five of them are a stash that stays on the device; when a sixth is
made, the computation waits for the copy of the first, which goes then. At the first op that reads what was saved the stash
serves it, and then goes as a whole. What an op of the backward pass reads is asked for while the one before it that reads
such is executed, and goes when it is done.

Published with one stream for both directions; here each has its own. There is no budget: the peak is what it is. As the
option offers it: small tensors stay. What the host has no room for stays as well, where torchtune would fail.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial

from solvers.baselines.common.answers import Candidate
from solvers.baselines.common.offloading import Fetch, Moves, Offer, offloading_answer, runs, schedule_with
from solvers.request import Request
from solvers.result import Result


@dataclass(frozen=True, slots=True)
class OffloadActivationsParams:
    """As published.

    Attributes:
        stash: how many tensors stay after the copy out of each has begun, 1 or more.
        least_bytes: smaller tensors stay.
    """

    stash: int = 5
    least_bytes: int = 1024


def solve(request: Request) -> Result:
    """As ``solvers.registry.Solver``; LIMIT when that does not fit. The parameters are ``OffloadActivationsParams``."""
    params = request.params_of(OffloadActivationsParams())
    trials = partial(_trials, params=params)
    return offloading_answer(request, "offload-activations", trials, what="offloading all activations", settings=asdict(params))


def _trials(offer: Offer, params: OffloadActivationsParams) -> Iterator[Candidate]:
    sent = offer.fitting(t for t in offer.saved() if offer.size_bytes(t) >= params.least_bytes)
    moves = Moves(sent=[(t, offer.made_at(t)) for t in sent])
    unpacking = sorted({r for t in sent for r in runs(offer.readers(t, forward=False))})
    before = dict(zip(unpacking[1:], unpacking, strict=False))
    for place, t in enumerate(sent):
        stashed = place + params.stash >= len(sent)
        moves.held.append((t, unpacking[0] if stashed else offer.made_at(sent[place + params.stash])))
        for reader in runs(offer.readers(t, forward=False)):
            if not (stashed and reader == unpacking[0]):
                moves.fetches.append(Fetch(t, before.get(reader, reader), reader))
    yield Candidate(schedule_with(offer, range(len(offer.program.ops)), moves))
