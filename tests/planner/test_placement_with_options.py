"""Plans with other devices and all other exact options: recorded, read again, run, and trained with."""

import copy
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import planner
from planner.graphs.ir import Graph
from planner.graphs.options.passes import order_by_passes
from planner.graphs.pools import HOST
from planner.graphs.simulate import simulate
from planner.measure.run_plan import run
from planner.plans import search
from planner.plans.document import write_plan
from planner.plans.plan import Plan, read_plan
from planner.plans.plan_check import check_plan
from planner.plans.summary import get_other_peaks, summarize
from planner.settings.budget import Budget
from planner.settings.option_settings import build_option_settings
from planner.settings.plan import PlanSettings
from planner.show.facts.graph import collect_graph_facts
from planner.show.facts.step import StepFacts
from planner.show.facts.timeline import Timeline
from planner.show.report.describe import plan_text
from planner.show.report.page import render_page
from planner.solvers.result import SolveSettings
from tests.support.graphs.random_choices import any_schedule
from tests.support.models.outcomes import assert_equal_steps

SECOND = "cpu:1"
FOUND = ["pack", "kernels", "in-place"]
BUDGET = 10**6
OPTIONS = ["placement", *FOUND, "offload"]

pytestmark = [pytest.mark.filterwarnings("ignore:the captured step takes:UserWarning"), pytest.mark.usefixtures("one_thread")]


def small() -> tuple[nn.Module, nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4))
    return model, nn.MSELoss(), (torch.randn(24, 8), torch.randn(24, 4))


def random_plan(graph: Graph, budget: int, *, seed: int, options: Sequence[str] = OPTIONS, host_budget: Any = 10**9) -> Plan:
    """What a solve could have found."""
    options_given = build_option_settings(options, "1GB/s", host_budget, exact=True)
    offered = options_given.apply(graph)
    schedule = order_by_passes(offered, any_schedule(offered, seed))
    found = simulate(offered, schedule)
    return Plan(
        graph=summarize(offered),
        schedule=schedule,
        budget_bytes=budget,
        peak_bytes=found.peak_bytes,
        time_s=found.time_s,
        bound_s=None,
        solver="chance",
        seconds=0.0,
        settings=SolveSettings(options=options_given.record(offered)),
        pool_peaks_bytes=get_other_peaks(offered, found),
    )


def no_solve(*_: Any, **__: Any) -> Plan:
    raise AssertionError("there is a plan already")


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_written_plan_with_placement_and_options_runs_exactly(seed: int, tmp_path: Path) -> None:
    model, loss_fn, batch = small()
    graph = planner.trace(model, loss_fn, batch, options=FOUND, other_devices=[SECOND], passes=1)
    write_plan(random_plan(graph, BUDGET, seed=seed), tmp_path / "plan.json")
    plan = read_plan(tmp_path / "plan.json")
    offered = build_option_settings(OPTIONS, "1GB/s", 10**9, exact=True).apply(graph)
    check_plan(offered, plan)
    assert list(plan.pool_peaks_bytes) == [SECOND, HOST]
    text = plan_text(plan)
    assert f"{SECOND} memory" in text and f"{HOST} memory" in text and f"{plan.copied} optional ops" in text
    assert "compute@cpu:1" in render_page(StepFacts.of(Timeline(offered, plan)))
    report = run(plan, model, loss_fn, batch, repeats=1)
    assert report.identical and not report.eager_differences
    assert report.measured_pools_bytes == report.predicted_pools_bytes == {SECOND: plan.pool_peaks_bytes[SECOND]}
    assert report.measured_host_bytes == report.predicted_host_bytes == plan.pool_peaks_bytes[HOST]
    assert report.measured_peak_bytes <= plan.peak_bytes


def test_training_with_placement_and_options_equals_eager(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model, loss_fn, batch = small()

    def solved(graph: Graph, budget: Budget, settings: PlanSettings, **_: Any) -> Plan:
        return random_plan(
            graph, budget.resolve(0), seed=3, options=settings.options.names, host_budget=settings.options.host_bytes
        )

    monkeypatch.setattr(search, "solve_graph", solved)
    compiled = partial(planner.compile, budget=BUDGET, options=OPTIONS, host_budget="1GB", exact=True, passes=1)
    kept = tmp_path / "plans"
    first = compiled(model, loss_fn, batch, other_devices=[SECOND], compare_eager=False, cache=kept)
    monkeypatch.setattr(search, "solve_graph", no_solve)  # the plan is read again
    step = compiled(model, loss_fn, batch, other_devices=[SECOND], compare_eager=False, cache=kept)
    assert step.plan.schedule == first.plan.schedule and list(step.plan.pool_peaks_bytes) == [SECOND, HOST]
    for planned in (first, step):
        assert_equal_steps(planned, model, copy.deepcopy(model), *batch, loss_fn=loss_fn)


@pytest.mark.slow
def test_facts_of_a_graph_with_all_options_equal_those_as_traced() -> None:
    model, loss_fn, batch = small()
    graph = planner.trace(model, loss_fn, batch, options=FOUND, other_devices=[SECOND], passes=1)
    offered = build_option_settings(OPTIONS, "1GB/s", 10**9).apply(graph)
    facts, alone = collect_graph_facts(offered), collect_graph_facts(graph)
    assert facts.traced == alone.traced and facts.placement == alone.placement
    assert facts.least_budget_bytes == alone.least_budget_bytes
