"""Round by_tensor in orders of executions: the judge agrees on when and where they wait, and rows 10 to 13 hold for them."""

import random

import pytest

from graphs.ir import Graph, Op, Tensor
from graphs.options.surroundings import Link, Surroundings
from graphs.schedule import Compute, Schedule
from graphs.simulate import simulate
from graphs.synthetic.random_graphs import random_graph
from planner.capture.options import with_options
from solvers.clock import WallClock
from solvers.highs import solve_program
from solvers.highs.program import Outcome
from solvers.problem import Problem, problem_of
from solvers.windows.decoding.decode import order_of, try_out
from solvers.windows.decoding.encode import choice_of_trial
from solvers.windows.decoding.host_transfers import timed
from solvers.windows.relaxation.discretization import Discretization
from solvers.windows.relaxation.models import build_relaxation
from tests.support.random_orders import everything, random_order, short_form


def offering(draw: random.Random, most_ops: int) -> Graph:
    graph = random_graph(draw.randint(0, 10**6), draw.randint(3, most_ops))
    host_bytes = draw.choice((None, None, draw.randint(3, 30)))
    rates = (0.5, 1.0, 2.0, 4.0)
    link = Link(draw.choice(rates), draw.choice(rates), draw.choice((0.0, 0.0, 0.5)))
    return with_options(graph, ("offload",), Surroundings(link, host_bytes))


def some_away(draw: random.Random, problem: Problem, computed: list[int]) -> frozenset[tuple[int, int]]:
    assert problem.offloads is not None
    reads = [(t, place) for place, op in enumerate(computed) for t in problem.inputs[op] if t in problem.offloads.by_tensor]
    return frozenset(pair for pair in reads if draw.random() < 0.5)


@pytest.mark.parametrize("seeds", [range(first, first + 100) for first in range(0, 600, 100)], ids=str)
def test_the_judge_says_the_same(seeds: range) -> None:
    waited = copied = 0
    for seed in seeds:
        draw = random.Random(seed)
        graph = offering(draw, 9)
        problem = problem_of(graph, graph.static_bytes + draw.choice((10**9, draw.randint(5, 60))))
        computed = random_order(draw, problem)
        found = timed(problem, computed, some_away(draw, problem, computed))
        simulation = simulate(graph, Schedule(tuple(found.steps)))
        assert simulation.clocks_s[0] == pytest.approx(found.time_s), seed
        assert simulation.peak_bytes == max(found.memory_bytes) + graph.static_bytes, seed
        executed = [step.op for step in found.steps if isinstance(step, Compute) and step.op < problem.ops]
        assert executed == computed
        assert len(found.waits_s) == len(found.ends) == len(computed)
        spent = sum(problem.time_s[op] for op in computed)
        assert spent + sum(found.waits_s) == pytest.approx(found.time_s), seed
        waited += any(found.waits_s)
        copied += bool(found.away)
    assert waited > 10 and copied > 10


@pytest.mark.parametrize("seeds", [range(first, first + 20) for first in range(0, 200, 20)], ids=str)
def test_every_schedule_with_copies_solves_the_relaxation_at_its_budget(seeds: range) -> None:
    copied = 0
    for seed in seeds:
        draw = random.Random(seed)
        graph = offering(draw, 8)
        loose = problem_of(graph, 10**9)
        n = loose.ops
        computed = short_form(loose.graph, random_order(draw, loose))
        away = some_away(draw, loose, computed)
        trial = try_out(loose, order_of(Discretization((n - 1,)), computed, away))
        problem = problem_of(graph, trial.peak_bytes)
        copied += bool(trial.order.away)
        some = tuple(sorted({*draw.sample(range(n), n // 2), n - 1}))
        for detail in (everything((n - 1,)), everything(some), everything(some).split(range(n))):
            model = build_relaxation(problem, detail)
            choice = choice_of_trial(problem, detail, trial)
            assert {(k, t) for k, taken in enumerate(choice.taken) for t in taken} <= model.taken.keys(), seed
            program = model.program
            for columns, there in (
                (model.again, choice.again),
                (model.handed, choice.handed),
                (model.taken, choice.taken),
            ):
                for (k, i), column in columns.items():
                    program.lower[column] = program.upper[column] = i in there[k]
            for pair, column in model.twice.items():
                program.lower[column] = program.upper[column] = pair in choice.twice
            answer = solve_program(program, clock=WallClock(60))
            assert answer.outcome is Outcome.OPTIMAL, (seed, detail.ends)
            assert answer.objective is not None
            assert answer.objective <= problem.units(trial.time_s - problem.base_s) + 1e-4, (seed, detail.ends)
    assert copied > len(seeds) / 3


def test_what_is_to_go_first_goes_out_first() -> None:
    """The channel is busy with z when a and b are made; b is read for the last time before a, and goes before it."""
    z, a, b = range(3)
    reads = ((), (), (), (b,), (z, a), (), (b,), (a,), (z,))
    tensors = tuple(Tensor(i, f"t{i}", 4, (i,)) for i in range(len(reads)))
    ops = tuple(Op(i, f"op{i}", "f", inputs, (i,), 1.0) for i, inputs in enumerate(reads))
    graph = with_options(Graph(ops, tensors, frozenset({8})), ("offload",), Surroundings(Link.even(1.0)))
    problem = problem_of(graph, 100)
    found = timed(problem, range(9), {(b, 6), (a, 7), (z, 8)})
    assert problem.offloads is not None
    out = {transfers.offload_op: t for t, transfers in problem.offloads.by_tensor.items()}
    assert [out[step.op] for step in found.steps if isinstance(step, Compute) and step.op in out] == [z, b, a]
