"""Binomial checkpointing of a chain of stages (Griewank & Walther, ``revolve``, ACM TOMS 2000).

The state before the first stage is a snapshot, and s - 1 more may be stored. To reverse l stages from a snapshot, m stages are
run, their result is stored, and the l - m after it are reversed with a snapshot less, then the first m. With the best m the
forward pass takes, besides one run of each stage for its backward,

    P(l, s) = r l - C(s + r, s + 1),  r the least with l <= C(s + r, s),

runs of a stage: the optimum for stages of equal time and size, which the method assumes.

Graphs that are not chains are cut at articulation points and, linearised, anywhere; numbers of snapshots are searched, and the
fastest schedule that fits is returned.
"""

import math
from collections.abc import Iterator
from functools import cache

from planner.graphs.ir import Graph
from planner.solvers.baselines.common.stages import Cuts, ForwardStages, StageRun, cut_places
from planner.solvers.baselines.common.verdicts import Candidate, answer
from planner.solvers.request import Request
from planner.solvers.result import Result

_MOST_RUNS = 10  # of a stage on average


def solve(request: Request) -> Result:
    """Return the fastest schedule of binomial checkpointing that fits; LIMIT if no number of snapshots does."""
    trials = (trial for cuts in Cuts for trial in generate_snapshot_trials(request.graph, cuts))
    return answer(request, "griewank", trials, what="binomial checkpointing")


def generate_snapshot_trials(graph: Graph, cuts: Cuts) -> Iterator[Candidate]:
    """Yield a schedule for each number of snapshots: all up to 8, then about a fifth more each time."""
    stages = ForwardStages(graph, cut_places(graph, cuts))
    snapshots = 1
    while snapshots <= max(1, len(stages)):
        if count_extra_runs(len(stages), snapshots) <= _MOST_RUNS * len(stages):
            yield Candidate(stages.schedule(plan(len(stages), snapshots)), {"cuts": str(cuts), "snapshots": snapshots})
        snapshots = max(snapshots + 1, math.ceil(1.2 * snapshots) if snapshots >= 8 else 0)


@cache
def count_extra_runs(length: int, snapshots: int) -> int:
    """Return P(length, snapshots): runs of a stage in addition to one each for its backward."""
    r = 0
    while math.comb(snapshots + r, snapshots) < length:
        r += 1
    return r * length - math.comb(snapshots + r, snapshots + 1)


@cache
def split(length: int, snapshots: int) -> int:
    """Return the m with the least m + P(length - m, snapshots - 1) + P(m, snapshots), for 2 or more snapshots."""
    return min(range(1, length), key=lambda m: m + count_extra_runs(length - m, snapshots - 1) + count_extra_runs(m, snapshots))


def plan(length: int, snapshots: int) -> Iterator[StageRun]:
    """Yield the executions of a chain of `length` stages."""
    parts = [(0, length, snapshots)]
    while parts:
        begin, end, left = parts.pop()
        if end - begin <= 1:
            yield from (StageRun(stage, saving=True) for stage in range(begin, end))
            continue
        middle = begin + split(end - begin, left) if left > 1 else end - 1
        yield from (StageRun(stage, saving=False) for stage in range(begin, middle))
        parts += [(begin, middle, left), (middle, end, max(left - 1, 1))]
