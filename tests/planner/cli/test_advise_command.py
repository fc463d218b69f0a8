"""``planner advise``: what it prints, for people and for machines."""

import json
from pathlib import Path

import pytest

from tests.support.cli import call

MLP = "zoo:mlp,layers=4,batch=512,width=128"
LARGE = "zoo:mlp,layers=1,batch=4096,width=512"
QUICK = ("--time-limit", "3", "--quiet")


def test_advice_is_printed_as_tables(capsys: pytest.CaptureFixture[str]) -> None:
    said = call(capsys, "advise", MLP, "--roofline", "l4", "--optimizer", "adamw", "--options", "offload,pack", *QUICK)
    assert said.code == 0
    for words in (
        "eager PyTorch needs",
        "least budget",
        "on l4 (modelled)",
        "of eager",
        "offload",
        "pack",
        "recommended: no plan",
    ):
        assert words in said.out
    assert "chunks" not in said.out


def test_advice_is_printed_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    said = call(capsys, "advise", LARGE, "--roofline", "h100", "--options", "offload", "--json", *QUICK)
    data = json.loads(said.out)
    assert data["holds"] == "advice" and data["device"] == "h100 (modelled)"
    assert (data["memory"], data["eager_bytes"]) == ("reserved", data["eager_memory"]["reserved_bytes"])
    assert data["least"]["budget_bytes"] < data["between"][0]["budget_bytes"] < data["eager_bytes"]
    assert all(price["reserved_bytes"] <= price["budget_bytes"] for price in data["between"])
    assert data["recommended"]["reserved_bytes"] == data["eager_bytes"]
    assert [option["name"] for option in data["options"]] == ["offload"]
    assert data["recommended"]["budget_bytes"] is None


def test_a_model_of_your_own_that_names_cuda_is_advised_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "own.py").write_text(
        "import torch\nfrom torch import nn\n"
        "def build():\n"
        "    model = nn.Sequential(*(nn.Linear(200_000, 200_000) for _ in range(2))).to('cuda', torch.bfloat16)\n"
        "    x = torch.randn(64, 200_000, device='cuda', dtype=torch.bfloat16)\n"
        "    return model, nn.functional.mse_loss, (x, torch.zeros_like(x))\n"
    )
    said = call(capsys, "advise", f"{tmp_path}/own.py:build", "--roofline", "h100", "--options", "offload", *QUICK)
    assert said.code == 0
    assert "recommended: a smaller batch: " in said.out
