"""Sifting: improvement of the order of ops by single moves to the position of least memory over the step.

Keeping everything, memory over an order of the ops is a profile. Moving an op later subtracts its outputs from the ops that it
passes, and adds its last-read inputs to them; moving it earlier does the reverse. So a weight gradient that frees a large
activation moves up as far as possible, and one that frees little and must be kept moves to the end.

What decides is the area under the profile; the peak must not rise. Known weakness: ops move one at a time, so those that would
have to move together stay where they are.
"""

from collections.abc import Callable, Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from planner.graphs.ir import Graph

_PASSES = 50  # over all ops; graphs of real models need three


def sift_ops(
    graph: Graph, before: Sequence[Collection[int]], after: Sequence[Collection[int]], *, should_stop: Callable[[], bool]
) -> list[int] | None:
    """Return op ids in an order whose profile has a smaller area than program order, and no higher peak; None if stopped.

    The memory that every schedule needs (an op's inputs, outputs and workspace, and the kept tensors produced before it) does not
    exceed its maximum in program order either.

    Args:
        graph: its program order is the start.
        before: for each op the ops that must come before it.
        after: for each op the ops that must come after it.
    """
    sift = _Sift(graph, before, after)
    for turn in range(_PASSES):
        ops = range(len(graph.ops))
        moved = False
        for op in ops if turn % 2 else reversed(ops):
            if should_stop():
                return None
            moved |= sift.move(op)
        if not moved:
            break
    return [int(op) for op in sift.order]


class _Sift:
    """An order and its memory profile, position by position.

    Attributes:
        order, place: the op at each position, the position of each op.
        during: bytes in memory while the op at a position is executed.
        left: bytes in memory after it and its frees.
        need: bytes in memory during it in every schedule, for the op itself and kept tensors.
        kept_at: bytes of kept outputs of the op at a position.
    """

    def __init__(self, graph: Graph, before: Sequence[Collection[int]], after: Sequence[Collection[int]]) -> None:
        count = len(graph.ops)
        self.graph = graph
        self.before, self.after = before, after
        self.sizes = [0 if t.static else t.size_bytes for t in graph.tensors]
        self.order = np.arange(count)
        self.place = np.arange(count)
        self.outputs = [sum(self.sizes[t] for t in op.outputs) for op in graph.ops]
        self.kept = [sum(self.sizes[t] for t in op.outputs if t in graph.kept) for op in graph.ops]
        # Outputs without readers are freed at once.
        self.lasting = [sum(self.sizes[t] for t in op.outputs if graph.consumers[t] or t in graph.kept) for op in graph.ops]
        self.held = [tuple(t for t in op.inputs if self.sizes[t] and t not in graph.kept) for op in graph.ops]
        phases = [op.phase for op in graph.ops]
        self.phases = {phase: (phases.index(phase), phases.index(phase) + phases.count(phase) - 1) for phase in set(phases)}
        self.kept_at = np.array(self.kept, dtype=np.int64)
        self.during, self.left, self.need = self._compute_profiles()
        self.most_needed = int(self.need.max())

    def _compute_profiles(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        during, left, need = (np.zeros(len(self.graph.ops), dtype=np.int64) for _ in range(3))
        live = kept = 0
        for op in self.graph.ops:
            during[op.id] = live + self.outputs[op.id] + op.workspace_bytes
            read = sum(self.sizes[t] for t in self.held[op.id])
            need[op.id] = kept + read + self.outputs[op.id] + op.workspace_bytes
            kept += self.kept[op.id]
            live += self.lasting[op.id] - sum(self.sizes[t] for t in self.held[op.id] if self.graph.consumers[t][-1] == op.id)
            left[op.id] = live
        return during, left, need

    def move(self, op: int) -> bool:
        """Move `op` to the position of least area; return False if it is there already."""
        here = int(self.place[op])
        first, last = self.phases[self.graph.ops[op].phase]
        first = max([first, *(int(self.place[o]) + 1 for o in self.before[op])])
        last = min([last, *(int(self.place[o]) - 1 for o in self.after[op])])
        moves = []
        if first < here:
            moves.append(self._find_best(op, here, np.arange(here - 1, first - 1, -1)))
        if last > here:
            moves.append(self._find_best(op, here, np.arange(here + 1, last + 1)))
        gain, place = max(moves, default=(0, here), key=lambda move: move[0])
        if gain <= 0:
            return False
        self._put(op, here, place)
        return True

    def _find_best(self, op: int, here: int, passed: NDArray[np.int64]) -> tuple[int, int]:
        """Return the largest gain from moving `op` past positions, and its new position.

        Args:
            passed: the positions that it can pass, the nearest first.
        """
        step = 1 if passed[0] > here else -1
        change, change_left = self._compute_changes(op, passed)
        own = self._compute_own(op, passed, change_left)
        gain = self.during[here] - own - np.cumsum(change)
        during = self.during[passed]
        peak = np.maximum(np.maximum.accumulate(during + change), own)
        # The peak over the positions that are passed must not rise; elsewhere nothing changes.
        allowed = peak <= np.maximum(np.maximum.accumulate(during), self.during[here])
        if self.kept[op] or self.kept_at[passed].any():
            own_need = self.need[here] + step * np.cumsum(self.kept_at[passed])
            need = np.maximum(own_need, np.maximum.accumulate(self.need[passed] - step * self.kept[op]))
            allowed &= need <= self.most_needed
        gain = np.where(allowed, gain, 0)
        best = int(np.argmax(gain))
        return int(gain[best]), int(passed[best])

    def _compute_changes(self, op: int, passed: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the change in memory during and after each op at the positions `passed`, once `op` has passed it."""
        during = np.full(len(passed), self.lasting[op])
        left = during.copy()
        for t in self.held[op]:
            # Without `op`, t is freed after the last of the others that read it.
            freed = max((int(self.place[o]) for o in self.graph.consumers[t] if o != op), default=-1)
            during[passed > freed] -= self.sizes[t]
            left[passed >= freed] -= self.sizes[t]
        return (-during, -left) if passed[0] > self.place[op] else (during, left)

    def _compute_own(self, op: int, passed: NDArray[np.int64], change_left: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the memory while `op` is executed, for each of the positions `passed`."""
        if passed[0] > self.place[op]:
            there = self.left[passed] + change_left
        else:
            there = np.where(passed > 0, self.left[passed - 1], 0)
        return there + self.outputs[op] + self.graph.ops[op].workspace_bytes

    def _put(self, op: int, here: int, there: int) -> None:
        """Move `op` from position `here` to `there`."""
        step = 1 if there > here else -1
        passed = np.arange(here + step, there + step, step)
        change, change_left = self._compute_changes(op, passed)
        own = self._compute_own(op, passed, change_left)[-1]
        if there > here:
            own_left = self.left[there]
        else:
            own_left = (self.left[there - 1] if there else 0) + change[-1]
        own_need = self.need[here] + step * self.kept_at[passed].sum()
        to = passed - step
        self.order[to] = self.order[passed]
        self.place[self.order[to]] = to
        self.during[to] = self.during[passed] + change
        self.left[to] = self.left[passed] + change_left
        self.need[to] = self.need[passed] - step * self.kept[op]
        self.kept_at[to] = self.kept_at[passed]
        self.order[there], self.place[op] = op, there
        self.during[there], self.left[there], self.need[there], self.kept_at[there] = own, own_left, own_need, self.kept[op]
