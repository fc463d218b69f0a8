"""Solves random graphs by a limit of work, to compare the exact solver before and after a change.

``python -m benchmarks random_graphs --out rows.csv --against before.csv`` writes a row a graph, prints those that differ from
the rows before, and exits with 1 if one is worse, or has a bound that a schedule refutes. The same schedules are found on any
machine.
"""

import argparse
import math
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from benchmarks.command import add_names
from planner.capture.options import apply_options
from planner.graphs.errors import PlannerError
from planner.graphs.ir import Graph, Phase
from planner.graphs.options.surroundings import Link, OtherDevice, Surroundings
from planner.graphs.schedule import schedule_of
from planner.graphs.simulate import simulate
from planner.graphs.synthetic.random_graphs import draw_graph, draw_options, draw_overwriting, draw_training_step
from planner.plans.select_attributes import select_attributes
from planner.solvers.bounds import bound_least_budget
from planner.solvers.clock import WorkClock
from planner.studies.experiment import Study
from planner.studies.rows import Key, declare_column, declare_key, declare_value, read_rows
from planner.studies.solves import solve_allocated

KINDS = ("plain", "offload", "options", "devices")
RANK = ("optimal", "within tolerance", "infeasible", "feasible", "limit", "error")
CLOSE = 1e-9  # share of a time that arithmetic may be off by
_ARITHMETIC = 1e-5  # of HiGHS


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The result of a solve."""

    kind: str = declare_key()
    seed: int = declare_key()
    ops: int = declare_column()
    budget_bytes: int = declare_column()
    status: str = declare_column("as in planner.solvers.result; error if the solver failed")
    time_s: float | None = declare_value("of the schedule, as peak_bytes")
    bound_s: float | None = declare_value()
    peak_bytes: int | None = declare_value()
    steps: int = declare_column("of the schedule", default=0)


def draw_case(kind: str, seed: int) -> tuple[Graph, int, float]:
    """Return a random graph of `kind`, a budget between its least and its peak, and a limit of work."""
    draw = random.Random(f"{kind} {seed}")
    small, limit = seed % 4 > 0, draw.choice((0.1, 0.2, 0.3)) if seed % 10 else 3.0
    if kind == "plain":
        limit *= 4
    if kind == "options":
        graph = draw_options(draw.randrange(10**6), draw.randint(4, 14), draw.randint(2, 8))
        graph = draw_overwriting(graph, draw) if draw.random() < 0.5 else graph
    elif kind == "devices" or small:
        graph = draw_graph(draw.randrange(10**6), draw.randint(4, 8 if kind == "devices" else 24))
        while kind == "devices" and any(t.static for t in graph.tensors):  # ops around tensors written in place do not move
            graph = draw_graph(draw.randrange(10**6), draw.randint(4, 8))
        half = len(graph.ops) / 2
        graph = replace(graph, ops=tuple(replace(op, phase=Phase.BACKWARD) if op.id >= half else op for op in graph.ops))
    else:
        graph = draw_training_step(draw.randrange(10**6), draw.randint(10, 60 if kind == "plain" else 25))
    peak_bytes = simulate(graph, schedule_of(graph, range(len(graph.program)))).peak_bytes
    rate = sum(t.size_bytes for t in graph.tensors) / max(graph.time_s, 1e-9)
    least_bytes = min(peak_bytes, bound_least_budget(graph).budget_bytes)
    budget_bytes = least_bytes + int(draw.random() ** 1.5 * (peak_bytes - least_bytes))
    link = Link.even(rate * draw.choice((0.2, 0.5, 1.0, 2.0)))
    room = draw.choice((None, None, int(peak_bytes * draw.uniform(0.3, 0.8))))
    if kind == "offload" or (kind == "options" and seed % 3 == 0):
        graph = apply_options(graph, ("offload",), Surroundings(link, room))
    if kind == "devices":
        devices = [_draw_device(name, graph, draw, link, room) for name in ("second", "third")[: 2 if draw.random() < 0.2 else 1]]
        graph = apply_options(graph, ("placement",), Surroundings(link, others=tuple(devices)))
    return graph, budget_bytes, limit


def _draw_device(name: str, graph: Graph, draw: random.Random, link: Link, room: int | None) -> OtherDevice:
    times = tuple(op.time_s * draw.choice((0.7, 1.0, 2.0)) if op.id < 2 or draw.random() < 0.9 else None for op in graph.ops)
    return OtherDevice(name, times, link.out_bytes_per_s, room)


def solve_case(case: tuple[str, int], known: Sequence[Row] = ()) -> Iterator[Row]:
    """Yield the row of one graph, given by kind and seed."""
    kind, seed = case
    graph, budget_bytes, limit = draw_case(kind, seed)
    row = Row(kind=kind, seed=seed, ops=len(graph.ops), budget_bytes=budget_bytes, status="error")
    try:
        result = solve_allocated(graph, budget_bytes, WorkClock(limit))
    except PlannerError:
        yield row
        return
    steps = 0 if result.schedule is None else len(result.schedule.steps)
    yield replace(row, steps=steps, **select_attributes(result, "status", "time_s", "bound_s", "peak_bytes"))


STUDY = Study(Row, solve_case, order=lambda row: (KINDS.index(row.kind), row.seed))


def is_wrong(now: Row, before: Row | None = None) -> bool:
    """Return True if a schedule, of either row, is faster than the bound of `now`."""
    times = [row.time_s for row in (now, before) if row is not None and row.time_s is not None]
    return now.bound_s is not None and any(time_s < now.bound_s * (1 - _ARITHMETIC) for time_s in times)


def judge(before: Row, now: Row) -> str:
    """Return "equal", "worse" by status, time or bound, else "better", or "other" for another schedule that takes as long.

    "wrong" is a bound that a schedule refutes.
    """
    if is_wrong(now, before):
        return "wrong"
    losses = (
        RANK.index(now.status) - RANK.index(before.status),
        _compute_loss(now.time_s, before.time_s, math.inf),
        _compute_loss(_bound(before), _bound(now), -math.inf),
    )
    close = CLOSE * (1.0 if before.time_s is None else before.time_s)
    if any(loss > close for loss in losses):
        return "worse"
    return "equal" if before == now else "better" if any(loss < -close for loss in losses) else "other"


def _bound(row: Row) -> float | None:
    return math.inf if row.status == "infeasible" else row.bound_s


def _compute_loss(one: float | None, other: float | None, unknown: float) -> float:
    """Return `one` minus `other`, 0 if they are equal or both unknown."""
    return 0.0 if one == other else (unknown if one is None else one) - (unknown if other is None else other)


def main(words: Sequence[str] | None = None) -> int:
    """Solve, write, and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    add_names(parser, "--kinds", KINDS)
    parser.add_argument("--count", type=int, default=1000, help="of graphs of each kind (default: %(default)s)")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--against", type=Path, help="rows to compare with; other graphs are not compared")
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args(words)
    seeds = range(args.first_seed, args.first_seed + args.count)
    cases: dict[Key, tuple[str, int]] = {case: case for case in product(args.kinds, seeds)}
    before = {} if args.against is None else {(row.kind, row.seed): row for row in read_rows(args.against, Row)}
    args.out.unlink(missing_ok=True)  # the rows of another state of the solver
    kept = replace(STUDY, file=args.out.name).read_kept(args.out.parent)
    for _ in STUDY.fill(kept, cases, jobs=args.processes):
        pass
    if args.against is None:
        wrong = [row for row in kept if is_wrong(row)]
        print(*(f"the bound is refuted: {row}" for row in wrong), sep="\n", end="")
        return 1 if wrong else 0
    verdicts = Counter(equal=0, other=0, better=0, worse=0, wrong=0)
    for known, row in ((before[row.kind, row.seed], row) for row in kept if (row.kind, row.seed) in before):
        verdicts[found := judge(known, row)] += 1
        if found != "equal":
            print(found, known, row, sep="\n  ")
    print(dict(verdicts))
    return 1 if verdicts["worse"] or verdicts["wrong"] else 0
