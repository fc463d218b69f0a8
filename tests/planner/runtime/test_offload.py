"""Schedules that copy to the host and back: the bits and bytes of eager PyTorch; a copy that fails is one clear error."""

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

from graphs.errors import CopyError, OutOfMemoryError
from graphs.ir import Kind
from graphs.options.offload import remove_offload
from graphs.pools import DEVICE_TO_HOST, HOST_TO_DEVICE
from graphs.schedule import Compute, Free, Schedule, Step, keep_everything
from graphs.simulate import simulate
from planner.capture.step import TrainingStep
from planner.capture.workload.models import Workload
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
from tests.support.models.outcomes import assert_alike_in_threads, assert_same, late_copies, train
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


def test_copies_that_are_late_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    makers = late_copies(monkeypatch)
    for name in ("mutated", "tied"):
        workload = make(name)
        offered = offering(capture_of(name))
        eager = train(workload, None)
        for seed in range(3):
            schedule = with_random_copies(offered.graph, keep_everything(capture_of(name).graph), seed)
            assert_same(eager, train(workload, (offered, schedule)))
    assert makers == {"planner: device to host", "planner: host to device"}


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


def test_host_memory_stays_within_the_host_budget() -> None:
    offered, schedule, _ = copying_step("gpt2_written", 3)
    most = simulate(offered.graph, schedule).pool_peaks_bytes[1]
    workload = make("gpt2_written")
    limited = offering(capture_of("gpt2_written"), host_bytes=most)
    executor = Executor(limited, schedule, workload.model, workload.loss_fn)
    for _ in range(3):
        executor(*workload.batch).backward()
        assert executor.devices.host.peak_bytes == most >= executor.devices.host.allocated_bytes
    assert_same(train(workload, None), train(workload, (limited, schedule)))


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


def test_two_forwards_before_one_backward() -> None:
    _, _, step = copying_step("resnet18", 1)
    workload = make("resnet18")
    both = step(*workload.batch) + 2 * step(*workload.batch)
    both.backward()
    planned = [p.grad for p in step.training_step.parameters()]
    first, second = (workload.loss_fn(workload.model(workload.batch[0]), workload.batch[1]) for _ in range(2))
    (first + 2 * second).backward()
    assert all(torch.equal(a, p.grad) for a, p in zip(planned, workload.model.parameters(), strict=True))
    assert all(map(torch.equal, step.training_step.buffers(), workload.model.buffers()))


def test_a_loss_that_is_dropped_leaves_nothing() -> None:
    _, _, step = copying_step("unet", 1)
    batch = make("unet").batch
    step(*batch)
    memory = step.devices.host
    held = memory.allocated_bytes
    for _ in range(5):
        loss = step(*batch)
        used = memory.used_bytes
        alive = [weakref.ref(value) for value in loss.grad_fn.alive if isinstance(value, torch.Tensor)]
        del loss
        assert used > memory.used_bytes == 0
        end_s = time.monotonic() + 10
        while any(ref() is not None for ref in alive) and time.monotonic() < end_s:  # copies under way hold what they read
            time.sleep(0.001)
        assert alive and not any(ref() is not None for ref in alive)
    assert memory.allocated_bytes == held


def test_several_threads_may_step_one_plan() -> None:
    _, _, step = copying_step("tied", 3)
    batch = make("tied").batch
    assert_alike_in_threads(step, batch, rounds=20)
    assert step.devices.host.used_bytes == 0


def test_threads_end_with_the_step() -> None:
    _, _, step = copying_step("tied", 3)
    step(*make("tied").batch).backward()
    threads = [channel.worker.thread for channel in step.devices.channels.values()]
    assert all(thread.is_alive() for thread in threads)
    del step
    for thread in threads:
        thread.join(10)
    assert not any(thread.is_alive() for thread in threads)


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


def state(step: Executor) -> dict[str, torch.Tensor]:
    model = step.training_step
    found = {name: value.detach().clone() for name, value in model.state_dict().items()}
    found |= {f"gradient of {name}": p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return found


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def source_of(step: Executor, part: str) -> str:
    return step.code.source.partition(f"def {part}(")[2].partition("\n\ndef ")[0]


def take_step(step: Callable[..., Any], workload: Workload) -> torch.Tensor:
    torch.manual_seed(5)
    loss: torch.Tensor = step(*workload.batch)
    loss.backward()
    return loss.detach()


def assert_as_eager(step: Executor, workload: Workload) -> None:
    """One more step, beside eager PyTorch from the same state."""
    workload.model.load_state_dict(step.training_step.model.state_dict())
    for p, q in zip(workload.model.parameters(), step.training_step.parameters(), strict=True):
        p.grad = None if q.grad is None else q.grad.clone()
    loss = take_step(lambda x, y: workload.loss_fn(workload.model(x), y), workload)
    assert torch.equal(loss, take_step(step, workload))
    planned = {name.removeprefix("model."): value for name, value in step.training_step.state_dict().items()}
    assert same(dict(workload.model.state_dict()), planned)
    for p, q in zip(workload.model.parameters(), step.training_step.parameters(), strict=True):
        assert (p.grad is None and q.grad is None) or torch.equal(p.grad, q.grad)


@pytest.mark.parametrize("name", ["mutated", *slow("resnet18", "gpt2_sdpa")])
@pytest.mark.parametrize("when", ["first", "forward", "backward", "late"])
def test_a_thread_that_cannot_copy(name: str, when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    workload = make(name)
    _, _, step = copying_step(name, 1)
    take_step(step, workload)
    before, generator = state(step), torch.get_rng_state()
    forward, copies = (part.count(".take(") for part in (source_of(step, "forward"), step.code.source))
    failing = Failing(np.copyto, _LINK_DOWN)
    late = forward + (copies - forward) * 9 // 10
    failing.fails_at = {"first": 1, "forward": forward // 2, "backward": (forward + copies) // 2, "late": late}[when]
    monkeypatch.setattr(np, "copyto", failing)
    loss = None
    with pytest.raises(CopyError, match=r"a copy from (device to host|host to device) failed: OSError: the link is down"):
        (loss := step(*workload.batch)).backward()
    assert same(before, state(step))
    assert (loss is not None) == (when in ("backward", "late"))
    if loss is None:
        assert torch.equal(generator, torch.get_rng_state())
    del loss
    failing.fails_at = None
    assert_as_eager(step, workload)
    assert step.devices.host.used_bytes == 0


@pytest.mark.parametrize("name", ["resnet18", "mutated"])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_host_out_of_memory_raises_and_restores_the_step(name: str, share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    workload = make(name)
    _, _, step = copying_step(name, 1)
    failing = Failing(HostMemory._allocate_new, partial(MemoryError, "out of it"))
    monkeypatch.setattr(HostMemory, "_allocate_new", lambda *args: failing(*args))
    before, generator = state(step), torch.get_rng_state()
    step(*workload.batch)
    needed = failing.calls
    _, _, step = copying_step(name, 1)
    failing.calls, failing.fails_at = 0, 1 + int(share * (needed - 1))
    with pytest.raises(
        OutOfMemoryError, match=r"op 'copy_.*_device_to_host' .* asked for [1-9].*Lower host_budget= to '"
    ) as raised:
        step(*workload.batch)
    assert str(raised.value.__cause__).startswith("the host has no memory for a copy of")
    assert same(before, state(step)) and step.devices.host.used_bytes == 0
    failing.fails_at = None
    torch.set_rng_state(generator)
    assert_as_eager(step, workload)


@pytest.mark.parametrize("stream", [DEVICE_TO_HOST, HOST_TO_DEVICE])
def test_dead_copy_thread_raises_and_restores_the_step(stream: str, monkeypatch: pytest.MonkeyPatch) -> None:
    workload = make("mutated")
    _, _, step = copying_step("mutated", 1)
    take_step(step, workload)
    before = state(step)
    monkeypatch.setattr(transfers, "LOOK_S", 0.01)
    channel = step.devices.channels[stream].worker
    thread = channel.thread

    def dies(copies: Any) -> None:
        copies.get()

    monkeypatch.setattr(workers, "_run_jobs", dies)
    channel._jobs.put(None)
    thread.join(_SLOW_S)
    with pytest.raises(CopyError, match="was not made: its thread has died; the step can be tried again"):
        step(*workload.batch).backward()
    assert same(before, state(step))
    monkeypatch.undo()
    channel.thread.join(_SLOW_S)
    assert not channel.thread.is_alive()
    assert_as_eager(step, workload)
    assert step.devices.host.used_bytes == 0


def test_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = make("mutated")
    _, _, step = copying_step("mutated", 1)
    before = state(step)

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(CopyError, match="no thread can be started for copies from device to host: can't start new thread"):
            step(*workload.batch)
    assert same(before, state(step))
    assert_as_eager(step, workload)


def test_more_than_the_host_may_hold() -> None:
    _, _, step = copying_step("resnet18", 1)
    workload = make("resnet18")
    take_step(step, workload)
    memory = step.devices.host
    memory.capacity_bytes = memory.peak_bytes
    first = step(*workload.batch)
    before = state(step)
    with pytest.raises(
        CopyError, match=r"does not fit: .* of the host's memory are in use, and the step may use .* or raise host_budget="
    ):
        step(*workload.batch)
    assert same(before, state(step))
    first.backward()
    assert memory.used_bytes == 0
    assert_as_eager(step, workload)


def test_writes_since_the_step_survive_the_rollback(monkeypatch: pytest.MonkeyPatch) -> None:
    """The running statistics of a step whose backward pass fails are put back, unless somebody has written to them since."""
    workload = make("mutated")
    _, _, step = copying_step("mutated", 1)
    loss = step(*workload.batch)
    with torch.no_grad():
        step.training_step.model.calls.fill_(41)
    written = state(step)
    failing = Failing(np.copyto, _LINK_DOWN)
    failing.fails_at = 1
    monkeypatch.setattr(np, "copyto", failing)
    with pytest.raises(CopyError):
        loss.backward()
    after = state(step)
    assert after["model.calls"] == 41
    assert written["model.mean"].any() and not after["model.mean"].any()


def test_a_step_that_fails_for_another_reason_is_undone_too(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = make("mutated")
    _, _, step = copying_step("mutated", 1)
    before, generator = state(step), torch.get_rng_state()

    waits = Failing(lambda: None, KeyboardInterrupt)
    waits.fails_at = 1
    monkeypatch.setattr(transfers.Transfer, "finish", lambda _: waits())
    with pytest.raises(KeyboardInterrupt):
        step(*workload.batch).backward()
    assert same(before, state(step)) and torch.equal(generator, torch.get_rng_state())
