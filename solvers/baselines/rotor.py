"""The optimal schedule of a chain of stages (rotor; Beaumont et al., "Optimal checkpointing for heterogeneous chains", 2019).

The output of stage k has a gradient of d_k bytes; x_(s,k) bytes of it were produced in stage s or later. Its backward
pass reads a_k bytes of its own stage, and needs v_k seconds and b_k more bytes. Running stage k takes u_k for its output
only, u'_k for its backward pass, u"_k for both (then a"_k bytes stay), and p_k, p'_k, p"_k bytes at most. T(s, t, m) is
the least time to reverse stages s..t with the input of s and m bytes, of which d_t are taken: the least of

    keep the input only:  u_s + .. + u_(r-1) + T(r, t, m - x_(s,r-1)) + T(s, r - 1, m),  s < r <= t,
                          if m >= d_t + x_(s,k-1) + p_k for s <= k < r,
    keep all of s:        u"_s + T(s + 1, t, m - a"_s) + v_s,  if m >= d_t + p"_s and m >= d_s + d_(s-1) + a_s + b_s,

and T(s, s, m) = u'_s + v_s, if m >= d_s + p'_s and m >= d_s + d_(s-1) + a_s + b_s. In the paper there is one a and
one u, for all backwards read their output, and x_(s,k) = d_k, for a chain has no skips.

Memory is counted in slots. Tensors outside the chain (parameter gradients, say) are not in the model: the
chain's schedules for several amounts of memory are simulated, and the fastest that fits is returned.

Graphs that are not chains are cut at articulation points and, linearised, anywhere; where that makes many stages,
neighbours are merged.
"""

import math
from collections.abc import Iterator, Sequence, Set as AbstractSet
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.graphs.ir import Graph, Phase
from planner.graphs.simulate import simulate
from planner.solvers.baselines.common.recomputation import find_needed
from planner.solvers.baselines.common.stages import Cuts, ForwardStages, StageRun, cut_places, select_evenly
from planner.solvers.baselines.common.verdicts import Candidate, answer
from planner.solvers.request import Request
from planner.solvers.result import Result

Floats = NDArray[np.float64]

_MOST_STAGES = 80  # neighbours are merged above this number
_SLOTS = 400  # for the memory of keeping everything
_BEYOND = 12  # slots above the largest amount of memory whose schedule fits, which are tried too


def solve(request: Request) -> Result:
    """Return the fastest optimal schedule of a chain that fits; LIMIT if none does."""
    trials = (trial for cuts in Cuts for trial in generate_chain_trials(request.graph, request.budget_bytes, cuts))
    return answer(request, "rotor", trials, what="the chain's schedule")


def generate_chain_trials(graph: Graph, budget_bytes: int, cuts: Cuts) -> Iterator[Candidate]:
    """Yield optimal schedules of the chain for the largest amount of memory whose schedule fits, and some above it."""
    stages = ForwardStages(graph, select_evenly(cut_places(graph, cuts), _MOST_STAGES))
    if not len(stages):
        return
    table = ChainTable(build_chain(stages), _SLOTS)
    times = table.best[0][len(stages) - 1]
    tried: dict[int, Candidate] = {}

    low, high = int(np.argmax(np.isfinite(times))), table.slots
    while low < high:
        middle = -(-(low + high) // 2)
        tried[middle] = _build_trial(stages, table, cuts, middle)
        fits = simulate(graph, tried[middle].schedule).peak_bytes <= budget_bytes
        low, high = (middle, high) if fits else (low, middle - 1)
    for slot in range(low, min(low + _BEYOND, table.slots) + 1):
        if slot not in tried:
            tried[slot] = _build_trial(stages, table, cuts, slot)
    yield from tried.values()


def _build_trial(stages: ForwardStages, table: "ChainTable", cuts: Cuts, slot: int) -> Candidate:
    settings = {"cuts": str(cuts), "stages": len(stages), "chain_bytes": slot * table.slot_bytes}
    return Candidate(stages.schedule(table.plan(slot)), settings)


@dataclass(frozen=True, slots=True)
class StageCost:
    """The cost of running a stage: seconds, peak, and bytes that stay, without its input."""

    time_s: float
    peak: int
    stay: int


@dataclass(frozen=True, slots=True)
class ChainStage:
    """A stage of a chain; times in seconds, sizes in bytes, or in slots.

    Attributes:
        output: run for its output only: u, p, and the part of the output that it produces.
        saved: run for its backward pass: u', p', a.
        both: u", p", a".
        backward_s, backward: v, b.
        crossing: bytes of its output by the stage that produced them; the sum is d.
    """

    output: StageCost
    saved: StageCost
    both: StageCost
    backward_s: float
    backward: int
    crossing: tuple[int, ...]


def build_chain(stages: ForwardStages) -> list[ChainStage]:
    """Return the chain of `stages`; gradients are assumed to be as large as their tensors."""
    graph, last = stages.graph, len(stages) - 1
    size = [t.size_bytes for t in graph.tensors]
    backward_s, backward = [0.0] * len(stages), [0] * len(stages)
    read: list[set[int]] = [set() for _ in stages.ops]
    level = last
    for op in graph.ops:
        if op.phase is Phase.FORWARD:
            continue
        level = min([level, *(stages.reach[t][1] for t in op.inputs if t in stages.reach)])
        for t in op.inputs:
            if t in stages.reach:
                made = stages.reach[t][0]
                read[made].update([t] if level <= made or t not in stages.crossing[made] else [])
        backward_s[level] += op.time_s
        made_bytes = sum(size[t] for t in op.outputs if t not in graph.kept) + op.workspace_bytes
        gradient = sum(size[t] for t in stages.crossing[level - 1]) if level else 0
        backward[level] = max(backward[level], made_bytes - gradient)
    return [
        ChainStage(
            _run(stages, k, stages.crossing[k]),
            _run(stages, k, read[k]),
            _run(stages, k, stages.crossing[k] | read[k]),
            backward_s[k],
            backward[k],
            _sum_by_producer(stages, k),
        )
        for k in range(len(stages))
    ]


def _sum_by_producer(stages: ForwardStages, stage: int) -> tuple[int, ...]:
    """Return the bytes that cross the cut after `stage`, by the stage that produced them."""
    made = [0] * (stage + 1)
    for t in stages.crossing[stage]:
        tensor = stages.graph.tensors[t]
        made[stages.find_stage(tensor.producers[0])] += tensor.size_bytes
    return tuple(made)


def _run(stages: ForwardStages, stage: int, stay: AbstractSet[int]) -> StageCost:
    """Return the cost of running `stage` for the tensors `stay`, without tensors that cross into it."""
    graph = stages.graph
    ops = find_needed(graph, stay, stages.ops[stage], stages.absent)
    made = {t for i in ops for t in graph.ops[i].outputs if t in stages.absent}
    last = {t: i for i in ops for t in graph.ops[i].inputs if t in made}
    live = peak = 0
    for i in ops:
        op = graph.ops[i]
        live += sum(graph.tensors[t].size_bytes for t in op.outputs if t in made)
        peak = max(peak, live + op.workspace_bytes)
        over = [t for t in (*op.inputs, *op.outputs) if t in made and t not in stay and last.get(t, i) == i]
        live -= sum(graph.tensors[t].size_bytes for t in over)
    return StageCost(math.fsum(graph.ops[i].time_s for i in ops), peak, sum(graph.tensors[t].size_bytes for t in stay & made))


class ChainTable:
    """The table of T(s, t, m) for all s <= t and m up to the memory of keeping everything.

    Attributes:
        slots: the most memory.
        slot_bytes: bytes of a slot; sizes are rounded up to whole ones.
        best: T, by s, t and m in slots; infinite if infeasible.
        choice: the r of the best split, -1: keep all of s.
    """

    def __init__(self, chain: Sequence[ChainStage], slots: int) -> None:
        largest = [max(values) for values in zip(*((k.output.peak, k.both.peak, k.backward) for k in chain), strict=True)]
        everything = sum(k.both.stay for k in chain) + sum(largest) + 2 * max(sum(k.crossing) for k in chain)
        self.slot_bytes: int = max(1, -(-everything // slots))
        self.slots = self._count_slots(everything)
        if self.slot_bytes > 1:
            self.slots += len(chain) + 5  # each size is rounded up by less than a slot
        self.chain = chain
        self.x = [[self._count_slots(sum(k.crossing[s:])) for k in chain] for s in range(len(chain))]
        self.d = self.x[0]
        self.best: list[dict[int, Floats]] = [{} for _ in chain]
        self.choice: list[dict[int, NDArray[np.int16]]] = [{} for _ in chain]
        for length in range(len(chain)):
            for s in range(len(chain) - length):
                self._fill(s, s + length)

    def _count_slots(self, size_bytes: int) -> int:
        return -(-size_bytes // self.slot_bytes)

    def _fill(self, s: int, t: int) -> None:
        own, d_t = self.chain[s], self.d[t]
        run = own.saved if s == t else own.both
        after = 0.0 if s == t else self._shift(self.best[s + 1][t], self._count_slots(run.stay))
        best: Floats = np.full(self.slots + 1, run.time_s + own.backward_s) + after
        gradients = self.d[s] + (self.d[s - 1] if s else 0)
        backward = gradients + self._count_slots(own.saved.stay) + self._count_slots(own.backward)
        self._forbid(best, max(d_t + self._count_slots(run.peak), backward))
        choice = np.full(self.slots + 1, -1, dtype=np.int16)
        forward_s, room, before = 0.0, 0, 0
        for r in range(s + 1, t + 1):
            output = self.chain[r - 1].output
            forward_s += output.time_s
            room = max(room, d_t + before + self._count_slots(output.peak))
            before = self.x[s][r - 1]
            split = forward_s + self._shift(self.best[r][t], before) + self.best[s][r - 1]
            self._forbid(split, room)
            better = split < best
            best[better] = split[better]
            choice[better] = r
        self.best[s][t], self.choice[s][t] = best, choice

    def _forbid(self, values: Floats, room: int) -> None:
        """Set the values for less than `room` slots to infinity."""
        values[: min(room, len(values))] = np.inf

    def _shift(self, values: Floats, slots: int) -> Floats:
        """Return T as a function of m, shifted by `slots`."""
        shifted = np.full(len(values), np.inf)
        if slots < len(values):
            shifted[slots:] = values[: len(values) - slots]
        return shifted

    def plan(self, slots: int) -> Iterator[StageRun]:
        """Yield the executions within `slots`, for which there must be a schedule."""
        parts = [(0, len(self.chain) - 1, slots)]
        while parts:
            s, t, m = parts.pop()
            r = int(self.choice[s][t][m])
            if r >= 0:
                yield from (StageRun(k, saving=False) for k in range(s, r))
                parts += [(s, r - 1, m), (r, t, m - self.x[s][r - 1])]
                continue
            yield StageRun(s, saving=True)
            if s < t:
                parts.append((s + 1, t, m - self._count_slots(self.chain[s].both.stay)))
