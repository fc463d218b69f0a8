"""Schedules to begin with: there is one wherever another method has one."""

from graphs.synthetic.random_graphs import random_training_step
from graphs.synthetic.small import training_chain
from solvers.clock import WorkClock
from solvers.registry import SOLVERS, get_solver
from solvers.request import Request
from solvers.result import SolveProgress
from solvers.windows.params import FirstScheduleParams, WindowsParams
from tests.support.budgets import budget_at, peak_bytes


def test_large_graphs_have_a_schedule_before_a_model_is_built() -> None:
    graph = training_chain(2_550)
    budget = peak_bytes(graph) // 2
    other, ours = (get_solver(name)(Request(graph, budget, clock=WorkClock(0.4))) for name in ("dtr", "windows"))
    assert other.time_s is not None
    assert ours.time_s is not None
    assert ours.time_s <= other.time_s


def test_other_methods_are_asked_where_rules_of_eviction_find_nothing() -> None:
    graph = random_training_step(5, 40)
    budget = budget_at(graph, 0.6)
    params = WindowsParams(first_schedule=FirstScheduleParams(rules=(), tight_rules=(), large_ops=0))
    told: list[str] = []

    def note(progress: SolveProgress) -> None:
        if progress.best_s is not None:
            told.append(progress.activity)

    result = get_solver("windows")(Request(graph, budget, clock=WorkClock(0.3), params=params, on_progress=note))
    assert result.time_s is not None
    assert told[0] == f"trying {params.first_schedule.sought[0]}"


def test_every_method_that_recomputes_is_asked() -> None:
    methods = {
        name
        for name, entry in SOLVERS.items()
        if not (entry.large_programs or entry.offloads or entry.only_places or name in {"windows", "store_all"})
    }
    assert set(FirstScheduleParams().sought) == methods
