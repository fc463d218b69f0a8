"""A copy that fails is one clear error, the model is as before the step, and the next step is right."""

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from graphs.errors import CopyError, OutOfMemoryError
from graphs.pools import DEVICE_TO_HOST, HOST_TO_DEVICE
from planner.capture.workload.models import Workload
from planner.runtime.executor import Executor
from planner.runtime.transfers import transfers, workers
from planner.runtime.transfers.host_memory import HostMemory
from tests.support.marks import slow
from tests.support.models.offloaded import copying_step
from tests.support.models.steps import make

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

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


def train(step: Callable[..., Any], workload: Workload) -> torch.Tensor:
    torch.manual_seed(5)
    loss: torch.Tensor = step(*workload.batch)
    loss.backward()
    return loss.detach()


def assert_as_eager(step: Executor, workload: Workload) -> None:
    """One more step, beside eager PyTorch from the same state."""
    workload.model.load_state_dict(step.training_step.model.state_dict())
    for p, q in zip(workload.model.parameters(), step.training_step.parameters(), strict=True):
        p.grad = None if q.grad is None else q.grad.clone()
    loss = train(lambda x, y: workload.loss_fn(workload.model(x), y), workload)
    assert torch.equal(loss, train(step, workload))
    planned = {name.removeprefix("model."): value for name, value in step.training_step.state_dict().items()}
    assert same(dict(workload.model.state_dict()), planned)
    for p, q in zip(workload.model.parameters(), step.training_step.parameters(), strict=True):
        assert (p.grad is None and q.grad is None) or torch.equal(p.grad, q.grad)


@pytest.mark.parametrize("name", ["mutated", *slow("resnet18", "gpt2_sdpa")])
@pytest.mark.parametrize("when", ["first", "forward", "backward", "late"])
def test_a_thread_that_cannot_copy(name: str, when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    workload = make(name)
    _, _, step = copying_step(name, 1)
    train(step, workload)
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
    train(step, workload)
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
    train(step, workload)
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
