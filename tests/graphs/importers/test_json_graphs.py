"""Import of Checkmate's and Moccasin's graphs and of DTR's logs, ``planner import``, and errors for damaged files."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from planner.cli.main import build_parser, main
from planner.graphs.errors import FormatError
from planner.graphs.importers import import_graph
from planner.graphs.io.formats import read_graph, write_graph
from planner.graphs.ir import Graph, Phase
from planner.graphs.synthetic.small import make_chain
from tests.support.budgets import peak_bytes
from tests.support.graphs.imported import (
    CHECKMATE,
    LAYERED,
    SMALL_LOG,
    TRAINING,
    annotate,
    call,
    constant,
    copy,
    log_peak_bytes,
    mutate,
    public,
    release,
    write,
    write_log,
)


def shape(graph: Graph) -> list[tuple[str, list[str], int, Phase]]:
    return [
        (op.name, [graph.ops[p].name for t in op.inputs for p in graph.tensors[t].producers],
         sum(graph.tensors[t].size_bytes for t in op.outputs), op.phase)
        for op in graph.ops
    ]  # fmt: skip


def test_checkmate_instance_is_imported(tmp_path: Path) -> None:
    graph = import_graph(write(tmp_path / "small.json", CHECKMATE))
    assert shape(graph) == [
        ("op0", [], 4096, Phase.FORWARD),
        ("loss", ["op0"], 2048, Phase.FORWARD),
        ("op2", ["loss", "op0"], 0, Phase.BACKWARD),
        ("op3", ["op2", "op0"], 1024, Phase.BACKWARD),
    ]
    assert [op.time_s for op in graph.ops] == [0.001, 0.0025, 0.0, 0.0005]
    assert (graph.static_bytes, graph.kept) == (10240, frozenset())
    assert graph.provenance["reference"] == [
        {"solver": "gurobi", "budget_bytes": 16384, "time_s": 0.005, "seconds": 3.0, "solved": True},
        {"solver": "gurobi", "budget_bytes": 15360, "time_s": 0.006, "seconds": 86401.0, "solved": False},
    ]


def test_a_training_graph_of_node_links(tmp_path: Path) -> None:
    graph = import_graph(write(tmp_path / "two.json", TRAINING))
    assert shape(graph) == [
        ("f", [], 100, Phase.FORWARD),
        ("g", ["f"], 50, Phase.FORWARD),
        ("g_backward", ["f", "g"], 100, Phase.BACKWARD),
    ]
    assert [op.time_s for op in graph.ops] == [3e-6, 4e-6, 8e-6]
    assert (graph.static_bytes, graph.kept, graph.provenance["model"]) == (0, frozenset(), "two layers")


def test_layered_graph_keeps_its_order(tmp_path: Path) -> None:
    graph = import_graph(write(tmp_path / "layered.json", LAYERED))
    assert shape(graph) == [
        ("op2", [], 20, Phase.FORWARD),
        ("op0", ["op2"], 0, Phase.FORWARD),
        ("op1", ["op2", "op0"], 10, Phase.FORWARD),
    ]
    assert graph.static_bytes == 3


@pytest.mark.parametrize(
    ("name", "ops", "peak"),
    [
        ("checkmate-24h/vgg16-176", 97, 21_435_766_784),
        ("checkmate-24h/unet-11", 154, 18_778_968_064),
        ("checkmate-24h/mobilenet_v2-272", 343, 14_860_000_256),
        ("moccasin/vgg16_train", 45, 15_825_108_992),
        ("moccasin/fcn8_train", 73, 13_484_795_520),
        ("moccasin/random_layered_n500", 500, 284_439),
    ],
)
def test_published_graphs_are_imported_with_known_peaks(name: str, ops: int, peak: int) -> None:
    path = public(f"{name}.json")
    graph = import_graph(path)
    data = json.loads(path.read_text())
    assert (len(graph.ops), peak_bytes(graph)) == (ops, peak)
    edges = sum(len(op.inputs) for op in graph.ops)
    if "parents" in data:
        assert edges == sum(map(len, data["parents"]))
        # Gurobi's schedules take the first executions into account: none is faster than keeping everything.
        assert all(row["gurobi_cost"] / 1e5 > graph.time_s * (1 - 1e-12) for row in data["reference"])
    else:
        assert edges == len(data["links"])


def test_a_log_becomes_storages_and_ops(tmp_path: Path) -> None:
    graph = import_graph(write_log(tmp_path / "small.log", SMALL_LOG))
    assert {op.name: [graph.tensors[t].name for t in op.inputs] for op in graph.ops} == {
        "mm.0": ["x", "w"],
        "relu_.1": ["h"],
        "hold.h": [],
        "constant.2": [],
        "dropout.3": ["hv@1"],
        "hold.hv@1": [],
        "dropout_backward.4": ["d"],
        "release.hv@1": ["hv@1 held"],
        "mm.5": ["g", "x"],
        "release.h": ["h held"],
    }
    assert {graph.tensors[t].name for t in graph.kept} == {"gw", "step"}
    assert graph.static_bytes == 110
    # The view of the constant goes to the op after it, that of h to the op that made h.
    assert graph.ops[0].time_s == pytest.approx(1320e-9)
    assert graph.time_s == pytest.approx(5320e-9)
    assert next(op.name for op in graph.ops if op.phase is Phase.BACKWARD) == "dropout_backward.4"
    assert [op.name for op in graph.ops if op.random] == ["dropout.3"]
    assert [op.name for op in graph.ops if not op.recomputable] == ["constant.2"]
    assert {name: graph.provenance[name] for name in ("log_ops", "constants", "mutations", "views")} == {
        "log_ops": 10,
        "constants": 3,
        "mutations": 1,
        "views": 2,
    }
    assert peak_bytes(graph) == log_peak_bytes(SMALL_LOG) == 298


@pytest.mark.parametrize("end", range(len(SMALL_LOG)))
def test_references_at_the_end_of_a_log_are_kept(end: int, tmp_path: Path) -> None:
    lines = SMALL_LOG[: end + 1]
    path = write_log(tmp_path / "small.log", lines)
    whole = end + 1 == len(SMALL_LOG) or SMALL_LOG[end + 1]["INSTRUCTION"] not in ("MEMORY", "ALIAS")
    if whole and any(line["INSTRUCTION"] in ("MUTATE", "CALL") and line["NAME"] != "t" for line in lines):
        assert peak_bytes(import_graph(path)) == log_peak_bytes(lines)
    else:
        with pytest.raises(
            FormatError, match=r"small.log: the log (is cut short: after line \d+, (MEMORY|ALIAS) of|has no CALL)"
        ):
            import_graph(path)


def test_references_follow_copies_and_releases(tmp_path: Path) -> None:
    lines = [
        *annotate("START"),
        *constant("x", 1),
        *call("f", "x", {"a": (10, -1)}),
        *call("g", "x", {"b": (20, -1)}),
        *copy("COPY_FROM", "a", "b"),
        *call("h", "a", {"c": (5, -1)}),
        *release("a", "b", "c"),
    ]
    graph = import_graph(write_log(tmp_path / "copy.log", lines))
    # The storage of 10 goes once nothing refers to it, though no op reads it.
    assert [op.name for op in graph.ops] == ["f.0", "hold.a", "g.1", "release.a", "h.2"]
    assert graph.kept == frozenset()
    assert peak_bytes(graph) == log_peak_bytes(lines) == 31


def test_a_gzipped_log_reads_as_a_plain_one(tmp_path: Path) -> None:
    plain = write_log(tmp_path / "small.log", SMALL_LOG)
    (tmp_path / "small.log.gz").write_bytes(gzip.compress(plain.read_bytes()))
    assert import_graph(tmp_path / "small.log.gz") == import_graph(plain)


@pytest.mark.parametrize(
    ("name", "peak_gb", "base_ms", "log_ops"),
    [("resnet32", 10.06, 292, 509), ("unet", 8.42, 435, 399), ("transformer", 9.86, 276, 3154)],
)
def test_public_logs_have_the_memory_that_they_count(name: str, peak_gb: float, base_ms: int, log_ops: int) -> None:
    path = public(f"simrd/{name}.log.gz")
    lines = [json.loads(line) for line in gzip.decompress(path.read_bytes()).decode().splitlines()]
    graph = import_graph(path)
    assert peak_bytes(graph) == log_peak_bytes(lines)
    assert round(peak_bytes(graph) / 1e9, 2) == peak_gb
    times_ns = [int(line["TIME"]) for line in lines if "TIME" in line]
    assert graph.time_s == pytest.approx(sum(times_ns) / 1e9, rel=1e-12)
    assert round(graph.time_s * 1e3) == base_ms
    assert graph.provenance["log_ops"] == log_ops == len(times_ns) + sum(line["INSTRUCTION"] == "CONSTANT" for line in lines)


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
