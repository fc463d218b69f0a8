"""``planner max-batch`` and ``planner advise``: what they print, for people and for machines."""

import json
from pathlib import Path

import pytest

from planner.cli.main import main
from planner.studies.sizes import METHODS
from tests.support.cli import call

MLP = "zoo:mlp,layers=4,width=32,classes=8"


@pytest.mark.slow
def test_the_command_prints_a_row_for_each_method(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["max-batch", MLP, "--roofline", "h200", "--budget", "200kB", "--limit", "15", "--memory", "allocated"]
    assert main(arguments) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.startswith("largest batch within 200.00 kB of allocated bytes\nmethod")
    assert main([*arguments, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["memory"] == "allocated"
    assert [row["method"] for row in data["methods"]] == [method for method, _ in METHODS]
    assert all(row["size"] == 15 and row["at_limit"] for row in data["methods"])
    assert "raise --limit" in out


def test_on_the_cpu_the_answer_with_modelled_times_comes_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["max-batch", MLP, "--budget", "400kB", "--limit", "9", "--passes", "1", "--json"]) == 0
    out, err = capsys.readouterr()
    sizes = {row["method"]: row["size"] for row in json.loads(out)["methods"]}
    said = ", ".join(f"{method} {size}" for method, size in sizes.items())
    assert f"with modelled times, the largest batch is: {said}; measuring at these now" in err


@pytest.mark.slow
def test_the_command_varies_another_size_with_options(capsys: pytest.CaptureFixture[str]) -> None:
    varied = ["--vary", "width", "--multiple-of", "8", "--limit", "70"]
    given = ["--options", "offload", "--link", "50GB/s", "--host-budget", "1GB"]
    arguments = ["max-batch", "zoo:mlp,layers=4,batch=64,classes=8,width=32", "--roofline", "h200", "--budget", "150kB", *varied]
    arguments += ["--memory", "allocated"]
    assert main([*arguments, *given, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["varies"], data["multiple_of"], data["limit"]) == ("width", 8, 64)
    assert (data["options"], data["link_bytes_per_s"], data["host_budget_bytes"]) == (["offload"], 50e9, 10**9)
    assert [row["method"] for row in data["methods"]] == [*(method for method, _ in METHODS), "with offload"]
    sizes = [row["size"] for row in data["methods"]]
    assert all(size % 8 == 0 for size in sizes) and sizes[-1] >= sizes[-2] >= sizes[0]
    assert main([*arguments, *given]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "largest width within 150.00 kB of allocated bytes"
    assert out[1].split() == ["method", "width", "overhead", "peak", "reserved", "step", "time"]


SMALL = "zoo:mlp,layers=4,batch=512,width=128"
LARGE = "zoo:mlp,layers=1,batch=4096,width=512"
QUICK = ("--time-limit", "3", "--quiet")


def test_advice_is_printed_as_tables(capsys: pytest.CaptureFixture[str]) -> None:
    said = call(capsys, "advise", SMALL, "--roofline", "l4", "--optimizer", "adamw", "--options", "offload,pack", *QUICK)
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
