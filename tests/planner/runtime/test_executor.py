"""The planned step in use: the budget as measured, interface, errors, and what it leaves in memory."""

import copy
import linecache
import re
from collections import Counter
from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import planner
from benchmarks.storages import LiveStorages
from graphs.errors import GraphError, InfeasibleError, MismatchError, ScheduleError
from graphs.schedule import Free, keep_everything, schedule_of
from planner.capture.lowering.lower import Capture
from planner.capture.step import TrainingStep
from planner.capture.trace import capture
from planner.capture.workload.models import Workload
from planner.measure.pool_memory import measure_peak
from planner.measure.run_plan import run
from planner.measure.tracing import profile_capture
from planner.runtime.allocator import record_cpu_allocations
from planner.runtime.code import compile_schedule
from planner.runtime.devices import Devices
from planner.runtime.executor import Executor
from planner.settings.plan import PlanSettings
from tests.support.budgets import HALF_WAY, on_the_way
from tests.support.marks import slow_except
from tests.support.models.steps import STEPS, capture_of, make, random_schedule, solve_for


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
    torch.manual_seed(3)
    loss = step(*workload.batch)
    loss.backward()
    gradients = {name: p.grad for name, p in workload.model.named_parameters()}
    workload.model.zero_grad()
    torch.manual_seed(3)
    workload.loss_fn(workload.model(workload.batch[0]), workload.batch[1]).backward()
    assert all(torch.equal(gradients[name], p.grad) for name, p in workload.model.named_parameters())
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


def test_extra_outputs_are_returned_detached() -> None:
    model = nn.Linear(4, 3)
    x, y = torch.randn(5, 4), torch.randint(3, (5,))

    def loss_fn(logits: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return F.cross_entropy(logits, target), logits, (logits.argmax(1) == target).float().mean()

    captured = capture(model, loss_fn, (x, y))
    loss, logits, accuracy = Executor(captured, keep_everything(captured.graph), model, loss_fn)(x, y)
    assert torch.equal(logits, model(x))
    assert not logits.requires_grad
    assert not accuracy.requires_grad
    loss.backward()
    assert model.weight.grad is not None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, y: (x[:2], y[:2]), "int64\\[2, 48\\], but the step was planned for int64\\[4, 48\\]"),
        (lambda x, y: (x.int(), y), "int32\\[4, 48\\], but the step was planned for int64"),
        (lambda x, y: (x,), "the batch has input 0, but the step was planned for input 0, input 1"),
        (lambda x, y: (x, "target"), "input 1 of the batch is str"),
    ],
    ids=["shape", "dtype", "missing", "no tensor"],
)
def test_another_batch_is_refused(change, message: str) -> None:
    step, batch = executor()
    with pytest.raises(MismatchError, match=message):
        step(*change(*batch))


def test_another_mode_is_refused() -> None:
    workload = make("gpt2_sdpa")
    captured = capture_of("gpt2_sdpa")
    step = Executor(captured, keep_everything(captured.graph), workload.model, workload.loss_fn)
    workload.model.eval()
    with pytest.raises(MismatchError, match=r"train\(\) or eval\(\)"):
        step(*workload.batch)
    workload.model.train()
    step(*workload.batch)
    next(workload.model.parameters()).requires_grad_(requires_grad=False)
    with pytest.raises(MismatchError, match="requires_grad"):
        step(*workload.batch)


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


def test_gradients_accumulate() -> None:
    step, batch = executor("frozen")
    step(*batch).backward()
    once = [None if p.grad is None else p.grad.clone() for p in step.training_step.parameters()]
    step(*batch).backward()
    for before, parameter in zip(once, step.training_step.parameters(), strict=True):
        assert (before is None and parameter.grad is None) or torch.equal(2 * before, parameter.grad)


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
    step(*workload.batch).backward()
    planned = workload.model.head.weight.grad
    workload.model.zero_grad()
    workload.loss_fn(workload.model(workload.batch[0]), workload.batch[1]).backward()
    assert torch.equal(planned, workload.model.head.weight.grad)


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
