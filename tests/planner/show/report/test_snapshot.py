"""Memory snapshots of PyTorch, made by hand in the format that ``torch.cuda.memory._snapshot`` documents."""

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from planner.cli.main import main
from planner.graphs.errors import FormatError
from planner.graphs.synthetic.small import make_training_chain
from planner.plans.document import write_plan
from planner.plans.solve import solve
from planner.show.report.snapshot import Holder, read_snapshot


def frames(line: int, *, node: str = "") -> list[dict[str, Any]]:
    """A stack, innermost first: PyTorch's C++ and Python above the user's own line."""
    own = {"filename": "/home/me/model.py", "line": line, "name": "forward"}
    return [
        {"filename": "c10/cuda/CUDACachingAllocator.cpp", "line": 0, "name": "malloc"},
        {"filename": "/usr/lib/python3/site-packages/torch/nn/functional.py", "line": 9, "name": "linear"},
        {**own, "fx_node_name": node} if node else own,
        {"filename": "/home/me/train.py", "line": 3, "name": "main"},
    ]


def entry(action: str, addr: int, size: int, stack: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    return {"action": action, "addr": addr, "size": size, "stream": 0, "frames": stack or []}


def block(addr: int, size: int, state: str = "active_allocated", stack: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    return {"address": addr, "size": size, "requested_size": size - 12, "state": state, "frames": stack or []}


def snapshot() -> dict[str, Any]:
    """512 bytes of a parameter; 1000, 200 and 3000 bytes of activations, of which 1000 are freed; then one that does not fit."""
    segment = {
        "device": 0,
        "address": 0,
        "total_size": 2**21,
        "stream": 0,
        "segment_type": "small",
        "blocks": [block(0, 524, stack=frames(1)), block(3000, 3012, stack=frames(20)), block(9000, 500, "inactive")],
    }
    trace = [
        entry("segment_alloc", 0, 2**21),
        entry("alloc", 1000, 1000, frames(10)),
        entry("alloc", 2000, 200, frames(20)),
        entry("free_requested", 1000, 1000),
        entry("free_completed", 1000, 1000),
        entry("alloc", 3000, 3000, frames(20)),
        entry("free_requested", 2000, 200),
        {"action": "oom", "size": 10**9, "stream": 0, "device_free": 5, "frames": []},
    ]
    return {"segments": [segment], "device_traces": [trace, []]}


def written(data: object, folder: Path) -> str:
    (folder / "snapshot.pickle").write_bytes(pickle.dumps(data))
    return str(folder / "snapshot.pickle")


def test_snapshot_peak_lists_its_holders(tmp_path: Path) -> None:
    (peak,) = read_snapshot(written(snapshot(), tmp_path))
    assert (peak.device, peak.peak_bytes, peak.at_action, peak.actions) == (0, 512 + 200 + 3000, 5, 8)
    assert (peak.end_bytes, peak.reserved_bytes, peak.out_of_memory_bytes) == (512 + 3000, 2**21, 10**9)
    assert peak.holders == (Holder("model.py:20 forward", 3200, 2), Holder("model.py:1 forward", 512, 1))


def test_memory_freed_before_its_allocation_was_held_from_the_start(tmp_path: Path) -> None:
    data = snapshot()
    data["device_traces"][0] = [entry("free_requested", 5000, 7000)]
    (peak,) = read_snapshot(written(data, tmp_path))
    assert (peak.peak_bytes, peak.at_action) == (7000 + 512 + 3000, None)
    assert peak.holders[0] == Holder("in memory before the recorded actions", 7000, 1)


def test_fx_nodes_and_missing_frames_are_named(tmp_path: Path) -> None:
    data = snapshot()
    data["device_traces"][0] = [entry("alloc", 7000, 10**6, frames(5, node="linear_3")), entry("alloc", 8000, 10**5)]
    (peak,) = read_snapshot(written(data, tmp_path))
    assert [one.name for one in peak.holders[:2]] == ["model.py:5 forward, node linear_3", "unknown (no frames were recorded)"]


class Hostile:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("exit 3",)


@pytest.mark.parametrize("data", [Hostile(), {"segments": [Hostile()]}])
def test_nothing_in_a_file_is_run(data: object, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"numbers and text alone: it names (posix|os|nt).system"):
        read_snapshot(written(data, tmp_path))


@pytest.mark.parametrize("data", [[], {}, {"segments": [{"blocks": 3}]}, {"segments": [], "device_traces": [[{"addr": 1}]]}])
def test_malformed_snapshot_raises(data: object, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="is not a memory snapshot of PyTorch"):
        read_snapshot(written(data, tmp_path))


def test_a_file_that_is_no_pickle(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text").write_text("{}")
    assert main(["snapshot", str(tmp_path / "text")]) == 1
    assert "is not a memory snapshot of PyTorch" in capsys.readouterr().err


def test_snapshot_command_reports_savings_of_a_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, plan = written(snapshot(), tmp_path), solve(make_training_chain(8), "60%")
    write_plan(plan, tmp_path / "plan.json")
    assert main(["snapshot", path, "--plan", str(tmp_path / "plan.json"), "--top", "1"]) == 0
    said = capsys.readouterr().out
    assert "3.71 kB, at action 6 of 8 recorded actions" in said
    assert "3.20 kB       2  model.py:20 forward" in said
    assert "1 more lines of code (--top 2 lists all)" in said
    assert f"saves {(3712 - plan.peak_bytes) / 1000:.2f} kB" in said
    assert main(["snapshot", path, "--plan", str(tmp_path / "plan.json"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["plan"]["saved_bytes"] == [3712 - plan.peak_bytes]
