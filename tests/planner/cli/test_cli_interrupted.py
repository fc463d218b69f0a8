"""The command interrupted, and with streams that end, fill up or are not there."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from graphs.simulate import simulate
from planner.plans.plan import read_plan
from tests.support.cli import PATIENCE_S, ROOT, WITH_ENDLESS_SOLVER, chain, start
from tests.support.marks import slow


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
