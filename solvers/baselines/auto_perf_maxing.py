"""torchtitan's ``auto_perf_maxing`` (proposed in 2026): fractions of layers by a linear program, tensors by a 0-1 program each.

The linear program chooses the fractions of each layer's saved bytes that are kept, recomputed and offloaded, for a cap on memory;
a 0-1 program for each layer (once for equal layers) chooses the tensors. Outputs of layers and random ops are never recomputed.
Tensors are offloaded and reloaded as in ``sac_and_offload``, and recomputed when they are needed. The peak of the schedule,
published as an estimate and here simulated, corrects the cap, in up to twelve rounds: by the excess over the budget and a little
more, or half of the unused memory.

Published with a tolerance of 1.5 GiB above the budget; here only schedules within the budget count, and the fastest of all rounds
is returned. All divisions into blocks are tried as layers.

Outer, linear, for each layer b with a_b saved bytes, of which fractions are kept, recomputed and offloaded:

    k_b + r_b + o_b = 1              r_b a_b <= recomputable bytes       o_b a_b <= offloadable bytes
    live(p) - sum of r_b a_b over the layers freed at p - the same of o_b a_b + sum of r_b w_b <= cap + excess
    o_b a_b <= bandwidth x time of the layer's own forward pass, and of its own backward pass
    sum of o_b a_b <= capacity of the host
    minimise sum of r_b x time of the layer's forward pass

for every position p in the step, w_b being the working memory of the recomputation of layer b, if p is in its backward pass. The
excess, at a dominant price, makes the program feasible.

Inner, 0-1, for each layer: every saved tensor is kept, recomputed or offloaded, so that the recomputed and offloaded bytes are as
close as possible to the fractions; ties are broken by recomputation time.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np

from planner.graphs.schedule import Compute, Schedule, keep_everything
from planner.graphs.simulate import simulate
from planner.solvers import highs
from planner.solvers.baselines.common.blocks import find_blockings
from planner.solvers.baselines.common.offloading import Layers, Offer, answer_by_offloading, schedule_with
from planner.solvers.baselines.common.recomputation import find_droppable, recompute_groups
from planner.solvers.baselines.common.verdicts import Candidate
from planner.solvers.clock import Clock
from planner.solvers.highs.builder import ProgramBuilder
from planner.solvers.highs.program import Milp
from planner.solvers.request import Request
from planner.solvers.result import Result

_ROUNDS = 12  # corrections of the cap, for each division into layers
_ENOUGH = 0.001  # the rounds end with a peak below the budget by at most this fraction of it
_EXCESS = 1e3  # its price, per capacity, in forward passes
_NEAR = 2e-4  # relative tolerance on a layer's bytes
_MOST_WORK = 1.0  # for a layer, see ``planner.solvers.clock``
_LESS_TIME = 2e-4  # weight of time relative to bytes, both as fractions of the layer's

Row = tuple[dict[int, float], float]  # weights by column, and the upper limit of their sum

Alike = dict[object, tuple[list[int], list[int]]]  # by layer and fractions, the positions of the chosen tensors


@dataclass(frozen=True, slots=True)
class LayerTensor:
    """A tensor that the forward pass of a layer saves.

    Attributes:
        time_s: of the op that produces it.
        again, away: True if it may be recomputed, or offloaded.
    """

    tensor: int
    size_bytes: int
    time_s: float
    again: bool
    away: bool


class FractionsProgram:
    """The linear program: the layers of a step that keeps everything, and their fractions."""

    def __init__(self, offer: Offer, blocks: Sequence[str | None]) -> None:
        self.offer, graph = offer, offer.program
        self.layers = Layers(offer, range(len(graph.ops)), blocks)
        count = self.layers.last + 1
        may_go, may_drop = frozenset(self.layers.may_go()), find_droppable(graph)
        self.saved: list[list[LayerTensor]] = [[] for _ in range(count)]
        self.forward_s, self.working_bytes = [0.0] * count, [0] * count
        for op_id, layer in self.layers.of_op.items():
            op = graph.ops[op_id]
            self.forward_s[layer] += op.time_s
            for t in op.outputs:
                if t not in graph.kept and offer.list_readers(t, forward=False):
                    again = t in may_drop and t in self.layers.inside and not op.random
                    self.saved[layer].append(LayerTensor(t, offer.get_size_bytes(t), op.time_s, again, t in may_go))
        self.bytes = [sum(s.size_bytes for s in saved) for saved in self.saved]
        self._set_working_bytes()
        self.backward = self._compute_backward_spans(count)
        self.backward_s = [sum(graph.ops[p].time_s for p in span) for span in self.backward]
        schedule = keep_everything(graph)
        memory = simulate(graph, schedule).memory_bytes
        self.live = [memory[k] for k, step in enumerate(schedule.steps) if isinstance(step, Compute)]

    def _set_working_bytes(self) -> None:
        """Set the most memory that each layer's forward pass needs besides its saved tensors."""
        saved = {s.tensor for layer in self.saved for s in layer}
        held: dict[int, int] = {}
        for op_id, layer in self.layers.of_op.items():
            op = self.offer.program.ops[op_id]
            for t in op.outputs:
                readers = self.offer.list_readers(t, forward=True)
                if t not in saved and t not in self.offer.program.kept:
                    held[t] = max((op_id, *readers))
            held = {t: last for t, last in held.items() if last >= op_id}
            bytes_now = op.workspace_bytes + sum(map(self.offer.get_size_bytes, held))
            self.working_bytes[layer] = max(self.working_bytes[layer], bytes_now)

    def _compute_backward_spans(self, count: int) -> list[range]:
        """Return the positions of each layer's backward pass, up to the start of the next one."""
        begins = sorted((position, layer) for layer, position in self.layers.first_backward.items())
        spans = [range(0)] * count
        for (begin, layer), (end, _) in pairwise([*begins, (len(self.offer.program.ops), -1)]):
            spans[layer] = range(begin, end)
        return spans

    def find_fractions(self, cap_bytes: int, clock: Clock) -> tuple[list[float], list[float]] | None:
        """Return r and o by layer, for a peak of `cap_bytes`; None if the time ran out."""
        count = len(self.saved)
        base_s = sum(self.forward_s) or 1.0
        unit = max(self.live) or 1
        rows: list[Row] = [({b: 1.0, count + b: 1.0}, 1.0) for b in range(count)]
        rows += self._build_memory_rows(cap_bytes, unit)
        if self.offer.host_bytes is not None:
            rows.append(({count + b: self.bytes[b] / unit for b in range(count)}, self.offer.host_bytes / unit))
        cost = [*(s / base_s for s in self.forward_s), *([0.0] * count), _EXCESS]
        upper = [*self._compute_limits(), 1e6]
        answer = highs.solve_program(_build_program(cost, upper, [False] * len(cost), rows), clock=clock)
        if answer.values is None:
            return None
        return answer.values[:count].tolist(), answer.values[count : 2 * count].tolist()

    def _compute_limits(self) -> list[float]:
        """Return the upper bounds of r and o of each layer."""
        all_s = sum(transfers.out.time_s for transfers in self.offer.by_tensor.values())
        rate = sum(map(self.offer.get_size_bytes, self.offer.by_tensor)) / all_s if all_s else np.inf
        again, away = [], []
        for b, saved in enumerate(self.saved):
            most_bytes = min(sum(s.size_bytes for s in saved if s.away), rate * self.forward_s[b], rate * self.backward_s[b])
            again.append(sum(s.size_bytes for s in saved if s.again) / max(self.bytes[b], 1))
            away.append(min(1.0, most_bytes / max(self.bytes[b], 1)))
        return again + away

    def _build_memory_rows(self, cap_bytes: int, unit: int) -> list[Row]:
        """Return the rows for all positions, of those with the same terms the tightest."""
        count, layers = len(self.saved), self.layers
        worst: dict[tuple[tuple[int, float], ...], int] = {}
        for position, live in enumerate(self.live):
            weights: dict[int, float] = {}
            for b in range(count):
                after = min(b + 1, layers.last)
                begins = layers.first_backward
                if layers.last_op[b] < position < begins.get(b, 0):
                    weights[b] = -float(self.bytes[b])
                if layers.last_op[after] < position < begins.get(after, 0):
                    weights[count + b] = -float(self.bytes[b])
                if position in self.backward[b]:
                    weights[b] = weights.get(b, 0.0) + self.working_bytes[b]
            key = tuple(sorted(weights.items()))
            worst[key] = max(live, worst.get(key, 0))
        return [
            ({**{column: weight / unit for column, weight in key}, 2 * count: -1.0}, (cap_bytes - live) / unit)
            for key, live in worst.items()
        ]


def choose_positions(
    saved: Sequence[LayerTensor], again_bytes: float, away_bytes: float, clock: Clock
) -> tuple[list[int], list[int]] | None:
    """Return the positions of a layer's tensors to recompute and of those to offload; None if the time ran out."""
    n, unit = len(saved), float(sum(s.size_bytes for s in saved) or 1)
    if again_bytes < 1e-6 * unit and away_bytes < 1e-6 * unit:
        return [], []
    total_s = sum(s.time_s for s in saved) or 1.0
    # Columns: again and away by tensor, then the deviation of the bytes of each.
    cost = [*(_LESS_TIME * s.time_s / total_s for s in saved), *([0.0] * n), 1.0, 1.0]
    upper = [*(float(s.again) for s in saved), *(float(s.away) for s in saved), 2.0, 2.0]
    rows: list[Row] = [({i: 1.0, n + i: 1.0}, 1.0) for i in range(n)]
    for first, off, wanted in ((0, 2 * n, again_bytes), (n, 2 * n + 1, away_bytes)):
        for sign in (1.0, -1.0):
            weights = {first + i: sign * s.size_bytes / unit for i, s in enumerate(saved)}
            rows.append(({**weights, off: -1.0}, sign * wanted / unit))
    program = _build_program(cost, upper, [True] * (2 * n) + [False, False], rows)
    answer = highs.solve_program(program, clock=clock.start_part(_MOST_WORK), absolute_gap=_NEAR)
    if answer.values is None:
        return None
    again, away = ([s.tensor for i, s in enumerate(saved) if answer.values[first + i] > 0.5] for first in (0, n))
    return again, away


def _build_program(cost: Sequence[float], upper: Sequence[float], integer: Sequence[bool], rows: Sequence[Row]) -> Milp:
    builder = ProgramBuilder()
    for of_column in zip(cost, upper, integer, strict=True):
        builder.add_column(of_column[0], upper=of_column[1], integer=of_column[2])
    for weights, limit in rows:
        builder.add_row(list(weights), list(weights.values()), -np.inf, limit)
    return builder.build_milp()


def solve(request: Request) -> Result:
    """Return the fastest schedule of all rounds that fits; LIMIT if none does."""
    trials = partial(_generate_trials, request)
    return answer_by_offloading(request, "auto-perf-maxing", trials, what="auto_perf_maxing", by_blocks=True)


def _generate_trials(request: Request, offer: Offer) -> Iterator[Candidate]:
    for way in find_blockings(offer.program):
        for number, schedule in enumerate(_generate_rounds(offer, way.blocks, request), start=1):
            yield Candidate(schedule, {**way.settings, "round": number})


def _generate_rounds(offer: Offer, blocks: Sequence[str | None], request: Request) -> Iterator[Schedule]:
    outer = FractionsProgram(offer, blocks)
    budget_bytes = cap_bytes = request.budget_bytes
    near_bytes = int(_ENOUGH * budget_bytes)
    known: dict[object, int] = {}
    alike: Alike = {}
    for _ in range(_ROUNDS):
        split = _split(outer, cap_bytes, request, alike)
        if split is None:
            return
        if split not in known:
            schedule = _schedule(offer, blocks, outer, *split)
            yield schedule
            known[split] = budget_bytes - simulate(offer.whole, schedule).peak_bytes
        slack_bytes = known[split]
        if 0 <= slack_bytes <= near_bytes:
            return
        cap_bytes += slack_bytes // 2 if slack_bytes >= 0 else slack_bytes - near_bytes // 2


def _split(
    outer: FractionsProgram, cap_bytes: int, request: Request, alike: Alike
) -> tuple[frozenset[int], frozenset[int]] | None:
    """Return the recomputed and the offloaded tensors for a cap; None if the time ran out."""
    fractions = outer.find_fractions(cap_bytes, request.clock)
    if fractions is None:
        return None
    again: set[int] = set()
    away: set[int] = set()
    for saved, total, r, o in zip(outer.saved, outer.bytes, *fractions, strict=True):
        key = (tuple((s.size_bytes, s.time_s, s.again, s.away) for s in saved), round(r, 4), round(o, 4))
        if key not in alike:
            found = choose_positions(saved, r * total, o * total, request.clock)
            if found is None:
                return None
            place = {s.tensor: i for i, s in enumerate(saved)}
            alike[key] = ([place[t] for t in found[0]], [place[t] for t in found[1]])
        again.update(_select(saved, alike[key][0]))
        away.update(_select(saved, alike[key][1]))
    return frozenset(again), frozenset(away)


def _select(saved: Sequence[LayerTensor], places: Sequence[int]) -> list[int]:
    return [saved[i].tensor for i in places]


def _schedule(
    offer: Offer, blocks: Sequence[str | None], outer: FractionsProgram, again: frozenset[int], away: frozenset[int]
) -> Schedule:
    kept = frozenset(s.tensor for saved in outer.saved for s in saved) - again
    computed = recompute_groups(offer.program, blocks, saved=kept, at_once=False).computed
    layers = Layers(offer, computed, blocks)
    may_go = [t for t in layers.may_go() if t in away]
    return schedule_with(offer, computed, layers.plan_moves(offer.select_fitting(may_go)))
