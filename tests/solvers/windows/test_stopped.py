"""The exact solver on its way: progress, stops, and limits of time and memory."""

import sys

import numpy as np
import pytest

from graphs.simulate import simulate
from graphs.synthetic.random_graphs import draw_training_step
from graphs.synthetic.small import make_training_chain
from graphs.synthetic.transformer import TransformerSize, transformer
from solvers.memory import give_back, read_resident_bytes
from solvers.registry import SOLVERS, get_solver
from solvers.result import SolveProgress, Status
from solvers.windows import solve
from solvers.windows.params import BoundParams, WindowsParams
from solvers.windows.search import Search
from solvers.windows.strategies.first_schedules import Imitation
from tests.support.budgets import peak_bytes
from tests.support.marks import slow
from tests.support.solvers.answers import ask


def test_progress_only_gets_better() -> None:
    seen: list[SolveProgress] = []
    graph = draw_training_step(3, 30)
    result = solve(ask(graph, peak_bytes(graph) * 6 // 10, time_limit_s=60, on_progress=seen.append))
    assert seen
    best = [p.best_s for p in seen if p.best_s is not None]
    bounds = [p.bound_s for p in seen if p.bound_s is not None]
    assert best == sorted(best, reverse=True)
    assert bounds == sorted(bounds)
    assert best[-1] == result.time_s
    assert all(p.seconds <= result.seconds for p in seen)
    assert all(p.activity for p in seen)


def test_a_stop_gives_the_best_so_far() -> None:
    graph = draw_training_step(5, 60)
    best: list[float] = []

    def note(progress: SolveProgress) -> None:
        if progress.best_s is not None:
            best.append(progress.best_s)

    result = solve(
        ask(
            graph, peak_bytes(graph) * 4 // 10, tolerance=0.0, time_limit_s=3600, on_progress=note, should_stop=lambda: bool(best)
        )
    )
    assert result.status is Status.FEASIBLE
    assert result.time_s <= best[0]


def test_a_stop_before_anything_is_found() -> None:
    graph = make_training_chain(30)
    result = solve(ask(graph, 5, should_stop=lambda: True))
    assert result.status is Status.LIMIT
    assert "Raise the time limit or the budget" in result.message


def test_a_time_limit_that_has_passed() -> None:
    assert solve(ask(make_training_chain(30), 5, time_limit_s=1e-9)).status is Status.LIMIT


def test_without_memory_to_grow_there_is_still_a_schedule() -> None:
    params = WindowsParams(bound=BoundParams(most_bytes=0))
    graph = transformer(TransformerSize(layers=2))
    budget = int(0.7 * peak_bytes(graph))
    result = solve(ask(graph, budget, time_limit_s=3, params=params))
    assert simulate(graph, result.schedule).peak_bytes <= budget


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems do not say")
def test_resident_bytes_follow_allocations() -> None:
    before = read_resident_bytes()
    block = np.ones(10_000_000)
    assert 60_000_000 < read_resident_bytes() - before < 200_000_000
    del block
    give_back()
    assert read_resident_bytes() - before < 40_000_000


@pytest.mark.parametrize("share", [7, *slow(9, 6)])
def test_no_other_method_is_faster_even_where_time_is_short(share: int) -> None:
    graph = transformer(TransformerSize(layers=4))
    budget = peak_bytes(graph) * share // 10
    search = Search.of(ask(graph, budget, tolerance=0.0, time_limit_s=60.0))
    Imitation(search).step(60.0)
    # Programs take as long as they are let.
    policies = [name for name, entry in SOLVERS.items() if name != "windows" and not entry.large_programs]
    times = [get_solver(name)(ask(graph, budget)).time_s for name in policies]
    assert search.incumbent.best_trial.peak_bytes <= budget
    assert search.incumbent.best_trial.time_s <= min(time_s for time_s in times if time_s is not None)
