"""The command ``planner import``."""

import json
from pathlib import Path

import pytest

from graphs.importers import import_graph
from graphs.io.formats import read_graph, write_graph
from graphs.synthetic.small import make_chain
from planner.cli.main import build_parser, main
from tests.support.graphs.imported import SMALL_LOG, write_log


def test_import_command_writes_the_graph(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log, model = write_log(tmp_path / "small.log", SMALL_LOG), tmp_path / "model.json"
    assert main(["import", str(log), "-o", str(model), "--json", "--quiet"]) == 0
    said = capsys.readouterr()
    graph = read_graph(model)
    assert graph == import_graph(log)
    assert json.loads(said.out) == {
        "output": str(model),
        "fingerprint": graph.fingerprint,
        "ops": 10,
        "optional_ops": 0,
        "tensors": len(graph.tensors),
        "static_bytes": 110,
        "keep_everything_peak_bytes": 298,
        "time_s": graph.time_s,
    }
    assert said.err == ""
    assert main(["import", str(log), "-o", str(model), "--quiet"]) == 0
    assert capsys.readouterr().out.startswith(f"{model}: 10 ops, {len(graph.tensors)} tensors, step time 5.32 us, ")


def test_import_errors_are_printed_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tmp_path / "model.json"
    write_graph(make_chain(3), model)
    for file, output, code, words in [
        (model, tmp_path / "other.json", 1, "is a file of this planner already"),
        (tmp_path / "absent.json", tmp_path / "other.json", 1, "there is no such file"),
        (model, model, 2, "is an input of this command: name another file"),
        (model, tmp_path / "nowhere" / "other.json", 1, "there is no folder"),
    ]:
        assert main(["import", str(file), "-o", str(output), "--quiet"]) == code
        said = capsys.readouterr()
        assert said.out == ""
        assert words in said.err
        assert said.err.count("\n") == 1
    assert sorted(tmp_path.iterdir()) == [model]


def test_the_help_has_an_example_that_parses(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["import", "--help"]) == 0
    examples = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("  planner import ")]
    assert [build_parser().parse_args(words[1:]).command for words in examples] == ["import"]
