"""Swapping in order of measured free time, as in Capuchin (Peng et al., ASPLOS 2020), without its recomputation.

Times of accesses are measured in a step that keeps everything. For each tensor the longest interval between two accesses counts;
its free time is this interval less the two transfers. Tensors are swapped in descending order of free time, even below 0, until
the step fits.

A tensor is offloaded after the first of the two accesses, and the computation waits for the transfer only if the memory is
needed. It is reloaded as late as it arrives in time for the second access, given the other transfers on the channel (which
Capuchin learns by feedback from step to step), or later if there is no space.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise

from planner.graphs.schedule import Schedule
from planner.graphs.simulate import simulate
from planner.solvers.baselines.common.offloading import Device, Offer, answer_by_offloading
from planner.solvers.baselines.common.verdicts import Candidate
from planner.solvers.request import Request
from planner.solvers.result import Result


@dataclass(frozen=True, slots=True)
class TensorSwap:
    """An offload of `tensor` between its accesses by ops `after` and `before`; `free_s` is the interval less the transfers."""

    tensor: int
    after: int
    before: int
    free_s: float


def solve(request: Request) -> Result:
    """Return the schedule with the fewest swaps that fit; LIMIT if swapping everything does not fit."""
    trials = partial(_generate_trials, budget_bytes=request.budget_bytes)
    return answer_by_offloading(request, "capuchin-swap", trials, what="swapping by free time")


def _generate_trials(offer: Offer, budget_bytes: int) -> Iterator[Candidate]:
    """Yield trials of a bisection for the fewest swaps that fit; the last one has all swaps if fewer do not fit."""
    swaps = list_swaps(offer)
    too_few, enough = -1, len(swaps)
    while too_few + 1 < enough:
        count = (too_few + enough) // 2
        candidate = Candidate(Swapping(offer, swaps[:count], budget_bytes).schedule(), {"swaps": count})
        if simulate(offer.whole, candidate.schedule).peak_bytes <= budget_bytes:
            enough = count
            yield candidate
        else:
            too_few = count
    if enough == len(swaps):
        yield Candidate(Swapping(offer, swaps, budget_bytes).schedule(), {"swaps": enough})


def list_swaps(offer: Offer) -> list[TensorSwap]:
    """Return the possible swaps, those with the most free time first."""
    starts_s = _compute_starts(offer)
    swaps: list[TensorSwap] = []
    for t, transfers in offer.by_tensor.items():
        accesses = [offer.get_producer(t), *offer.program.consumers[t]]
        gaps = [(starts_s[b] - starts_s[a + 1], a, b) for a, b in pairwise(accesses) if b > a + 1]
        if gaps:
            away_s, after, before = max(gaps)
            swaps.append(TensorSwap(t, after, before, away_s - transfers.out.time_s - transfers.back.time_s))
    return sorted(swaps, key=lambda swap: -swap.free_s)


def _compute_starts(offer: Offer) -> list[float]:
    """Return the start of each op in a step that keeps everything, and the end of the step."""
    return list(accumulate((op.time_s for op in offer.program.ops), initial=0.0))


class Swapping:
    """A step with `swaps`."""

    def __init__(self, offer: Offer, swaps: Sequence[TensorSwap], budget_bytes: int) -> None:
        self.offer, self.device = offer, Device(offer, budget_bytes)
        self.leaves: dict[int, list[TensorSwap]] = {}
        self.asked: dict[int, list[TensorSwap]] = {}
        self.last = [max((t.producers[0], *offer.program.consumers[t.id])) if t.producers else -1 for t in offer.program.tensors]
        for swap in swaps:
            self.leaves.setdefault(swap.after, []).append(swap)
        for begin, swap in self._plan_reloads(swaps):
            self.asked.setdefault(begin, []).append(swap)

    def _plan_reloads(self, swaps: Sequence[TensorSwap]) -> Iterator[tuple[int, TensorSwap]]:
        """Yield each swap with the op before which its reload is issued, planned backwards over the channel."""
        ops, starts_s = self.offer.program.ops, _compute_starts(self.offer)
        memory = self._compute_memory_bytes(swaps)
        free_until_s = starts_s[-1]
        for swap in sorted(swaps, key=lambda swap: -swap.before):
            free_until_s = min(free_until_s, starts_s[swap.before]) - self.offer.by_tensor[swap.tensor].back.time_s
            begin = max(bisect_right(starts_s, free_until_s, hi=len(ops)) - 1, swap.after + 1)
            begin = min(begin, swap.before)
            size = self.offer.get_size_bytes(swap.tensor)
            full = [op for op in range(begin, swap.before) if memory[op] + size > self.device.budget_bytes]
            begin = full[-1] + 1 if full else begin
            for op in range(begin, swap.before):
                memory[op] += size
            yield begin, swap

    def _compute_memory_bytes(self, swaps: Sequence[TensorSwap]) -> list[int]:
        """Return the memory during each op, if swaps took no time."""
        ops = self.offer.program.ops
        change = [0] * (len(ops) + 1)
        for t in self.offer.program.tensors:
            if t.producers:
                change[t.producers[0]] += t.size_bytes
                change[len(ops) if t.id in self.offer.program.kept else self.last[t.id] + 1] -= t.size_bytes
        for swap in swaps:
            change[swap.after + 1] -= self.offer.get_size_bytes(swap.tensor)
            change[swap.before] += self.offer.get_size_bytes(swap.tensor)
        lasting = accumulate(change, initial=self.offer.program.static_bytes)
        next(lasting)
        return [held + op.workspace_bytes for held, op in zip(lasting, ops, strict=False)]

    def schedule(self) -> Schedule:
        """Return the schedule, which may exceed the budget."""
        device, program = self.device, self.offer.program
        for op in program.ops:
            for swap in self.asked.get(op.id, ()):
                self._bring(swap.tensor)
            read = [t for t in op.inputs if not program.tensors[t].static]
            for t in sorted(read, key=lambda t: t not in device.live):  # live ones first, so that they stay
                self._bring(t)
            device.make_room(sum(map(self.offer.get_size_bytes, op.outputs)) + op.workspace_bytes)
            device.compute(op.id)
            for t in (*op.inputs, *op.outputs):
                if self.last[t] == op.id and t not in program.kept:
                    device.free(t)
            for swap in self.leaves.get(op.id, ()):
                if device.can_send(swap.tensor):
                    device.send(swap.tensor)
        return device.schedule

    def _bring(self, t: int) -> None:
        if t not in self.device.live:
            self.device.make_room(self.offer.get_size_bytes(t))
            self.device.fetch(t)
        self.device.recall(t)
