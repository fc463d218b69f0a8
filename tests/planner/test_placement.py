"""Other devices from the command line and from Python: measured, planned with, run; and what is said where that cannot be."""

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import planner
from planner.capture.options import apply_options
from planner.cli.main import main
from planner.graphs.errors import GraphError, MismatchError, PlannerError, UsageError
from planner.graphs.io.formats import read_graph, write_graph
from planner.graphs.ir import Graph, Op
from planner.graphs.options.placement import find_fixed
from planner.graphs.options.surroundings import Link, OtherDevice, Surroundings
from planner.plans.plan import read_plan
from planner.plans.solve import solve
from planner.settings.option_settings import apply_recorded_options, build_option_settings
from planner.settings.other_devices import DEVICES_KEY, decode_devices, encode_devices, parse_device
from planner.solvers.result import SolveSettings
from tests.support.graphs.random_choices import found_in_a_step
from tests.support.graphs.small_graphs import diamond
from tests.support.models.outcomes import assert_equal_steps

MODEL = "zoo:mlp,layers=1,width=24,batch=16,classes=5"
SECOND = "cpu:1"


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a small step with the times of a second pool of the CPU, where what could be placed takes no time."""
    path = tmp_path_factory.mktemp("placement") / "step.json"
    assert main(["trace", MODEL, "--other-devices", SECOND, "--passes", "1", "-o", str(path), "--quiet"]) == 0
    graph = read_graph(path)
    (device,) = decode_devices(graph.provenance)
    quick = replace(device, times_s=tuple(None if s is None else 1e-9 for s in device.times_s), bytes_per_s=1e12, latency_s=0.0)
    write_graph(replace(graph, provenance={**graph.provenance, DEVICES_KEY: encode_devices([quick])}), path)
    return path


def test_a_step_is_measured_on_both(traced: Path) -> None:
    graph = read_graph(traced)
    (device,) = decode_devices(graph.provenance)
    assert (device.name, device.capacity_bytes, device.block_bytes) == (SECOND, None, 1)
    stay = find_fixed(graph)
    assert stay and all((device.times_s[op.id] is None) == (op.id in stay) for op in graph.ops)
    # With as many threads the kernels are the same: so are their bits, and the memory that they take meanwhile.
    assert (device.differs, set(device.exact)) == ("", {op.id for op in graph.ops} - stay)
    assert all(device.workspaces_bytes[op.id] == op.workspace_bytes for op in graph.ops if op.id not in stay)


def test_other_devices_are_measured_with_all_options() -> None:
    """Times of other devices are of the program; what draws stays, and what updates statistics, which are here alone."""
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 4))
    batch = torch.randn(12, 8), torch.randn(12, 4)
    options = ["chunks", "pack", "kernels", "in-place", "compress"]
    graph = planner.trace(model, nn.MSELoss(), batch, options=options, other_devices=[SECOND], passes=1)
    (device,) = decode_devices(graph.provenance)
    assert len(device.times_s) == len(graph.program) < len(graph.ops)
    stay = {op.target.split(".")[1] for op, time_s in zip(graph.program, device.times_s, strict=True) if time_s is None}
    assert stay == {"_native_batch_norm_legit", "add_", "get_state", "native_dropout"}
    assert graph.writes_over_inputs and any(op.time_s for op in graph.ops if op.optional)


def test_commands_trace_solve_and_run_with_another_device(
    traced: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = tmp_path / "plan.json"
    solved = ["solve", str(traced), "--budget", "100%", "--options", "placement", "--solver", "xengine-overlapped"]
    assert main([*solved, "--tolerance", "100%", "--quiet", "-o", str(plan)]) == 0
    assert f"{SECOND} memory" in capsys.readouterr().out
    found = read_plan(plan)
    assert found.pool_peaks_bytes[SECOND] > 0 and found.copied > 0 and not found.differs
    code = main(["run", str(plan), "--model", MODEL, "--repeats", "1", "--quiet", "--json"])
    said = capsys.readouterr().out
    assert code == 0 and '"identical": true' in said and '"eager_differences": []' in said
    data = json.loads(said)
    assert data["measured_pools_bytes"] == data["predicted_pools_bytes"] == {SECOND: found.pool_peaks_bytes[SECOND]}
    assert main(["info", str(traced)]) == 0
    said = capsys.readouterr().out
    graph, stay = read_graph(traced), find_fixed(read_graph(traced))
    ops = len(graph.program)
    assert f"devices          {SECOND}: " in said
    assert f"with placement   {ops - len(stay)} of {ops} ops may run on {SECOND}, all exact: " in said
    rounds = replace(decode_devices(graph.provenance)[0], differs="rounding", exact=(0,), capacity_bytes=10**9)
    write_graph(replace(graph, provenance={**graph.provenance, DEVICES_KEY: encode_devices([rounds])}), tmp_path / "rounds.json")
    for more, offered, inexact in (([], ops - len(stay), ops - len(stay) - 1), (["--exact"], 1, 0)):
        assert main(["info", str(tmp_path / "rounds.json"), "--json", *more]) == 0
        device = json.loads(capsys.readouterr().out)["placement"][SECOND]
        assert (device["ops"], device["inexact_ops"], device["capacity_bytes"]) == (offered, inexact, 10**9)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_compiled_step_with_placement_is_exact(tmp_path: Path) -> None:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    batch = torch.randn(12, 8), torch.randn(12, 4)
    step, other = (
        planner.compile(
            model,
            nn.MSELoss(),
            batch,
            budget="100%",
            solver="xengine",
            options=["placement"],
            other_devices=[device],
            passes=1,
            compare_eager=False,
            cache=tmp_path,
        )
        for device in (SECOND, "cpu:2")
    )
    assert list(other.plan.pool_peaks_bytes) == ["cpu:2"]  # that of the first is kept, and is for other devices
    assert step.plan.settings["options"] == ["placement"] and SECOND in step.plan.pool_peaks_bytes
    assert_equal_steps(step, model, copy.deepcopy(model), *batch, loss_fn=nn.MSELoss())
    with pytest.raises(PlannerError, match=r"other_devices= and options=\['placement'\] go together"):
        planner.compile(model, nn.MSELoss(), batch, budget="100%", other_devices=[SECOND])


def test_a_graph_without_other_devices_says_how_to_get_them() -> None:
    with pytest.raises(GraphError, match=r"trace the step with --other-devices cpu:2, or cuda \(planner.trace\("):
        solve(diamond(), "100%", solver="xengine", options=["placement"])
    with pytest.raises(UsageError, match=r"needs to know other devices: Surroundings\(others="):
        apply_options(diamond(), ("placement",))


@pytest.mark.parametrize(
    ("solver", "options", "said"),
    [
        ("xengine", ["offload"], "the solver 'xengine' only places ops on other devices: use the solver 'windows'"),
        ("dtr", ["placement"], "the solver 'dtr' does not place ops on other devices: use the solver 'windows'"),
    ],
)
def test_a_solver_for_something_else(solver: str, options: list[str], said: str) -> None:
    with pytest.raises(PlannerError, match=said):
        solve(diamond(), "100%", solver=solver, options=options)


def test_device_names_are_parsed() -> None:
    assert [(d.name, d.torch_device, d.threads) for d in map(parse_device, ("cpu", "cpu:2", "cuda", "cuda:1"))] == [
        ("cpu", "cpu", None),
        ("cpu:2", "cpu", 2),
        ("cuda", "cuda", None),
        ("cuda:1", "cuda:1", None),
    ]
    for name in ("gpu", "cpu:0", "cpu:two", ""):
        with pytest.raises(UsageError, match=f"there is no device '{name}': write cpu"):
            parse_device(name)


def edited(times_s: object) -> SolveSettings:
    device = {"name": "cpu", "times_s": times_s, "bytes_per_s": 1.0}
    return SolveSettings(options={"options": ["placement"], DEVICES_KEY: [device]})


def test_malformed_device_measurements_raise() -> None:
    with pytest.raises(MismatchError, match="the measurements on other devices are not in the form that a trace writes"):
        apply_recorded_options(diamond(), edited("quick"))
    with pytest.raises(GraphError, match="device 'cpu' has 1 times for a program of 5 ops"):
        apply_recorded_options(diamond(), edited([1.0]))


def test_recorded_settings_restore_the_graph_of_a_plan() -> None:
    """Devices, the link and the host's memory, whatever else was found in the step."""
    ops = len(found_in_a_step(5).program)
    rounds = OtherDevice("cpu", (1.0,) * ops, 1.0, differs="rounding", exact=(0, 2))
    provenance = {DEVICES_KEY: encode_devices([OtherDevice("b", (2.0,) * ops, 1.0, 99), rounds])}
    graph = replace(found_in_a_step(5), provenance=provenance)
    assert {op.differs for op in apply_options(graph, ["placement"], Surroundings(Link.even(1.0), others=(rounds,))).ops} == {
        "",
        "rounding",
    }
    for options, exact in ((["placement"], False), (["offload", "placement"], False), (["placement", "offload"], True)):
        copies = "offload" in options
        options_given = build_option_settings(options, "3GB/s" if copies else None, 1000 if copies else None, exact=exact)
        offered = options_given.apply(graph)
        assert apply_recorded_options(graph, SolveSettings(options=options_given.record(graph))) == offered
        assert (len(offered.pools), "host_budget_bytes" in options_given.record(graph)) == (3 + copies, copies)
        stand_ins = [op for op in offered.ops if op.stream == "compute@cpu"]
        assert all(op.exact for op in stand_ins) is exact
        assert not exact or {op.replaces for op in stand_ins} <= {(0,), (2,)}


CHANGES: dict[str, tuple[OtherDevice, Callable[[Op, Graph], Any], object]] = {
    "workspaces": (OtherDevice("b", (1.0,) * 5, 1.0, workspaces_bytes=(7, 6, 5, 4, 3)), lambda op, _: op.workspace_bytes, 7),
    "exact": (OtherDevice("b", (1.0,) * 5, 1.0, differs="rounding", exact=(1, 2)), lambda op, _: op.differs, "rounding"),
    "exact there": (OtherDevice("b", (1.0,) * 5, 1.0, differs="rounding", exact=(0, 2)), lambda op, _: op.differs, ""),
    "blocks": (OtherDevice("b", (1.0,) * 5, 1.0, block_bytes=512), lambda op, g: g.tensors[op.outputs[0]].size_bytes, 512),
}


@pytest.mark.parametrize("name", CHANGES)
def test_measured_device_figures_reach_the_graph(name: str) -> None:
    device, look, wanted = CHANGES[name]
    graph = apply_options(diamond(), ("placement",), Surroundings(Link.even(1.0), others=(device,)))
    first = next(op for op in graph.ops if op.replaces == (0,))
    assert look(first, graph) == wanted


def test_copies_take_a_latency_besides_their_bytes() -> None:
    device = OtherDevice("b", (1.0,) * 5, 2.0, latency_s=0.25)
    graph = apply_options(diamond(), ("placement",), Surroundings(Link.even(1.0), others=(device,)))
    copies = [op for op in graph.ops if op.target == "copy"]
    assert copies and all(op.time_s == 0.25 + graph.tensors[op.inputs[0]].size_bytes / 2 for op in copies)
    with pytest.raises(GraphError, match=r"a copy from 'device' to 'b' has a latency of -1.0 s"):
        replace(device, latency_s=-1.0)


def test_devices_of_an_edited_file_are_refused_as_such() -> None:
    said = {DEVICES_KEY: [{"name": "cpu:2", "times_s": [1.0], "bytes_per_s": 0.0}]}
    with pytest.raises(
        MismatchError,
        match=r"not in the form that a trace writes \(the link from 'device' to 'cpu:2' has a rate of 0.0 bytes a second",
    ):
        decode_devices(said)
