"""DELTA (2022): when memory runs out, a tensor is swapped or freed for recomputation, whichever costs less.

Ops run in program order. While there is no space, the tensor of least 1 / (bytes x staleness) is evicted, staleness being the
time since it was last read. It is recomputed later if that takes less than two transfers, otherwise it is swapped. Inputs of the
next ops that are on the host are reloaded ahead, as far as there is space without eviction.

Where the paper leaves it open: recomputation time includes missing ancestors; a tensor is freed after its last use; the
computation waits for an offload only if its memory is needed; a tensor with a copy on the host is not offloaded again; several
numbers of ops to look ahead are tried.

Feasibility is not monotone in the budget. A failure proves nothing.
"""

from collections.abc import Callable
from functools import partial

from planner.graphs.schedule import Schedule
from planner.graphs.units import format_bytes
from planner.solvers.baselines.common.offloading import Device, Offer, answer_by_offloading, offer_of
from planner.solvers.baselines.common.online import OnlineFailedError
from planner.solvers.baselines.common.recomputation import find_last_needed, find_repeatable
from planner.solvers.baselines.common.verdicts import Candidate, answer, build_failure
from planner.solvers.request import Request
from planner.solvers.result import Reason, Result

_AHEAD = (1, 2, 4, 8)  # numbers of ops for which tensors are reloaded ahead
_THRASH_FACTOR = 2.0  # a step whose computation takes longer than this times the one without recomputation is a failure
_WORK_PER_OP = 5e-5  # of the evictions for an op and its execution


def solve(request: Request) -> Result:
    """Return the fastest run that ends; LIMIT if all run out of memory or thrash."""
    offer = offer_of(request.graph)
    if offer is None:
        return answer_by_offloading(request, "delta", lambda _: (), what="DELTA")
    trials: list[Candidate] = []
    failed: OnlineFailedError | None = None
    stop = partial(request.explain_end, _WORK_PER_OP)
    for ahead in _AHEAD:
        try:
            schedule = DeltaRun(offer, request.budget_bytes, ahead, stop).run()
            trials.append(Candidate(schedule, {"ahead": ahead}))
        except OnlineFailedError as error:
            failed = failed or error
    if trials or failed is None:
        return answer(request, "delta", trials, what="DELTA")
    why = f"delta fails at {format_bytes(request.budget_bytes)}: {failed}. Raise the budget, or use the solver windows"
    return build_failure(request, "delta", why, failed.reason)


class DeltaRun:
    """One run; `run` may be called once."""

    def __init__(self, offer: Offer, budget_bytes: int, ahead: int, stop: Callable[[], str]) -> None:
        self.offer, self.graph, self.ahead, self.stop = offer, offer.program, ahead, stop
        self.device = Device(offer, budget_bytes)
        self.left_s = (_THRASH_FACTOR - 1.0) * self.graph.time_s
        self.again = find_repeatable(self.graph)
        needed = find_last_needed(self.graph)
        # A tensor that cannot be recomputed is needed as long as its readers may be recomputed.
        self.last = [
            max((t.producers[0], *(r if self.again[t.producers[0]] else needed[r] for r in self.graph.consumers[t.id])))
            if t.producers
            else -1
            for t in self.graph.tensors
        ]
        self.dies: dict[int, list[int]] = {}
        for t in self.graph.tensors:
            if t.producers and t.id not in self.graph.kept:
                self.dies.setdefault(self.last[t.id], []).append(t.id)
        self.touched_s = [0.0] * len(self.graph.tensors)
        self.locks = [0] * len(self.graph.tensors)
        self.now = 0

    def run(self) -> Schedule:
        """Return the schedule of the run.

        Raises:
            OnlineFailedError: out of memory, thrashing, or stopped.
        """
        for op in self.graph.ops:
            self.now = op.id
            self._look_ahead()
            self._execute(op.id)
            for t in self.dies.get(op.id, ()):
                if t in self.device.live:
                    self.device.free(t)
        return self.device.schedule

    def _look_ahead(self) -> None:
        device, op = self.device, self.graph.ops[self.now]
        coming = [t for next_op in self.graph.ops[self.now : self.now + self.ahead + 1] for t in next_op.inputs]
        missing = [t for t in op.inputs if not self._is_there(t)]
        own_bytes = sum(map(self.offer.get_size_bytes, {*missing, *op.outputs})) + op.workspace_bytes
        for t in coming:
            if t in device.leaving:
                device.recall(t)
            elif (
                t not in missing
                and not self._is_there(t)
                and t in device.host
                and device.fits(own_bytes + self.offer.get_size_bytes(t))
            ):
                device.fetch(t)

    def _is_there(self, t: int) -> bool:
        return self.graph.tensors[t].static or t in self.device.live

    def _execute(self, op_id: int) -> None:
        """Execute op `op_id` after recomputing or reloading its missing inputs; without recursion, since chains may be long."""
        stack = [self._begin(op_id)]
        while stack:
            op, missing = stack[-1]
            while missing and missing[-1] in self.device.live:
                self._lock(missing.pop())
            if not missing:
                stack.pop()
                self._compute(op, stack[-1][1][-1] if stack else None)
                continue
            t = missing[-1]
            if t in self.device.host:
                self._make_room(self.offer.get_size_bytes(t), op)
                self.device.fetch(t)
            else:
                stack.append(self._begin(self.graph.tensors[t].producers[0]))
            if reason := self.stop():
                raise OnlineFailedError(reason, Reason.TIME)

    def _begin(self, op_id: int) -> tuple[int, list[int]]:
        """Lock the inputs in memory; return the op and the other inputs."""
        inputs = [t for t in self.graph.ops[op_id].inputs if not self.graph.tensors[t].static]
        missing = [t for t in inputs if t not in self.device.live]
        for t in inputs:
            if t in self.device.live:
                self._lock(t)
        return op_id, missing

    def _lock(self, t: int) -> None:
        self.device.recall(t)
        self.locks[t] += 1

    def _compute(self, op_id: int, wanted: int | None) -> None:
        """Execute op `op_id` again for output `wanted`, or for the first time (None)."""
        device, op = self.device, self.graph.ops[op_id]
        for t in op.outputs:
            device.recall(t)
        self._make_room(sum(map(self.offer.get_size_bytes, op.outputs)) + op.workspace_bytes, op_id)
        device.compute(op_id)
        for t in (*op.inputs, *op.outputs):
            self.touched_s[t] = device.now_s
        for t in op.inputs:
            self.locks[t] -= not self.graph.tensors[t].static
        if wanted is None:
            return
        self.left_s -= op.time_s
        if self.left_s < 0:
            raise OnlineFailedError("it thrashes: it recomputes for longer than it may", Reason.THRASHING)
        for t in (*op.inputs, *op.outputs):
            done = t in device.live and t not in self.graph.kept and self.last[t] < self.now
            if done and not self.locks[t] and t != wanted:
                device.free(t)

    def _make_room(self, size_bytes: int, op_id: int) -> None:
        device = self.device
        while not device.make_room(size_bytes):
            outputs = self.graph.ops[op_id].outputs
            idle = [t for t in device.live if not self.locks[t] and t not in self.graph.kept and t not in outputs]
            idle.sort(key=lambda t: (-self.offer.get_size_bytes(t) * (device.now_s - self.touched_s[t]), t))
            if not any(self._evict(t) for t in idle):
                raise OnlineFailedError.out_of_memory(self.graph.ops[op_id], size_bytes, device.memory_bytes)

    def _evict(self, t: int) -> bool:
        """Free or swap tensor `t`; return False if neither is possible."""
        again = self.again[self.graph.tensors[t].producers[0]]
        swap = self.device.can_send(t)
        if again and swap:
            trip = self.offer.by_tensor[t]
            swap = self._compute_recompute_s(t) >= trip.back.time_s + (0.0 if t in self.device.host else trip.out.time_s)
        if swap:
            self.device.send(t)
        elif again:
            self.device.free(t)
        return swap or again

    def _compute_recompute_s(self, t: int) -> float:
        """Return the seconds to recompute tensor `t`, with the ancestors that are neither on the device nor on the host."""
        ops: set[int] = set()
        wanted = [t]
        while wanted:
            producer = self.graph.tensors[wanted.pop()].producers[0]
            if producer not in ops:
                ops.add(producer)
                inputs = self.graph.ops[producer].inputs
                wanted += (i for i in inputs if not self._is_there(i) and i not in self.device.host)
        return sum(self.graph.ops[op].time_s for op in ops)
