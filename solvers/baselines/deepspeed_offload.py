"""DeepSpeed's activation offload (DeepCompile, 2025): all large tensors are offloaded, then the largest are kept instead.

All saved tensors of floating point and at least 5 MiB are offloaded after their last use in the forward pass, and the computation
waits at once. The peak of this plan is the floor. The budget above it is spent on keeping tensors: the largest first, each that
fits into the rest. The others are reloaded before their first reader, earlier by as many ops as take as long as the transfer,
while the profiled memory with all tensors reloaded by then is within the budget; they stay until their last reader.

Published with the peak of the forward pass as the floor, less a tenth of the device for the allocator; here without that tenth,
and also with the peak of the whole step, whichever is faster among those that fit.
"""

from collections.abc import Iterator, Sequence
from functools import partial

from planner.graphs.ir import Phase
from planner.graphs.schedule import Compute, Schedule
from planner.graphs.simulate import simulate
from planner.solvers.baselines.common.offloading import Fetch, Moves, Offer, answer_by_offloading, schedule_with
from planner.solvers.baselines.common.verdicts import Candidate
from planner.solvers.request import Request
from planner.solvers.result import Result

_LEAST_BYTES = 5 * 2**20  # as published; smaller tensors stay


def solve(request: Request) -> Result:
    """Return the faster of the two plans that fits; LIMIT if neither does."""
    trials = partial(_generate_trials, budget_bytes=request.budget_bytes)
    return answer_by_offloading(request, "deepspeed-offload", trials, what="DeepSpeed's offload")


def _generate_trials(offer: Offer, budget_bytes: int) -> Iterator[Candidate]:
    dtypes = {t: offer.program.tensors[t].dtype for t in offer.list_saved() if offer.get_size_bytes(t) >= _LEAST_BYTES}
    large = [t for t, dtype in dtypes.items() if not dtype or "float" in dtype]  # if unknown, it counts as floating point
    eligible = offer.select_fitting(sorted(large, key=lambda t: -offer.get_size_bytes(t)))
    plan = _OffloadPlan(offer, eligible)
    forward = [op.id for op in offer.program.ops if op.phase is Phase.FORWARD]
    floors = {"forward pass": max((plan.memory_bytes[op] for op in forward), default=0), "step": max(plan.memory_bytes)}
    for name, floor_bytes in floors.items():
        room = budget_bytes - floor_bytes
        moved: list[int] = []
        for t in eligible:
            if offer.get_size_bytes(t) <= room:
                room -= offer.get_size_bytes(t)
            else:
                moved.append(t)
        yield Candidate(_OffloadPlan(offer, moved).reload_early(budget_bytes), {"floor": name})


class _OffloadPlan:
    """A plan in which tensors `moved` are offloaded and reloaded just in time.

    Attributes:
        memory_bytes: during each op of the program.
    """

    def __init__(self, offer: Offer, moved: Sequence[int]) -> None:
        self.offer = offer
        self.ops = range(len(offer.program.ops))
        self.sent = [(t, max((offer.get_producer(t), *offer.list_readers(t, forward=True)))) for t in moved]
        self.first = sorted((offer.list_readers(t, forward=False)[0], t) for t in moved)
        schedule = self._schedule([Fetch(t, reader, reader) for reader, t in self.first])
        memory = simulate(offer.whole, schedule).memory_bytes
        at = {step.op: memory[k] for k, step in enumerate(schedule.steps) if isinstance(step, Compute)}
        self.memory_bytes = [at[op] for op in self.ops]

    def reload_early(self, budget_bytes: int) -> Schedule:
        """Return the schedule that reloads tensors early enough, as far as memory allows."""
        offer, ops = self.offer, self.offer.program.ops
        fetches: list[Fetch] = []
        brought_bytes = 0
        for reader, t in self.first:
            begin, passed_s = reader, 0.0
            brought_bytes += offer.get_size_bytes(t)
            while (
                passed_s < offer.by_tensor[t].back.time_s
                and ops[begin - 1].phase is not Phase.FORWARD
                and self.memory_bytes[begin - 1] + brought_bytes <= budget_bytes
            ):
                begin -= 1
                passed_s += ops[begin].time_s
            fetches.append(Fetch(t, begin, reader))
        return self._schedule(fetches)

    def _schedule(self, fetches: Sequence[Fetch]) -> Schedule:
        return schedule_with(self.offer, self.ops, Moves(sent=self.sent, fetches=list(fetches)))
