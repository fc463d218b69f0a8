"""Atomic writing of files."""

import os
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from graphs.errors import FormatError, OutputError
from graphs.io.formats import read_graph, write_graph
from graphs.ir import Graph
from planner.plans.document import write_plan
from planner.plans.plan import Plan
from tests.support.graphs.documents import files_in


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
    with pytest.raises(OutputError, match="permission denied"):
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
