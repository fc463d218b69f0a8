"""Settings are checked when they are made, conflicts are refused wherever they are asked for, and parameters reach the solver."""

import json
import re
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import planner
from graphs.errors import PlannerError, UsageError
from graphs.io.formats import write_graph
from graphs.options.option import Feature, Need
from graphs.synthetic.small import make_training_chain
from planner.capture.options import OPTIONS, needs
from planner.cli.main import main
from planner.plans.plan import read_plan
from planner.plans.search import StepSearch
from planner.settings.compatibility import Incompatibility, build_table, check_compatible, list_conflicts
from planner.settings.counted_memory import CountedMemory
from planner.settings.option_settings import build_option_settings
from planner.settings.plan import NOT_IN_PLANS, PlanSettings, select_settings
from planner.train.backend.settings import OPTIONS_OF_COMPILE
from solvers.baselines.dtr import DtrParams
from solvers.tolerance import Tolerance
from solvers.windows.params import BoundParams, WindowsParams

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
    planner.checkpoint(model, budget="1GB", params=PARAMS)(torch.ones(2, 4)).sum().backward()
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
