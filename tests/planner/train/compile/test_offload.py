"""``planner.compile(..., options=["offload"])``, and what it goes with."""

import copy
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import planner
from benchmarks.models.parts import FunctionModule
from planner.capture.workload.models import Workload, build
from planner.graphs.errors import OutOfMemoryError
from planner.graphs.io.formats import read_graph
from planner.graphs.pools import HOST
from planner.plans import search
from planner.plans.document import write_plan
from planner.plans.plan import read_plan
from planner.settings.link import get_measured_link
from planner.solvers.result import SolveSettings
from tests.support.cli import call
from tests.support.models.outcomes import assert_equal_steps
from tests.support.models.steps import make
from tests.support.raised_warnings import raise_warnings

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

_FAST: dict[str, Any] = {"options": ["offload"], "link": 1e12}


def compiled(workload: Workload, **options: Any) -> planner.PlannedStep:
    return planner.compile(*workload, **{"budget": "75%", "passes": 1, "tolerance": 0.1, **_FAST, **options})


def small() -> Workload:
    torch.manual_seed(0)
    return build("mlp", batch=64, layers=4, width=32, classes=3)


def test_compiled_step_with_offload_is_exact_within_both_budgets(tmp_path: Path) -> None:
    workload = make("gpt2_written")
    step = compiled(workload, host_budget="1GB")
    plan = step.plan
    assert plan.copied and plan.settings["options"] == ["offload"]
    assert plan.measured_peak_bytes <= plan.budget_bytes
    assert plan.eager.identical
    assert step.debug.devices.host.peak_bytes == plan.pool_peaks_bytes[HOST] > 0
    step.report(tmp_path / "report.html", trace=tmp_path / "trace.json")
    assert "Host memory" in (tmp_path / "report.html").read_text()
    ran = [event["cat"] for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"] if event["ph"] == "X"]
    assert len(ran) - ran.count("wait") == len(plan.schedule.computed)
    assert_equal_steps(step, workload.model, copy.deepcopy(workload.model), *workload.batch, loss_fn=workload.loss_fn)


def test_the_link_is_measured_where_none_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("planner.measure.link_rates.LARGE_BYTES", 2**23)
    plan = compiled(small(), link=None, budget="95%").plan
    measured = get_measured_link(plan.graph.provenance)
    assert plan.settings["link"] == {**asdict(measured.link), "source": "measured"}
    assert get_measured_link(compiled(small()).plan.graph.provenance) is None


@pytest.mark.slow
def test_plans_with_copies_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = compiled(small(), cache=tmp_path, host_budget="1GB")
    plain = compiled(small(), cache=tmp_path, options=(), link=None)
    slower = compiled(small(), cache=tmp_path, host_budget="1GB", link="1GB/s")
    less = compiled(small(), cache=tmp_path, host_budget="2GB")
    assert len(list(tmp_path.iterdir())) == 4

    def solve_again(*_: object, **__: object) -> None:
        raise AssertionError("solved again")

    monkeypatch.setattr(search, "solve_graph", solve_again)
    for step, options in (
        (first, {"host_budget": 10**9}),
        (plain, {"options": (), "link": None}),
        (slower, {"host_budget": "1000MB", "link": 1e9}),
        (less, {"host_budget": "2GB"}),
    ):
        with raise_warnings(UserWarning):
            assert compiled(small(), cache=tmp_path, **options).plan == step.plan
    assert first.plan.copied and not plain.plan.copied


def test_a_kept_plan_that_takes_too_much_of_the_host_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = compiled(small(), cache=tmp_path).plan
    assert compiled(small(), cache=tmp_path).plan == kept
    free_bytes = 2 * kept.pool_peaks_bytes[HOST] - 2
    monkeypatch.setattr(
        "planner.settings.option_settings.psutil.virtual_memory", lambda: type("Memory", (), {"available": free_bytes})
    )
    with pytest.warns(UserWarning, match=r"it takes .* of the host's memory, and may take .* here"):
        again = compiled(small(), cache=tmp_path)
    assert again.plan.pool_peaks_bytes[HOST] <= free_bytes // 2


@pytest.mark.slow
def test_a_kept_plan_that_was_edited_is_made_again(tmp_path: Path) -> None:
    plan = compiled(small(), cache=tmp_path).plan
    (file,) = tmp_path.iterdir()
    squeezed = SolveSettings(options={**plan.settings.options, "options": ["squeeze"]})
    for edited, why in (
        (replace(plan, pool_peaks_bytes={HOST: 1}), "in other pools"),
        (replace(plan, settings=SolveSettings()), "the plan is for another graph"),
        (replace(plan, settings=squeezed), "there is no option 'squeeze'"),
    ):
        write_plan(edited, file)
        with pytest.warns(UserWarning, match=f"cannot be used, and the step is planned again: .*{why}"):
            compiled(small(), cache=tmp_path)
        assert read_plan(file).pool_peaks_bytes[HOST] > 1


@pytest.mark.slow
def test_replanned_steps_share_the_hosts_memory() -> None:
    workload = small()
    model = FunctionModule(lambda m, x: m.model(x * m.scale), model=small().model, scale=1.0)
    step = compiled(Workload(model, workload.loss_fn, workload.batch), replan=True)
    found = []
    for scale in (1.0, 2.0, 1.0):
        model.scale = scale
        assert_equal_steps(step, model, copy.deepcopy(model), *workload.batch, loss_fn=workload.loss_fn)
        found.append((step.plan, step.debug.devices.host))
    assert found[0][1] is found[1][1] is found[2][1]


@pytest.mark.slow
def test_plans_of_varying_sizes_copy_and_share_the_hosts_memory() -> None:
    workload = small()
    step = compiled(workload, dynamic=True, host_budget="1GB", time_limit_s=3.0)
    host = step.debug.devices.host
    copied = 0
    for size in (64, 56, 52, 56):
        batch = tuple(value[:size] for value in workload.batch)
        assert_equal_steps(step, workload.model, copy.deepcopy(workload.model), *batch, loss_fn=workload.loss_fn)
        assert step.debug.devices.host is host and host.used_bytes == 0
        assert step.plan.measured_peak_bytes <= step.plan.budget_bytes
        copied += step.plan.copied > 0
    assert copied >= 2 and host.peak_bytes <= 10**9


def test_a_host_without_memory_is_an_error_of_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("planner.runtime.transfers.host_memory.HostMemory._allocate_new", none)
    workload = small()
    before = {name: value.clone() for name, value in workload.model.state_dict().items()}
    with pytest.raises(
        OutOfMemoryError,
        match=r"^while rehearsing the plan .* op 'copy_.*_device_to_host' .* Lower host_budget= .* \(MemoryError\)$",
    ):
        compiled(workload)
    assert all(torch.equal(before[name], value) for name, value in workload.model.state_dict().items())


@pytest.mark.slow
def test_the_commands_solve_and_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = "zoo:mlp,batch=64,layers=6,width=32,classes=3"
    graph_file, plan_file = tmp_path / "graph.json", tmp_path / "plan.json"
    assert call(capsys, "trace", model, "--measure-link", "-o", graph_file, "--quiet").code == 0
    assert get_measured_link(read_graph(graph_file).provenance) is not None
    asked = ("--options", "offload", "--link", "1000GB/s", "--host-budget", "1GB", "--time-limit", "10", "--quiet")
    assert call(capsys, "solve", graph_file, "--budget", "60%", *asked, "-o", plan_file).code == 0
    plan = read_plan(plan_file)
    assert plan.copied
    said = call(capsys, "run", plan_file, "--model", model, "--repeats", "1", "--json", "--quiet")
    assert said.code == 0, said.err
    data = json.loads(said.out)
    assert data["identical"] and data["measured_peak_bytes"] <= data["budget_bytes"]
    assert data["predicted_host_bytes"] == data["measured_host_bytes"] == plan.pool_peaks_bytes[HOST] > 0
    assert "host memory" in call(capsys, "run", plan_file, "--model", model, "--repeats", "1", "--quiet").out
