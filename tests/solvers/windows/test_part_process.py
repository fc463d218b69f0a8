"""Searches in processes of their own."""

import operator
import random
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from graphs.ir import Graph
from graphs.options import remove_options
from graphs.schedule import keep_everything
from graphs.simulate import simulate
from graphs.synthetic.random_graphs import draw_options
from solvers import child_process
from solvers.clock import WallClock
from solvers.request import Request
from solvers.result import Result, Status
from solvers.tolerance import Tolerance
from solvers.windows import solve
from solvers.windows.decoding.decode import Trial
from solvers.windows.driver import _commit_in_process, _run_in_process, _search_in_background, run
from solvers.windows.params import WindowsParams
from solvers.windows.part_process import Inbox, PartProcess, PartTask, SearchEnd
from solvers.windows.parts import OwnProcess, Part, start_process
from solvers.windows.search import Search
from solvers.windows.strategies.substitution import substitute
from tests.support.marks import slow_among

# At once: small graphs are solved before anything else would begin.
AT_ONCE = replace(WindowsParams(), parts=replace(WindowsParams().parts, between=0.0))
TOLERANCE = Tolerance.of(1e-4)
LONG = 7  # takes longer than starting a process
SEEDS = (1, 5, 26, LONG)  # one has no schedule


def instance(seed: int) -> tuple[Graph, int]:
    """A graph with options, and a budget below its peak."""
    draw = random.Random(seed)
    graph = draw_options(seed, draw.randint(40, 60) if seed == LONG else draw.randint(8, 12))
    program = remove_options(graph)
    return graph, max(1, round(simulate(program, keep_everything(program)).peak_bytes * draw.uniform(0.6, 0.9)))


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list["subprocess.Popen[bytes]"]:
    """The processes that are started."""
    processes: list[subprocess.Popen[bytes]] = []

    class Noted(subprocess.Popen):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            processes.append(self)

    monkeypatch.setattr(child_process.subprocess, "Popen", Noted)
    return processes


def solved(seed: int, params: WindowsParams = AT_ONCE) -> Result:
    graph, budget = instance(seed)
    return solve(Request(graph, budget, TOLERANCE, WallClock(120), params=params))


def received_from(process: PartProcess) -> list[Trial | SearchEnd]:
    """All that is heard until it has ended."""
    found: list[Trial | SearchEnd] = []
    with process:
        while not found or not isinstance(found[-1], SearchEnd):
            if (news := process.receive(60.0)) is not None:
                found.append(news)
    return found


def task_of(seed: int, task: Callable[[Search, Inbox], None]) -> PartTask:
    return PartTask(*instance(seed), TOLERANCE, WindowsParams(), 120.0, task)


@pytest.mark.parametrize("seed", slow_among(SEEDS, LONG))
def test_search_in_a_process_equals_the_local_search(seed: int) -> None:
    here = Search.of(Request(*instance(seed), TOLERANCE, WallClock(120)))
    run(here)
    *found, end = received_from(PartProcess(task_of(seed, partial(_run_in_process, function=run))))
    assert isinstance(end, SearchEnd) and (end.failure, end.died) == ("", False)
    times = [trial.time_s for trial in found if isinstance(trial, Trial)]
    assert times == sorted(times, reverse=True)
    assert bool(times) == (here.incumbent.best is not None)
    if here.incumbent.best is not None:
        assert times[-1] == pytest.approx(here.incumbent.best.time_s, rel=1e-4)


def check_solves() -> None:
    """With processes they come to what they do without."""
    for seed in SEEDS:
        found, here = solved(seed), solved(seed, WindowsParams())
        assert (found.message, here.message) == ("", "") or found.status is Status.INFEASIBLE
        assert here.status is found.status in (Status.OPTIMAL, Status.INFEASIBLE)
        assert (found.time_s is None) == (here.time_s is None)
        if here.time_s is not None:
            assert found.time_s == pytest.approx(here.time_s, rel=1e-4)


def test_solves_are_the_same_with_processes_as_with_threads(started: list["subprocess.Popen[bytes]"]) -> None:
    check_solves()
    assert len(started) > len(SEEDS)
    assert all(process.returncode is not None for process in started)


DYING = ("raise SystemExit(1)", "import os; os.read(0, 1); os.kill(os.getpid(), 9)")


@pytest.mark.parametrize("command", DYING)
def test_a_process_that_dies_is_told_of(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_process, "_COMMAND", command)
    assert received_from(PartProcess(task_of(SEEDS[0], _until_stopped))) == [SearchEnd(died=True)]


@pytest.mark.slow
@pytest.mark.parametrize("command", DYING)
def test_work_of_a_dead_process_is_done_locally(
    command: str, started: list["subprocess.Popen[bytes]"], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_process, "_COMMAND", command)
    assert received_from(PartProcess(task_of(SEEDS[0], _until_stopped))) == [SearchEnd(died=True)]
    check_solves()
    assert len(started) > len(SEEDS)


@pytest.mark.parametrize("command", DYING)
def test_a_part_whose_process_dies_is_searched_in_a_thread(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_process, "_COMMAND", command)
    graph, _ = instance(SEEDS[0])
    program, found = remove_options(graph), list[Trial]()
    peak_bytes = simulate(program, keep_everything(program)).peak_bytes
    whole = Search.of(Request(graph, peak_bytes, TOLERANCE, WallClock(120)))
    with _search_in_background(Part(whole, program, found.append, process=OwnProcess(0, 1, 0))):
        pass
    assert [trial.time_s for trial in found] == [program.time_s]


@pytest.mark.slow
def test_where_none_can_be_started_there_are_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_process, "get_executable", lambda: None)
    with pytest.raises(OSError, match="no interpreter"):
        PartProcess(task_of(LONG, _until_stopped))
    check_solves()


@pytest.mark.slow
def test_commitments_are_solved_in_the_process() -> None:
    graph, budget = instance(LONG)
    search = Search.of(Request(graph, budget, TOLERANCE, WallClock(120)))
    order = substitute(search.problem, frozenset())
    assert order is not None
    with PartProcess(task_of(LONG, partial(_commit_in_process, known={}))) as process:
        assert process.receive(0.2) is None
        process.send(order)
        process.send(None)
        *found, end = received_from(process)
    assert isinstance(end, SearchEnd) and (end.failure, end.died) == ("", False)
    alone, all_of_it = (solve(Request(some, budget, TOLERANCE, WallClock(120))) for some in (remove_options(graph), graph))
    assert isinstance(found[-1], Trial)
    assert all_of_it.bound_s <= found[-1].time_s * (1 + 1e-9) and found[-1].time_s <= alone.time_s * (1 + 1e-4)
    judged = simulate(graph, found[-1].schedule)
    assert (judged.time_s, judged.peak_bytes) == (pytest.approx(found[-1].time_s), found[-1].peak_bytes)


def test_failure_in_the_process_is_reported() -> None:
    (end,) = received_from(PartProcess(task_of(SEEDS[0], operator.add)))
    assert isinstance(end, SearchEnd) and not end.died
    assert end.failure.startswith("TypeError: unsupported operand type(s) for +: 'Search' and 'Inbox'")


def test_better_known_time_ends_the_process() -> None:
    graph, _ = instance(SEEDS[0])
    with PartProcess(task_of(SEEDS[0], _until_stopped)) as process:
        assert process.receive(0.5) is None
        process.send(2 * graph.time_s)
        assert process.receive(0.5) is None
        process.send(0.0)  # nothing is faster
        assert process.receive(60.0) == SearchEnd()


def test_process_ends_with_its_parent(started: list["subprocess.Popen[bytes]"]) -> None:
    with pytest.raises(KeyboardInterrupt), PartProcess(task_of(SEEDS[0], _until_stopped)):
        raise KeyboardInterrupt
    assert started[0].returncode == -9
    process = PartProcess(task_of(SEEDS[0], _until_stopped))
    assert process.receive(0.5) is None
    process.process.connection.close()  # as if whoever has started it had been killed
    assert started[1].wait(60.0) == 0


@pytest.mark.parametrize("may", [True, False])
def test_processes_started_by_a_process_end_with_it(may: bool, tmp_path: Path) -> None:
    file = tmp_path / "pid"
    with PartProcess(replace(task_of(LONG, partial(_start_another, file=file)), starts_others=may)) as process:
        while not file.exists():
            assert process.receive(0.05) is None
    started_by_it = int(file.read_text())
    assert bool(started_by_it) == may
    for _ in range(600 if may else 0):
        if not psutil.pid_exists(started_by_it) or psutil.Process(started_by_it).status() == psutil.STATUS_ZOMBIE:
            break
        time.sleep(0.1)
    else:
        assert not may


def _start_another(search: Search, _: Inbox, *, file: Path) -> None:
    other = start_process(search, search.problem.whole, _until_stopped, params=search.params)
    part_of = file.with_suffix(".part")
    part_of.write_text(str(other.process.process.pid if other is not None else 0))
    part_of.rename(file)
    _until_stopped(search, _)


def _until_stopped(search: Search, _: Inbox) -> None:
    while not search.stopping.is_stopped():
        search.clock.wait(0.01)


def test_a_script_needs_no_guard(tmp_path: Path) -> None:
    script = tmp_path / "plans.py"
    script.write_text(
        textwrap.dedent(f"""
            import sys
            sys.path.insert(0, {str(Path(__file__).parents[3])!r})
            from tests.solvers.windows.test_part_process import SEEDS, solved
            print([solved(seed).status.value for seed in SEEDS[:2]])
        """)
    )
    said = subprocess.run([sys.executable, script], cwd=tmp_path, check=True, capture_output=True, text=True).stdout
    assert said == f"{[solved(seed).status.value for seed in SEEDS[:2]]}\n"
