"""What a command's exit code says, of one that was interrupted too, and of streams that end, fill up or are not there."""

import json
import os
import signal
import subprocess
import sys
import time
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from planner.cli.main import main
from planner.graphs.errors import OutOfMemoryError
from planner.graphs.io.formats import write_graph
from planner.graphs.simulate import simulate
from planner.graphs.synthetic.small import make_training_chain
from planner.measure.run_plan import RunReport
from planner.plans.document import write_plan
from planner.plans.plan import read_plan
from planner.plans.solve import solve
from planner.studies.comparison_rows import ComparisonRow
from planner.studies.rows import read_rows
from tests.support.cli import PATIENCE_S, ROOT, WITH_ENDLESS_SOLVER, Said, call, chain, refused, run_report, start
from tests.support.marks import slow


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    write_graph(make_training_chain(6), tmp_path / "model.json")
    write_plan(replace(solve(make_training_chain(6), "60%"), graph_file="model.json"), tmp_path / "plan.json")
    return tmp_path / "plan.json"


NOT_COMPARED = run_report(
    identical=None,
    differences=None,
    eager_differences=None,
    measured_ratio=None,
    eager_ratio=None,
    overhead=None,
    spread=None,
    not_compared="it needs 3.00 kB, and there is room for 2.50 kB",
)
UNREPEATABLE = run_report(
    identical=False, differences=("loss",), eager_differences=("loss",), eager_error=1e-7, measured_gradient_error=2e-7
)


def ran(report: RunReport, plan_file: Path, capsys: Any, monkeypatch: Any, *options: str) -> Said:
    """What ``planner run`` says where the run came to `report`."""
    from planner import measure

    module = types.ModuleType("planner.measure.run_plan")
    module.run = lambda *_, **__: report
    monkeypatch.setitem(sys.modules, "planner.measure.run_plan", module)
    monkeypatch.setattr(measure, "run_plan", module, raising=False)
    return call(capsys, "run", plan_file, "--model", "zoo:mlp,batch=2,layers=1,width=4,classes=3", *options)


@pytest.mark.parametrize(
    ("report", "code", "said"),
    [
        (run_report(identical=True), 0, "within the budget"),
        (run_report(identical=True, measured_peak_bytes=2000), 0, "within the budget"),
        (run_report(identical=True, measured_peak_bytes=2001), 5, "OVER the budget"),
        (run_report(identical=False, differences=("loss",)), 6, "DIFFERENT from keeping everything"),
        (run_report(identical=True, eager_differences=("gradient of 'w'",)), 6, "DIFFERENT from plain PyTorch"),
        (run_report(identical=False, differences=("loss",), measured_peak_bytes=2001), 6, "OVER the budget"),
        (run_report(identical=True, eager_differences=("loss",), measured_peak_bytes=2001), 6, "OVER the budget"),
        (
            run_report(identical=False, differences=("loss by up to 1e-7",), differs=("rounding: x",)),
            0,
            "may differ, as the plan says",
        ),
        (run_report(identical=False, differs=("rounding: x",), measured_peak_bytes=2001), 5, "OVER the budget"),
        (
            UNREPEATABLE,
            0,
            "plain PyTorch run twice differs from itself: gradient error 1.0e-07, and that of the plan is 2.0e-07",
        ),
        (replace(UNREPEATABLE, measured_gradient_error=1e-3), 6, "DIFFERENT from plain PyTorch"),
        (NOT_COMPARED, 0, "not run to compare with, it needs 3.00 kB, and there is room for 2.50 kB"),
        (replace(NOT_COMPARED, measured_peak_bytes=2001, needed_bytes=2001), 5, "OVER the budget"),
    ],
)
def test_a_run_has_codes_of_its_own(
    report: RunReport, code: int, said: str, plan_file: Path, capsys: Any, monkeypatch: Any
) -> None:
    text = ran(report, plan_file, capsys, monkeypatch)
    assert (text.code, text.err) == (code, "")
    assert said in text.out
    data = ran(report, plan_file, capsys, monkeypatch, "--json")
    assert data.code == code
    assert json.loads(data.out)["measured_peak_bytes"] == report.measured_peak_bytes


def test_a_plan_that_promises_less_than_its_tensors_take_is_not_run(tmp_path: Path, capsys: Any) -> None:
    model = "zoo:mlp,batch=64,layers=3,width=16,classes=3"
    graph_file, plan_file = tmp_path / "model.json", tmp_path / "plan.json"
    assert call(capsys, "trace", model, "-o", graph_file, "--passes", "1").code == 0
    assert call(capsys, "solve", graph_file, "--budget", "100%", "-o", plan_file).code == 0
    plan = read_plan(plan_file)
    write_plan(replace(plan, peak_bytes=plan.graph.static_bytes), plan_file)
    refused(call(capsys, "run", plan_file, "--model", model), 1, "says a peak of", "its file was edited")
    graph_file.unlink()  # without it, what the step allocates tells
    refused(call(capsys, "run", plan_file, "--model", model), 1, "its tensors alone take")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OutOfMemoryError("out of memory in the forward pass: op 'mm'", op="mm"), "out of memory in the forward pass: op 'mm'"),
        (MemoryError(), "out of memory: the command asked for more memory; free memory, or lower the batch size (MemoryError)"),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4194304 bytes."),
            "out of memory: the command asked for 4.19 MB; free memory, or lower the batch size (DefaultCPUAllocator: can't",
        ),
    ],
)
def test_running_out_of_memory_is_one_line(error: Exception, said: str, plan_file: Path, capsys: Any, monkeypatch: Any) -> None:
    def solve_without_memory(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("planner.plans.solve.solve", solve_without_memory)
    refused(call(capsys, "solve", plan_file.parent / "model.json", "--budget", "60%"), 1, said)


def test_exit_codes_are_documented(capsys: Any) -> None:
    helped = " ".join(call(capsys, "run", "--help").out.split())
    assert "5 measured peak over its budget" in helped
    assert "6 loss, gradients, buffers or random state different" in helped
    documented = (ROOT / "docs/command-line.md").read_text()
    assert "`5` over its budget" in documented
    assert "`6` different" in documented
    assert "130 interrupted" in " ".join(call(capsys, "compare", "--help").out.split())


# --- a comparison that is interrupted -------------------------------------------------------------

# The first row is done at once; the second takes until it is told to stop.


@pytest.mark.slow
def test_an_interrupted_comparison_says_so_and_goes_on_later(plan_file: Path, tmp_path: Path, capsys: Any) -> None:
    marker, folder, graph_file = tmp_path / "started", tmp_path / "out", plan_file.with_name("model.json")
    asked = ["compare", graph_file, "--budgets", "100%", "-o", folder, "--jobs", "1"]
    process = start(marker, "-c", WITH_ENDLESS_SOLVER, marker, "listens", *asked, "--methods", "keep-everything,endless")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130, err
    assert "with the rows that are done, to go on with the others next time" in err
    assert [row.method for row in read_rows(folder / "rows.csv", ComparisonRow)] == ["keep-everything"]
    assert "keep-everything" in out
    assert main([str(word) for word in (*asked, "--methods", "keep-everything,chen-sqrt")]) == 0
    assert [row.method for row in read_rows(folder / "rows.csv", ComparisonRow)] == ["keep-everything", "chen-sqrt"]


def start_endless(marker: Path, how: str, graph_file: Path, *words: object) -> "subprocess.Popen[str]":
    """A solve that does not end, and listens to interrupts or is deaf to them."""
    return start(marker, "-c", WITH_ENDLESS_SOLVER, marker, how, "solve", graph_file, "--solver", "endless", *words)


def test_interrupted_solve_writes_its_best_plan(graph_file: Path, tmp_path: Path) -> None:
    marker, plan_file = tmp_path / "started", tmp_path / "plan.json"
    process = start_endless(marker, "listens", graph_file, "--budget", "100%", "-o", plan_file)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, err
    assert f"written to {plan_file}" in out
    assert err == "planner: interrupted: ending with the best schedule found so far; Ctrl-C again to quit at once\n"
    simulate(chain(), read_plan(plan_file).schedule)


@pytest.mark.slow
def test_an_interrupted_solve_without_an_answer_says_so(graph_file: Path, tmp_path: Path) -> None:
    marker, plan_file = tmp_path / "started", tmp_path / "plan.json"
    process = start_endless(marker, "listens", graph_file, "--budget", "60%", "-o", plan_file, "--quiet")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, out) == (4, "")
    assert err.startswith("planner: error: keeping everything needs")
    assert not plan_file.exists()


def test_a_second_interrupt_quits_at_once(graph_file: Path, tmp_path: Path) -> None:
    marker, plan_file = tmp_path / "started", tmp_path / "plan.json"
    process = start_endless(marker, "deaf", graph_file, "--budget", "100%", "-o", plan_file)
    deadline = time.monotonic() + PATIENCE_S
    # Two signals at the same moment may arrive as one.
    while process.poll() is None and time.monotonic() < deadline:
        process.send_signal(signal.SIGINT)
        time.sleep(0.1)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, out, err) == (130, "", "")
    assert sorted(tmp_path.iterdir()) == [graph_file, marker]


@pytest.mark.parametrize(
    "words", [["trace", "{model}", "-o", "{output}"], *slow(["advise", "{model}"])], ids=lambda words: words[0]
)
def test_an_interrupted_trace_leaves_nothing(words: list[str], tmp_path: Path) -> None:
    marker, model, folder = tmp_path / "started", tmp_path / "own.py", tmp_path / "out"
    folder.mkdir()
    model.write_text(f"import pathlib, time\ndef build():\n    pathlib.Path({str(marker)!r}).touch()\n    time.sleep(1000)\n")
    given = {"model": f"{model}:build", "output": folder / "model.json"}
    process = start(marker, "-m", "planner", *(word.format(**given) for word in words))
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, out, err) == (130, "", "")
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("arguments", [["--help"], ["info", "{graph}"], *slow(["info", "{graph}", "--json"])], ids=" ".join)
def test_a_reader_that_leaves_is_no_error(arguments: list[str], graph_file: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    ended = subprocess.run(
        [sys.executable, "-m", "planner", *(word.format(graph=graph_file) for word in arguments)],
        cwd=ROOT,
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        timeout=PATIENCE_S,
    )
    os.close(write)
    # argparse finds that out by itself, and goes.
    assert (ended.returncode, ended.stderr) == (0 if arguments == ["--help"] else 1, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full on this system")
def test_a_full_disk_under_the_output_is_one_line(graph_file: Path) -> None:
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "planner", "info", graph_file],
            cwd=ROOT,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=PATIENCE_S,
        )
    assert (ended.returncode, ended.stderr) == (1, "planner: error: the output: No space left on device\n")


def test_a_process_without_streams_still_works(graph_file: Path, tmp_path: Path) -> None:
    plan_file = tmp_path / "plan.json"
    line = '"$0" -m planner solve "$1" --budget 100% -o "$2" >&- 2>&-'
    ended = subprocess.run(["sh", "-c", line, sys.executable, graph_file, plan_file], cwd=ROOT, timeout=PATIENCE_S)
    assert ended.returncode == 0
    assert read_plan(plan_file).graph.ops == 12
