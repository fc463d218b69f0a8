"""PyTorch's ``torch.autograd.graph.save_on_cpu``: all saved tensors are offloaded.

A tensor is offloaded when it is produced, and reloaded for each autograd node that reads it; both transfers are on the stream of
the computation, which waits. If the forward pass reads the tensor further on, the wait is after its last read, when the memory is
freed. There is no budget: the peak is what it is.

Small tensors stay, as with the option offload, and so do tensors that the host has no space for, where PyTorch would fail.
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


def solve(request: Request) -> Result:
    """Return the schedule; LIMIT if it does not fit."""
    return answer_by_offloading(request, "save-on-cpu", _generate_trials, what="saving on the host")


def _generate_trials(offer: Offer) -> Iterator[Candidate]:
    moves = Moves()
    for t in offer.select_fitting(offer.list_saved()):
        moves.sent.append((t, offer.get_producer(t)))
        moves.fetches += (Fetch(t, reader, reader) for reader in iterate_run_starts(offer.list_readers(t, forward=False)))
    yield Candidate(schedule_with(offer, range(len(offer.program.ops)), moves))
