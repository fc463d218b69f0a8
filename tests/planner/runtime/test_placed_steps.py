"""Steps on several pools of the CPU, also with the host, chunks and writes over inputs: eager bits, and bytes of each pool."""

import gc
import re
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch

from planner.capture.lowering.lower import Capture
from planner.capture.program.program import Call, call_of
from planner.capture.replay import collect_written_tensors
from planner.capture.step import TrainingStep
from planner.capture.workload.models import Workload
from planner.graphs.errors import CopyError, DeviceError, GraphError, UsageError
from planner.graphs.ir import Graph
from planner.graphs.options.compress import predict_gradient_error
from planner.graphs.options.passes import order_by_passes
from planner.graphs.options.selection import get_option_name
from planner.graphs.pools import COMPUTE, HOST
from planner.graphs.schedule import Compute, Schedule, find_boundary, live_after
from planner.graphs.simulate import simulate
from planner.measure.pool_memory import measure_other_peaks, measure_peak
from planner.measure.steps import measure_outcome
from planner.runtime import devices
from planner.runtime.executor import Executor
from planner.runtime.transfers import transfers, workers
from tests.support.graphs.random_choices import any_schedule
from tests.support.marks import slow
from tests.support.models.offloaded import copying_step
from tests.support.models.outcomes import assert_alike_in_threads, assert_same, late_copies, train
from tests.support.models.placed import (
    SECOND,
    on_pools,
    placed_at_random,
    placed_step,
    profiled,
    state,
    step_with_everything,
    traced,
    undone_and_right_again,
    with_everything,
)
from tests.support.models.steps import make

pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning"), pytest.mark.usefixtures("one_thread")]

QUICK = ("mutated", "tied", "shared_gradient")
MakeStep = Callable[[str, int], tuple[Capture, Schedule, Executor]]


@pytest.mark.parametrize("name", [*QUICK, *slow("gpt2_sdpa", "resnet18")])
def test_placed_steps_train_as_eager_does_within_the_bytes_of_each_pool(name: str) -> None:
    workload = make(name)
    captured = profiled(name)
    eager = train(workload, None)
    placed = 0
    for seed, names in enumerate(((SECOND,), (SECOND,), (SECOND, "cpu"))):
        offered = on_pools(captured, names)
        schedule = order_by_passes(offered.graph, placed_at_random(offered.graph, seed))
        assert_same(eager, train(workload, (offered, schedule)))
        assert_within_its_bytes(Executor(offered, schedule, workload.model, workload.loss_fn), workload, captured)
        placed += sum(bool(offered.graph.ops[op].replaces) for op in schedule.computed)
    assert placed > 10


def test_devices_and_channels_work_side_by_side() -> None:
    """Two ops meet: either waits for the other to have begun, which one after the other never happens."""
    workload = make("tied")
    offered = on_pools(profiled("tied"))
    ops = offered.graph.program
    # Of the last gradients, one is of the main device and one is not, and neither reads the other.
    reads = {op.id: set(op.inputs) for op in ops}
    pairs = [(a, b) for a in ops for b in ops[a.id + 1 :] if "mm" in a.target and "mm" in b.target]
    first, second = next(
        (a, b) for a, b in reversed(pairs) if not set(a.outputs) & reads[b.id] and a.phase is b.phase and b.id == a.id + 1
    )
    meeting, seen = threading.Barrier(2, timeout=20), []

    def met(value: torch.Tensor) -> torch.Tensor:
        seen.append(threading.current_thread().name)
        meeting.wait()
        return value

    calls = list(offered.program.calls)
    for op in (first, second):
        calls[op.id] = call_of(Call(met, (calls[op.id].call,)), calls[op.id].outputs)

    computed = [op.id for op in ops]
    stand_in = next(op for op in offered.graph.ops if op.replaces == (second.id,))
    names = {op.name: op.id for op in offered.graph.ops if op.optional}
    copies = [names[f"copy_{offered.graph.tensors[t].name}_device_to_{SECOND}"] for t in second.inputs]
    back = [names[f"copy_{offered.graph.tensors[t].name}_{SECOND}_to_device"] for t in second.outputs]
    at = computed.index(first.id)
    schedule = Schedule(tuple(map(Compute, (*computed[:at], *copies, first.id, stand_in.id, *back, *computed[at + 2 :]))))
    changed = replace(offered, program=replace(offered.program, calls=tuple(calls)))
    executor = Executor(changed, schedule, workload.model, workload.loss_fn)
    executor(*workload.batch).backward()
    assert sorted(seen) == ["MainThread", f"planner: {SECOND}"]


@pytest.mark.parametrize("make_step", [placed_step, copying_step, step_with_everything])
def test_two_forwards_before_one_backward_and_several_threads(make_step: MakeStep) -> None:
    _, _, step = make_step("tied", 3)
    batch = make("tied").batch
    parameters = list(step.training_step.parameters())
    expected = torch.autograd.grad(step(*batch), parameters)
    both = torch.autograd.grad(step(*batch) + 2 * step(*batch), parameters)
    assert all(torch.equal(3 * a, b) or torch.allclose(3 * a, b) for a, b in zip(expected, both, strict=True))
    assert_alike_in_threads(step, batch, rounds=5)
    assert step.devices.host is None or step.devices.host.used_bytes == 0


@pytest.mark.parametrize("half", ["forward", "backward"])
def test_an_op_that_fails_elsewhere(half: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, step = placed_step("mutated", 1)
    batch = make("mutated").batch
    compute = devices.Devices._compute

    def fails(self: Any, stream: str, part: Any, running: Any) -> None:
        def failing(transfers: Any) -> None:
            part(transfers)
            raise RuntimeError("no such kernel")

        compute(self, stream, failing, running)

    with undone_and_right_again(step), monkeypatch.context() as patch:
        loss = step(*batch) if half == "backward" else None
        patch.setattr(devices.Devices, "_compute", fails)
        with pytest.raises(DeviceError, match=f"an op on '{SECOND}' failed: RuntimeError: no such kernel; the step can be tried"):
            step(*batch) if loss is None else loss.backward()


@pytest.mark.parametrize("thread", ["device to host", "host to device", f"device to {SECOND}", f"{SECOND} to device"])
def test_failed_copy_raises_and_restores_the_step(thread: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, step = step_with_everything("mutated", 0)
    batch = make("mutated").batch

    def fails(target: Any, source: Any) -> None:
        if threading.current_thread().name == f"planner: {thread}":
            raise OSError("the link is down")
        target[:] = source

    with undone_and_right_again(step), monkeypatch.context() as patch:
        patch.setattr(np, "copyto", fails)
        with pytest.raises(CopyError, match=rf"a copy from {thread} failed: OSError: the link is down; the step can be tried"):
            step(*batch).backward()


@pytest.mark.parametrize(("make_step", "method"), [(placed_step, "send"), (copying_step, "finish")])
def test_failure_on_the_main_device_ends_the_other_threads(
    make_step: MakeStep, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, step = make_step("mutated", 1)
    batch = make("mutated").batch

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with undone_and_right_again(step), monkeypatch.context() as patch:
        patch.setattr(transfers.Transfer, method, interrupted)
        with pytest.raises((KeyboardInterrupt, DeviceError)):
            step(*batch).backward()


def test_dead_device_thread_raises_and_restores_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, step = placed_step("mutated", 1)
    batch = make("mutated").batch
    with undone_and_right_again(step), monkeypatch.context() as patch:
        patch.setattr(workers, "_run_jobs", lambda jobs: jobs.get())
        for module in (transfers, workers):
            patch.setattr(module, "LOOK_S", 0.01)
        with pytest.raises(DeviceError, match="were not executed: their thread has died; the step can be tried again"):
            step(*batch)


@pytest.mark.parametrize(
    ("make_step", "error", "said"),
    [(placed_step, DeviceError, f"ops on {SECOND}"), (copying_step, CopyError, "copies from device to host")],
)
def test_no_thread_can_be_started(
    make_step: MakeStep, error: type[Exception], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, step = make_step("mutated", 1)

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with undone_and_right_again(step), monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(error, match=f"no thread can be started for {said}: can't start new thread"):
            step(*make("mutated").batch)


def test_threads_end_with_the_step_and_have_their_own_number_of_threads() -> None:
    _, _, step = placed_step("tied", 1, ("cpu:2",))
    found = []
    with step.devices.watch_pool("cpu:2", lambda part: (found.append(torch.get_num_threads()), part())):
        step(*make("tied").batch).backward()
    counted = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    counted.start()
    counted.join()
    assert found == [2, 2, torch.get_num_threads()]
    threads = [worker.thread for worker in step.devices.workers.values()]
    threads += [channel.worker.thread for channel in step.devices.channels.values()]
    assert len(threads) == 3
    del step
    gc.collect()
    for thread in threads:
        thread.join(10)
    assert not any(thread.is_alive() for thread in threads)


def test_unrunnable_placed_steps_raise() -> None:
    workload = make("tied")
    captured = profiled("tied")
    here = Schedule(tuple(Compute(op.id) for op in captured.graph.ops))
    with pytest.raises(UsageError, match="there is no device 'second': write cpu, cpu:2 for two threads of it, cuda, or cuda:1"):
        Executor(on_pools(captured, ("second",)), here, workload.model, workload.loss_fn)
    offered = on_pools(captured, (SECOND,))
    schedule = placed_at_random(offered.graph, 1)
    op = next(offered.graph.ops[op] for op in schedule.computed if offered.graph.ops[op].replaces)
    calls = list(offered.program.calls)
    calls[op.replaces[0]] = call_of(Call(torch.ops.aten.empty.memory_format, ([1],), {"device": torch.device("meta")}), ())
    named = replace(offered, program=replace(offered.program, calls=tuple(calls)))
    with pytest.raises(GraphError, match=f"op '{op.name}' cannot be called elsewhere than on cpu: it names a device"):
        Executor(named, schedule, workload.model, workload.loss_fn)


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
    pools = [pool.name for pool in executor.graph.pools]
    assert others == dict(zip(pools[1:], predicted.pool_peaks_bytes[1:], strict=True))
    assert HOST not in pools or executor.devices.host.used_bytes == 0


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
    before = state(executor.training_step)
    with pytest.raises(
        CopyError, match=r"of the host's memory are in use, and the step may .* call backward\(\) before the next"
    ):
        executor(*workload.batch)
    assert_same(before, state(executor.training_step))
    del loss
    assert memory.used_bytes == 0  # nothing of what failed is held
    executor(*workload.batch).backward()
    assert memory.peak_bytes == most


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
