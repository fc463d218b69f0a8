"""torchtune's ``OffloadActivations``: all saved tensors are offloaded, in parallel with the computation.

A tensor is offloaded when it is produced. The last five of them are a stash that stays on the device; when a sixth is produced,
the computation waits for the offload of the first, which is then freed. At the first op that reads a saved tensor the stash
serves it, and is then freed as a whole. Saved tensors that a backward op reads are reloaded during the previous such op, and
freed after their reader.

Published with one stream for both directions; here each has its own. There is no budget: the peak is what it is. Small tensors
stay, as with the option offload, and so do tensors that the host has no space for, where torchtune would fail.
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
    """Parameters of the method, with the published values.

    Attributes:
        stash: number of tensors that stay after their offload has begun, 1 or more.
        least_bytes: smaller tensors stay.
    """

    stash: int = 5
    least_bytes: int = 1024


def solve(request: Request) -> Result:
    """Return the schedule; LIMIT if it does not fit. The parameters are ``OffloadActivationsParams``."""
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
