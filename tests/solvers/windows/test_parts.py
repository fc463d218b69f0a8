"""Searches with fewer options, also in processes of their own: no option slows a solve; the first schedule of a solve."""

import operator
import os
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

from planner.capture.options import apply_options
from planner.graphs.ir import Graph
from planner.graphs.options import remove_options
from planner.graphs.options.compress import VARIANCE
from planner.graphs.options.selection import get_option_name, remove_ops
from planner.graphs.options.surroundings import Link, Surroundings
from planner.graphs.schedule import Compute, Schedule, keep_everything
from planner.graphs.simulate import simulate
from planner.graphs.synthetic.random_graphs import draw_options, draw_overwriting
from planner.graphs.synthetic.small import make_training_chain
from planner.graphs.synthetic.transformer import TransformerSize, transformer
from planner.solvers import child_process
from planner.solvers.clock import WallClock, WorkClock
from planner.solvers.problem import build_problem
from planner.solvers.registry import get_solver
from planner.solvers.request import Request, Start
from planner.solvers.result import Result, SolveProgress, Status
from planner.solvers.tolerance import Tolerance
from planner.solvers.windows import driver, solve
from planner.solvers.windows.decoding.decode import Trial, order_of_schedule, try_out
from planner.solvers.windows.driver import _commit_in_process, _run_in_process, _search_in_background, run
from planner.solvers.windows.params import PartParams, WindowsParams
from planner.solvers.windows.part_process import Inbox, PartProcess, PartTask, SearchEnd
from planner.solvers.windows.parts import LAST, OwnProcess, Part, start_process
from planner.solvers.windows.search import Search
from planner.solvers.windows.strategies.branches import Branches
from planner.solvers.windows.strategies.refinement import Relaxation
from planner.solvers.windows.strategies.substitution import substitute
from tests.support.budgets import budget_at, peak_bytes
from tests.support.marks import slow, slow_among
from tests.support.solvers.answers import ask

FLOATING = 1e-9
TRANSFORMER = transformer(TransformerSize(layers=4))


def offloading(graph: Graph) -> Graph:
    """With transfers over a link that carries half of the program's peak in the time of its step."""
    program = remove_options(graph)
    link = Link.even(peak_bytes(program) / 2 / program.time_s)
    return apply_options(graph, ("offload",), Surroundings(link))


def asked(graph: Graph, budget_bytes: int, work: float, params: WindowsParams | None = None) -> Request:
    return Request(graph, budget_bytes, Tolerance.of(1e-3), WorkClock(work), params=params)


def solved(graph: Graph, budget_bytes: int, work: float) -> Result:
    return get_solver("windows")(asked(graph, budget_bytes, work))


def time_of(result: Result) -> float:
    return float("inf") if result.time_s is None else result.time_s


def test_sending_is_no_slower_than_not_sending() -> None:
    budget = peak_bytes(TRANSFORMER) // 2
    alone, sending = (solved(graph, budget, 0.5) for graph in (TRANSFORMER, offloading(TRANSFORMER)))
    assert alone.status is Status.OPTIMAL
    assert time_of(sending) <= time_of(alone) * (1 + FLOATING)


@pytest.mark.parametrize("seed", [2, *slow(8, 12)])
def test_no_budget_gets_slower_by_an_option(seed: int) -> None:
    graph = draw_options(seed, 40, 12)
    program = remove_options(graph)
    budget = budget_at(program, 0.25)
    alone = time_of(solved(program, budget, 0.3))
    instead = time_of(solved(graph, budget, 0.3))
    sending = time_of(solved(offloading(program), budget, 0.3))
    both = time_of(solved(offloading(graph), budget, 0.3))
    assert max(instead, sending) <= alone * (1 + FLOATING)
    assert both <= min(instead, sending) * (1 + FLOATING)


def test_writing_over_inputs_makes_nothing_slower() -> None:
    """By a hundredth of the work that a proof takes, also where tensors may go to the host."""
    graph = draw_overwriting(TRANSFORMER, random.Random(3))
    budget = budget_at(graph.out_of_place(), 0.3)
    for offered in (graph, offloading(graph)):
        apart = solved(offered.out_of_place(), budget, 0.05)
        assert apart.schedule is not None
        assert time_of(solved(offered, budget, 0.05)) <= time_of(apart) * (1 + FLOATING)


def of_two_kinds(graph: Graph) -> Graph:
    """`graph` whose optional ops are of one option where they work with what only such ops make, and of another elsewhere."""
    apart = {t.id for t in graph.tensors if t.producers and all(graph.ops[p].optional for p in t.producers)}
    ops = tuple(
        replace(op, target=f"{'pack' if apart.intersection((*op.inputs, *op.outputs)) else 'kernels'}.op") if op.optional else op
        for op in graph.ops
    )
    return replace(graph, ops=ops)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [5, 12])
def test_no_budget_gets_slower_by_a_second_kind_of_options(seed: int) -> None:
    graph = of_two_kinds(draw_options(seed, 40, 12))
    assert {get_option_name(op) for op in graph.ops if op.optional} == {"pack", "kernels"}
    budget = budget_at(remove_options(graph), 0.25)
    both = solved(graph, budget, 0.4)
    alone = [
        solved(remove_ops(graph, lambda op, kind=kind: get_option_name(op) != kind), budget, 0.4) for kind in ("pack", "kernels")
    ]
    assert time_of(both) <= min(map(time_of, alone)) * (1 + FLOATING)
    sending = solved(offloading(graph), budget, 0.4)
    assert time_of(sending) <= time_of(both) * (1 + FLOATING)


def lossy_and_faithful() -> tuple[Graph, Graph]:
    """A graph with a lossy kind of options and another, and the same without the lossy ones."""
    graph = of_two_kinds(draw_options(5, 40, 12))
    ops = tuple(op.using(VARIANCE, 1e-3) if op.optional and get_option_name(op) == "pack" else op for op in graph.ops)
    lossy = replace(graph, ops=ops, limits=((VARIANCE, 2e-3),))
    return lossy, remove_ops(lossy, lambda op: op.used(VARIANCE) > 0)


@pytest.mark.slow
def test_lossy_options_never_slow_down_the_schedule() -> None:
    lossy, faithful = lossy_and_faithful()
    budget = budget_at(remove_options(lossy), 0.25)
    for smaller, larger in ((faithful, lossy), (offloading(faithful), offloading(lossy))):
        found = solved(larger, budget, 0.4)
        assert time_of(found) <= time_of(solved(smaller, budget, 0.4)) * (1 + FLOATING)
        assert larger.allows(found.schedule.computed)


@pytest.mark.skipif(sys.platform != "linux", reason="threads have priorities on Linux alone")
def test_graphs_with_lossy_options_run_at_low_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    own = os.getpriority(os.PRIO_PROCESS, 0)
    bounded_at, init = [], Branches.__init__

    def noted(branches: Branches, search: Search) -> None:
        bounded_at.append(os.getpriority(os.PRIO_PROCESS, 0))
        init(branches, search)

    monkeypatch.setattr(Branches, "__init__", noted)
    for graph in lossy_and_faithful():
        result = get_solver("windows")(Request(graph, budget_at(remove_options(graph), 0.25), clock=WallClock(60.0)))
        assert result.status is Status.OPTIMAL
    assert bounded_at == [min(own + LAST, 19), own]
    assert os.getpriority(os.PRIO_PROCESS, 0) == own


def searched_beside(graph: Graph, part: Graph, budget_bytes: int, monkeypatch: pytest.MonkeyPatch) -> tuple[Search, Search]:
    """A search that does nothing but to let a part of its choices be searched; and the search of that."""
    search, searches, run = Search.of(asked(graph, budget_bytes, 2.0)), [], driver.run

    def run_part(sub: Search) -> None:
        searches.append(sub)
        run(sub)

    with monkeypatch.context() as patch:
        patch.setattr(driver, "run", run_part)
        with driver._search_in_background(Part(search, part, search.incumbent.take)):
            pass
    return search, searches[0]


def test_part_search_equals_a_solve_alone_and_keeps_its_bound_separate(monkeypatch: pytest.MonkeyPatch) -> None:
    budget = peak_bytes(TRANSFORMER) // 2
    search, part = searched_beside(offloading(TRANSFORMER), TRANSFORMER, budget, monkeypatch)
    alone = solved(TRANSFORMER, budget, 2.0)
    assert (part.incumbent.best.schedule, part.incumbent.bound_s) == (
        alone.schedule,
        alone.bound_s,
    )
    assert search.incumbent.best is part.incumbent.best
    assert search.incumbent.bound_s == search.problem.least_s < part.incumbent.bound_s


def test_that_nothing_fits_in_a_part_says_nothing_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = draw_options(1, 40, 12)
    program = remove_options(graph)
    budget = budget_at(program, 0.25)
    search, part = searched_beside(offloading(program), program, budget, monkeypatch)
    assert part.incumbent.infeasible and not search.incumbent.infeasible
    assert solved(program, budget, 0.3).status is Status.INFEASIBLE
    result = solved(offloading(program), budget, 1.0)
    assert result.bound_s <= result.time_s * (1 + FLOATING)


@pytest.mark.parametrize(("known", "spent"), [(False, 20.0), (True, 1.25)])
def test_a_part_that_is_behind_and_gets_no_better_ends(known: bool, spent: float, monkeypatch: pytest.MonkeyPatch) -> None:
    budget = peak_bytes(TRANSFORMER) // 2
    params = WindowsParams(parts=PartParams(least_idle=1.0, idle_share=0.5))
    search, ended = Search.of(asked(offloading(TRANSFORMER), budget, 20.0, params)), []
    if known:
        search.incumbent.take(searched_beside(offloading(TRANSFORMER), TRANSFORMER, budget, monkeypatch)[1].incumbent.best_trial)

    def find_nothing(sub: Search) -> None:
        while not sub.stopping.poll_stop():
            sub.clock.spend(0.25)
        ended.append(sub.clock.now)

    monkeypatch.setattr(driver, "run", find_nothing)
    with driver._search_in_background(Part(search, TRANSFORMER, search.incumbent.take)):
        pass
    assert ended == [pytest.approx(spent)]


GRAPHS = {
    "offload": offloading(transformer(TransformerSize(layers=2))),
    **{f"alternatives {seed}": draw_options(seed, 30) for seed in (5, 9, 31, 38)},
}


@pytest.mark.parametrize("graph", GRAPHS.values(), ids=GRAPHS)
def test_the_first_schedule_is_that_of_the_start(graph: Graph) -> None:
    budget_bytes = budget_at(remove_options(graph), 0.4)
    solved = get_solver("windows")(Request(graph, budget_bytes, clock=WorkClock(2.0)))
    order = order_of_schedule(build_problem(graph, budget_bytes), solved.schedule)
    assert order is not None
    used = {op for op in solved.schedule.computed if graph.ops[op].optional}
    assert used  # the options make a difference
    again = try_out(build_problem(graph, budget_bytes), order)
    assert again.time_s == pytest.approx(solved.time_s) and again.peak_bytes <= budget_bytes

    slower = replace(graph, ops=tuple(replace(op, time_s=op.time_s * (1 + op.id % 3)) for op in graph.ops))
    told: list[float] = []

    def note(progress: SolveProgress) -> None:
        told.extend([] if progress.best_s is None else [progress.best_s])

    ended = Request(slower, budget_bytes, clock=WorkClock(2.0), on_progress=note, should_stop=lambda: bool(told))
    get_solver("windows")(replace(ended, start=Start(solved.schedule)))
    at_other_times = try_out(build_problem(slower, budget_bytes), order)
    assert told[0] == pytest.approx(at_other_times.time_s)


def test_a_start_in_another_order_is_left_out() -> None:
    graph = transformer(TransformerSize(layers=1))
    problem, kept = build_problem(graph, peak_bytes(graph)), keep_everything(graph)
    assert order_of_schedule(problem, kept) is not None
    last = Compute(kept.computed[-1])
    assert order_of_schedule(problem, Schedule((last, *(step for step in kept.steps if step != last)))) is None


class RelaxedError(BaseException):
    """Ends the solve where the relaxation would begin."""


@pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
def test_rules_of_eviction_are_asked_before_the_relaxation(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    graph, found = make_training_chain(20), []

    def begin(relaxation: Relaxation, limit: float) -> None:
        found.append(relaxation.search.incumbent.best is not None)
        raise RelaxedError

    monkeypatch.setattr(Relaxation, "step", begin)
    with pytest.raises(RelaxedError):
        solve(ask(graph, budget_at(graph, share)))
    assert found == [True]


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


def solved_beside(seed: int, params: WindowsParams = AT_ONCE) -> Result:
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
        found, here = solved_beside(seed), solved_beside(seed, WindowsParams())
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
    process.connection.close()  # as if whoever has started it had been killed
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
    part_of.write_text(str(other.process.pid if other is not None else 0))
    part_of.rename(file)
    _until_stopped(search, _)


def _until_stopped(search: Search, _: Inbox) -> None:
    while not search.stopping.poll_stop():
        search.clock.wait(0.01)


def test_a_script_needs_no_guard(tmp_path: Path) -> None:
    script = tmp_path / "plans.py"
    script.write_text(
        textwrap.dedent(f"""
            import sys
            sys.path.insert(0, {str(Path(__file__).parents[3])!r})
            from tests.solvers.windows.test_parts import SEEDS, solved_beside
            print([solved_beside(seed).status.value for seed in SEEDS[:2]])
        """)
    )
    said = subprocess.run([sys.executable, script], cwd=tmp_path, check=True, capture_output=True, text=True).stdout
    assert said == f"{[solved_beside(seed).status.value for seed in SEEDS[:2]]}\n"
