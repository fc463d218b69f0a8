"""Running out of memory is one clear error, the step can be called again; freed memory goes back to the system."""

import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import planner
from graphs.errors import OutOfMemoryError, PlannerError
from graphs.ir import Kind
from graphs.options.passes import order_by_passes
from graphs.schedule import Compute, keep_everything
from graphs.simulate import simulate
from planner.capture.lowering.lower import Capture
from planner.capture.program.program import OpCalls
from planner.capture.trace import capture
from planner.measure.observation import OpTimer
from planner.memory import release
from planner.memory.release import return_large_blocks
from planner.runtime import out_of_memory
from planner.runtime.executor import Executor
from planner.runtime.out_of_memory import report_errors
from tests.support.logs import lines_of
from tests.support.marks import slow_except
from tests.support.memory_limits.steps import CHECKS, run_check
from tests.support.models.placed import SECOND, on_pools, placed_at_random, profiled, undone_and_right_again
from tests.support.models.steps import capture_of, make, random_schedule
from tests.support.processes import run_apart

CUDA_MESSAGE = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB of which 1.50 GiB is free. Of the "
    "allocated memory 70.00 GiB is allocated by PyTorch"
)


@pytest.mark.skipif(sys.platform != "linux", reason="limits of the process's memory are those of Linux")
@pytest.mark.parametrize("check", slow_except(CHECKS, "both_passes"))
def test_a_step_under_a_limit_of_memory(check: str) -> None:
    run_apart(run_check, check)


class Failing:
    """An operator that raises `error` as long as it is told to.

    Attributes:
        fails: whether it does, wherever or in threads of that name only.
    """

    def __init__(self, called: Callable[..., Any], error: Exception) -> None:
        self.fails: bool | str = True
        self._called, self._error = called, error

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.fails is True or self.fails == threading.current_thread().name:
            raise self._error
        return self._called(*args, **kwargs)


def failing_in(captured: Capture, target: str, error: Exception) -> tuple[Capture, Failing]:
    calls = captured.program.calls
    called = next(each.call.target for each in calls if str(each.call.target) == target)
    assert callable(called)
    op = Failing(called, error)
    changed = (calling(each, op) if each.call.target is called else each for each in calls)
    return replace(captured, program=replace(captured.program, calls=tuple(changed))), op


def calling(calls: OpCalls, target: Callable[..., Any]) -> OpCalls:
    (statement,) = calls.statements
    return replace(calls, statements=(replace(statement, value=replace(calls.call, target=target)),))


def failing_step(name: str, target: str, error: Exception, seed: int | None = None) -> tuple[Executor, Failing]:
    captured, op = failing_in(capture_of(name), target, error)
    schedule = keep_everything(captured.graph) if seed is None else random_schedule(captured.graph, seed)
    workload = make(name)
    return Executor(captured, schedule, workload.model, workload.loss_fn), op


@pytest.mark.parametrize("target", ["aten.sub.Tensor", "aten.gelu_backward.default"])
@pytest.mark.parametrize("seed", [None, 1])
def test_an_op_that_runs_out_on_cuda(target: str, seed: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(out_of_memory, "free_bytes", lambda _: 3_000)
    step, failing = failing_step("mutated", target, torch.OutOfMemoryError(CUDA_MESSAGE), seed)
    generator = torch.get_rng_state()
    with undone_and_right_again(step):
        with pytest.raises(OutOfMemoryError) as raised:
            step(*make("mutated").batch).backward()
        assert torch.equal(generator, torch.get_rng_state())
        assert all(p.grad is None for p in step.training_step.parameters())
        failing.fails = False
    op = next(op for op in step.graph.ops if op.target == target)
    text, which = str(raised.value), "backward" if "backward" in target else "forward"
    assert raised.value.op == op.name and raised.value.asked_bytes == 2 * 2**30
    assert text.startswith(f"out of memory in the {which} pass: op {op.name!r} ({target}) ")
    held = simulate(step.graph, step.schedule).memory_bytes[step.schedule.steps.index(Compute(op.id))]
    assert (
        f"asked for 2.15 GB, and without what it takes 3.00 kB are free on cpu; the plan holds at this op {held / 1e3:.2f} kB, "
        in text
    )
    assert text.endswith("(CUDA out of memory. Tried to allocate 2.00 GiB)")  # as PyTorch's users and libraries know it
    assert isinstance(raised.value.__cause__, torch.OutOfMemoryError)


def test_an_op_that_runs_out_on_another_device() -> None:
    captured, failing = failing_in(profiled("mutated"), "aten.gelu.default", torch.OutOfMemoryError(CUDA_MESSAGE))
    failing.fails = f"planner: {SECOND}"
    offered, workload = on_pools(captured), make("mutated")
    gelu = next(op.id for op in offered.graph.program if op.target == "aten.gelu.default")
    schedules = (order_by_passes(offered.graph, placed_at_random(offered.graph, seed)) for seed in range(100))
    schedule = next(s for s in schedules if any(offered.graph.ops[op].replaces == (gelu,) for op in s.computed))
    step = Executor(offered, schedule, workload.model, workload.loss_fn)
    said = rf"op '.*gelu.*' .* asked for 2.15 GB, .* Free memory there, or leave out the device '{SECOND}'"
    with undone_and_right_again(step):
        with pytest.raises(OutOfMemoryError, match=said):
            step(*workload.batch).backward()
        failing.fails = False


def test_a_state_that_the_optimizer_makes_later_is_no_room() -> None:
    workload = make("tied")
    captured = capture(*workload, optimizer="adamw", accumulate=True)
    captured, _ = failing_in(captured, "aten.tanh.default", torch.OutOfMemoryError(CUDA_MESSAGE))
    step = Executor(captured, keep_everything(captured.graph), workload.model, workload.loss_fn)
    sizes = captured.graph.static_bytes_by_kind
    gradients, moments = sizes[Kind.ACCUMULATED_GRADIENT], sizes[Kind.OPTIMIZER_STATE]
    assert step.memory.missing_bytes() == gradients + moments > gradients > 0
    optimizer = torch.optim.AdamW(workload.model.parameters())
    workload.loss_fn(workload.model(workload.batch[0]), workload.batch[1]).backward()
    assert step.memory.missing_bytes() == moments
    optimizer.step()
    assert step.memory.missing_bytes() == 0


def test_out_of_memory_error_is_caught_as_memory_and_runtime_error() -> None:
    step, _ = failing_step("tied", "aten.tanh.default", torch.OutOfMemoryError(CUDA_MESSAGE))
    for kind in (MemoryError, RuntimeError, PlannerError, planner.OutOfMemoryError):
        with pytest.raises(kind, match=r"op 'tanh' \(aten.tanh.default\)"):
            step(*make("tied").batch)


@pytest.mark.parametrize("target", ["aten.sub.Tensor", "aten.gelu_backward.default"])
def test_an_op_that_runs_out_while_ops_are_timed(target: str) -> None:
    step, _ = failing_step("mutated", target, torch.OutOfMemoryError(CUDA_MESSAGE))
    OpTimer(step, steps=1)
    with pytest.raises(OutOfMemoryError) as raised:
        step(*make("mutated").batch).backward()
    assert raised.value.op == next(op.name for op in step.graph.ops if op.target == target)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError(CUDA_MESSAGE),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4194304 bytes."),
    ],
)
def test_accelerate_and_lightning_recognize_the_out_of_memory_error(error: Exception) -> None:
    from accelerate.utils.memory import should_reduce_batch_size
    from lightning.pytorch.utilities.memory import is_oom_error

    step, _ = failing_step("tied", "aten.tanh.default", error)
    with pytest.raises(OutOfMemoryError) as raised:
        step(*make("tied").batch)
    assert should_reduce_batch_size(raised.value)
    assert is_oom_error(raised.value)


def test_other_errors_are_raised_unchanged() -> None:
    step, _ = failing_step("tied", "aten.tanh.default", RuntimeError("the sizes do not match"))
    with pytest.raises(RuntimeError, match="the sizes do not match"):
        step(*make("tied").batch)


def test_out_of_memory_error_names_the_stage() -> None:
    said = r"^out of memory while measuring op 'mm': it asked for 2.15 GB. .* \(CUDA out of memory. Tried to allocate 2.00 GiB\)$"
    with pytest.raises(OutOfMemoryError, match=said), report_errors("measuring op 'mm'"):
        raise torch.OutOfMemoryError(CUDA_MESSAGE)
    with pytest.raises(ValueError, match="no"), report_errors("measuring op 'mm'"):
        raise ValueError("no")
    step, _ = failing_step("tied", "aten.tanh.default", torch.OutOfMemoryError(CUDA_MESSAGE))
    said = r"^while rehearsing: out of memory in the forward pass: op 'tanh'"
    with pytest.raises(OutOfMemoryError, match=said) as raised, report_errors("rehearsing"):
        step(*make("tied").batch)
    assert raised.value.op == "tanh"


_HELD = """
import torch
from benchmarks.process_memory import read_status_bytes
from planner.memory.release import return_blocks_beside_arena, return_large_blocks
for change, size_bytes in ((return_large_blocks, 2**22), (return_blocks_beside_arena, 2**19)):
    change()
    blocks = [torch.ones(size_bytes // 4) for _ in range(32)]
    between = [torch.ones(2**12) for _ in blocks]
    before = read_status_bytes("VmRSS")
    del blocks[1::2]
    print((before - read_status_bytes("VmRSS")) / size_bytes)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="memory is measured as on Linux")
def test_large_blocks_are_returned_when_they_are_freed_and_smaller_ones_beside_an_arena() -> None:
    run = subprocess.run([sys.executable, "-c", _HELD], capture_output=True, text=True, check=True)
    returned = [float(line) for line in run.stdout.split()]
    assert len(returned) == 2 and min(returned) > 15


def test_cost_of_released_memory_is_logged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Libc:
        def mallopt(self, parameter: int, value: int) -> None: ...

        def malloc_trim(self, pad: int) -> None: ...

    monkeypatch.setattr(release, "_load_glibc", Libc)
    monkeypatch.setattr(release, "_returns_large_blocks", False)
    with lines_of(release.__name__) as messages:
        return_large_blocks()
        return_large_blocks()
    assert len(messages) == 1


_ASKED = """
import re, torch
from planner.native.library import wait_for_library
from planner.runtime.arena_allocator import use_large_pages
wait_for_library()
use_large_pages()
block = torch.empty(2**26, dtype=torch.uint8)
middle = block.data_ptr() + 2**25
for area in re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", open("/proc/self/smaps").read(), flags=re.MULTILINE)[1:]:
    begin, end = (int(bound, 16) for bound in area.split()[0].split("-"))
    if begin <= middle < end:
        print(area.rpartition("VmFlags:")[2])
"""


@pytest.mark.skipif(sys.platform != "linux" or shutil.which("g++") is None, reason="pages of Linux, asked for in C++")
def test_large_pages_are_asked_for() -> None:
    run = subprocess.run([sys.executable, "-c", _ASKED], capture_output=True, text=True, check=True)
    assert "hg" in run.stdout.split()
