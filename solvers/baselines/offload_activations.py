"""torchtune's ``OffloadActivations``: all saved tensors are offloaded, in parallel with the computation.

A tensor is offloaded when it is produced. The last five of them are a stash that stays on the device; when a sixth is produced,
the computation waits for the offload of the first, which is then freed. At the first op that reads a saved tensor the stash
serves it, and is then freed as a whole. Saved tensors that a backward op reads are reloaded during the previous such op, and
freed after their reader.

Published with one stream for both directions; here each has its own. There is no budget: the peak is what it is. Small tensors
stay, as with the option offload, and so do tensors that the host has no space for, where torchtune would fail.
"""

from collections.abc import Iterator

from planner.solvers.baselines.common.offloading import (
    Fetch,
    Moves,
    Offer,
    answer_by_offloading,
    iterate_run_starts,
    schedule_with,
)
from planner.solvers.baselines.common.verdicts import Candidate
from planner.solvers.request import Request
from planner.solvers.result import Result

# The published values.
_STASH = 5  # tensors that stay after their offload has begun
_LEAST_BYTES = 1024  # smaller tensors stay


def solve(request: Request) -> Result:
    """Return the schedule; LIMIT if it does not fit."""
    return answer_by_offloading(request, "offload-activations", _generate_trials, what="offloading all activations")


def _generate_trials(offer: Offer) -> Iterator[Candidate]:
    sent = offer.select_fitting(t for t in offer.list_saved() if offer.get_size_bytes(t) >= _LEAST_BYTES)
    moves = Moves(sent=[(t, offer.get_producer(t)) for t in sent])
    unpacking = sorted({r for t in sent for r in iterate_run_starts(offer.list_readers(t, forward=False))})
    before = dict(zip(unpacking[1:], unpacking, strict=False))
    for place, t in enumerate(sent):
        stashed = place + _STASH >= len(sent)
        moves.held.append((t, unpacking[0] if stashed else offer.get_producer(sent[place + _STASH])))
        for reader in iterate_run_starts(offer.list_readers(t, forward=False)):
            if not (stashed and reader == unpacking[0]):
                moves.fetches.append(Fetch(t, before.get(reader, reader), reader))
    yield Candidate(schedule_with(offer, range(len(offer.program.ops)), moves))
