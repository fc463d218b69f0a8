"""Better plans are swapped in while a step trains: same bits, within the budget, and nothing is left behind."""

import math
import os
import signal
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import planner
from planner.graphs.errors import InfeasibleError, PlannerError
from planner.graphs.ir import Graph
from planner.graphs.simulate import simulate
from planner.graphs.synthetic.small import make_chain
from planner.measure.observation import OpTimer, PeakWatch, set_times
from planner.plans import background
from planner.plans.background import BackgroundSolve, Ended, SolveJob, solve_here
from planner.plans.plan import Plan, read_plan
from planner.plans.plan_check import check_plan
from planner.plans.search import StepSearch
from planner.plans.solve import judge_on, solve, solve_graph
from planner.progress import Progress, Stage, Stages
from planner.progress.stages import StageReport
from planner.runtime.arena_allocator import Missed
from planner.settings.budget import Budget, Bytes
from planner.settings.option_settings import apply_recorded_options
from planner.settings.plan import PlanSettings, Wait
from planner.solvers.clock import WorkClock
from planner.solvers.eviction.least_peak import find_least_evicting_schedule
from planner.solvers.result import SolveSettings, compute_gap
from planner.solvers.tolerance import Tolerance
from planner.train.compile import compare_eager, compiler, improvement
from planner.train.compile.improvement import Improvement, is_rounded_alike
from tests.support.budgets import between
from tests.support.models.alternatives import in_chunks, make, schedule_with
from tests.support.models.outcomes import assert_exact

Batch = tuple[torch.Tensor, torch.Tensor]


def model_and_batch() -> tuple[nn.Module, Batch]:
    torch.manual_seed(0)
    layers = [
        part for _ in range(4) for part in (nn.Linear(32, 64), nn.GELU(), nn.BatchNorm1d(64), nn.Linear(64, 32), nn.Dropout(0.1))
    ]
    return nn.Sequential(*layers), (torch.randn(256, 32), torch.randn(256, 32))


class Solved:
    """Stands for a solve in the background: its plans are there at once."""

    jobs: list[SolveJob] = []  # noqa: RUF012
    news: list[Plan | Ended] = []  # noqa: RUF012

    def __init__(self, job: SolveJob) -> None:
        type(self).jobs.append(job)
        self.ended: Ended | None = None

    def receive(self, most_s: float = 0.0) -> Plan | None:
        self.ended = Ended(
            solve_graph(
                self.jobs[-1].graph,
                self.jobs[-1].budget,
                replace(self.jobs[-1].settings, work_limit=2.0),
                start=self.jobs[-1].start,
            )
        )
        return self.ended.plan

    def stop(self) -> None:
        self.ended = Ended(failure="stopped")

    @property
    def is_running(self) -> bool:
        return False


@pytest.fixture(autouse=True)
def swaps_repay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each swap be repaid at once: steps here take less than a thousandth of what compiling their passes takes."""
    monkeypatch.setattr(Improvement, "_count_repaying_steps", lambda *_: 0.0)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> type[Solved]:
    """Solves that pay at once, and are over at once."""
    in_processes(monkeypatch, Solved)
    monkeypatch.setattr(improvement, "_LOST_AT_ONCE_S", 0.0)
    return Solved


def in_processes(monkeypatch: pytest.MonkeyPatch, process: type[Solved]) -> None:
    """Let `process` stand for the process of each solve; no solve between two steps finds a plan."""
    monkeypatch.setattr(improvement, "BackgroundSolve", process)
    monkeypatch.setattr(improvement, "solve_here", lambda job, most_s: Ended(failure="there was no time"))
    process.jobs, process.news = [], []


def worst_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the first plan be the one that needs the least memory."""

    def first_plan(search: StepSearch, graph: Graph, budget: Budget, stage: StageReport) -> Plan:
        plan = solve_graph(graph, budget, replace(search.settings, work_limit=2.0))
        offered = apply_recorded_options(graph, plan.settings)
        schedule = find_least_evicting_schedule(offered.out_of_place(), WorkClock(1.0))
        found = simulate(offered, schedule)
        return replace(plan, schedule=schedule, time_s=found.time_s, peak_bytes=found.peak_bytes, bound_s=None)

    monkeypatch.setattr(StepSearch, "find_first_plan", first_plan)


@cache
def half_way_bytes() -> int:
    model, batch = model_and_batch()
    return between(planner.trace(model, F.mse_loss, batch, passes=1))


def planned(model: nn.Module, batch: Batch, **options: object) -> planner.PlannedStep:
    asked = {"budget": half_way_bytes(), "passes": 1, "compare_eager": False, "options": [], **options}
    return planner.compile(model, F.mse_loss, batch, **asked)


def assert_trains_as_eager(step: planner.PlannedStep, model: nn.Module, batch: Batch, seeds: Iterable[int]) -> None:
    for seed in seeds:
        assert_exact(step, model, batch, F.mse_loss, seed=seed)


def above_by(excess_bytes: int, budget_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the next peak be measured as one above the budget."""
    peak_of = PeakWatch._compute_peak

    def measured(*_: object) -> int:
        monkeypatch.setattr(PeakWatch, "_compute_peak", peak_of)
        return budget_bytes + excess_bytes

    monkeypatch.setattr(PeakWatch, "_compute_peak", measured)


def test_a_better_plan_takes_the_place_of_the_first(at_once: type[Solved], monkeypatch: pytest.MonkeyPatch) -> None:
    worst_first(monkeypatch)
    model, batch = model_and_batch()
    step = planned(model, batch)
    first = step.plan
    assert_trains_as_eager(step, model, batch, range(6))
    assert [use.step for use in step.history][:2] == [1, 1]  # found before the first step ran
    assert step.history[-1].plan.overhead < step.history[0].plan.overhead  # times are by other costs
    assert step.plan.schedule != first.schedule and step.plan.budget_bytes == first.budget_bytes
    assert step.plan.measured_peak_bytes is not None
    assert step.plan.measured_peak_bytes == step.plan.peak_bytes <= step.plan.budget_bytes
    # The first job has the costs that were measured alone; the next one those of the first steps.
    assert [job.graph.provenance["times"] for job in at_once.jobs[:2]] == ["measured", "measured in training steps"]
    numbers, plan = step.scalars(), step.plan
    assert numbers["plan/swaps"] == len(step.history) - 1 and numbers["plan/overhead"] == plan.overhead
    assert numbers["plan/measured_peak_bytes"] == plan.measured_peak_bytes and numbers["plan/budget_bytes"] == plan.budget_bytes
    assert numbers.get("plan/gap") == plan.gap and all(type(number) is float for number in numbers.values())


class Scripted(Solved):
    """Stands for a solve in the background that is told what it has found."""

    def receive(self, most_s: float = 0.0) -> Plan | None:
        news = self.news.pop(0) if self.news else None
        if isinstance(news, Ended):
            self.ended = news
            return news.plan
        return news


def times_in_steps(monkeypatch: pytest.MonkeyPatch, *factors: float) -> None:
    """Let the times measured in steps be those measured alone, times one of `factors` after another."""

    def times_s(timer: OpTimer) -> dict[int, float]:
        executor = timer._executor
        return {op.id: op.time_s * factors[op.id % len(factors)] for op in executor.graph.ops}

    monkeypatch.setattr(OpTimer, "compute_times_s", times_s)


def plan_with_proof(monkeypatch: pytest.MonkeyPatch) -> tuple[nn.Module, Batch, planner.PlannedStep]:
    """Return a model, its batch and its step, whose plan is proved for other times than ops take in steps."""
    in_processes(monkeypatch, Scripted)
    monkeypatch.setattr(improvement, "_LOST_AT_ONCE_S", 0.0)
    times_in_steps(monkeypatch, 2.0, 1.0, 3.0)
    model, batch = model_and_batch()
    return model, batch, planned(model, batch, wait=Wait(gap=0.01, seconds=60.0))


def proof(plan: Plan) -> tuple[object, ...]:
    return plan.status, plan.gap, plan.bound_s, plan.time_s, str(plan)


def test_a_proof_stays_until_the_program_was_solved_for_times_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch, step = plan_with_proof(monkeypatch)
    first = step.plan
    assert first.gap <= 0.01 and "for the costs measured alone" in str(first)
    for seed in range(5):
        assert_trains_as_eager(step, model, batch, [seed])
        assert proof(step.plan) == proof(first)
    job = Scripted.jobs[-1]
    assert job.graph.provenance["times"] == "measured in training steps"
    assert job.start.schedule == first.schedule
    assert job.start.windows == tuple(first.settings["windows"])
    corrected = judge_on(apply_recorded_options(job.graph, first.settings), first)
    assert step.plan.predicted_s == pytest.approx(corrected.predicted_s) != first.predicted_s  # at the times in steps
    assert step.plan.overhead == first.overhead

    found = solve_graph(job.graph, job.budget, replace(job.settings, work_limit=50.0), start=job.start)
    assert found.status == "optimal"
    Scripted.news = [replace(found, bound_s=job.graph.time_s)]  # on the way, little is proved
    assert_trains_as_eager(step, model, batch, [6])
    assert proof(step.plan) == proof(first)
    Scripted.news = [Ended(found)]
    assert_trains_as_eager(step, model, batch, [7])
    assert "for the costs measured in training steps" in str(step.plan)
    assert step.plan.graph == found.graph and step.plan.bound_s == pytest.approx(found.bound_s)
    assert step.plan.predicted_s == pytest.approx(step.plan.time_s + step.plan.graph.around_s)
    assert (step.plan.status, step.plan.gap) == ("optimal", compute_gap(step.plan.time_s, step.plan.bound_s))
    assert step.measured is not None and check_plan(apply_recorded_options(step.measured, step.plan.settings), step.plan)


@pytest.mark.parametrize("slower", [0.0, 0.01])
def test_no_proof_is_lost_to_a_solve_that_proves_another_order(slower: float, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch, step = plan_with_proof(monkeypatch)
    first = step.plan
    assert_trains_as_eager(step, model, batch, range(4))
    job = Scripted.jobs[-1]
    now = judge_on(apply_recorded_options(job.graph, first.settings), first)
    monkeypatch.setattr(improvement, "_list_first_executions", lambda plan: plan is found)
    found = replace(now, time_s=now.time_s * (1 + slower), bound_s=now.time_s * (1 + slower))
    Scripted.news = [Ended(found)]
    assert_trains_as_eager(step, model, batch, [4])
    assert (step.plan.status, step.plan.gap) == (("optimal", 0.0) if slower == 0.0 else (first.status, first.gap))


@pytest.mark.parametrize(("repaying", "step_of_swap"), [(10.0, 5), (14.0, 14)])
def test_a_faster_plan_waits_until_its_swap_is_repaid(
    repaying: float, step_of_swap: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_processes(monkeypatch, Scripted)
    monkeypatch.setattr(improvement, "_LOST_AT_ONCE_S", 0.0)
    monkeypatch.setattr(Improvement, "_count_repaying_steps", lambda *_: repaying)
    times_in_steps(monkeypatch, 1.0)
    worst_first(monkeypatch)
    model, batch = model_and_batch()
    step = planned(model, batch)
    for number in range(1, 16):
        if number == 5:
            job = Scripted.jobs[-1]
            Scripted.news = [solve_graph(job.graph, job.budget, replace(job.settings, work_limit=2.0))]
        step(*batch).backward()
        model.zero_grad()
    assert [use.step for use in step.history] == [1, step_of_swap]


def test_a_proof_stays_in_short_runs_and_if_the_next_solve_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    in_processes(monkeypatch, Scripted)
    nothing_pays(monkeypatch)
    times_in_steps(monkeypatch, 1.0, 2.0)
    model, batch = model_and_batch()
    step = planned(model, batch)
    first = step.plan
    for seed in range(5):
        assert_trains_as_eager(step, model, batch, [seed])
        assert proof(step.plan) == proof(first)
    assert Scripted.jobs == []
    Scripted.news = [Ended(failure="its process has died")]
    assert proof(step.wait()) == proof(first)
    assert len(Scripted.jobs) == 1


def nothing_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no time that is lost be worth a process."""
    monkeypatch.setattr(improvement, "_LOST_AT_ONCE_S", math.inf)
    monkeypatch.setattr(improvement, "_START_S", math.inf)


def test_a_short_run_of_short_steps_has_a_proof_for_its_own_times(monkeypatch: pytest.MonkeyPatch) -> None:
    in_processes(monkeypatch, Scripted)
    monkeypatch.setattr(improvement, "solve_here", solve_here)
    nothing_pays(monkeypatch)  # but solves that take less than the start of a process
    times_in_steps(monkeypatch, 2.0, 1.0, 3.0)
    model, batch = model_and_batch()
    step = planned(model, batch, wait=Wait(gap=0.001, seconds=60.0))
    assert_trains_as_eager(step, model, batch, range(4))
    assert Scripted.jobs == []
    assert step.plan.graph.provenance["times"] == "measured in training steps"
    assert step.plan.status == "optimal" and step.plan.gap <= 0.001
    assert step.measured is not None and check_plan(apply_recorded_options(step.measured, step.plan.settings), step.plan)


def test_a_run_that_is_no_trial_is_solved_again_whatever_it_loses(monkeypatch: pytest.MonkeyPatch) -> None:
    in_processes(monkeypatch, Scripted)
    nothing_pays(monkeypatch)
    times_in_steps(monkeypatch, 2.0, 1.0, 3.0)
    model, batch = model_and_batch()
    step = planned(model, batch, wait=Wait(gap=0.001, seconds=60.0))
    jobs = []
    for _ in range(12):
        step(*batch).backward()
        model.zero_grad()
        jobs.append(len(Scripted.jobs))
    assert jobs == [0] * 9 + [1] * 3


@pytest.mark.parametrize(("most_s", "must_stop"), [(60.0, False), (-1.0, True)])
def test_a_solve_here_ends_in_time(most_s: float, *, must_stop: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def solve_graph(*_: object, must_stop: Callable[[], bool], **__: object) -> Plan:
        asked.append(must_stop())
        raise InfeasibleError("too little")

    monkeypatch.setattr(background, "solve_graph", solve_graph)
    assert solve_here(SolveJob(make_chain(2), Bytes(1), PlanSettings()), most_s).failure == "too little"
    assert asked == [must_stop]


def first_plan_with(monkeypatch: pytest.MonkeyPatch, **changes: object) -> None:
    """Let the first plan be one of a short solve with these `changes`, without a proof."""

    def first_plan(search: StepSearch, graph: Graph, budget: Budget, stage: StageReport) -> Plan:
        plan = solve_graph(graph, budget, replace(search.settings, work_limit=2.0))
        return replace(plan, **{"bound_s": graph.time_s, **changes})

    monkeypatch.setattr(StepSearch, "find_first_plan", first_plan)


@pytest.mark.parametrize(("seconds", "here"), [(0.4, True), (0.6, False)])
def test_only_a_plan_found_in_a_moment_is_solved_again_here(
    seconds: float, *, here: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_processes(monkeypatch, Scripted)
    times_in_steps(monkeypatch, 2.0, 1.0, 3.0)
    first_plan_with(monkeypatch, seconds=seconds)
    limits: list[float] = []

    def solve(job: SolveJob, most_s: float) -> Ended:
        limits.append(most_s)
        return Ended(failure="there was no time")

    monkeypatch.setattr(improvement, "solve_here", solve)
    model, batch = model_and_batch()
    step = planned(model, batch)
    assert step.plan.gap > 0
    assert_trains_as_eager(step, model, batch, range(4))
    assert limits == ([improvement._START_S] if here else [])


def test_a_solve_here_seeks_the_gap_that_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    in_processes(monkeypatch, Scripted)
    times_in_steps(monkeypatch, 2.0, 1.0, 3.0)
    first_plan_with(monkeypatch, seconds=0.1)
    tolerances: list[float] = []

    def solve(job: SolveJob, most_s: float) -> Ended:
        tolerances.append(job.settings.tolerance.first)
        plan = solve_graph(job.graph, job.budget, replace(job.settings, work_limit=50.0), start=job.start)
        return Ended(replace(plan, bound_s=plan.time_s / 1.0009, settings=replace(plan.settings, tolerance=0.0)))

    monkeypatch.setattr(improvement, "solve_here", solve)
    model, batch = model_and_batch()
    step = planned(model, batch)
    first = step.plan
    assert_trains_as_eager(step, model, batch, range(4))
    assert tolerances == [min(1e-3, first.gap)]
    assert step.plan.status == "optimal" and step.plan.proof == "gap 0.09% for the costs measured in training steps"
    assert all(use.reason.endswith(step.plan.proof) for use in step.history[1:])


@pytest.mark.parametrize("reordered", [True, False])
def test_an_order_that_was_preferred_to_program_order_stays(*, reordered: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    in_processes(monkeypatch, Scripted)
    nothing_pays(monkeypatch)
    times_in_steps(monkeypatch, 2.0, 1.0, 3.0)
    first_plan_with(monkeypatch, settings=SolveSettings(reordered=reordered))
    model, batch = model_and_batch()
    step = planned(model, batch)
    step.wait(0.0)
    assert Scripted.jobs[-1].settings.reorder is (False if reordered else None)


@pytest.mark.usefixtures("at_once")
def test_a_better_plan_runs_in_the_slab_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    worst_first(monkeypatch)
    model, batch = model_and_batch()
    step = planned(model, batch, arena=True)
    first, slabs = step.plan, []
    for seed in range(6):
        assert_trains_as_eager(step, model, batch, [seed])
        slabs.append(step.debug.arena.slab)
        assert step.debug.arena.missed == Missed()
    assert slabs[0] is not None and all(slab is slabs[0] for slab in slabs)  # of the second plan, found before the first step
    plan = step.plan
    assert len(step.history) > 1
    assert plan.arena_bytes > first.arena_bytes  # the first plan needs the least memory
    assert plan.measured_peak_bytes == plan.graph.static_bytes + plan.arena_bytes + plan.outside_arena_bytes
    assert plan.measured_peak_bytes <= plan.budget_bytes


@pytest.mark.usefixtures("at_once")
def test_the_better_plan_is_kept_in_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    worst_first(monkeypatch)
    model, batch = model_and_batch()

    def step() -> planner.PlannedStep:
        return planner.compile(model, F.mse_loss, batch, budget=half_way_bytes(), passes=1, options=[], cache=tmp_path)

    first = step()
    kept = [first.plan.schedule]
    assert_trains_as_eager(first, model, batch, range(3))
    (path,) = tmp_path.iterdir()
    kept.append(read_plan(path).schedule)
    assert kept[0] != kept[1]
    again = step()
    assert again.plan.schedule == kept[1] and again.plan.eager.overhead is not None
    assert_trains_as_eager(again, model, batch, [7])


def test_a_plan_over_the_budget_is_taken_back(at_once: type[Solved], monkeypatch: pytest.MonkeyPatch) -> None:
    worst_first(monkeypatch)
    model, batch = model_and_batch()
    step = planned(model, batch)
    first, budget = step.plan, step.plan.budget_bytes
    above_by(1000, budget, monkeypatch)
    assert_trains_as_eager(step, model, batch, [1])
    assert step.plan.schedule != first.schedule
    assert_trains_as_eager(step, model, batch, [2])
    assert step.plan.schedule == first.schedule
    assert step.history[-1].reason == "the peak of the next one was over the budget"
    assert_trains_as_eager(step, model, batch, [3])
    assert at_once.jobs[-1].budget == Bytes(budget - 1000)  # solved for as much less
    assert step.plan.measured_peak_bytes is None or step.plan.measured_peak_bytes <= budget


@pytest.mark.slow
def test_ops_are_timed_where_a_plan_was_taken_back(at_once: type[Solved], monkeypatch: pytest.MonkeyPatch) -> None:
    worst_first(monkeypatch)
    model, batch = model_and_batch()
    step = planned(model, batch)
    first = step.plan
    above_by(1000, first.budget_bytes, monkeypatch)
    assert_trains_as_eager(step, model, batch, [0])
    assert step.plan.schedule != first.schedule
    monkeypatch.setattr(at_once, "receive", lambda solve, most_s=0.0: None)  # nothing else is found
    assert_trains_as_eager(step, model, batch, range(1, 5))
    assert step.plan.schedule == first.schedule
    assert step.plan.graph.provenance["times"] == "measured in training steps"


@pytest.fixture
def eager_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (compiler, compare_eager):
        monkeypatch.setattr(module, "explain_not_fitting", lambda graph, device: "it needs more")


@pytest.mark.slow
@pytest.mark.usefixtures("eager_does_not_fit")
def test_where_eager_does_not_fit_the_first_step_measures_the_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "measure_peak", None)  # no step is run before
    monkeypatch.setattr(improvement, "_LOST_AT_ONCE_S", math.inf)  # nor is another plan looked for
    model, batch = model_and_batch()
    step = planned(model, batch)
    assert step.plan.measured_peak_bytes is None and step.plan.eager is None
    assert_trains_as_eager(step, model, batch, range(2))
    assert len(step.history) == 1
    assert step.plan.measured_peak_bytes == step.plan.peak_bytes <= step.plan.budget_bytes


@pytest.mark.usefixtures("eager_does_not_fit")
def test_a_first_plan_over_the_budget_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = model_and_batch()
    step = planned(model, batch)
    budget = step.plan.budget_bytes
    above_by(1000, budget, monkeypatch)
    assert_trains_as_eager(step, model, batch, range(3))
    assert [(use.step, use.reason) for use in step.history][1] == (2, "the peak of the first one was over the budget")
    assert step.history[1].plan.peak_bytes <= budget - 1000
    assert step.plan.budget_bytes == budget
    assert step.plan.measured_peak_bytes <= budget - 1000


@pytest.mark.slow
@pytest.mark.usefixtures("eager_does_not_fit")
def test_a_first_plan_over_the_budget_that_nothing_can_replace_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = model_and_batch()
    step = planned(model, batch)
    above_by(9 * step.plan.budget_bytes // 10, step.plan.budget_bytes, monkeypatch)
    assert_trains_as_eager(step, model, batch, [0])
    with pytest.raises(
        InfeasibleError, match=r"over the budget of .*; no plan is found that needs that much less: raise the budget"
    ):
        step(*batch)


@pytest.mark.slow
def test_plans_are_not_swapped_if_waiting_or_swap_never(at_once: type[Solved], monkeypatch: pytest.MonkeyPatch) -> None:
    worst_first(monkeypatch)
    model, batch = model_and_batch()
    for options in ({"swap": "never"}, {"wait": "5%"}, {"wait": "2 work"}):
        step = planned(model, batch, **options)
        for seed in range(4):
            assert_trains_as_eager(step, model, batch, [seed])
        assert not step.improves and len(step.history) == 1 and step.wait() == step.plan
    assert at_once.jobs == []


def test_the_same_costs_give_the_same_plan_where_a_gap_is_waited_for() -> None:
    model, batch = model_and_batch()
    graph = planner.trace(model, F.mse_loss, batch, roofline="cpu")
    budget = between(graph)
    settings = PlanSettings(tolerance=Tolerance.of(1e-3), time_limit_s=20.0)
    plans = [StepSearch(replace(settings, wait=Wait.of("2%"))).find_first_plan(graph, Bytes(budget)) for _ in range(2)]
    assert plans[0].schedule == plans[1].schedule
    assert plans[0].gap <= 0.02


def test_a_step_is_ready_with_its_first_schedule() -> None:
    model, batch = model_and_batch()
    graph = planner.trace(model, F.mse_loss, batch, roofline="cpu")
    settings = PlanSettings(tolerance=Tolerance.of(0.0), time_limit_s=20.0, reorder=False)
    told: list[Progress] = []
    with Stages(told.append).run_stage(Stage.SOLVE) as stage:
        first = StepSearch(replace(settings, wait=Wait.of(0))).find_first_plan(graph, Bytes(between(graph)), stage)
    assert told[-2].best_s == first.time_s
    assert simulate(graph, first.schedule).peak_bytes <= first.budget_bytes


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (None, Wait(0.01, 3.0)),
        (0, Wait(None, 0.0)),
        (2.5, Wait(None, 2.5)),
        ("10s", Wait(None, 10.0)),
        ("2m", Wait(None, 120.0)),
        ("0.5%", Wait(0.005, None)),
        ("20 work", Wait(None, None, 20.0)),
        (Wait(0.1, None), Wait(0.1, None)),
    ],
)
def test_wait_values_are_parsed(given: object, wanted: Wait) -> None:
    assert Wait.of(given) == wanted
    assert wanted.reproducible == (wanted.seconds is None)


@pytest.mark.parametrize("given", [-1, float("nan"), True, "soon", "10", "5 percent", []])
def test_invalid_wait_and_swap_values_raise(given: object) -> None:
    with pytest.raises(PlannerError, match="must be seconds"):
        Wait.of(given)
    with pytest.raises(PlannerError, match="swap is 'sometimes': choose from exact, any, never"):
        PlanSettings(swap="sometimes")


@pytest.mark.usefixtures("solves_at_once")
def test_a_solve_in_the_background_sends_plans_and_its_end() -> None:
    model, batch = model_and_batch()
    graph = planner.trace(model, F.mse_loss, batch, roofline="cpu")
    budget = between(graph)
    background = BackgroundSolve(SolveJob(graph, Bytes(budget), PlanSettings(tolerance=Tolerance.of(0.05), work_limit=0.5)))
    found = [plan for _ in range(300) if background.ended is None and (plan := background.receive(0.2)) is not None]
    assert background.ended.failure == ""
    assert found[-1] == background.ended.plan
    assert simulate(graph, found[-1].schedule).peak_bytes <= budget
    assert found[-1].time_s <= min(plan.time_s for plan in found)
    impossible = BackgroundSolve(SolveJob(graph, Bytes(1), PlanSettings(time_limit_s=20.0)))
    while impossible.ended is None:
        impossible.receive(0.2)
    assert "the least any schedule" in impossible.ended.failure
    stopped = BackgroundSolve(SolveJob(graph, Bytes(budget), PlanSettings()))
    stopped.stop()
    assert stopped.ended is not None and stopped.receive(1.0) is None


@pytest.mark.skipif(sys.platform != "linux", reason="the scheduling class is Linux's")
def test_a_solve_in_the_background_takes_only_idle_cores() -> None:
    solve = BackgroundSolve(SolveJob(make_chain(40), Bytes(10**9), PlanSettings(time_limit_s=20.0)))
    process = solve._process.process.pid
    assert os.getpriority(os.PRIO_PROCESS, process) == 19 > os.getpriority(os.PRIO_PROCESS, 0)
    assert os.sched_getscheduler(process) == os.SCHED_IDLE != os.sched_getscheduler(0)
    solve.stop()


def test_training_does_not_wait_for_a_solve_that_has_no_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process reads nothing, and the job is larger than what the system buffers."""
    monkeypatch.setattr(background, "_lower_priority", lambda process: os.kill(process, signal.SIGSTOP))
    graph = replace(make_chain(4), provenance={"model": "x" * 2**22})
    solve = BackgroundSolve(SolveJob(graph, Bytes(10**9), PlanSettings()))
    assert solve.is_running and solve.receive(0.1) is None
    os.kill(solve._process.process.pid, signal.SIGCONT)
    while solve.ended is None:
        solve.receive(0.2)
    assert solve.ended.plan is not None
    idle = BackgroundSolve(SolveJob(graph, Bytes(10**9), PlanSettings()))
    idle.stop()  # while the job is being sent
    assert idle.ended.failure == "it was stopped"


def test_times_of_ops_that_did_not_run_are_scaled_as_those_that_did() -> None:
    model, batch = model_and_batch()
    graph = planner.trace(model, F.mse_loss, batch, roofline="cpu")
    first, *others = graph.ops
    corrected = set_times(graph, {op.name: 2 * op.time_s for op in others})
    assert corrected.ops[0].time_s == pytest.approx(2 * first.time_s)
    assert [op.time_s for op in corrected.ops[1:]] == [2 * op.time_s for op in others]
    assert corrected.fingerprint == graph.fingerprint


def test_a_plan_without_recomputation_stays_optimal_at_other_costs() -> None:
    model, batch = model_and_batch()
    graph = planner.trace(model, F.mse_loss, batch, roofline="cpu")
    corrected = set_times(graph, {op.name: 2 * op.time_s for op in graph.ops[1:]})
    whole = judge_on(corrected, solve(graph, "100%", time_limit_s=5.0))
    assert (whole.status, whole.gap) == ("optimal", 0.0)
    tight = judge_on(corrected, solve(graph, between(graph), time_limit_s=5.0))
    assert tight.status == "feasible" and tight.gap > 0


def test_plans_round_alike_if_they_execute_the_same_inexact_ops() -> None:
    torch.manual_seed(0)
    graph = planner.trace(*make("smoothed"), passes=1, options=["chunks"])
    plan = solve(graph, "100%", options=["chunks"], tolerance=0.5, work_limit=2.0)
    schedules = [schedule_with(graph, ops) for ops in ((), in_chunks(graph, 2), in_chunks(graph, 4))]
    program, in_two, in_four = (replace(plan, schedule=schedule) for schedule in schedules)
    for one in (program, in_two, in_four):
        assert [is_rounded_alike(graph, one, other) for other in (program, in_two, in_four)].count(True) == 1
        assert is_rounded_alike(graph, one, one)
