"""Steps on several pools of the CPU that also go to the host and back, chunk and write over inputs, all in one schedule."""

import gc
import re
import threading
from collections import Counter
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch

from graphs.errors import CopyError
from graphs.ir import Graph
from graphs.options.compress import predict_gradient_error
from graphs.options.passes import order_by_passes
from graphs.options.selection import get_option_name
from graphs.pools import COMPUTE, HOST
from graphs.schedule import Compute, Schedule, find_boundary, live_after
from graphs.simulate import simulate
from planner.capture.lowering.lower import Capture
from planner.capture.replay import collect_written_tensors
from planner.capture.step import TrainingStep
from planner.capture.workload.models import Workload
from planner.measure.pool_memory import measure_other_peaks, measure_peak
from planner.measure.steps import measure_outcome
from planner.runtime.executor import Executor
from tests.support.graphs.random_choices import any_schedule
from tests.support.marks import slow
from tests.support.models.outcomes import assert_alike_in_threads, assert_same, late_copies, train
from tests.support.models.placed import (
    SECOND,
    state,
    step_with_everything,
    traced,
    undone_and_right_again,
    with_everything,
)
from tests.support.models.steps import make

pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning"), pytest.mark.usefixtures("one_thread")]

# What each can do besides: a head in chunks, a stand-in by another kernel, ops in place.
BESIDES = {"gpt2_written": {"chunks", "kernels", "in place"}, "tied": {"kernels", "in place"}}
LEAST_SEEDS, MOST_SEEDS = 3, 12
STEPS = ("mutated", *slow("gpt2_written", "tied", "resnet18", "vit", "unet"))


def assert_within_its_bytes(executor: Executor, workload: Workload, captured: Capture) -> None:
    """Each memory holds at most what was predicted, and the host's pool nothing when the step is done."""
    step = TrainingStep(workload.model, workload.loss_fn)
    predicted = simulate(executor.graph, executor.schedule)
    tangent_bytes = sum(captured.graph.tensors[s.tensor].size_bytes for s in captured.program.sources if s.is_tangent)
    gc.collect()
    measured = measure_peak(captured, executor, step, workload.batch).peak_bytes
    # The gradient of the loss is counted throughout, and comes with the backward pass.
    assert predicted.peak_bytes - tangent_bytes <= measured <= predicted.peak_bytes
    others = measure_other_peaks(captured, executor, step, workload.batch)
    memory = executor.devices.host
    assert (*others.values(),) == predicted.pool_peaks_bytes[1:]
    assert memory.used_bytes == 0


@pytest.mark.parametrize("name", STEPS)
def test_they_train_as_eager_does_within_the_bytes_of_each_pool(name: str) -> None:
    workload = make(name)
    eager = train(workload, None)
    wanted = {f"{COMPUTE}@{SECOND}", f"device_to_{SECOND}", f"{SECOND}_to_device", "device_to_host", "host_to_device"}
    wanted |= BESIDES.get(name, set())
    ways: set[str] = set()
    seeds = count()
    while (seed := next(seeds)) < LEAST_SEEDS or (not wanted <= ways and seed < MOST_SEEDS):  # what is offered depends on times
        offered = with_everything(name, (SECOND, "cpu") if seed == 1 else (SECOND,))
        schedule = order_by_passes(offered.graph, any_schedule(offered.graph, seed))
        assert_same(eager, train(workload, (offered, schedule)))
        executor = Executor(offered, schedule, workload.model, workload.loss_fn)
        assert_within_its_bytes(executor, workload, traced(name))
        ops = [offered.graph.ops[op] for op in schedule.computed]
        ways |= {get_option_name(op) if op.stream == COMPUTE else op.stream for op in ops if op.optional}
        ways |= {"in place"} if re.search(r"out=t|\w_\(t", executor.code.source) else set()
    assert wanted <= ways


@pytest.mark.slow
def test_inexact_placed_steps_stay_within_the_predicted_error() -> None:
    workload, captured = make("gpt2_written"), traced("gpt2_written")
    offered = with_everything("gpt2_written", exact=False)
    eager = TrainingStep(workload.model, workload.loss_fn)
    written = collect_written_tensors(captured, eager, workload.batch)
    reference = measure_outcome(eager, workload.model, workload.batch, seed=0, written=written)
    for seed in range(2):
        schedule = order_by_passes(offered.graph, any_schedule(offered.graph, seed))
        executor = Executor(offered, schedule, workload.model, workload.loss_fn)
        assert_within_its_bytes(executor, workload, captured)
        found = measure_outcome(executor, workload.model, workload.batch, seed=0, written=written)
        predicted = predict_gradient_error(offered.graph, schedule.computed)
        assert predicted > 0 and reference.compute_gradient_error(found) < 3 * predicted
        loss, wanted = found.values["loss"], reference.values["loss"]
        assert loss is not None and wanted is not None and torch.allclose(loss, wanted)


def test_copies_that_are_late_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    makers = late_copies(monkeypatch)
    workload = make("mutated")
    eager = train(workload, None)
    sent_on: set[str] = set()
    for seed in range(4):
        offered, schedule, executor = step_with_everything("mutated", seed)
        assert_same(eager, train(workload, (offered, schedule)))
        # What comes from the host goes on to the other device at once, and what comes from there to the host.
        main = executor.code.source.partition(f"# {SECOND}")[0]
        issued = r"(transfers\[\d+\])\.send\(t\d+, transfer\S+\)\n(?: +(?:t\d+ = )?\1\.take)?"
        sent_on |= {"host" if match[0].endswith("take") else SECOND for match in re.finditer(issued, main)}
    ends = ("device", SECOND), (SECOND, "device"), ("device", "host"), ("host", "device")
    assert makers == {f"planner: {source} to {target}" for source, target in ends}
    assert sent_on == {"host", SECOND}


def between_passes(graph: Graph, schedule: Schedule) -> set[int]:
    """The tensors that are in some memory between the passes."""
    return set(live_after(graph, schedule.steps[: find_boundary(graph, schedule)]))


def test_host_memory_stays_within_the_host_budget() -> None:
    offered, schedule = next(
        (offered, schedule)
        for offered, schedule, _ in (step_with_everything("mutated", seed) for seed in range(20))
        if any(offered.graph.tensors[t].pool == HOST for t in between_passes(offered.graph, schedule))
    )
    most = simulate(offered.graph, schedule).pool_peaks_bytes[-1]
    workload = make("mutated")
    limited = with_everything("mutated", host_bytes=most)
    executor = Executor(limited, schedule, workload.model, workload.loss_fn)
    memory = executor.devices.host
    for _ in range(3):
        executor(*workload.batch).backward()
        assert memory.peak_bytes == most >= memory.allocated_bytes
    loss = executor(*workload.batch)
    assert memory.used_bytes
    before = state(executor)
    with pytest.raises(
        CopyError, match=r"of the host's memory are in use, and the step may .* call backward\(\) before the next"
    ):
        executor(*workload.batch)
    assert all(torch.equal(value, before[name]) for name, value in state(executor).items())
    del loss
    assert memory.used_bytes == 0  # nothing of what failed is held
    executor(*workload.batch).backward()
    assert memory.peak_bytes == most


def test_several_threads_may_step_one_plan() -> None:
    _, _, step = step_with_everything("tied", 3)
    assert_alike_in_threads(step, make("tied").batch, rounds=5)
    assert step.devices.host.used_bytes == 0


@pytest.mark.parametrize("thread", ["device to host", "host to device"])
def test_a_copy_to_the_host_or_back_that_fails(thread: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, step = step_with_everything("mutated", 0)
    batch = make("mutated").batch

    def fails(target: Any, source: Any) -> None:
        if threading.current_thread().name == f"planner: {thread}":
            raise OSError("the link is down")
        target[:] = source

    with undone_and_right_again(step), monkeypatch.context() as patch:
        patch.setattr(np, "copyto", fails)
        with pytest.raises(CopyError, match=rf"a copy from {thread} failed: OSError: the link is down"):
            step(*batch).backward()


def test_forward_results_return_with_the_forward_pass_despite_offload() -> None:
    graph = with_everything("tied").graph
    moved = 0
    for seed in range(12):  # kernels that are worth a choice differ by machine and load, and schedules with them
        schedule = any_schedule(graph, seed)
        again = order_by_passes(graph, schedule)
        assert order_by_passes(graph, again) == again
        simulate(graph, again)
        before, after = Counter(schedule.steps), Counter(again.steps)
        moved += again != schedule and before == after
        # What is computed here again in the backward pass is copied besides, for the caller gets it before.
        assert not before - after
        assert all(isinstance(step, Compute) and graph.kept.issuperset(graph.ops[step.op].outputs) for step in after - before)
    assert moved
