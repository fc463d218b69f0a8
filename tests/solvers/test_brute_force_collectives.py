"""The exact solver with collectives on a channel, against all schedules of small graphs on two streams; on four with offload."""

import random
from dataclasses import replace

import pytest

from graphs.ir import Graph, Phase
from graphs.options.gather import OVERLAP, CollectiveCost, Shard, Unit, insert_units
from graphs.options.offload import OFFLOAD
from graphs.options.surroundings import Link, Surroundings
from graphs.schedule import keep_everything
from graphs.simulate import simulate
from graphs.synthetic.draft import Draft
from solvers.bounds import bound_least_budget
from solvers.problem import build_problem
from tests.support.solvers.answers import Case, check_answers, check_models
from tests.support.solvers.brute_force_collectives import fastest_with_collectives

RANGES = [range(first, first + 50) for first in range(100, 600, 50)]
SEEDS = [  # with offload or without; with it a graph has many more schedules
    *((range(30), False), (range(8, 38), True)),
    *(pytest.param(seeds, False, marks=pytest.mark.slow) for seeds in RANGES),
    *(pytest.param(seeds, True, marks=pytest.mark.slow) for seeds in RANGES[:3]),
]


def draw_units(draw: random.Random, ops: int) -> Graph:
    """Return a program of `ops` ops that read two units of parameters, one of which may have gradients, with collectives."""
    draft = Draft()
    units = [[draft.add_static(f"p{u}.{i}", draw.randint(1, 6)) for i in range(draw.choice((1, 1, 2)))] for u in range(2)]
    made: list[int] = []
    for i in range(ops):
        parameters = units[i % 2] if i < 2 else draw.choice(units)
        inputs = [*draw.sample(made[-3:], min(len(made), draw.choice((0, 1, 1, 2)))), *draw.sample(parameters, 1)]
        sizes = [draw.randint(1, 8) for _ in range(draw.choice((1, 1, 2)))]
        made += draft.add_op(
            f"op{i}",
            inputs,
            sizes,
            time_s=float(draw.randint(1, 9)),
            workspace_bytes=draw.choice((0, 0, 3)),
            phase=Phase.BACKWARD,
        )
    graph = draft.build_graph([])
    read = [[t for t in unit if graph.consumers[t]] for unit in units]

    def describe(u: int, gradients: tuple[int, ...]) -> Unit:
        cost = CollectiveCost(float(draw.randint(1, 8)), draw.choice((0, 2, 4)))
        reduction = CollectiveCost(float(draw.randint(1, 6)), draw.choice((0, 2))) if gradients else None
        return Unit(f"u{u}", tuple(Shard(t, 1, graph.tensors[t].size_bytes) for t in read[u]), cost, gradients, 2, reduction)

    last = graph.ops[-1].outputs[:1] if draw.random() < 0.7 else ()
    kept = [] if last else [made[-1]]
    whole = insert_units(graph, [describe(0, last), describe(1, ())], kept).graph
    return replace(whole, ops=tuple(replace(op, phase=Phase.FORWARD) for op in whole.ops))  # one pass: transfers end with it


def case(seed: int, most_ops: int, *, offload: bool) -> Case | None:
    """None where a graph has too many schedules to try, or nothing to offload."""
    draw = random.Random(seed)
    program = draw_units(draw, draw.randint(2, most_ops))
    graph = OVERLAP.add_to(program, Surroundings())
    if offload:
        graph = OFFLOAD.add_to(graph, Surroundings(Link.even(draw.choice((1.0, 2.0, 4.0)))))
        if not build_problem(graph, 1).offloads:
            return None
    least = bound_least_budget(graph).budget_bytes
    peak = simulate(program, keep_everything(program)).peak_bytes
    budget = max(1, least - (draw.random() < 0.1) + round((1.3 * peak - least) * draw.random() ** 2))
    try:
        optimum = fastest_with_collectives(graph, budget)
    except TimeoutError:
        return None
    return Case(seed, graph, budget, optimum)


def cases(seeds: range, *, offload: bool = False) -> list[Case]:
    return [found for seed in seeds if (found := case(seed, 4 - offload, offload=offload)) is not None]


@pytest.mark.parametrize(("seeds", "offload"), SEEDS, ids=str)
def test_schedules_and_bounds_with_overlap_agree_with_brute_force(seeds: range, offload: bool) -> None:
    found = cases(seeds, offload=offload)
    assert len(found) > len(seeds) / 3
    feasible, met, gained = check_answers(found)
    assert met >= 0.9 * feasible
    assert gained >= 0.3 * feasible
    assert sum(map(check_models, found)) >= 0.4 * len(found)


def test_no_row_makes_the_main_device_wait_for_a_gradient_that_only_a_reduction_lacks() -> None:
    """Were the first gradient offloaded, it could come back beside the last op, and the reduction would run after that."""
    draft, cost = Draft(), CollectiveCost(1.0, 0)
    p = draft.add_static("p", 1)
    (first,) = draft.add_op("first", [p], [4], time_s=9.0, phase=Phase.BACKWARD)
    draft.add_op("peek", [first], [1], time_s=6.0, phase=Phase.BACKWARD)
    (large,) = draft.add_op("large", [], [1], time_s=5.0, workspace_bytes=6, phase=Phase.BACKWARD)
    (second,) = draft.add_op("second", [large], [1], time_s=1.0, phase=Phase.BACKWARD)
    (last,) = draft.add_op("last", [large], [1], time_s=9.0, phase=Phase.BACKWARD)
    unit = Unit("u", (Shard(p, 1, 1),), cost, (first, second), 1, cost)
    program = OVERLAP.add_to(insert_units(draft.build_graph([]), [unit], [last]).graph, Surroundings())
    graph = OFFLOAD.add_to(program, Surroundings(Link.even(1.0)))
    for budget in (10, 12):
        check_models(Case(budget, graph, budget, fastest_with_collectives(graph, budget)))
