"""Settings are checked when they are made, and parameters of the solver reach it from everywhere."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import planner
from graphs.errors import PlannerError
from graphs.io.formats import write_graph
from graphs.synthetic.small import make_training_chain
from planner.cli.main import main
from planner.plans.plan import read_plan
from planner.plans.search import StepSearch
from planner.settings.option_settings import option_settings
from planner.settings.stages import RunSettings, SolveSettings, TraceSettings
from solvers.baselines.dtr import DtrParams
from solvers.windows.params import BoundParams, WindowsParams

PARAMS = WindowsParams(bound=BoundParams(small_ops=12))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: SolveSettings("simplex"), "there is no solver 'simplex'"),
        (lambda: SolveSettings(time_limit_s=0), "time limit is 0: must be seconds, above 0"),
        (lambda: SolveSettings(work_limit=-1.0), "work limit is -1.0: must be a number, above 0"),
        (lambda: SolveSettings("dtr", options=option_settings(["offload"])), "the solver 'dtr' recomputes only"),
        (lambda: TraceSettings(options=("offload",)), "'offload' is not found in a step"),
        (lambda: SolveSettings(params=DtrParams()), "must be WindowsParams"),
        (lambda: SolveSettings("dtr", params="many"), "params is 'many': must be DtrParams"),
        (lambda: SolveSettings("chen-sqrt", params=WindowsParams()), "'chen-sqrt' has no parameters: leave params out"),
        (lambda: TraceSettings(passes=0), "passes is 0: must be at least 1"),
        (lambda: TraceSettings(optimizer="lion"), "unknown optimizer 'lion': choose one of none, sgd"),
        (lambda: TraceSettings(roofline="h900"), "unknown device 'h900': choose from"),
        (lambda: TraceSettings(other_devices=("tpu",)), "there is no device 'tpu': write cpu"),
        (lambda: TraceSettings(roofline="h100", measure_link=True), "roofline= does not go with measure_link=True"),
        (lambda: RunSettings(kernels="triton"), "kernels is 'triton': choose from eager, inductor"),
        (lambda: RunSettings(swap="often"), "swap is 'often': choose from exact, any, never"),
        (lambda: RunSettings(max_plans=0), "max_plans is 0: at least one plan must be kept"),
        (lambda: RunSettings(arena=True, cuda_graph=True), "arena=True does not go with cuda_graph=True"),
        (lambda: RunSettings(cuda_graph=True, replan=True), "cuda_graph=True does not go with replan=True"),
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

    def search(settings: SolveSettings, run: RunSettings) -> StepSearch:
        reached.append(settings.params)
        return StepSearch(settings, run)

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
