"""The first schedule of a solve: that of the request, whatever the options, and one before the relaxation is solved."""

from dataclasses import replace

import pytest

from graphs.ir import Graph
from graphs.options import remove_options
from graphs.options.surroundings import Link, Surroundings
from graphs.schedule import Compute, Schedule, keep_everything
from graphs.synthetic.random_graphs import draw_options
from graphs.synthetic.small import make_training_chain
from graphs.synthetic.transformer import TransformerSize, transformer
from planner.capture.options import apply_options
from solvers.clock import WorkClock
from solvers.problem import build_problem
from solvers.registry import get_solver
from solvers.request import Request, Start
from solvers.result import SolveProgress
from solvers.windows import solve
from solvers.windows.decoding.decode import order_of_schedule, try_out
from solvers.windows.strategies.refinement import Relaxation
from tests.support.budgets import budget_at, peak_bytes
from tests.support.solvers.answers import ask


def offloading() -> Graph:
    graph = transformer(TransformerSize(layers=2))
    return apply_options(graph, ("offload",), Surroundings(Link.even(peak_bytes(graph) / graph.time_s)))


GRAPHS = {"offload": offloading(), **{f"alternatives {seed}": draw_options(seed, 30) for seed in (5, 9, 31, 38)}}


@pytest.mark.parametrize("graph", GRAPHS.values(), ids=GRAPHS)
def test_the_first_schedule_is_that_of_the_start(graph: Graph) -> None:
    budget_bytes = budget_at(remove_options(graph), 0.4)
    solved = get_solver("windows")(Request(graph, budget_bytes, clock=WorkClock(2.0)))
    order = order_of_schedule(build_problem(graph, budget_bytes), solved.schedule)
    assert order is not None
    used = {op for op in solved.schedule.computed if graph.ops[op].optional}
    assert used  # the options make a difference
    again = try_out(build_problem(graph, budget_bytes), order)
    assert again.time_s == pytest.approx(solved.time_s) and again.peak_bytes <= budget_bytes

    slower = replace(graph, ops=tuple(replace(op, time_s=op.time_s * (1 + op.id % 3)) for op in graph.ops))
    told: list[float] = []

    def note(progress: SolveProgress) -> None:
        told.extend([] if progress.best_s is None else [progress.best_s])

    ended = Request(slower, budget_bytes, clock=WorkClock(2.0), on_progress=note, should_stop=lambda: bool(told))
    get_solver("windows")(replace(ended, start=Start(solved.schedule)))
    at_other_times = try_out(build_problem(slower, budget_bytes), order)
    assert told[0] == pytest.approx(at_other_times.time_s)


def test_a_start_in_another_order_is_left_out() -> None:
    graph = transformer(TransformerSize(layers=1))
    problem, kept = build_problem(graph, peak_bytes(graph)), keep_everything(graph)
    assert order_of_schedule(problem, kept) is not None
    last = Compute(kept.computed[-1])
    assert order_of_schedule(problem, Schedule((last, *(step for step in kept.steps if step != last)))) is None


class RelaxedError(BaseException):
    """Ends the solve where the relaxation would begin."""


@pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
def test_rules_of_eviction_are_asked_before_the_relaxation(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    graph, found = make_training_chain(20), []

    def begin(relaxation: Relaxation, limit: float) -> None:
        found.append(relaxation.search.incumbent.best is not None)
        raise RelaxedError

    monkeypatch.setattr(Relaxation, "step", begin)
    with pytest.raises(RelaxedError):
        solve(ask(graph, budget_at(graph, share)))
    assert found == [True]
