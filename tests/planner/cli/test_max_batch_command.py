"""``planner max-batch``: what it prints, and what it refuses."""

import json
from pathlib import Path

import pytest

from planner.cli.main import main
from planner.studies.sizes import METHODS

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


@pytest.mark.parametrize(
    ("arguments", "code", "word"),
    [
        (["zoo:mlp", "--budget", "8GB", "--link", "50GB/s"], 2, "link given, but no option that transfers tensors"),
        (["zoo:mlp", "--budget", "8GB", "--options", "shrink"], 2, "there is no option 'shrink'"),
        (["zoo:mlp", "--budget", "8GB", "--vary", "seq"], 2, "name another with --vary"),
        (["zoo:mlp", "--budget", "8GB", "--multiple-of", "8", "--limit", "7"], 2, "--limit 7 is below --multiple-of 8"),
        (["zoo:mlp"], 2, "--budget"),
        (["zoo:mlp", "--budget", "60%"], 2, "a share of a peak, which changes with the batch"),
        (["zoo:mlp", "--budget", "8"], 2, "has no unit"),
        (["zoo:mlp", "--budget", "8GB", "--limit", "0"], 2, "--limit"),
        (["zoo:mlp,batch=x", "--budget", "8GB"], 2, "a size that varies is a whole number above 0"),
        (["zoo:none", "--budget", "8GB"], 2, "gpt2"),
        (["zoo:mlp", "--budget", "8GB", "--batch-option", "size"], 2, "name the one that is the batch size with --batch-option"),
        (["{file}:build", "--budget", "8GB"], 2, "has no option 'batch'"),
        (["zoo:mlp,width=64", "--budget", "1kB", "--limit", "4"], 3, "not even a batch of 1"),
    ],
)
def test_invalid_max_batch_arguments_print_one_line(
    arguments: list[str], code: int, word: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "own.py"
    file.write_text(
        "import torch\ndef build(width: int = 4):\n    return torch.nn.Linear(width, 1), None, (torch.ones(2, width),)\n"
    )
    assert main(["max-batch", *(a.format(file=file) for a in arguments), "--roofline", "h200"]) == code
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("planner: error: ")
    assert word in err


def test_reserved_memory_of_the_cpu_is_refused_before_anything_is_traced(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["max-batch", MLP, "--budget", "8GB", "--memory", "device", "--roofline", "cpu"]) == 2
    assert capsys.readouterr().err.endswith("give memory='allocated'\n")
