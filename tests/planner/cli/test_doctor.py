"""The command ``planner doctor``: facts about the installation and about a model."""

import json
import sys
from pathlib import Path

import pytest
import torch

from tests.support.cli import call

MODELS = """
import torch
from torch import nn


class Doubled(nn.Module):
    def __init__(self, of_batch: bool):
        super().__init__()
        self.layer, self.of_batch = nn.Linear(4, 4), of_batch

    def forward(self, x):
        hidden = self.layer(x)
        return 2 * hidden if (x if self.of_batch else hidden).sum() > 0 else hidden


def build(of_batch: bool):
    return Doubled(of_batch), nn.functional.mse_loss, (torch.ones(3, 4), torch.ones(3, 4))


def fails():
    raise RuntimeError("no weights")
"""


@pytest.fixture
def models(tmp_path: Path) -> Path:
    path = tmp_path / "models.py"
    path.write_text(MODELS)
    return path


def test_installation_is_described(capsys: pytest.CaptureFixture[str]) -> None:
    said = call(capsys, "doctor")
    assert (said.code, said.err) == (0, "")
    assert f"torch          {torch.__version__}" in said.out and "GB/s to host memory" in said.out
    assert said.out.endswith("no problem found\n")


def test_a_model_with_one_graph_is_measured_by_its_ops(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = call(capsys, "doctor", f"{models}:build,of_batch=true")
    assert said.code == 0 and "one graph of" in said.out  # a branch on the batch is no graph break


def test_graph_breaks_are_listed_with_their_lines(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = call(capsys, "doctor", f"{models}:build,of_batch=false", "--json")
    data = json.loads(said.out)
    assert said.code == 1
    (broken,) = (fact for fact in data["facts"] if fact["name"] == "graph break 1")
    assert f"{models}:13: " in broken["value"]
    assert len(data["problems"]) == 1 and "planner.checkpoint(" in data["problems"][0]


def test_a_model_that_cannot_be_built_is_a_problem(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = call(capsys, "doctor", f"{models}:fails")
    assert said.code == 1 and "problem: fails of" in said.out and "no weights" in said.out


def test_another_package_that_is_imported_by_our_name_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "graphs").mkdir()
    (tmp_path / "graphs" / "__init__.py").touch()
    own = list(sys.path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *own])
    said = call(capsys, "doctor")
    assert said.code == 1 and f"problem: Python imports 'graphs' from {tmp_path / 'graphs'}" in said.out
    monkeypatch.setattr(sys, "path", [*own, str(tmp_path)])  # ours is found first
    assert "problem: " not in call(capsys, "doctor").out
