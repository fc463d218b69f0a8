"""``make gpu`` on the emulated CUDA device: its output and its files."""

import time
from pathlib import Path

import psutil
import pytest
import torch

from benchmarks.__main__ import list_benchmarks
from benchmarks.gpu import capped, plans, probe, steps as gpu
from benchmarks.gpu.steps import ROOT, GpuStep
from planner.capture.workload.models import Workload, build
from tests.support.cuda_device import cuda_device, on_device


def test_the_probe_prints_a_line_for_each_fact(capsys: pytest.CaptureFixture[str]) -> None:
    with cuda_device():
        assert probe.main() == 0
    lines = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())
    assert lines["torch"].startswith(torch.__version__)
    assert lines["workspaces of libraries, first call"] == "69206016 B"
    assert lines["workspaces of libraries, second call"] == "0 B"
    assert lines["request of 1048577 B"] == "allocated 1049088 B, reserved 20971520 B: as simulated"
    assert "NOT as simulated" not in str(lines)
    assert lines["gradients of embedding, five times"] == "the same bits"
    assert lines["copies to the host"].endswith("GB/s")


def test_failing_probe_is_a_line_and_the_others_run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> probe.Lines:
        yield "first", "found"
        raise RuntimeError("no such thing")

    monkeypatch.setattr(probe, "PROBES", (broken, lambda: iter([("last", "found")])))
    assert probe.main() == 1
    assert capsys.readouterr().out.splitlines() == ["first: found", "broken: FAILED, RuntimeError: no such thing", "last: found"]


def test_a_step_trains_under_a_cap_that_eager_pytorch_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    def wide(*, device: str) -> Workload:
        return on_device(build("mlp", batch=16384, layers=12, width=64, classes=3), f"{device}:0")

    monkeypatch.setattr(capped, "MODELS", {"wide": wide})
    with cuda_device(capacity_bytes=2**30) as machine:
        monkeypatch.setattr(capped, "clear_cublas_workspaces", machine.memories[0].workspaces.clear)
        found = list(capped.check_all(["wide"], ("eager", "compile"), 0.75))
    assert [holds for _, holds in found] == [True, True, True], found
    plain, without, planned = (line for line, _ in found)
    assert "without a cap" in plain and "out of memory" in without and "bits equal" in planned


def test_an_error_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(**_: object) -> Workload:
        raise RuntimeError("out of luck\nand more")

    monkeypatch.setattr(plans, "MODELS", {"tiny": broken, "other": broken})
    with cuda_device():
        assert plans.main(["--out", str(tmp_path / "plans"), "--shares", "50%"]) == 1
    assert (tmp_path / "plans" / "table.md").read_text().count("RuntimeError: out of luck |") == 4


@pytest.fixture
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A GPU")


@pytest.mark.usefixtures("a_gpu")
def test_every_step_is_a_line_and_a_log(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "steps.py").write_text(
        "import subprocess, sys, time\nprint('said', flush=True)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(child.pid)\ntime.sleep(float(sys.argv[2]))\nsys.exit(int(sys.argv[1]))\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    words = {"good": ("0", "0", 60.0), "bad": ("3", "0", 60.0), "long": ("0", "600", 2.5)}
    monkeypatch.setattr(gpu, "STEPS", {name: GpuStep(("steps", *given), limit_s) for name, (*given, limit_s) in words.items()})
    out = tmp_path / "out"
    assert gpu.main(["--out", str(out), "--steps", "good,bad,long"]) == 1
    said = capsys.readouterr().out
    table = (out / "table.md").read_text()
    assert said.endswith(table)
    assert [line.split("|")[2].strip() for line in table.splitlines()[2:5]] == ["exit code 0", "exit code 3", "not ended"]
    assert table.splitlines()[-1].startswith(f"A GPU, torch {torch.__version__}")
    children = [int((out / f"{name}.log").read_text().splitlines()[1]) for name in words]
    until = time.monotonic() + 10.0
    while any(map(psutil.pid_exists, children)) and time.monotonic() < until:
        time.sleep(0.05)  # until they are collected by the system
    alive = [pid for pid in children if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]
    assert not alive


def test_nothing_runs_without_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main(["--out", str(tmp_path / "out")]) == 2
    assert "no CUDA device" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_steps_fit_a_borrowed_gpu() -> None:
    """Commands of ten minutes, half an hour in all, and the modules and files are there."""
    assert all(step.limit_s < 600 for step in gpu.STEPS.values())
    assert sum(step.limit_s for step in gpu.STEPS.values()) < 1600
    assert next(iter(gpu.STEPS)) == "host"
    names = [step.words[1] for step in gpu.STEPS.values() if step.words[0] != "pytest"]
    assert set(names) <= list_benchmarks().keys()
    assert gpu.find_gpu_tests() and all((ROOT / name).exists() for name in gpu.find_gpu_tests())
