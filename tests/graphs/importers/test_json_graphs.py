"""Import of Checkmate's and Moccasin's graphs."""

import json
from pathlib import Path

import pytest

from graphs.importers import import_graph
from graphs.ir import Graph, Phase
from tests.support.budgets import peak_bytes
from tests.support.graphs.imported import CHECKMATE, LAYERED, TRAINING, public, write


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
