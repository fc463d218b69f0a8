"""The command ``planner import``, and its errors for malformed, cut or damaged graphs in other formats."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from graphs.errors import FormatError
from graphs.importers import import_graph
from graphs.io.formats import read_graph, write_graph
from graphs.synthetic.small import make_chain
from planner.cli.main import build_parser, main
from tests.support.graphs.imported import (
    CHECKMATE,
    LAYERED,
    SMALL_LOG,
    TRAINING,
    annotate,
    call,
    constant,
    copy,
    mutate,
    release,
    write,
    write_log,
)


def change(data: dict[str, Any], **fields: object) -> dict[str, Any]:
    return {name: value for name, value in (data | fields).items() if value is not None}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "not a graph in a format that can be imported"),
        ({"format": "remat-planner graph"}, "is a file of this planner already"),
        (change(CHECKMATE, cost=None), "object missing required field `cost`"),
        (change(CHECKMATE, cost=[1, 2, -3, 4]), r"cost\[2\] is -3: expected `int` >= 0"),
        (change(CHECKMATE, memory=[1, 2, 3]), "memory has 3 entries for the 4 in cost"),
        (change(CHECKMATE, loss=4), "loss is 4: must be the index of one of the 4 ops"),
        (change(CHECKMATE, parents=[[], [0], [3], [2]]), r"parents\[2\] is \[3\]: must be .* below 2"),
        (change(CHECKMATE, parents=[[0], [0], [1], [2]]), r"parents\[0\] is \[0\]: must be empty"),
        (change(CHECKMATE, reference=[{"budget": 1}]), r"reference\[0\]: object missing required field `gurobi_cost`"),
        (change(TRAINING, directed=False), "directed is false: must be true"),
        (change(TRAINING, links=None), "object missing required field `links`"),
        (change(TRAINING, links=[{"source": 0, "target": 9}]), r"links\[0\].target is 9: must be one of the 3 nodes"),
        (change(TRAINING, links=[{"source": 2, "target": 1}]), r"links\[0\].target is 1: must be a node after the one it reads"),
        (change(TRAINING, links=[{"from": 2}]), r"links\[0\]: object missing required field `source`"),
        (
            change(TRAINING, nodes=[{"id": 0, "cost_cpu": -1, "cost_ram": 0}]),
            r"nodes\[0\].cost_cpu is -1: expected `float` >= 0.0",
        ),
        (change(TRAINING, nodes=[{"id": 0, "cost_cpu": 1}]), r"nodes\[0\]: object missing required field `cost_ram`"),
        (change(TRAINING, nodes=[{"id": [], "cost_cpu": 1, "cost_ram": 1}]), r"nodes\[0\].id is \[\]"),
        (change(TRAINING, nodes=TRAINING["nodes"][:1] * 2), "node 0 appears twice"),
        (change(LAYERED, graph={"order": [0, 1]}), r"graph.order is \[0, 1\]: must be a list of the 3 nodes, each once"),
        (change(LAYERED, graph={"order": [0, 1, [2]]}), "graph.order is"),
    ],
)
def test_malformed_json_is_named(data: object, message: str, tmp_path: Path) -> None:
    path = write(tmp_path / "bad.json", data)
    with pytest.raises(FormatError, match=message) as refused:
        import_graph(path)
    assert str(refused.value).startswith(f"{path}: ")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"INSTRUCTION": "CAL', "line 4 is not JSON, or cut short"),
        ("[]", r"line 4 is \[\]: expected `object`, got `array`"),
        ({"NAME": "a"}, "line 4: object missing required field `INSTRUCTION`"),
        ({"INSTRUCTION": "SWAP"}, 'line 4.INSTRUCTION is "SWAP": expected one of CONSTANT, CALL'),
        ({"INSTRUCTION": "MEMORY", "NAME": "x", "MEMORY": "1"}, 'line 4.INSTRUCTION is "MEMORY": must be after the CONSTANT'),
        ({"INSTRUCTION": "RELEASE"}, "line 4: object missing required field `NAME`"),
        (copy("COPY", "y", "nothing")[0], r'line 4.SRC is "nothing": must be what is in memory: "nothing" was never made'),
        (copy("COPY", "x", "x")[0], 'line 4.DST is "x": must be a new name'),
        (copy("COPY_FROM", "y", "x")[0], 'line 4.DST is "y"'),
        (call("f", "x", {"x": (1, -1)})[0], 'line 4.RESULT is .*: must be new names: "x" is taken'),
        ({**call("f", "x", {})[0], "TIME": "-5"}, 'line 4.TIME is "-5": must be a whole number as a string, 0 or more'),
        ({**call("f", "x", {})[0], "TIME": 5}, "line 4.TIME is 5: expected `str`, got `int`"),
        ({**call("f", "x", {})[0], "ARGS": "x"}, 'line 4.ARGS is "x": expected `array`, got `str`'),
        ({**call("f", "x", {})[0], "ARGS": [1]}, r"line 4.ARGS\[0\] is 1: expected `str`, got `int`"),
        ({**mutate("f_", "x")[0], "MUTATE": [1]}, r"line 4.MUTATE is \[1\]: must be .* below 1"),
        ({**mutate("f_", "x")[0], "MUTATE": [0, 0]}, r"line 4.MUTATE is \[0, 0\]: must be a list of different"),
        (call("f", "x", {"y": (1, -1)})[0], 'line 5.INSTRUCTION is "RELEASE": must be MEMORY of "y"'),
    ],
)
def test_malformed_logs_are_named_by_line(line: object, message: str, tmp_path: Path) -> None:
    text = line if isinstance(line, str) else json.dumps(line)
    path = write_log(tmp_path / "bad.log", [*annotate("START"), *constant("x", 8)])
    path.write_text(path.read_text() + text + "\n" + json.dumps(release("x")[0]) + "\n")
    with pytest.raises(FormatError, match=message) as refused:
        import_graph(path)
    assert str(refused.value).startswith(f"{path}: line ")


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([*constant("x", 8), *release("x", "x")], r'line 4.NAME is "x": must be .* "x" was released'),
        ([*call("f", "", {"y": (1, 0)})], 'line 3.ALIAS is "0": must be .* below 0'),
        ([*call("f", "", {"y": (1, -2)})], 'line 3.ALIAS is "-2": must be .* -1 or more'),
        ([*constant("x", 8)[:1], *constant("y", 8)[1:]], 'line 2.NAME is "y": must be "x"'),
        (constant("x", 8), "the log has no CALL"),
    ],
)
def test_inconsistent_logs_raise(lines: list[dict[str, Any]], message: str, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=message):
        import_graph(write_log(tmp_path / "bad.log", lines))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda content: content[:-20], "cut short: the gzip stream has no end"),
        (lambda content: content[:30] + bytes(30) + content[60:], "the gzip stream is damaged"),
        (lambda content: gzip.compress(b"\xff\xfe{}"), "not a text file: byte 0 is 0xff"),
        (lambda content: gzip.compress(b"some text"), "line 1 is not JSON"),
    ],
)
def test_damaged_gzip_raises(spoil: Callable[[bytes], bytes], message: str, tmp_path: Path) -> None:
    plain = write_log(tmp_path / "small.log", SMALL_LOG)
    path = tmp_path / "small.log.gz"
    path.write_bytes(spoil(gzip.compress(plain.read_bytes())))
    with pytest.raises(FormatError, match=message):
        import_graph(path)


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
