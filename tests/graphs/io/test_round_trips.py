"""Graphs and plans survive writing and reading; files are written whole or not at all, and damaged ones are refused."""

import json
import os
import re
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

from planner.graphs.documents import convert_to_json
from planner.graphs.errors import FormatError, GraphError, OutputError
from planner.graphs.io import files
from planner.graphs.io.formats import read_graph, write_graph
from planner.graphs.io.graph_document import build_from_dict, convert_to_dict
from planner.graphs.ir import Graph, Kind, Phase
from planner.graphs.simulate import simulate
from planner.plans.document import plan_to_dict, write_plan
from planner.plans.plan import Plan, plan_from_dict, read_graph_or_plan, read_plan
from tests.support.graphs.documents import files_in, graphs, plans, refusal, through_text


@given(graphs())
def test_written_graph_reads_back_equal(graph: Graph) -> None:
    again = build_from_dict(through_text(convert_to_dict(graph)))
    assert again == graph
    assert again.fingerprint == graph.fingerprint
    assert [op.time_s.hex() for op in again.ops] == [op.time_s.hex() for op in graph.ops]


SETTINGS = """{"tolerance": 0, "time_limit_s": null, "params": {"bounds": {}}, "schedules": "some", "serial_s": 2.5,
"serial_bound_s": 1.5, "windows": [3, 5], "arena_solves": 2, "arena_bytes": 4, "outside_arena_bytes": 1, "arena_offsets": [0, 2],
"max_overhead": 1, "least_budget_proved_bytes": 7, "reordered": false, "allocated_budget_bytes": 8, "no_arena": "slower",
"options": ["offload"], "exact": [], "devices": [], "link": {"source": "given"}, "host_budget_bytes": 9}"""


def test_settings_keep_the_order_and_form_of_files(plan: Plan) -> None:
    text = files.format_json({**plan_to_dict(plan), "settings": json.loads(SETTINGS)})
    read = plan_from_dict(json.loads(text))
    assert files.format_json(plan_to_dict(read)) == text
    assert (read.settings.tolerance, read.settings.windows, read.arena_offsets) == (0, [3, 5], (0, 2))


@given(plans())
def test_written_plan_reads_back_equal(plan: Plan) -> None:
    assert plan_from_dict(through_text(plan_to_dict(plan))) == plan


def test_files_hold_one_op_and_one_execution_a_line(graph: Graph, plan: Plan, tmp_path: Path) -> None:
    write_graph(graph, tmp_path / "graph.json")
    write_plan(plan, tmp_path / "plan.json")
    assert read_graph(tmp_path / "graph.json") == graph == read_graph_or_plan(tmp_path / "graph.json")
    assert read_plan(tmp_path / "plan.json") == plan == read_graph_or_plan(tmp_path / "plan.json")
    graph_lines = (tmp_path / "graph.json").read_text().splitlines()
    assert len([line for line in graph_lines if '"target"' in line]) == len(graph.ops)
    assert '  ["compute", 1], ["free", 1],' in (tmp_path / "plan.json").read_text().splitlines()


def test_the_examples_of_the_document_are_read_and_written() -> None:
    document = (Path(__file__).parents[3] / "docs" / "formats.md").read_text()
    examples = dict(re.findall(r"<!-- example: (\w+) -->\n```json\n(.*?)```", document, re.DOTALL))
    graph, plan = build_from_dict(json.loads(examples["graph"])), plan_from_dict(json.loads(examples["plan"]))
    assert files.format_json(convert_to_dict(graph)) == examples["graph"]
    assert files.format_json(plan_to_dict(plan)) == examples["plan"]
    assert plan.graph.fingerprint == graph.fingerprint
    assert simulate(graph, plan.schedule).peak_bytes == plan.peak_bytes


def test_the_document_names_every_field(graph: Graph, plan: Plan) -> None:
    document = (Path(__file__).parents[3] / "docs" / "formats.md").read_text()
    graph_data: Any = convert_to_dict(graph)
    plan_data: Any = plan_to_dict(plan)
    rows = [graph_data, *graph_data["tensors"], *graph_data["ops"], plan_data, plan_data["graph"]]
    fields = {field for row in rows for field in row} | set(Kind) | set(Phase)
    assert {field for field in fields if f"`{field}`" not in document} == set()


def test_plain_graph_has_no_fields_of_options(graph: Graph, plan: Plan) -> None:
    data: Any = convert_to_dict(graph)
    fields = {field for row in (data, *data["tensors"], *data["ops"], plan_to_dict(plan)) for field in row}
    assert not fields & {
        "pools",
        "pool",
        "producers",
        "stream",
        "optional",
        "replaces",
        "differs",
        "overwrites",
        "pool_peaks_bytes",
    }


@pytest.mark.parametrize("field", ["time_s", "bound_s", "seconds"])
def test_unwritable_plan_leaves_the_file_unchanged(field: str, plan: Plan, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text("before")
    with pytest.raises(FormatError, match="not finite"):
        write_plan(replace(plan, **{field: float("nan")}), path)
    assert path.read_text() == "before"
    assert files_in(tmp_path) == ["plan.json"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left on device")])
@pytest.mark.parametrize("moment", ["fsync", "replace"])
def test_interrupted_write_leaves_the_file_unchanged(
    moment: str, error: BaseException, graph: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "graph.json"
    path.write_text("before")

    def fail(*args: object) -> None:
        raise error

    if moment == "fsync":
        monkeypatch.setattr(os, "fsync", fail)
    else:
        monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(KeyboardInterrupt if error is KeyboardInterrupt else OutputError):
        write_graph(graph, path)
    assert path.read_text() == "before"
    assert files_in(tmp_path) == ["graph.json"]


def test_unwritable_paths_raise(graph: Graph, tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="is a folder: name a file"):
        write_graph(graph, tmp_path)
    with pytest.raises(OutputError, match="there is no folder"):
        write_graph(graph, tmp_path / "none" / "graph.json")
    assert files_in(tmp_path) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may write everywhere")
def test_folder_without_permission_raises(graph: Graph, tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(OutputError, match="Permission denied"):
        write_graph(graph, tmp_path / "graph.json")
    tmp_path.chmod(0o700)


def test_writing_keeps_links_devices_and_modes(graph: Graph, tmp_path: Path) -> None:
    target, link = tmp_path / "target.json", tmp_path / "link.json"
    target.write_text("before")
    target.chmod(0o640)
    link.symlink_to(target)
    write_graph(graph, link)
    assert link.is_symlink() and read_graph(target) == graph
    assert stat.S_IMODE(target.stat().st_mode) == 0o640
    write_graph(graph, os.devnull)
    assert stat.S_ISCHR(Path(os.devnull).stat().st_mode)


INFINITE = float("inf")

BROKEN_GRAPHS: list[tuple[str, Any, str]] = [
    ("version", 1, "is a graph of version 1, this planner reads 4: make a new one with planner trace"),
    ("version", True, "version is true: expected `int`, got `bool`"),
    ("version", "1", 'version is "1": expected `int`, got `str`'),
    ("provenance", [], "provenance is []: expected `object`, got `array`"),
    ("provenance.loss", float("nan"), "provenance.loss is NaN: must be finite"),
    ("provenance.loss", [1, {"a": -INFINITE}], "provenance.loss[1].a is -Infinity: must be finite"),
    ("provenance.model", "\ud800", 'provenance.model is "\\ud800": not valid Unicode'),
    ("tensors", {}, "tensors is {}: expected `array`, got `object`"),
    ("tensors.0", 3, "tensors[0] is 3: expected `object`, got `int`"),
    ("tensors.1.id", 2, "tensors[1].id is 2: must be its position in the list, 1"),
    ("tensors.1.id", True, "tensors[1].id is true: expected `int`, got `bool`"),
    ("tensors.1.name", None, "tensors[1].name is null: expected `str`, got `null`"),
    ("tensors.1.name", "x", "tensor 'x' appears twice"),
    ("tensors.1.name", "\udfff", 'tensors[1].name is "\\udfff": not valid Unicode'),
    ("tensors.1.bytes", 1.0, "tensors[1].bytes is 1.0: expected `int`, got `float`"),
    ("tensors.1.bytes", "16", 'tensors[1].bytes is "16": expected `int`, got `str`'),
    ("tensors.1.bytes", -16, "tensor 'h' has size -16"),
    ("tensors.1.bytes", 2**63, "tensors[1].bytes is 9223372036854775808: expected `int` <= 9223372036854775807"),
    (
        "tensors.1.kind",
        "Activation",
        'tensors[1].kind is "Activation": expected one of parameter, buffer, input, constant',
    ),
    ("tensors.1.kind", [], "tensors[1].kind is []: expected `str`, got `array`"),
    ("tensors.1.shape", [2, -1], "tensors[1].shape[1] is -1: expected `int` >= 0"),
    ("tensors.1.shape", [True], "tensors[1].shape[0] is true: expected `int`, got `bool`"),
    ("tensors.1.dtype", 32, "tensors[1].dtype is 32: expected `str`, got `int`"),
    ("tensors.1.view_of", "x", 'tensors[1].view_of is "x": expected `int`, got `str`'),
    (
        "tensors.1.view_of",
        4,
        "tensor 'h' is a view of, or held for, tensor 4: it must be produced by an op, and 4 be another tensor",
    ),
    ("tensors.1.view_of", 1, "tensor 'h' is a view of, or held for, tensor 1"),
    ("tensors.0.view_of", 1, "tensor 'x' is a view of, or held for, tensor 1"),
    ("tensors.1.held_for", 2, "tensor 'h' is held for another: its op must read nothing"),
    ("tensors.1.size", 1, "tensors[1]: object contains unknown field `size`"),
    ("ops", None, "ops is null: expected `array`, got `null`"),
    ("ops", [], "the graph has no ops"),
    ("ops.1", [], "ops[1] is []: expected `object`, got `array`"),
    ("ops.1.id", -1, "ops[1].id is -1: must be its position in the list, 1"),
    ("ops.1.id", 7, "ops[1].id is 7: must be its position in the list, 1"),
    ("ops.1.name", "f", "op 'f' appears twice"),
    ("ops.1.target", 1, "ops[1].target is 1: expected `str`, got `int`"),
    ("ops.1.phase", "sideways", 'ops[1].phase is "sideways": expected one of forward, backward, optimizer'),
    ("ops.0.phase", "backward", "op 'g' is forward but comes after a backward op"),
    ("ops.1.inputs", [4], "ops[1].inputs is [4]: must be ids of tensors, below 4"),
    ("ops.1.inputs", [-1], "ops[1].inputs[0] is -1: expected `int` >= 0"),
    ("ops.1.inputs", [1, 1], "op 'g' lists a tensor twice"),
    ("ops.1.inputs", 1, "ops[1].inputs is 1: expected `array`, got `int`"),
    ("ops.0.inputs", [2], "op 'f' reads 'y', which op 'g' makes at or after it"),
    ("ops.1.outputs", [2, 4], "ops[1].outputs is [2, 4]: must be ids of tensors, below 4"),
    ("ops.1.outputs", [2, 1], "tensor 'h' is an output of both 'f' and 'g'"),
    ("ops.1.mutates", [9], "ops[1].mutates is [9]: must be ids of tensors, below 4"),
    ("ops.1.mutates", [1], "op 'g' mutates 'h', which is not static"),
    ("ops.1.time_s", -1.0, "op 'g' has time -1.0"),
    ("ops.1.time_s", float("nan"), "ops[1].time_s is NaN: expected a finite number"),
    ("ops.1.time_s", INFINITE, "ops[1].time_s is Infinity: expected a finite number"),
    ("ops.1.time_s", 10**400, "ops[1].time_s is 1000000"),
    ("ops.1.time_s", True, "ops[1].time_s is true: expected `float`, got `bool`"),
    ("ops.1.time_s", "3", 'ops[1].time_s is "3": expected `float`, got `str`'),
    ("ops.1.workspace_bytes", -5, "op 'g' has workspace -5"),
    ("ops.1.workspace_bytes", 1e3, "ops[1].workspace_bytes is 1000.0: expected `int`, got `float`"),
    ("ops.1.recomputable", 0, "ops[1].recomputable is 0: expected `bool`, got `int`"),
    ("ops.1.random", None, "ops[1].random is null: expected `bool`, got `null`"),
    ("ops.1.module", 0, "ops[1].module is 0: expected `str`, got `int`"),
    ("ops.1.flops", 0, "ops[1]: object contains unknown field `flops`"),
    ("kept", [9], "kept is [9]: must be ids of tensors, below 4"),
    ("kept", [3, 3], "kept is [3, 3]: must be a list without repetition"),
    ("kept", [0], "kept tensor 'x' has no producer"),
    ("kept", None, "kept is null: expected `array`, got `null`"),
    ("pools", [3], "pools[0] is 3: expected `object`, got `int`"),
    ("pools", [{"name": "host"}], "pools[0]: object missing required field `owner`"),
    ("pools", [{"name": "host", "owner": 1}], "pools[0].owner is 1: expected `str`, got `int`"),
    (
        "pools",
        [{"name": "host", "owner": "copies", "capacity_bytes": 0.5}],
        "pools[0].capacity_bytes is 0.5: expected `int`, got `float`",
    ),
    ("pools", [{"name": "device", "owner": "compute"}], "pool 'device' appears twice"),
    ("tensors.1.pool", "host", "tensor 'h' is in the pool 'host': the graph has 'device'"),
    ("tensors.1.pool", 1, "tensors[1].pool is 1: expected `str`, got `int`"),
    ("ops.1.stream", 1, "ops[1].stream is 1: expected `str`, got `int`"),
    ("ops.1.optional", 1, "ops[1].optional is 1: expected `bool`, got `int`"),
    ("ops.1.optional", True, "op 'l' comes after the optional op 'g'"),
    ("ops.1.replaces", [0], "op 'g' replaces other ops, but is not optional"),
    ("ops.1.replaces", 0, "ops[1].replaces is 0: expected `array`, got `int`"),
    ("ops.1.differs", "rounding", "op 'g' differs from the program (rounding), but is not optional"),
    ("ops.1.differs", None, "ops[1].differs is null: expected `str`, got `null`"),
    ("ops.1.overwrites", [[1]], "ops[1].overwrites[0] is [1]: expected `array` of length 2, got 1"),
    ("ops.1.overwrites", [[2, 9]], "op 'g' writes tensor 2 over 9: the first must be an output of it, the second an input"),
    ("budget_bytes", 1, "object contains unknown field `budget_bytes`"),
    ("a\nb` - at `$[99]", 1, "object contains unknown field `a b"),
    ("x" * 5000, 1, "object contains unknown field `xxx"),
    ("ops.1.tensors", "\ud800", 'ops[1].tensors is "\\ud800": not valid Unicode'),
    ("tensors.1.view_of", None, "tensors[1].view_of is null: expected `int`, got `null`"),
    ("ops.0.time_s", -INFINITE, "ops[0].time_s is -Infinity: expected a finite number"),
    ("ops.0.time_s", -(10**400), "ops[0].time_s is -1000000"),
    ("tensors.0.bytes", -(10**30), "tensor 'x' has size -1000000000000000000000000000000"),
]

BROKEN_PLANS: list[tuple[str, Any, str]] = [
    ("version", 1, "is a plan of version 1, this planner reads 4: make a new one with planner solve"),
    ("version", 10**5000, "digits"),
    ("graph", None, "graph is null: expected `object`, got `null`"),
    ("graph.fingerprint", 1, "graph.fingerprint is 1: expected `str`, got `int`"),
    ("graph.ops", -1, "graph.ops is -1: expected `int` >= 0"),
    ("graph.static_bytes", 0.5, "graph.static_bytes is 0.5: expected `int`, got `float`"),
    ("graph.time_s", -0.5, "graph.time_s is -0.5: expected `float` >= 0.0"),
    ("graph.name", "x", "graph: object contains unknown field `name`"),
    ("budget_bytes", "8GB", 'budget_bytes is "8GB": expected `int`, got `str`'),
    ("peak_bytes", 10**9, "peak_bytes is 1000000000: must be within budget_bytes"),
    ("time_s", None, "time_s is null: expected `float`, got `null`"),
    ("bound_s", False, "bound_s is false: expected `float | null`, got `bool`"),
    ("bound_s", INFINITE, "bound_s is Infinity: expected a finite number"),
    ("status", "infeasible", 'status is "infeasible": expected one of optimal, within tolerance, feasible'),
    ("solver", 1, "solver is 1: expected `str`, got `int`"),
    ("seconds", -1, "seconds is -1: expected `float` >= 0.0"),
    ("settings", 1, "settings is 1: expected `object`, got `int`"),
    ("settings.windows", "all", 'settings.windows is "all": expected `array | null`, got `str`'),
    ("settings.limit", INFINITE, "settings.limit is Infinity: must be finite"),
    ("versions", {"a": 1}, 'versions is {"a": 1}: expected `str`, got `int`'),
    ("measured_peak_bytes", "much", 'measured_peak_bytes is "much": expected `int | null`, got `str`'),
    ("pool_peaks_bytes", {"host": 0.5}, 'pool_peaks_bytes is {"host": 0.5}: expected `int`, got `float`'),
    ("pool_peaks_bytes", 1, "pool_peaks_bytes is 1: expected `object`, got `int`"),
    ("steps", "CCF", 'steps is "CCF": expected `array`, got `str`'),
    ("steps.1", [], "steps[1] is []: expected `array` of length 2, got 0"),
    ("steps.1", "compute", 'steps[1] is "compute": expected `array`, got `str`'),
    ("steps.1", ["compute", 1, 2], 'steps[1] is ["compute", 1, 2]: expected `array` of length 2, got 3'),
    ("steps.1", [1, 1], "steps[1][0] is 1: expected `str`, got `int`"),
    ("steps.1", ["offload", 1], 'steps[1][0] is "offload": expected one of compute, free'),
    ("steps.1", ["compute", 3], 'steps[1] is ["compute", 3]: must be one of the 3 ops of the graph'),
    ("steps.1", ["compute", -1], "steps[1][1] is -1: expected `int` >= 0"),
    ("steps.1", ["compute", True], "steps[1][1] is true: expected `int`, got `bool`"),
    ("steps.1", ["free", 4], 'steps[1] is ["free", 4]: must be one of the 4 tensors of the graph'),
    ("steps.1", ["free", "h"], 'steps[1][1] is "h": expected `int`, got `str`'),
    ("best_s", 1, "object contains unknown field `best_s`"),
]


def put(data: Any, place: str, value: Any) -> None:
    *path, last = [int(part) if part.isdecimal() else part for part in place.split(".")]
    for part in path:
        data = data[part]
    data[last] = value


@pytest.mark.parametrize(
    ("place", "value", "said"), BROKEN_GRAPHS, ids=[f"{case[0]}-{i}" for i, case in enumerate(BROKEN_GRAPHS)]
)
def test_defective_graph_raises(place: str, value: Any, said: str, graph: Graph, tmp_path: Path) -> None:
    data: Any = through_text(convert_to_dict(graph))
    put(data, place, value)
    path = tmp_path / "graph.json"
    path.write_text(json.dumps(data))
    assert said in refusal(read_graph, path)


@pytest.mark.parametrize(("place", "value", "said"), BROKEN_PLANS, ids=[f"{case[0]}-{i}" for i, case in enumerate(BROKEN_PLANS)])
def test_defective_plan_raises(place: str, value: Any, said: str, plan: Plan, tmp_path: Path) -> None:
    data: Any = through_text(plan_to_dict(plan))
    digits = "9" * 5000
    put(data, place, "DIGITS" if value == 10**5000 else value)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(data).replace('"DIGITS"', digits))
    assert said in refusal(read_plan, path)


@pytest.mark.parametrize("which", ["graph", "plan"])
def test_missing_required_field_raises(which: str, graph: Graph, plan: Plan, tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    write: Any = write_graph if which == "graph" else write_plan
    read: Any = read_graph if which == "graph" else read_plan
    write(graph if which == "graph" else plan, path)
    whole = path.read_text()
    optional = {"shape", "dtype", "workspace_bytes", "recomputable", "random", "mutates", "module"}

    def objects(data: Any) -> list[dict[str, Any]]:
        return [data, *data["tensors"], *data["ops"]] if which == "graph" else [data, data["graph"]]

    for i in range(len(objects(json.loads(whole)))):
        for field in objects(json.loads(whole))[i].keys() - optional:
            data = json.loads(whole)
            del objects(data)[i][field]
            path.write_text(json.dumps(data))
            said = 'it has no field "format"' if field == "format" else f"object missing required field `{field}`"
            assert said in refusal(read, path)


def test_a_graph_error_keeps_its_kind(graph: Graph, tmp_path: Path) -> None:
    data: Any = convert_to_dict(graph)
    data["ops"][0]["time_s"] = -1.0
    (tmp_path / "graph.json").write_text(json.dumps(data))
    with pytest.raises(GraphError, match=r"graph\.json: op 'f' has time -1\.0"):
        read_graph(tmp_path / "graph.json")


def test_free_form_objects_are_limited_in_depth_and_type() -> None:
    deep: object = 1
    for _ in range(200):
        deep = [deep]
    with pytest.raises(FormatError, match="nested more than 100 deep"):
        convert_to_json({"a": deep}, "provenance")
    with pytest.raises(FormatError, match=r"provenance\.a is of type set"):
        convert_to_json({"a": {1}}, "provenance")
    with pytest.raises(FormatError, match="provenance has the key 1: keys are strings"):
        convert_to_json({1: 1}, "provenance")


@pytest.mark.parametrize(
    ("edits", "said"),
    [
        (
            {"tensors": {"bytes": 2**62}},
            f"sizes of its tensors and workspaces sum to {4 * 2**62 + 3} bytes: must be below 2^63",
        ),
        ({"ops": {"workspace_bytes": 2**62}}, f"workspaces sum to {3 * 2**62 + 44} bytes: must be below 2^63"),
        ({"ops": {"time_s": 2.0**62}}, "the times of its ops sum to 1.38351e+19 s: must be below 2^63"),
    ],
)
def test_overflowing_sums_raise(edits: dict[str, Any], said: str, graph: Graph, tmp_path: Path) -> None:
    data: Any = convert_to_dict(graph)
    for rows, fields in edits.items():
        data[rows] = [row | fields for row in data[rows]]
    path = tmp_path / "graph.json"
    path.write_text(json.dumps(data))
    readers: tuple[Any, ...] = (read_graph, read_graph_or_plan)
    for read in readers:
        assert said in refusal(read, path)
    with pytest.raises(GraphError, match="must be below"):
        write_graph(build_from_dict(data), tmp_path / "again.json")
    assert not (tmp_path / "again.json").exists()
    largest: Any = convert_to_dict(graph)
    largest["tensors"][0]["bytes"] = 2**63 - 1 - 16 - 16 - 4 - 3
    path.write_text(json.dumps(largest))
    assert read_graph(path).static_bytes == 2**63 - 40


@pytest.mark.parametrize("which", ["graph", "plan"])
def test_truncated_file_raises(which: str, graph: Graph, plan: Plan, tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    text = files.format_json(convert_to_dict(graph) if which == "graph" else plan_to_dict(plan))
    read: Callable[[Path], object] = read_graph if which == "graph" else read_plan
    for length in range(len(text.rstrip())):
        path.write_text(text[:length])
        with pytest.raises(FormatError) as caught:
            read(path)
        assert str(path) in str(caught.value) and "\n" not in str(caught.value)
        assert "cut short: it ends at line" in str(caught.value) or not text[:length].strip()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "the file is empty"),
        (b" \n", "the file is empty"),
        (b"\x89PNG\r\n\x1a\n", "not a text file: byte 0 is 0x89"),
        (b'{"format": "\0"}', "not a text file: byte 12 is 0x00"),
        (b"hello", "not JSON at line 1, column 1"),
        (b'{"a": 1,,}', "not JSON at line 1, column 9"),
        (b'{"a": 1} x}', "not JSON at line 1, column 10"),
        (b"[]", "holds []: must be an object"),
        (b"3", "holds 3: must be an object"),
        (b"NaN", "holds NaN: must be an object"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "nested too deeply"),
        (b'{"a": 1, "a": 2}', 'the field "a" appears twice'),
        (b'{"a": ' + b"9" * 5000 + b"}", "digits"),
        (b"{}", 'it has no field "format"'),
        (b'{"\\ud800": 1}', 'name is "\\ud800": not valid Unicode'),
        (b'{"format": 3}', "holds format 3"),
        (b'{"format": "onnx"}', 'holds format "onnx"'),
    ],
)
@pytest.mark.parametrize("read", [read_graph, read_plan, read_graph_or_plan])
def test_files_of_other_formats_raise(read: Callable[[Path], object], content: bytes, said: str, tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    path.write_bytes(content)
    assert said in refusal(read, path)


@pytest.mark.parametrize("read", [read_graph, read_plan])
def test_unreadable_paths_raise(read: Callable[[Path], object], tmp_path: Path) -> None:
    assert refusal(read, tmp_path / "none.json") == "there is no such file"
    assert refusal(read, tmp_path / "none" / "none.json") == "there is no such file"
    assert refusal(read, tmp_path) == "is a folder, not a file"
    (tmp_path / "file").touch()
    assert refusal(read, tmp_path / "file" / "below.json") == "cannot be read: Not a directory"


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may read everything")
def test_file_without_permission_raises(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    path.touch(mode=0)
    assert refusal(read_graph, path) == "cannot be read: Permission denied"


def test_a_plan_is_no_graph_and_a_graph_is_no_plan(graph: Graph, plan: Plan, tmp_path: Path) -> None:
    write_graph(graph, tmp_path / "graph.json")
    write_plan(plan, tmp_path / "plan.json")
    assert refusal(read_graph, tmp_path / "plan.json") == "holds a plan, but a graph is expected, as written by planner trace"
    assert refusal(read_plan, tmp_path / "graph.json") == "holds a graph, but a plan is expected, as written by planner solve"
