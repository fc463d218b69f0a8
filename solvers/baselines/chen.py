"""Recomputation of segments of the forward pass, one after the other (Chen et al., 2016).

Of a segment, tensors that later segments read stay; the others are recomputed together before its backward pass; the last segment
is kept. ``chen-sqrt`` has about sqrt(n) segments of n stages. ``chen-greedy`` (their algorithm 3) ends a segment once it has
produced more bytes than a threshold b, and searches for b: first b = 0, then a grid in [B / sqrt 2, sqrt 2 B], where B = sqrt(x
y) for the x bytes that cross the cuts and the y bytes of the largest segment found so far, as in the paper; in addition, the
total bytes divided by 2, 3, ..., for other budgets.

Graphs that are not chains are cut at articulation points and, linearised, anywhere; the faster schedule that fits is returned.
"""

import math
from collections.abc import Iterator, Sequence
from enum import StrEnum

from planner.graphs.ir import Graph
from planner.graphs.schedule import Schedule
from planner.solvers.baselines.common.recomputation import recompute_groups
from planner.solvers.baselines.common.stages import Cuts, ForwardStages, cut_places, find_crossings, select_evenly
from planner.solvers.baselines.common.verdicts import Candidate, answer
from planner.solvers.request import Request
from planner.solvers.result import Result

_GRID, _PARTS = 6, 40  # thresholds around the centre; least share of all bytes, as 1 / this


class ChenRule(StrEnum):
    """The choice of segments, by the name in the registry."""

    SQRT = "chen-sqrt"
    GREEDY = "chen-greedy"


def solve(request: Request, *, rule: str = ChenRule.SQRT) -> Result:
    """Return the fastest schedule with recomputed segments that fits; LIMIT if none does.

    Args:
        rule: the choice of segments; see ``ChenRule``.

    Raises:
        ValueError: no such rule.
    """
    trials_of = generate_sqrt_trials if ChenRule(rule) is ChenRule.SQRT else generate_greedy_trials
    trials = (trial for cuts in Cuts for trial in trials_of(request.graph, cuts))
    return answer(request, str(rule), trials, what="recomputing segments")


def generate_sqrt_trials(graph: Graph, cuts: Cuts) -> Iterator[Candidate]:
    """Yield the schedule with about sqrt(n) segments of as many stages each."""
    places = cut_places(graph, cuts)
    count = max(1, round(math.sqrt(len(places))))
    yield Candidate(checkpoint_segments(graph, select_evenly(places, count)), {"cuts": str(cuts), "segments": count})


def generate_greedy_trials(graph: Graph, cuts: Cuts) -> Iterator[Candidate]:
    """Yield the schedules of all thresholds, those with the same segments once."""
    made = [sum(graph.tensors[t].size_bytes for t in graph.ops[i].outputs) for i in range(len(find_crossings(graph)))]
    tried: set[tuple[int, ...]] = set()
    for threshold in list_thresholds(graph, cuts, made):
        ends = find_greedy_ends(cut_places(graph, cuts), made, threshold)
        if tuple(ends) not in tried:
            tried.add(tuple(ends))
            yield Candidate(
                checkpoint_segments(graph, ends), {"cuts": str(cuts), "segments": len(ends), "threshold_bytes": threshold}
            )


def list_thresholds(graph: Graph, cuts: Cuts, made: Sequence[int]) -> list[int]:
    """Return the thresholds of the module's docstring, in bytes. `made`: bytes that each forward op produces."""
    places = cut_places(graph, cuts)
    if not places:
        return [0]
    stages = ForwardStages(graph, find_greedy_ends(places, made, 0))
    crossing = sum(graph.tensors[t].size_bytes for tensors in stages.crossing for t in tensors)
    centre = math.sqrt(crossing * max(sum(made[i] for i in ops) for ops in stages.ops))
    around = [centre * 2 ** (k / (_GRID - 1) - 0.5) for k in range(_GRID)]
    return [0, *map(int, around), *(sum(made) // k for k in range(2, _PARTS + 1))]


def find_greedy_ends(places: Sequence[int], made: Sequence[int], threshold_bytes: int) -> list[int]:
    """Return the ends of segments: each of `places` at which more than the threshold was produced since the last."""
    ends = []
    since, begin = 0, 0
    for place in places:
        since += sum(made[begin : place + 1])
        begin = place + 1
        if since > threshold_bytes:
            ends.append(place)
            since = 0
    return ends if ends and ends[-1] == places[-1] else [*ends, *places[-1:]]


def checkpoint_segments(graph: Graph, ends: Sequence[int]) -> Schedule:
    """Return the schedule whose segments end with the forward ops `ends`."""
    return recompute_groups(graph, ForwardStages(graph, ends).groups)
