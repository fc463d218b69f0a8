"""``planner curve``, ``max-batch`` and ``advise``: what they print, write and draw, and what an interruption leaves."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

from planner.cli.main import main
from planner.graphs.io.formats import write_graph
from planner.studies.sizes import METHODS
from tests.support.cli import PATIENCE_S, ROOT, call, chain_of_six


@pytest.fixture
def graph_file(tmp_path: Path) -> Path:
    path = tmp_path / "model.json"
    write_graph(chain_of_six(), path)
    return path


def test_the_command_prints_writes_and_draws(graph_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table, figure = tmp_path / "c.csv", tmp_path / "c.png"
    arguments = ["curve", str(graph_file), "--budgets", "4", "--jobs", "1", "-o", str(table), "--plot", str(figure)]
    assert main(arguments) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.splitlines()[0].split() == ["budget", "%", "of", "eager", "overhead", "bound", "gap", "seconds", "status"]
    assert out.count("optimal") == 4
    assert "least feasible budget" in out
    assert figure.read_bytes().startswith(b"\x89PNG")
    rows = pd.read_csv(table, dtype={"budget_bytes": int, "overhead": float, "status": str})
    assert list(rows["status"]) == ["optimal"] * 4
    assert main([*arguments, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["complete"]
    assert [point["budget_bytes"] for point in data["points"]] == list(rows["budget_bytes"])
    assert rows["overhead"].iloc[0] == pytest.approx(data["points"][0]["overhead"], abs=2e-3)
    assert rows["overhead"].iloc[-1] == 0


def test_no_budget_that_anything_fits_is_exit_code_3(graph_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["curve", str(graph_file), "--budgets", "1B,2B"]) == 3
    out = capsys.readouterr().out
    assert out.count("infeasible") == 2 and "least feasible budget: 3.00 kB, proved" in out


def test_options_are_drawn_and_written_beside(graph_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table, figure = tmp_path / "c.csv", tmp_path / "c.png"
    given = ["--options", "offload", "--link", "1GB/s", "--host-budget", "1GB", "-o", str(table), "--plot", str(figure)]
    assert main(["curve", str(graph_file), "--budgets", "5kB,7kB", "--jobs", "1", *given]) == 0
    assert "with offload" in capsys.readouterr().out
    rows = pd.read_csv(table, keep_default_na=False)
    assert list(rows["options"]) == ["", "", "offload", "offload"]
    assert figure.read_bytes().startswith(b"\x89PNG")


ENDLESS = """
import os, time
from pathlib import Path
from planner.solvers.baselines import keep_everything

FOLDER = Path(__file__).parent

def solve(request):
    (FOLDER / f"{os.getpid()}.started").touch()
    while not request.is_interrupted():
        time.sleep(0.01)
    return keep_everything.solve(request)
"""

WITH_ENDLESS_SOLVER = """
import sys
folder, *arguments = sys.argv[1:]
sys.path.insert(0, folder)
from planner.solvers.registry import SOLVERS, Entry
SOLVERS["endless"] = Entry("endless", "never ends by itself")
if __name__ == "__main__":
    from planner.cli.main import main
    sys.exit(main(arguments))
"""


def waiting(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return not Path(f"/proc/{pid}/stat").exists() or Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"


@pytest.mark.slow
@pytest.mark.parametrize("signals", ["one", "many"])
def test_an_interrupted_curve_answers_and_leaves_no_process(signals: str, graph_file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "solver"
    folder.mkdir()
    (folder / "endless.py").write_text(ENDLESS)
    (folder / "run.py").write_text(WITH_ENDLESS_SOLVER)
    process = subprocess.Popen(
        [sys.executable, folder / "run.py", folder, "curve", graph_file, "--solver", "endless", "--budgets", "70%,80%,90%,100%"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    waiting(lambda: len(list(folder.glob("*.started"))) == 2 or process.poll() is not None)
    assert process.poll() is None, process.communicate()
    pids = [int(path.stem) for path in folder.glob("*.started")]
    # As a terminal does: to the whole group.
    while process.poll() is None:
        os.killpg(process.pid, signal.SIGINT)
        if signals == "one":
            break
        time.sleep(0.02)
    out, err = process.communicate(timeout=PATIENCE_S)
    if signals == "one":
        assert process.returncode == 0, err
        assert "stopped before every budget was solved" in out
        assert out.count("optimal") == 1
        assert err.startswith("planner: interrupted: ending with")
        assert err.count("\n") == 1
    else:
        # At the second the process ends at once, unless it had ended already.
        assert process.returncode in (0, 130)
        assert "Traceback" not in err
    waiting(lambda: not any(map(alive, pids)))


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
