"""Import of Checkmate's and Moccasin's graphs, and of DTR's logs."""

import gzip
import json
from pathlib import Path

import pytest

from graphs.errors import FormatError
from graphs.importers import import_graph
from graphs.ir import Graph, Phase
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
