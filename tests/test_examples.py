"""The scripts that users copy: short, and they train."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
SCRIPTS = sorted(EXAMPLES.glob("train_*.py"))
ON_TWO = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")  # torchrun, at a port that is free
NEEDS = {"train_huggingface": "transformers", "train_accelerate": "accelerate"}
QUICK = ("train_checkpoint", "train_eager", "train_own_model")
WITHOUT_PLAN = ("train_torch_compile", "train_checkpoint", "train_eager")  # to print: one for each graph, or none


@pytest.mark.parametrize(
    "script",
    [script if script.stem in QUICK else pytest.param(script, marks=pytest.mark.slow) for script in SCRIPTS],
    ids=lambda script: script.stem,
)
def test_an_example_trains(script: Path, tmp_path: Path) -> None:
    if (needed := NEEDS.get(script.stem)) is not None and importlib.util.find_spec(needed) is None:
        pytest.skip(f"needs {needed}")
    environment = {**os.environ, "HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    launcher = ON_TWO if script.stem in ("train_ddp", "train_fsdp2") else ()
    half_way = ("-m", "tests.support.budgets") if script.stem != "train_eager" else ()  # its budget is an amount
    run = [sys.executable, *launcher, *half_way, str(script), "--steps", "6"]
    ended = subprocess.run(run, capture_output=True, text=True, timeout=300, check=False, env=environment, cwd=ROOT)
    assert ended.returncode == 0, ended.stderr
    losses = [float(loss) for loss in re.findall(r"loss ([0-9.]+)", ended.stdout)]
    assert losses[-1] < losses[0]
    if script.stem == "train_own_model":
        assert list((tmp_path / ".cache" / "remat-planner").glob("*.json"))
    if script.stem not in WITHOUT_PLAN:
        assert re.search(r"^budget .*, peak .* predicted, .* measured", ended.stdout, re.MULTILINE)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_an_example_is_short(script: Path) -> None:
    assert len(script.read_text().splitlines()) < 60
