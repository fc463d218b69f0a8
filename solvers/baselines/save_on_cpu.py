"""PyTorch's ``torch.autograd.graph.save_on_cpu``: all that is saved for the backward pass goes to the host.

A tensor is copied out right when it is made, and comes back when it is read, for each node of autograd anew; both copies are
in the stream of the computation, which waits. Where the forward pass goes on reading a tensor, the wait is put off until
it does no longer, for only then the memory is wanted. There is no budget: the peak is what it is.

As the option offers it: small tensors stay. What the host has no room for stays as well, where PyTorch would fail.
"""

from collections.abc import Iterator

from solvers.baselines.common.answers import Candidate
from solvers.baselines.common.offloading import Fetch, Moves, Offer, offloading_answer, runs, schedule_with
from solvers.request import Request
from solvers.result import Result


def solve(request: Request) -> Result:
    """As ``solvers.registry.Solver``; LIMIT when that does not fit."""
    return offloading_answer(request, "save-on-cpu", _trials, what="saving on the host", settings={})


def _trials(offer: Offer) -> Iterator[Candidate]:
    moves = Moves()
    for t in offer.fitting(offer.saved()):
        moves.sent.append((t, offer.made_at(t)))
        moves.fetches += (Fetch(t, reader, reader) for reader in runs(offer.readers(t, forward=False)))
    yield Candidate(schedule_with(offer, range(len(offer.program.ops)), moves))
