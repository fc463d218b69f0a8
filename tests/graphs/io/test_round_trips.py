"""Graphs and plans survive writing and reading, as docs/formats.md says, and files are written whole or not at all."""

import json
import os
import re
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

from graphs.errors import FormatError, OutputError
from graphs.io import files
from graphs.io.formats import read_graph, write_graph
from graphs.io.graph_document import build_from_dict, convert_to_dict
from graphs.ir import Graph, Kind, Phase
from graphs.simulate import simulate
from planner.plans.document import plan_to_dict, write_plan
from planner.plans.plan import Plan, plan_from_dict, read_graph_or_plan, read_plan
from tests.support.graphs.documents import files_in, graphs, plans, through_text


@given(graphs())
def test_written_graph_reads_back_equal(graph: Graph) -> None:
    again = build_from_dict(through_text(convert_to_dict(graph)))
    assert again == graph
    assert again.fingerprint == graph.fingerprint
    assert [op.time_s.hex() for op in again.ops] == [op.time_s.hex() for op in graph.ops]


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
