"""Schedules that copy to the host and back: the bits and bytes of eager PyTorch; a copy that fails is one clear error."""

import gc
import re
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from planner.capture.step import TrainingStep
from planner.graphs.errors import CopyError, OutOfMemoryError
from planner.graphs.ir import Kind
from planner.graphs.options.offload import remove_offload
from planner.graphs.pools import DEVICE_TO_HOST, HOST_TO_DEVICE
from planner.graphs.schedule import Compute, Free, Schedule, Step, keep_everything
from planner.graphs.simulate import simulate
from planner.measure.pool_memory import measure_peak
from planner.measure.tracing import profile_capture
from planner.plans.solve import solve
from planner.runtime.executor import Executor
from planner.runtime.transfers import transfers, workers
from planner.runtime.transfers.channels import HostChannels
from planner.runtime.transfers.host_memory import HostMemory
from planner.runtime.transfers.transfers import view_storage
from planner.settings.plan import PlanSettings
from tests.support.budgets import on_the_way
from tests.support.marks import slow, slow_except
from tests.support.models.offloaded import copies_in, copying_step, offering, with_random_copies
from tests.support.models.outcomes import assert_same, train
from tests.support.models.placed import undone_and_right_again
from tests.support.models.steps import STEPS, capture_of, make, random_schedule

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

QUICK = ("gpt2_sdpa", "mutated")


@pytest.mark.parametrize("name", slow_except(STEPS, *QUICK))
def test_plans_with_copies_train_as_eager_does_within_their_bytes(name: str) -> None:
    workload = make(name)
    captured = profile_capture(capture_of(name), workload, PlanSettings(passes=1))
    offered = offering(captured)
    eager = train(workload, None)
    tangent_bytes = sum(captured.graph.tensors[s.tensor].size_bytes for s in captured.program.sources if s.is_tangent)
    step = TrainingStep(workload.model, workload.loss_fn)
    schedules = []
    for budget in on_the_way(captured.graph, 0.6, 0.1):
        # Over a fast link: copies are worth it on any machine.
        plan = solve(offered.graph, budget, tolerance=0.05, time_limit_s=5.0)
        assert simulate(offered.graph, plan.schedule).peak_bytes == plan.peak_bytes <= budget
        schedules.append(plan.schedule)
    schedules.append(with_random_copies(offered.graph, random_schedule(captured.graph, 1), 1))
    schedules += (with_random_copies(offered.graph, keep_everything(captured.graph), seed) for seed in range(2, 4))
    copies = 0
    for schedule in schedules:
        predicted = simulate(offered.graph, schedule)
        executor = Executor(offered, schedule, workload.model, workload.loss_fn)
        measured = measure_peak(captured, executor, step, workload.batch).peak_bytes
        # The gradient of the loss is counted throughout, and comes with the backward pass.
        assert predicted.peak_bytes - tangent_bytes <= measured <= predicted.peak_bytes
        assert executor.devices.host.peak_bytes == predicted.pool_peaks_bytes[1]
        assert executor.devices.host.used_bytes == 0
        assert_same(eager, train(workload, (offered, schedule)))
        copies += sum(op >= len(captured.graph.ops) for op in schedule.computed)
    assert copies > 0


def test_waits_stand_directly_before_the_dependent_statement() -> None:
    _, _, executor = copying_step("gpt2_sdpa", 2)
    lines = [line.strip() for line in executor.code.source.splitlines()]
    issued = copies_in(executor.code.source)
    wait = r"(?:(t\d+) = )?transfer(?:s\[\d+\]|_\d+)\.(?:wait_for_arrival\(\1\)|finish\(\))"
    waits = sum(re.fullmatch(wait, line) is not None for line in lines)
    assert 0 < waits <= len(issued) and any(copy.back for copy in issued)
    for i, line in enumerate(lines):
        if (m := re.fullmatch(wait, line)) is None:
            continue
        # What follows the waits is the reader of what was copied in, or the end of what was copied.
        behind = next(line for line in lines[i + 1 :] if not re.fullmatch(rf"{wait}|del transfer_\d+", line))
        assert re.search(rf"\b{m[1]}\b", behind) if m[1] else re.fullmatch(r"del t\d+", behind)


def test_states_of_generators_stay_on_the_device() -> None:
    captured = capture_of("gpt2_written")
    states = {t.id for t in captured.graph.tensors if t.kind is Kind.RANDOM_STATE and t.size_bytes}
    _, offloads = remove_offload(offering(captured).graph)
    assert states and offloads and states.isdisjoint(offloads.by_tensor)


def test_buffers_are_kept_from_step_to_step(monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, executor = copying_step("gpt2_sdpa", 1)
    workload = make("gpt2_sdpa")
    executor(*workload.batch).backward()
    memory = executor.devices.host
    held = memory.allocated_bytes
    monkeypatch.setattr(HostMemory, "_allocate_new", None)  # nothing is allocated any more
    for _ in range(3):
        executor(*workload.batch).backward()
    assert memory.allocated_bytes == held and memory.used_bytes == 0


def test_a_loss_that_is_dropped_leaves_nothing() -> None:
    _, _, step = copying_step("unet", 1)
    batch = make("unet").batch
    step(*batch)
    memory = step.devices.host
    held = memory.allocated_bytes
    for _ in range(5):
        before = {id(value) for value in gc.get_objects()}
        loss = step(*batch)
        used = memory.used_bytes
        new = (value for value in gc.get_objects() if type(value) is torch.Tensor and id(value) not in before)
        alive = [weakref.ref(value) for value in new if value is not loss]
        del loss
        assert used > memory.used_bytes == 0
        end_s = time.monotonic() + 10
        while any(ref() is not None for ref in alive) and time.monotonic() < end_s:  # copies under way hold what they read
            time.sleep(0.001)
        assert alive and not any(ref() is not None for ref in alive)
    assert memory.allocated_bytes == held


def test_layouts_come_back_as_they_were() -> None:
    copies = HostChannels(torch.device("cpu"))
    whole = torch.arange(60, dtype=torch.int16)
    for tensor in (whole.view(3, 4, 5).permute(2, 0, 1), whole[7:31:2], torch.randn(3, dtype=torch.complex64), torch.tensor(2.5)):
        host, out = copies.offload(tensor)
        out.finish()
        taken, back = copies.reload(host)
        found = back.wait_for_arrival(taken)
        assert torch.equal(found, tensor) and found.dtype == tensor.dtype and found.stride() == tensor.stride()
        assert found.storage_offset() == tensor.storage_offset()
        assert torch.equal(view_storage(found), view_storage(tensor))
        assert found.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()
        del host
    assert copies.memory.used_bytes == 0 < copies.memory.peak_bytes == 120


def test_copy_waits_for_earlier_copies_of_its_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow_back(target: Any, source: Any) -> None:
        if threading.current_thread().name.endswith("to device"):
            time.sleep(0.02)
        target[:] = source

    monkeypatch.setattr(np, "copyto", slow_back)
    copies = HostChannels(torch.device("cpu"))
    ones, twos = torch.ones(1000), torch.full((1000,), 2.0)
    host, _ = copies.offload(ones)
    found, back = copies.reload(host)  # not before it is on the host
    place = host.bytes.room.data_ptr()
    del host
    second, out = copies.offload(twos)  # into a buffer that is still read
    assert second.bytes.room.data_ptr() == place
    out.finish()
    assert torch.equal(back.wait_for_arrival(found), ones) and torch.equal(second.bytes.values.view(torch.float32), twos)
    found, back = copies.reload(second)
    third, out = copies.offload(found, back)  # not before it is on the device
    out.finish()
    assert torch.equal(third.bytes.values.view(torch.float32), twos)


def test_offload_of_a_reloading_tensor_waits_for_the_reload() -> None:
    workload = make("tied")
    captured = capture_of("tied")
    offered = offering(captured)
    _, offloads = remove_offload(offered.graph)
    steps: list[Step] = []
    for step in keep_everything(captured.graph).steps:
        steps.append(step)
        made = offered.graph.ops[step.op].outputs if isinstance(step, Compute) else ()
        for t in offloads.by_tensor.keys() & set(made):
            out, back, host = offloads.by_tensor[t].out.op, offloads.by_tensor[t].back.op, offloads.by_tensor[t].host_tensor
            # Back, and out again into other memory, before anything has read it.
            steps += (Compute(out), Free(t), Compute(back), Free(host), Compute(out), Free(t), Compute(back), Free(host))
    schedule = Schedule(tuple(steps))
    simulate(offered.graph, schedule)
    source = Executor(offered, schedule, workload.model, workload.loss_fn).code.source
    issued = copies_in(source)
    again = [b for a, b in pairwise(issued) if a.back and not b.back and b.read == a.made and b.after == a.name]
    assert len(again) == len(offloads.by_tensor)
    assert_same(train(workload, None), train(workload, (offered, schedule)))


_SLOW_S = 10.0
_LINK_DOWN = partial(OSError, "the link is down")


class Failing:
    """Calls that fail from one on, until they may succeed again."""

    def __init__(self, call: Callable[..., Any], error: Callable[[], BaseException]) -> None:
        self._call, self._error = call, error
        self.calls = 0
        self.fails_at: int | None = None

    def __call__(self, *args: Any) -> Any:
        self.calls += 1
        if self.fails_at is not None and self.calls >= self.fails_at:
            raise self._error()
        return self._call(*args)


def source_of(step: Executor, part: str) -> str:
    return step.code.source.partition(f"def {part}(")[2].partition("\n\ndef ")[0]


@pytest.mark.parametrize("name", ["mutated", *slow("resnet18", "gpt2_sdpa")])
@pytest.mark.parametrize("when", ["first", "forward", "backward", "late"])
def test_a_thread_that_cannot_copy(name: str, when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    workload = make(name)
    _, _, step = copying_step(name, 1)
    step(*workload.batch).backward()
    forward, copies = (part.count(".take(") for part in (source_of(step, "forward"), step.code.source))
    failing = Failing(np.copyto, _LINK_DOWN)
    late = forward + (copies - forward) * 9 // 10
    failing.fails_at = {"first": 1, "forward": forward // 2, "backward": (forward + copies) // 2, "late": late}[when]
    monkeypatch.setattr(np, "copyto", failing)
    with undone_and_right_again(step, name):
        loss, generator = None, torch.get_rng_state()
        with pytest.raises(CopyError, match=r"a copy from (device to host|host to device) failed: OSError: the link is down"):
            (loss := step(*workload.batch)).backward()
        assert (loss is not None) == (when in ("backward", "late"))
        if loss is None:
            assert torch.equal(generator, torch.get_rng_state())
        del loss
        failing.fails_at = None


@pytest.mark.parametrize("name", ["resnet18", "mutated"])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_host_out_of_memory_raises_and_restores_the_step(name: str, share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    workload = make(name)
    _, _, step = copying_step(name, 1)
    failing = Failing(HostMemory._allocate_new, partial(MemoryError, "out of it"))
    monkeypatch.setattr(HostMemory, "_allocate_new", lambda *args: failing(*args))
    step(*workload.batch)
    needed = failing.calls
    _, _, step = copying_step(name, 1)
    failing.calls, failing.fails_at = 0, 1 + int(share * (needed - 1))
    with undone_and_right_again(step, name):
        with pytest.raises(
            OutOfMemoryError, match=r"op 'copy_.*_device_to_host' .* asked for [1-9].*Lower host_budget= to '"
        ) as raised:
            step(*workload.batch)
        assert str(raised.value.__cause__).startswith("the host has no memory for a copy of")
        assert step.devices.host.used_bytes == 0
        failing.fails_at = None


@pytest.mark.parametrize("stream", [DEVICE_TO_HOST, HOST_TO_DEVICE])
def test_dead_copy_thread_raises_and_restores_the_step(stream: str, monkeypatch: pytest.MonkeyPatch) -> None:
    workload = make("mutated")
    _, _, step = copying_step("mutated", 1)
    step(*workload.batch).backward()
    monkeypatch.setattr(transfers, "LOOK_S", 0.01)
    channel = step.devices.channels[stream].worker
    thread = channel.thread
    with undone_and_right_again(step):
        monkeypatch.setattr(workers, "_run_jobs", lambda jobs: jobs.get())
        channel._jobs.put(None)
        thread.join(_SLOW_S)
        with pytest.raises(CopyError, match="was not made: its thread has died; the step can be tried again"):
            step(*workload.batch).backward()
        monkeypatch.undo()
        channel.thread.join(_SLOW_S)
        assert not channel.thread.is_alive()


def test_writes_since_the_step_survive_the_rollback(monkeypatch: pytest.MonkeyPatch) -> None:
    """The running statistics of a step whose backward pass fails are put back, unless somebody has written to them since."""
    workload = make("mutated")
    _, _, step = copying_step("mutated", 1)
    loss, model = step(*workload.batch), step.training_step.model
    with torch.no_grad():
        model.calls.fill_(41)
    assert model.mean.any()
    failing = Failing(np.copyto, _LINK_DOWN)
    failing.fails_at = 1
    monkeypatch.setattr(np, "copyto", failing)
    with pytest.raises(CopyError):
        loss.backward()
    assert model.calls == 41 and not model.mean.any()
