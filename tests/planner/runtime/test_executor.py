"""The planned step in use: the budget as measured, interface, errors, what it leaves, and running out of memory."""

import copy
import linecache
import re
import shutil
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

import planner
from benchmarks.storages import LiveStorages
from planner.capture.lowering.lower import Capture
from planner.capture.program.program import OpCalls
from planner.capture.step import TrainingStep
from planner.capture.trace import capture
from planner.capture.workload.models import Workload
from planner.graphs.errors import GraphError, InfeasibleError, MismatchError, OutOfMemoryError, PlannerError, ScheduleError
from planner.graphs.ir import Kind
from planner.graphs.options.passes import order_by_passes
from planner.graphs.schedule import Compute, Free, keep_everything, schedule_of
from planner.graphs.simulate import simulate
from planner.measure.observation import OpTimer
from planner.measure.pool_memory import measure_peak
from planner.measure.run_plan import run
from planner.measure.tracing import profile_capture
from planner.memory import release
from planner.memory.release import return_large_blocks
from planner.runtime import out_of_memory
from planner.runtime.allocator import record_cpu_allocations
from planner.runtime.code import compile_schedule
from planner.runtime.devices import Devices
from planner.runtime.executor import Executor
from planner.runtime.out_of_memory import report_errors
from planner.settings.plan import PlanSettings
from tests.support.budgets import HALF_WAY, on_the_way
from tests.support.logs import lines_of
from tests.support.marks import slow_except
from tests.support.memory_limits.steps import CHECKS, run_check
from tests.support.models.outcomes import assert_equal_steps
from tests.support.models.placed import SECOND, on_pools, placed_at_random, profiled, undone_and_right_again
from tests.support.models.steps import STEPS, capture_of, make, random_schedule, solve_for
from tests.support.processes import run_apart


@cache
def captured_step(name: str) -> tuple[Workload, Capture]:
    return make(name), capture_of(name)


def executor(name: str = "gpt2_sdpa") -> tuple[Executor, tuple[torch.Tensor, ...]]:
    workload, captured = captured_step(name)
    return Executor(captured, keep_everything(captured.graph), copy.deepcopy(workload.model), workload.loss_fn), workload.batch


@pytest.mark.usefixtures("half_way")
def test_compiled_step_is_exact_within_its_budget() -> None:
    workload = make("vit")
    step = planner.compile(*workload, budget=HALF_WAY, tolerance=0.05, passes=1, time_limit_s=20.0)
    assert step.plan.measured_peak_bytes <= step.plan.budget_bytes
    assert step.plan.overhead > 0
    assert_equal_steps(step, workload.model, copy.deepcopy(workload.model), *workload.batch, loss_fn=workload.loss_fn)
    assert re.search(r"peak .* predicted, .* measured .*\nstep time (measured|predicted) ", str(step.plan))


def test_compile_refuses_an_impossible_budget() -> None:
    least = r"the least any schedule of this graph needs( that first executes the ops in the order that was tried)?: op"
    with pytest.raises(InfeasibleError, match=rf"is below .*, {least}"):
        planner.compile(*make("tied"), budget="5%", passes=1)


def test_an_op_on_a_channel_is_refused() -> None:
    workload = make("vit")
    captured = capture_of("vit")
    graph, schedule = captured.graph, keep_everything(captured.graph)
    aside = replace(captured, graph=replace(graph, ops=(replace(graph.ops[0], stream="side"), *graph.ops[1:])))
    with pytest.raises(GraphError, match="is on 'side', a stream where only copies and collectives run"):
        Executor(aside, schedule, workload.model, workload.loss_fn)


def test_a_second_backward_needs_the_graph_to_be_retained() -> None:
    step, batch = executor()
    loss = step(*batch)
    loss.backward()
    with pytest.raises(RuntimeError, match=r"called twice on one planned step.*: call the first with retain_graph=True"):
        loss.backward()


def test_a_parameter_changed_before_backward_is_noticed() -> None:
    workload = make("gpt2_sdpa")
    captured = capture_of("gpt2_sdpa")
    loss = Executor(captured, keep_everything(captured.graph), workload.model, workload.loss_fn)(*workload.batch)
    with torch.no_grad():
        for parameter in workload.model.parameters():
            parameter.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_two_forwards_before_one_backward() -> None:
    workload = make("resnet18")
    captured = capture_of("resnet18")
    step = Executor(captured, random_schedule(captured.graph, 0), workload.model, workload.loss_fn)
    both = step(*workload.batch) + 2 * step(*workload.batch)
    both.backward()
    planned = [p.grad for p in workload.model.parameters()]
    other = make("resnet18")
    first, second = (other.loss_fn(other.model(other.batch[0]), other.batch[1]) for _ in range(2))
    (first + 2 * second).backward()
    assert all(torch.equal(a, p.grad) for a, p in zip(planned, other.model.parameters(), strict=True))


def test_nothing_is_left_in_memory() -> None:
    step, batch = executor("mutated")
    step(*batch).backward()
    for parameter in step.training_step.parameters():
        parameter.grad = None

    def run() -> None:
        for _ in range(3):
            step(*batch).backward()
            for parameter in step.training_step.parameters():
                parameter.grad = None

    events = record_cpu_allocations(run)
    assert events
    assert sum(event.size_bytes for event in events) == 0


def test_generated_code_follows_the_schedule() -> None:
    captured = capture_of("unet")
    schedule = random_schedule(captured.graph, 2)
    devices = Devices(captured.graph, torch.device("cpu"))
    source = compile_schedule(captured.graph, captured.program, schedule, devices).source
    frees = re.findall(r"^    del t(\d+)$", source, flags=re.MULTILINE)
    assert [int(t) for t in frees] == [step.tensor for step in schedule.steps if isinstance(step, Free)]
    targets = [str(calls.call.target).replace(".", "_") for calls in captured.program.calls]
    assert {*schedule.computed} == {*range(len(targets))}
    for target, times in Counter(targets[op] for op in schedule.computed).items():
        assert source.count(f"{target}(") >= times


def test_the_source_of_a_step_is_there_for_tracebacks_as_long_as_the_step() -> None:
    before = set(linecache.cache)
    first, _ = executor()
    second, _ = executor()
    files = [list(dict.fromkeys(file for file, _ in each.launched.lines.steps)) for each in (first, second)]
    assert len({*files[0], *files[1]}) == 4 and all("schedule of" in file for file in (*files[0], *files[1]))
    for step, pair in zip((first, second), files, strict=True):
        assert "\n".join("".join(linecache.getlines(file)) for file in pair) == step.code.source
    backward = first.code.backward
    del first, step
    assert linecache.getlines(files[0][1])
    del backward
    assert not any(map(linecache.getlines, files[0]))
    assert all(map(linecache.getlines, files[1]))
    del second
    assert not {file for file in set(linecache.cache) - before if "schedule of" in file}


def test_an_invalid_schedule_is_refused() -> None:
    workload = make("frozen")
    captured = capture_of("frozen")
    broken = schedule_of(captured.graph, range(len(captured.graph.ops) - 1))
    with pytest.raises(ScheduleError, match="never computes"):
        Executor(captured, broken, workload.model, workload.loss_fn)


def test_a_plan_for_another_graph_is_refused() -> None:
    small, large = make("frozen"), make("mutated")
    plan = planner.solve(planner.trace(*small, passes=1), "100%")
    with pytest.raises(MismatchError, match=r"the plan is for another graph .*ops"):
        planner.run(plan, *large)


def test_a_module_that_is_replaced_is_trained_by_the_same_plan() -> None:
    workload = make("frozen")
    captured = capture_of("frozen")
    step = Executor(captured, schedule_of(captured.graph, range(len(captured.graph.ops))), workload.model, workload.loss_fn)
    workload.model.head = copy.deepcopy(workload.model.head)
    assert_equal_steps(step, workload.model, copy.deepcopy(workload.model), *workload.batch, loss_fn=workload.loss_fn)


def test_dispatch_mode_around_the_step_is_accepted() -> None:
    step, batch = executor("frozen")
    with LiveStorages([]) as storages:
        step(*batch).backward()
    assert storages.peak_bytes > 0


QUICK = ("gpt2_sdpa", "tied", "frozen", "mutated", "shared_gradient")


@pytest.mark.parametrize("name", slow_except(STEPS, *QUICK))
def test_measured_peak_is_within_the_budget_and_as_predicted(name: str) -> None:
    workload = make(name)
    captured = profile_capture(capture_of(name), workload, PlanSettings(passes=1))
    step = TrainingStep(workload.model, workload.loss_fn)
    for budget in on_the_way(captured.graph, 1.0, 0.6, 0.3, 0.1):
        plan = solve_for(0.0, captured.graph, budget)
        executor = Executor(captured, plan.schedule, workload.model, workload.loss_fn)
        measured = measure_peak(captured, executor, step, workload.batch).peak_bytes
        assert measured <= budget
        assert abs(measured - plan.peak_bytes) <= 0.01 * plan.peak_bytes
    report = run(plan, *workload, repeats=1)
    assert report.measured_peak_bytes == measured
    assert report.identical


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
import ctypes, threading, torch
from benchmarks.process_memory import read_status_bytes
from planner.memory.release import return_blocks_beside_arena, return_large_blocks
for change, size_bytes in ((return_large_blocks, 2**22), (return_blocks_beside_arena, 2**19)):
    change()
    blocks = [torch.ones(size_bytes // 4) for _ in range(32)]
    between = [torch.ones(2**12) for _ in blocks]
    before = read_status_bytes("VmRSS")
    del blocks[1::2]
    print((before - read_status_bytes("VmRSS")) / size_bytes)
held, libc = [], ctypes.CDLL(None)
thread = threading.Thread(target=lambda: held.extend(bytes(1000) for _ in range(1000)))
thread.start()
thread.join()
libc.fdopen.restype = ctypes.c_void_p
libc.malloc_info(0, ctypes.c_void_p(libc.fdopen(2, b"w")))
libc.fflush(None)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="memory is measured as on Linux")
def test_large_blocks_are_returned_when_they_are_freed_and_smaller_ones_beside_an_arena() -> None:
    run = subprocess.run([sys.executable, "-c", _HELD], capture_output=True, text=True, check=True)
    returned = [float(line) for line in run.stdout.split()]
    assert len(returned) == 2 and min(returned) > 15
    assert run.stderr.count("<heap nr=") == 1, "threads have heaps of their own"


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
