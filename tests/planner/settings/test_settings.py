"""Settings are checked when they are made, conflicts refused; budgets as users write them: amounts, shares, auto, overheads."""

import json
import re
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import planner
from planner.capture.options import OPTIONS, needs
from planner.cli.main import main
from planner.graphs.errors import BudgetError, PlannerError, UsageError
from planner.graphs.io.formats import write_graph
from planner.graphs.ir import Graph
from planner.graphs.options.option import Feature, Need
from planner.graphs.synthetic.random_graphs import draw_graph
from planner.graphs.synthetic.small import make_training_chain
from planner.plans.plan import read_plan
from planner.plans.search import StepSearch
from planner.plans.summary import summarize
from planner.settings.budget import Auto, Bytes, Overhead, Share, read_budget, read_budget_or_overhead
from planner.settings.compatibility import Incompatibility, build_table, check_compatible, list_conflicts
from planner.settings.counted_memory import CountedMemory
from planner.settings.option_settings import build_option_settings
from planner.settings.plan import NOT_IN_PLANS, PlanSettings, select_settings
from planner.solvers.baselines.dtr import DtrParams
from planner.solvers.bounds import bound_least_budget
from planner.solvers.tolerance import Tolerance
from planner.solvers.windows.params import BoundParams, WindowsParams
from planner.train.backend.settings import OPTIONS_OF_COMPILE
from tests.support.solvers.brute_force import fastest

PARAMS = WindowsParams(bound=BoundParams(small_ops=12))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: PlanSettings(solver="simplex"), "there is no solver 'simplex'"),
        (lambda: PlanSettings(time_limit_s=0), "time limit is 0: must be seconds, above 0"),
        (lambda: PlanSettings(work_limit=-1.0), "work limit is -1.0: must be a number, above 0"),
        (lambda: PlanSettings(solver="dtr", options=build_option_settings(["offload"])), "the solver 'dtr' recomputes only"),
        (lambda: planner.trace(nn.Linear(1, 1), None, (), options=["offload"]), "'offload' is not found in a step"),
        (lambda: build_option_settings([], link="1GB/s"), "link given, but no option that transfers tensors: add options"),
        (lambda: PlanSettings(params=DtrParams()), "must be WindowsParams"),
        (lambda: PlanSettings(solver="dtr", params="many"), "params is 'many': must be DtrParams"),
        (lambda: PlanSettings(solver="chen-sqrt", params=WindowsParams()), "'chen-sqrt' has no parameters: leave params out"),
        (lambda: PlanSettings(passes=0), "passes is 0: must be at least 1"),
        (lambda: PlanSettings(optimizer="lion"), "unknown optimizer 'lion': choose one of none, sgd"),
        (lambda: PlanSettings(roofline="h900"), "unknown device 'h900': choose from"),
        (lambda: PlanSettings(other_devices=("tpu",)), "there is no device 'tpu': write cpu"),
        (lambda: PlanSettings(roofline="h100", measure_link=True), "roofline= does not go with measure_link=True"),
        (lambda: PlanSettings(kernels="triton"), "kernels is 'triton': choose from eager, inductor"),
        (lambda: PlanSettings(swap="often"), "swap is 'often': choose from exact, any, never"),
        (lambda: PlanSettings(max_plans=0), "max_plans is 0: at least one plan must be kept"),
        (lambda: PlanSettings(arena=True, cuda_graph=True), "arena=True does not go with cuda_graph=True"),
        (lambda: PlanSettings(cuda_graph=True, replan=True), "cuda_graph=True does not go with replan=True"),
    ],
)
def test_settings_that_cannot_be_are_refused_when_they_are_made(make: Callable[[], object], said: str) -> None:
    with pytest.raises(PlannerError, match=said):
        make()


def test_parameters_reach_the_solver() -> None:
    graph = make_training_chain(6)
    plan = planner.solve(graph, 4, params=PARAMS)
    assert plan.settings["params"] == PARAMS.export()
    at_most = planner.solve(graph, max_overhead=0.5, params=PARAMS)
    assert at_most.settings["params"] == PARAMS.export()
    with pytest.raises(PlannerError, match="must be WindowsParams"):
        planner.solve(graph, 4, params=DtrParams())


def test_parameters_reach_the_graphs_of_torch_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    reached: list[object] = []

    def search(settings: PlanSettings) -> StepSearch:
        reached.append(settings.params)
        return StepSearch(settings)

    monkeypatch.setattr("planner.train.backend.shared_budget.StepSearch", search)
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    model = planner.checkpoint(model, budget="1GB", params=PARAMS)
    for _ in range(2):  # the first step keeps little, and is not solved for
        model(torch.ones(2, 4)).sum().backward()
    assert reached == [PARAMS]


def test_a_kept_plan_is_one_of_the_same_parameters(tmp_path: Path) -> None:
    model, batch = nn.Linear(4, 3), (torch.ones(2, 4), torch.zeros(2, 3))
    given = {"budget": "100%", "passes": 1, "compare_eager": False, "cache": tmp_path, "wait": "5%"}
    for params in (None, PARAMS, PARAMS):
        step = planner.compile(model, nn.MSELoss(), batch, params=params, **given)
        assert step.plan.settings["params"] == (params or WindowsParams()).export()
    assert len(list(tmp_path.glob("*.json"))) == 2


_OTHER_VALUES: dict[str, Any] = {
    "roofline": "h100",
    "other_devices": ("cpu:1",),
    "options": build_option_settings(["in-place"]),
    "solver": "chen-sqrt",
    "tolerance": Tolerance.of(0.01),
    "time_limit_s": 7.0,
    "work_limit": 7.0,
    "reorder": True,
    "params": PARAMS,
    "memory": CountedMemory.RESERVED,
    "arena": True,
    "kernels": "inductor",
    "cuda_graph": True,
}


def test_every_setting_is_in_the_key_of_cached_plans_unless_it_is_known_not_to_matter() -> None:
    default = PlanSettings()
    assert _OTHER_VALUES.keys() == {field.name for field in fields(PlanSettings)} - NOT_IN_PLANS
    for name, value in _OTHER_VALUES.items():
        changed = replace(default, **{name: value}).made_with
        assert [one for one in changed if changed[one] != default.made_with[one]] == [name]
        json.dumps(changed)


def test_a_share_of_host_memory_keeps_its_key_and_amounts_are_bytes_in_it() -> None:
    shares = [build_option_settings(["offload"], host_budget=share).key for share in ("50%", "50%", "40%", None)]
    assert shares[0] == shares[1] != shares[2] != shares[3] != shares[0]
    assert (
        build_option_settings(["offload"], host_budget="2GB").key
        == build_option_settings(["offload"], host_budget=2_000_000_000).key
    )


def test_front_ends_take_only_known_settings() -> None:
    for front_end in (planner.compile, planner.solve, planner.trace, planner.checkpoint, planner.advise):
        names = {p.name for p in signature(front_end).parameters.values() if p.kind is Parameter.KEYWORD_ONLY}
        others = names - select_settings(dict.fromkeys(names)).keys()
        assert others <= {"budget", "max_overhead", "on_progress", "on_plan", "should_stop"}


def test_the_guide_names_every_option_of_the_backend() -> None:
    guide = (Path(__file__).parents[3] / "docs/guides/torch-compile.md").read_text()
    for name in OPTIONS_OF_COMPILE:
        assert f"`{name}`" in guide or f'"{name}":' in guide or f"{name}=" in guide, name


def test_the_command_reads_parameters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    graph, plan, params = (str(tmp_path / name) for name in ("graph.json", "plan.json", "params.toml"))
    write_graph(make_training_chain(6), graph)
    Path(params).write_text("[bound]\nsmall_ops = 12\n")
    assert main(["solve", graph, "--budget", "100%", "--params", params, "-o", plan, "--quiet"]) == 0
    assert read_plan(plan).settings["params"] == PARAMS.export()
    assert main(["solve", graph, "--budget", "100%", "--params", params, "--solver", "dtr"]) == 2
    assert "leave it out, or use --solver windows" in capsys.readouterr().err


@pytest.mark.parametrize("solver", ["chen-sqrt", "monet"])
def test_compile_adds_default_options_only_for_solvers_that_take_them(solver: str) -> None:
    model, batch = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), (torch.ones(2, 4), torch.zeros(2, 3))
    step = planner.compile(model, nn.MSELoss(), batch, budget="100%", solver=solver, passes=1, compare_eager=False)
    assert step.plan.solver == solver
    assert step.plan.settings.get("options") == (["in-place"] if solver == "monet" else None)


X, Y = torch.ones(2, 4), torch.zeros(2, 3)


def compiled(name: str, **how: object) -> None:
    others = ["cpu:2"] if Need.DEVICES in needs((name,)) else []
    planner.compile(
        nn.Linear(4, 3), nn.MSELoss(), (X, Y), budget="100%", options=[OPTIONS[name].to_try], other_devices=others, **how
    )


def under_torch_compile(name: str, **how: object) -> None:
    options = {"budget": "100%", "options": [OPTIONS[name].to_try], **how}
    torch.compile(nn.Linear(4, 3), backend="planner", options=options)(X)


WAYS: dict[Feature, list[Callable[[str], None]]] = {
    Feature.TORCH_COMPILE: [under_torch_compile],
    Feature.VARYING_SIZES: [partial(compiled, dynamic=True)],
    Feature.INDUCTOR: [partial(compiled, kernels="inductor"), partial(under_torch_compile, kernels="inductor")],
}
OF_OPTIONS = [conflict for conflict in list_conflicts() if conflict.one in OPTIONS]


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(("name", "feature"), [(one.one, one.other) for one in OF_OPTIONS if one.other in WAYS])
def test_no_step_is_made_with_an_option_that_the_table_refuses(name: str, feature: Feature) -> None:
    refusal = rf"the option .{name}. does not go with ({feature}|torch\.compile): .*leave .* out"
    for way in WAYS[feature]:
        with pytest.raises(Exception, match=refusal) as e:
            way(name)
        assert isinstance(getattr(e.value, "inner_exception", e.value), UsageError)


@pytest.mark.parametrize("conflict", list_conflicts(), ids=lambda one: f"{one.one}-{one.other}")
def test_each_conflict_of_the_table_is_one_clear_error(conflict: Incompatibility) -> None:
    with pytest.raises(UsageError, match=re.escape(str(conflict))):
        check_compatible({conflict.one, conflict.other})
    check_compatible({conflict.one})
    check_compatible({conflict.other})


def test_the_documentation_shows_the_table() -> None:
    page = (Path(__file__).parents[3] / "docs" / "options" / "index.md").read_text()
    for row in build_table():
        assert f"| {' | '.join(row)} |" in page


def test_the_command_prints_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["options"]) == 0
    printed = capsys.readouterr().out
    assert all(f"{things} with {other}: {reason}" in printed for things, other, reason in build_table())


@pytest.fixture
def graph() -> Graph:
    return make_training_chain(6)


@pytest.mark.parametrize(
    ("budget", "size_bytes"), [("60%", 600), ("2kB", 2000), (7, 7), (2**70, 2**63 - 1), ("1e30GB", 2**63 - 1), ("130 %", 1300)]
)
def test_budgets_come_to_bytes(budget: str | int, size_bytes: int) -> None:
    assert read_budget(budget).resolve(1000) == size_bytes


def test_a_float_is_a_share(graph: Graph) -> None:
    assert planner.solve(graph, 0.6).budget_bytes == planner.solve(graph, "60%").budget_bytes
    assert [read_budget(budget) for budget in (1.0, np.float64(0.125), np.int64(8), "8GB")] == [
        Share(100),
        Share(12.5),
        Bytes(8),
        Bytes(8 * 10**9),
    ]
    assert [str(Share(percent)) for percent in (60.0, 12.5, 33.3)] == ["60%", "12.5%", "33.3%"]


@pytest.mark.parametrize("budget", [0.0, -0.5, 1.5, 8e9, float("nan")])
def test_a_float_that_is_no_share_raises(budget: float, graph: Graph) -> None:
    with pytest.raises(BudgetError, match=r"budget is .*: a float is a share .* above 0 and at most 1"):
        planner.solve(graph, budget)


@pytest.mark.parametrize("budget", ["auto", " AUTO "])
def test_auto_without_a_device_raises(budget: str, graph: Graph) -> None:
    assert read_budget(budget) == Auto()
    with pytest.raises(BudgetError, match="there is no device here, only a graph: write an amount"):
        planner.solve(graph, budget)


@pytest.mark.parametrize(("given", "share"), [("10%", 0.1), (0.1, 0.1), ("0.25", 0.25), (0, 0.0), ("150%", 1.5)])
def test_overheads_are_parsed(given: str | float, share: float) -> None:
    assert read_budget_or_overhead(None, given) == Overhead(share)


@pytest.mark.parametrize("given", ["ten", "-1%", -0.1, float("nan"), float("inf"), True, "", "8GB", object(), 10, "2.5"])
def test_other_overheads_raise(given: Any) -> None:
    with pytest.raises(BudgetError, match=r"max_overhead is .*: must be a fraction of the step time"):
        read_budget_or_overhead(None, given)


@pytest.mark.parametrize("given", [{}, {"budget": "8GB", "max_overhead": 0.1}, {"budget": None, "max_overhead": None}])
def test_not_exactly_one_of_budget_and_overhead_raises(given: dict[str, Any], graph: Graph) -> None:
    with pytest.raises(BudgetError, match="give either a budget or max_overhead"):
        planner.solve(graph, **given)


@pytest.mark.parametrize("given", ["0%", "8", "8GBit", "GB", 0, -1, True, None, object()])
def test_what_is_no_budget_raises_where_it_is_read(given: Any) -> None:
    with pytest.raises(BudgetError, match="budget"):
        read_budget(given)


def test_budgets_are_equal_however_they_are_written() -> None:
    assert read_budget("2kB") == read_budget(2000) == Bytes(2000)
    assert read_budget("60 %") == read_budget("60.0%") == read_budget(0.6) == Share(60)
    assert read_budget_or_overhead(None, "10%") == read_budget_or_overhead(None, 0.1) != read_budget("10%")
    assert read_budget(Share(60)) == Share(60)


@pytest.mark.parametrize("seed", range(12))
def test_the_least_memory_at_a_price_is_that_of_brute_force(seed: int) -> None:
    graph = draw_graph(seed, ops=7)
    price = 0.3
    plan = planner.solve(graph, max_overhead=price, tolerance=0.0, reorder=False, time_limit_s=20)
    assert plan.overhead <= price + 1e-9 and plan.peak_bytes == plan.budget_bytes
    limit_s = graph.time_s * (1 + price) * (1 + 1e-9)
    peak_bytes = summarize(graph).keep_everything_peak_bytes
    within = [
        budget
        for budget in range(bound_least_budget(graph).budget_bytes, peak_bytes + 1)
        if (time_s := fastest(graph, budget)) is not None and time_s <= limit_s
    ]
    assert min(within) <= plan.budget_bytes <= min(within) + max(1, 0.01 * plan.budget_bytes)
    assert plan.settings["least_budget_proved_bytes"] <= min(within)
    assert plan.settings["max_overhead"] == price


@pytest.mark.slow
def test_more_overhead_never_needs_more_memory() -> None:
    graph = make_training_chain(10)
    found = [planner.solve(graph, max_overhead=price, work_limit=20).budget_bytes for price in (0, 0.05, 0.1, 0.3, 0.6)]
    assert found == sorted(found, reverse=True)
    assert found[0] == summarize(graph).keep_everything_peak_bytes > found[-1]


def test_the_least_memory_is_reproducible_by_work() -> None:
    graph = draw_graph(3, ops=40)
    first, second = (planner.solve(graph, max_overhead="20%", work_limit=5) for _ in range(2))
    assert (first.budget_bytes, first.schedule) == (second.budget_bytes, second.schedule)


def test_a_search_that_is_stopped_keeps_everything(graph: Graph) -> None:
    plan = planner.solve(graph, max_overhead=0.5, should_stop=lambda: True)
    assert plan.overhead <= 0.5
    assert plan.budget_bytes <= summarize(graph).keep_everything_peak_bytes


def test_options_lower_the_memory_at_a_price() -> None:
    graph = make_training_chain(8)
    alone = planner.solve(graph, max_overhead=0.05, work_limit=20)
    offloaded = planner.solve(graph, max_overhead=0.05, work_limit=20, options=["offload"], link="1000GB/s", host_budget="1GB")
    assert offloaded.budget_bytes < alone.budget_bytes
    assert offloaded.overhead <= 0.05
