"""torchtitan's ``auto_perf_maxing`` (proposed in 2026): fractions of layers by a linear program, tensors by a 0-1 program each.

The linear program (``layer_fractions``) says what part of each layer's saved bytes is kept, computed again and offloaded, for a
cap on memory; a 0-1 program for each layer, for equal layers once, which tensors that is. Ends of layers and random ops
are never computed again. What is offloaded leaves and comes back as in ``sac_and_offload``, what is computed again is so when
it is needed. The peak of the schedule, published as an estimate and here the judge's, corrects the cap, in up to twelve
rounds: by what it is over the budget, and a little more, or half of what it is below.

Published with a tolerance of 1.5 GiB above the budget; here only what fits counts, the fastest of all rounds. All choices of
blocks are tried as layers.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from graphs.schedule import Schedule
from graphs.simulate import simulate
from solvers.policies.checkpoint_blocks import blockings
from solvers.policies.offload.layer_fractions import Outer, Saved, chosen
from solvers.policies.offload.layers import Layers
from solvers.policies.offload.moves import Offer, offloading_answer, schedule_with
from solvers.policies.replay import Candidate, recompute_groups
from solvers.request import Request
from solvers.result import Result

Alike = dict[object, tuple[list[int], list[int]]]  # of layers and fractions, the places of what goes


@dataclass(frozen=True, slots=True)
class AutoPerfParams:
    """As published.

    Attributes:
        rounds: in which the cap is corrected, for each choice of layers.
        near: the rounds end with a peak below the budget by no more than this part of it.
    """

    rounds: int = 12
    near: float = 0.001


def solve(request: Request) -> Result:
    """As ``solvers.registry.Solver``; LIMIT when no round fits. The parameters are ``AutoPerfParams``."""
    params = request.params_of(AutoPerfParams())
    what = "auto_perf_maxing"

    def trials(offer: Offer) -> Iterator[Candidate]:
        for way in blockings(offer.program):
            for number, schedule in enumerate(_rounds(offer, way.blocks, request, params), start=1):
                yield Candidate(schedule, {**way.settings, "round": number})

    return offloading_answer(request, "auto-perf-maxing", trials, what=what, settings=asdict(params), by_blocks=True)


def _rounds(offer: Offer, blocks: Sequence[str | None], request: Request, params: AutoPerfParams) -> Iterator[Schedule]:
    outer = Outer(offer, blocks)
    budget_bytes = cap_bytes = request.budget_bytes
    near_bytes = int(params.near * budget_bytes)
    known: dict[object, int] = {}
    alike: Alike = {}
    for _ in range(params.rounds):
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


def _split(outer: Outer, cap_bytes: int, request: Request, alike: Alike) -> tuple[frozenset[int], frozenset[int]] | None:
    """What is computed again and what is offloaded, for a cap; None if there was no time to find it."""
    fractions = outer.fractions(cap_bytes, request.clock)
    if fractions is None:
        return None
    again: set[int] = set()
    away: set[int] = set()
    for saved, total, r, o in zip(outer.saved, outer.bytes, *fractions, strict=True):
        key = (tuple((s.size_bytes, s.time_s, s.again, s.away) for s in saved), round(r, 4), round(o, 4))
        if key not in alike:
            found = chosen(saved, r * total, o * total, request.clock)
            if found is None:
                return None
            place = {s.tensor: i for i, s in enumerate(saved)}
            alike[key] = ([place[t] for t in found[0]], [place[t] for t in found[1]])
        again.update(_at(saved, alike[key][0]))
        away.update(_at(saved, alike[key][1]))
    return frozenset(again), frozenset(away)


def _at(saved: Sequence[Saved], places: Sequence[int]) -> list[int]:
    return [saved[i].tensor for i in places]


def _schedule(offer: Offer, blocks: Sequence[str | None], outer: Outer, again: frozenset[int], away: frozenset[int]) -> Schedule:
    kept = frozenset(s.tensor for saved in outer.saved for s in saved) - again
    computed = recompute_groups(offer.program, blocks, saved=kept, at_once=False).computed
    layers = Layers(offer, computed, blocks)
    may_go = [t for t in layers.may_go() if t in away]
    return schedule_with(offer, computed, layers.moves(offer.fitting(may_go)))
