"""What runs on a machine with a GPU: each step once, with what it printed, whether it ends well or not."""

import tarfile
from pathlib import Path

import pytest
import torch

from benchmarks import gpu


def test_every_step_is_a_line_and_a_log(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "steps.py").write_text(
        "import pathlib, sys, time\nprint('said', flush=True)\n"
        "pathlib.Path(sys.argv[1], 'rows.csv').write_text('a,b')\ntime.sleep(float(sys.argv[2]))\nsys.exit(int(sys.argv[3]))\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A GPU")
    steps = {"good": ("0", "0"), "bad": ("0", "3"), "long": ("600", "0")}
    monkeypatch.setattr(gpu, "STEPS", {name: ("steps", "{results}", *words) for name, words in steps.items()})
    assert gpu.main(["--out", str(tmp_path / "out"), "--steps", "good,bad,long", "--limit", "5"]) == 1
    said = capsys.readouterr().out
    assert (tmp_path / "out" / "table.md").read_text() == said
    assert [line.split("|")[2].strip() for line in said.splitlines()[2:5]] == ["exit code 0", "exit code 3", "not ended"]
    assert said.splitlines()[-1].startswith(f"A GPU, torch {torch.__version__}")
    assert (tmp_path / "out" / "bad.log").read_text() == "said\n"
    with tarfile.open(tmp_path / "out" / "results.tar.gz") as archive:
        assert "results/rows.csv" in archive.getnames()


def test_without_a_gpu_nothing_is_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main(["--out", str(tmp_path / "out")]) == 2
    assert "no CUDA device" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_what_is_run_is_there() -> None:
    files = [Path(__file__).parents[2] / words[0].replace(".", "/") for words in gpu.STEPS.values() if words[0] != "pytest"]
    assert files and all(file.with_suffix(".py").exists() for file in files)
