"""Errors for files of other formats and unreadable files."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from graphs.errors import FormatError
from graphs.io import files
from graphs.io.formats import read_graph, write_graph
from graphs.io.graph_document import convert_to_dict
from graphs.ir import Graph
from planner.plans.document import plan_to_dict, write_plan
from planner.plans.plan import Plan, read_graph_or_plan, read_plan
from tests.support.graphs.documents import refusal


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
