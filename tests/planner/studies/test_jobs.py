"""One loop for all executors: in this process, in processes beside it, and on a Dask cluster; how processes end."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from planner.graphs.errors import PlannerError
from planner.graphs.io.formats import write_graph
from planner.graphs.ir import Graph
from planner.graphs.synthetic.small import make_training_chain
from planner.measure.machine import describe_machine
from planner.studies import cluster
from planner.studies.compare import compare
from planner.studies.jobs import run
from planner.studies.processes import ProcessError, iterate_results
from planner.studies.settings import StudySettings
from planner.studies.solve_curve import solve_curve
from planner.studies.workers import return_false
from tests.support.cli import call, refused

PATIENCE_S = 30.0


def square(task: int, should_stop: Callable[[], bool]) -> int:
    return task * task


def until_told(task: int, should_stop: Callable[[], bool]) -> str:
    deadline = time.monotonic() + PATIENCE_S
    while not should_stop() and time.monotonic() < deadline:
        time.sleep(0.01)
    return "told" if should_stop() else "never told"


def fail(error: BaseException, task: int, should_stop: Callable[[], bool]) -> int:
    raise error


def tasks(count: int) -> Callable[[], int | None]:
    waiting = iter(range(count))
    return lambda: next(waiting, None)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Of a scheduler with one worker of two threads, in this process."""
    distributed = pytest.importorskip("distributed")
    with distributed.LocalCluster(
        n_workers=1, threads_per_worker=2, processes=False, protocol="tcp", dashboard_address=":0", worker_dashboard_address=":0"
    ) as local:
        yield local.scheduler_address


@pytest.fixture
def graph() -> Graph:
    return make_training_chain(6)


def test_tasks_are_done_one_by_one_here() -> None:
    done = run(square, tasks(4), return_false)
    assert next(done) == 0
    assert list(done) == [1, 4, 9]


@pytest.mark.slow
def test_an_interrupt_while_processes_start_is_only_delayed(monkeypatch: pytest.MonkeyPatch) -> None:
    submit, interrupts = ProcessPoolExecutor.submit, []

    def interrupted(executor: ProcessPoolExecutor, *given: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        assert not interrupts
        return submit(executor, *given)

    monkeypatch.setattr(ProcessPoolExecutor, "submit", interrupted)
    before = signal.signal(signal.SIGINT, lambda *_: interrupts.append(True))
    try:
        assert list(run(square, tasks(4), lambda: bool(interrupts), jobs=2)) == [0]
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(interrupts) == 1


def test_tasks_are_done_on_a_cluster(address: str) -> None:
    assert sorted(run(square, tasks(7), return_false, cluster=address)) == [n * n for n in range(7)]
    assert list(run(square, tasks(0), return_false, cluster=address)) == []


def test_stop_request_reaches_running_cluster_tasks(address: str) -> None:
    begun = threading.Event()

    def take() -> int:
        begun.set()
        return 1

    assert list(run(until_told, take, begun.is_set, cluster=address)) == ["told"]


def test_abandoned_cluster_tasks_are_stopped(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def give_up(*arguments: object, **options: object) -> None:
        raise ValueError("enough")

    monkeypatch.setattr("planner.studies.jobs.wait", give_up)
    began = time.monotonic()
    with pytest.raises(ValueError, match="enough"):
        next(run(until_told, tasks(2), return_false, cluster=address))
    monkeypatch.undo()
    assert list(run(square, tasks(1), return_false, cluster=address)) == [0]  # the threads of the cluster are free again
    assert time.monotonic() - began < PATIENCE_S


def test_a_task_that_fails_ends_the_others(address: str) -> None:
    for where in (None, address):
        with pytest.raises(PlannerError, match="no such thing"):
            list(run(partial(fail, PlannerError("no such thing")), tasks(2), return_false, cluster=where))


def test_lost_cluster_tasks_raise_one_error(address: str) -> None:
    import distributed

    lost = distributed.KilledWorker("task", SimpleNamespace(address="tcp://h:1"), 3)
    with pytest.raises(
        PlannerError, match=rf"the cluster at {address} has no workers, or lost .*KilledWorker.*leave out --cluster"
    ):
        list(run(partial(fail, lost), tasks(1), return_false, cluster=address))
    with pytest.raises(PlannerError, match=r"No module named 'planner'.*install this version of remat-planner there"):
        list(run(partial(fail, ImportError("No module named 'planner'")), tasks(1), return_false, cluster=address))


def test_a_cluster_without_workers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    distributed = pytest.importorskip("distributed")
    monkeypatch.setattr(cluster, "_CONNECT_S", 0.5)
    with (
        distributed.LocalCluster(n_workers=0, processes=False, protocol="tcp", dashboard_address=":0") as empty,
        pytest.raises(PlannerError, match="has no workers"),
    ):
        list(run(square, tasks(1), return_false, cluster=empty.scheduler_address))
    watch = cluster._WorkerWatch(dict)
    watch()
    watch._seen -= 1
    with pytest.raises(TimeoutError):
        watch()


def test_a_cluster_that_is_not_there_is_refused(graph: Graph, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("distributed")
    write_graph(graph, tmp_path / "model.json")
    asked = ["curve", tmp_path / "model.json", "--quiet", "--cluster"]
    refused(
        call(capsys, *asked, "tcp://127.0.0.1:1x"), 1, "the cluster at tcp://127.0.0.1:1x cannot be reached", "such as tcp://"
    )
    refused(call(capsys, *asked, "nowhere"), 1, "missing port number", "leave out --cluster")


def test_without_dask_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(PlannerError, match=r"pip install 'remat-planner\[cluster\]'"):
        list(run(square, tasks(1), return_false, cluster="tcp://127.0.0.1:1"))


def test_studies_are_the_same_on_a_cluster(address: str, graph: Graph, tmp_path: Path) -> None:
    here, there = solve_curve(graph, 3), solve_curve(graph, 3, StudySettings(cluster=address))
    assert [(p.budget_bytes, p.status, p.time_s) for p in there.points] == [
        (p.budget_bytes, p.status, p.time_s) for p in here.points
    ]
    rows = compare(graph, ["80%"], ["keep-everything", "chen-sqrt"], tmp_path, StudySettings(cluster=address))
    assert {(row.method, row.status) for row in rows} == {("keep-everything", "limit"), ("chen-sqrt", "feasible")}
    assert {row.machine for row in rows} == {describe_machine()}


def counting(until: int, sleep_s: float = 0.0) -> Iterator[tuple[int, int]]:
    sys.stdout.write("what is printed is not what is yielded")
    for number in range(until):
        yield number, os.getpid()
    time.sleep(sleep_s)


def failing() -> Iterator[int]:
    yield 1
    raise ValueError("no such thing")


def variable(name: str) -> Iterator[str | None]:
    yield os.environ.get(name)


def test_stream_yields_values_from_another_process() -> None:
    numbers, processes = zip(*iterate_results(counting, 3), strict=True)
    assert numbers == (0, 1, 2)
    assert len(set(processes)) == 1 and os.getpid() not in processes


def test_failed_process_raises_after_its_yielded_values() -> None:
    made: list[int] = []
    with pytest.raises(ProcessError, match="exit code 1: ValueError: no such thing"):
        made.extend(number for number in iterate_results(failing))
    assert made == [1]
    with pytest.raises(ProcessError, match="exit code 1: TypeError"):
        list(iterate_results(divmod, 1))


def test_a_process_that_does_not_end_is_ended() -> None:
    with pytest.raises(ProcessError, match="not ended after 1 s"):
        list(iterate_results(counting, 2, 60.0, limit_s=1.0))


def test_variables_are_those_of_the_process() -> None:
    assert list(iterate_results(variable, "FOR_THE_CHILD", variables={"FOR_THE_CHILD": "yes"})) == ["yes"]
    assert "FOR_THE_CHILD" not in os.environ
