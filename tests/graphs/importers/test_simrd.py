"""Import of DTR's logs."""

import gzip
import json
from pathlib import Path

import pytest

from graphs.errors import FormatError
from graphs.importers import import_graph
from graphs.ir import Phase
from tests.support.budgets import peak_bytes
from tests.support.graphs.imported import SMALL_LOG, annotate, call, constant, copy, log_peak_bytes, public, release, write_log


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
