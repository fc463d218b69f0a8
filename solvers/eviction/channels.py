"""An estimate of the load of the channels to the host and back, from which eviction knows what a transfer costs.

That is the time that the computation would wait for it, plus a price for channel time, which another tensor might use.

Known weakness: offloads are taken to follow each other in the order in which they are decided, and no reload starts before the
peak of keeping everything. The estimate chooses between alternatives only; the times of the schedule are computed when it is
decoded.
"""

from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from planner.solvers.problem import Problem

NEVER = 1 << 60  # the next use of a tensor that is not used again


class Channels:
    """An estimate of both channels: transfers to the host one at a time, each after its tensor was produced; reloads by deadline.

    Reloads start after the peak of keeping everything: before it, there is no room to be ahead of their readers.
    """

    def __init__(self, problem: Problem) -> None:
        self.round_trips = problem.round_trips
        self.time_s, self.outputs = problem.time_s, problem.outputs
        self.starts_s = np.array(list(accumulate(problem.time_s, initial=0.0)))
        self.peak = _find_peak_op(problem) if self.round_trips else 0
        self.now_s = self.out_s = self.in_s = 0.0
        self.begin_s = float(self.starts_s[self.peak])  # earliest start of reloads, on the time axis of keeping everything
        self.made_s: dict[int, float] = {}
        self.sent: set[int] = set()
        self.away: dict[int, int] = {}  # offloaded tensors, and the ops that need them back
        self.slack_s = self.starts_s.copy()  # for each op, the time before it minus that of the reloads due by then
        self.least_s: NDArray[np.float64] | None = None  # the least slack of an op and its successors

    def execute(self, i: int, done: int) -> None:
        """Record the execution of op `i` on the device, `done` being the last new op before it."""
        self.now_s += self.time_s[i]
        self.begin_s = float(self.starts_s[max(done + 1, self.peak)])
        if done < self.peak:
            self.in_s = max(self.in_s, self.now_s)
        for t in self.outputs[i]:
            self.made_s[t] = self.now_s
            if t in self.away:
                self._forget(t)

    def compute_cost_s(self, t: int, use: int, price: float) -> float:
        """Return the cost of offloading and reloading `t` in seconds, inf if that is impossible."""
        if t not in self.round_trips or use >= NEVER:
            return np.inf
        transfers = self.round_trips[t]
        if self.least_s is None:
            self.least_s = np.minimum.accumulate(self.slack_s[::-1])[::-1]
        left_s = float(self.least_s[use]) - self.begin_s
        # The price is for the channel in any case; the rest is how long the computation would wait. A copy on the host stays
        # valid, so that only the first eviction pays for the way out.
        cost_s = price * transfers.back.time_s + max(0.0, transfers.back.time_s - max(0.0, left_s))
        if t not in self.sent:
            cost_s += price * transfers.out.time_s + max(0.0, self._compute_out_s(t) - self.now_s)
        return cost_s

    def _compute_out_s(self, t: int) -> float:
        return max(self.out_s, self.made_s[t]) + self.round_trips[t].out.time_s

    def offload(self, t: int, use: int) -> None:
        """Offload `t`, which op `use` reads next."""
        if t not in self.sent:
            self.out_s = self._compute_out_s(t)
            self.now_s = max(self.now_s, self.out_s)
            self.sent.add(t)
        self.away[t] = use
        self.slack_s[use:] -= self.round_trips[t].back.time_s
        self.least_s = None

    def reload(self, t: int) -> None:
        """Reload `t` for the next execution."""
        self._forget(t)
        self.in_s += self.round_trips[t].back.time_s
        self.now_s = max(self.now_s, self.in_s)

    def _forget(self, t: int) -> None:
        self.slack_s[self.away.pop(t) :] += self.round_trips[t].back.time_s
        self.least_s = None


def _find_peak_op(problem: Problem) -> int:
    """Return the op at which keeping everything needs most memory."""
    change = np.zeros(problem.ops + 1)
    for t, readers in enumerate(problem.graph.consumers):
        producer = problem.producer[t]
        if producer >= 0:
            change[producer] += problem.sizes[t]
            change[problem.ops if problem.kept[t] else max(readers, default=producer) + 1] -= problem.sizes[t]
    return int(np.argmax(np.cumsum(change)[: problem.ops]))
