"""Peaks and times that are measured on CUDA, on a stand-in: those of the step, without what libraries keep for threads."""

import gc

import pytest
import torch
from torch import nn

import planner
from benchmarks.models.parts import FunctionModule
from planner.capture.replay import collect_static
from planner.capture.step import LossFn, TrainingStep
from planner.capture.trace import capture
from planner.capture.workload.models import Workload
from planner.graphs.schedule import keep_everything
from planner.graphs.simulate import simulate
from planner.graphs.units import format_bytes
from planner.measure.device_profile import profile_other_devices
from planner.measure.observation import OpTimer, PeakWatch
from planner.measure.pool_memory import measure_peak
from planner.measure.steps import get_loss
from planner.measure.tracing import profile_capture
from planner.runtime.executor import Executor
from planner.runtime.libraries import warm_up_libraries
from planner.settings.plan import PlanSettings
from planner.show.report.describe import run_data, run_text
from planner.studies.baselines import Method
from planner.studies.measured import Benchmark
from planner.train.compile import compiler
from tests.support.budgets import assert_is_peak, between
from tests.support.cuda_device import cuda_device, on_device
from tests.support.cuda_device.memory import LIBRARY_BYTES
from tests.support.cuda_device.steps import assert_as_eager
from tests.support.marks import slow
from tests.support.models.steps import make, random_schedule

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

CUDA = torch.device("cuda:0")


def step_on_cuda(name: str, seed: int | None = None) -> tuple[Executor, TrainingStep, tuple[torch.Tensor, ...]]:
    """A step whose ops are measured in none of its threads yet, but for the forward pass."""
    workload = on_device(make(name))
    captured = profile_capture(capture(*workload), workload, PlanSettings(passes=1))
    schedule = keep_everything(captured.graph) if seed is None else random_schedule(captured.graph, seed)
    return Executor(captured, schedule, workload.model, workload.loss_fn), captured, workload


def forget_workspaces(cuda) -> None:
    cuda.memories[0].workspaces.clear()


@pytest.mark.parametrize("seed", [None, 1])
def test_the_first_backward_pass_of_a_process_is_measured_without_its_workspaces(seed: int | None) -> None:
    with cuda_device() as cuda:
        step, captured, workload = step_on_cuda("tied", seed)
        forget_workspaces(cuda)
        measured = measure_peak(captured, step, TrainingStep(workload.model, workload.loss_fn), workload.batch)
        assert_is_peak(measured.peak_bytes, simulate(captured.graph, step.schedule).peak_bytes, captured.graph)
        assert measured.library_bytes == LIBRARY_BYTES  # of the caller's thread, and of autograd's
        assert measured.reserved_bytes >= measured.peak_bytes + measured.library_bytes


def test_the_first_step_that_is_watched_is_measured_without_its_workspaces() -> None:
    with cuda_device() as cuda:
        step, captured, workload = step_on_cuda("mutated")
        forget_workspaces(cuda)
        watch = PeakWatch(step)
        get_loss(step(*workload.batch)).backward()
        assert watch.done and watch.peak_bytes is not None
        assert_is_peak(watch.peak_bytes, simulate(captured.graph, step.schedule).peak_bytes, captured.graph)


def test_libraries_are_warm_in_both_threads_afterwards() -> None:
    with cuda_device() as cuda:
        assert warm_up_libraries(CUDA) == LIBRARY_BYTES == torch.cuda.memory_allocated(CUDA)
        assert {thread in cuda.passes for thread, *_ in cuda.memories[0].workspaces} == {True, False}
        assert warm_up_libraries(CUDA) == LIBRARY_BYTES == torch.cuda.memory_allocated(CUDA)
    assert warm_up_libraries(torch.device("cpu")) == 0


def test_a_budget_is_met_by_the_first_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    solved: list[object] = []
    first_plan = compiler.Compiler._find_first_plan
    monkeypatch.setattr(compiler.Compiler, "_find_first_plan", lambda *args, **kw: solved.append(0) or first_plan(*args, **kw))
    with cuda_device():
        workload = on_device(make("tied"))
        graph = planner.trace(*workload, passes=1)
        exactly = {"passes": 1, "wait": "20 work", "swap": "never", "tolerance": 0.05, "memory": "allocated"}
        step = planner.compile(*workload, budget=between(graph), **exactly)
        assert len(solved) == 1
        assert step.plan.measured_peak_bytes <= step.plan.budget_bytes
        assert_as_eager(workload, step)


def test_no_more_is_reserved_than_a_plan_says() -> None:
    with cuda_device():
        workload = on_device(make("tied"))
        step = planner.compile(*workload, budget="100%", passes=1, wait="20 work", compare_eager=False)
        plan = step.plan
        assert plan.memory == "reserved"
        assert plan.reserved.library_bytes == LIBRARY_BYTES
        torch.cuda.empty_cache()
        for _ in range(3):
            step(*workload.batch).backward()
            workload.model.zero_grad()
        assert torch.cuda.memory_reserved() <= plan.reserved_bytes <= plan.budget_bytes


def test_a_step_that_multiplies_no_matrices_has_no_workspaces_of_libraries() -> None:
    model = FunctionModule(lambda m, x: torch.tanh(x * m.scale).sin() * m.scale, scale=nn.Parameter(torch.ones(64, 64)))
    with cuda_device() as cuda:
        workload = on_device(Workload(model, nn.MSELoss(), (torch.randn(256, 64, 64), torch.randn(256, 64, 64))))
        step = planner.compile(*workload, budget="100%", passes=1, wait="20 work", swap="never")
        assert step.plan.eager is not None
        assert not cuda.memories[0].workspaces and step.plan.reserved.library_bytes == 0
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        for _ in range(3):
            step(*workload.batch).backward()
            workload.model.zero_grad()
        assert torch.cuda.max_memory_reserved() == step.plan.reserved_bytes


def test_run_report_names_library_workspaces() -> None:
    with cuda_device():
        workload = on_device(make("tied"))
        plan = planner.solve(planner.trace(*workload, passes=1), "100%", time_limit_s=5.0)
        report = planner.run(plan, *workload, repeats=1)
    assert report.measured_peak_bytes <= report.budget_bytes and report.identical
    assert report.library_bytes == run_data(report)["library_bytes"] == LIBRARY_BYTES
    text = run_text(report)
    assert "69.21 MB of workspaces that libraries keep are not in it" in text
    assert report.predicted_reserved_bytes == plan.reserved_bytes == report.needed_bytes <= report.budget_bytes
    assert report.reserved_bytes is not None
    (row,) = (line.split() for line in text.splitlines() if "reserved memory" in line)
    assert " ".join(row) == (
        f"reserved memory {format_bytes(report.predicted_reserved_bytes)} {format_bytes(report.reserved_bytes)}"
    )


def test_planning_leaves_nothing_on_the_device() -> None:
    with cuda_device():
        workload = on_device(make("tied"))
        warm_up_libraries(CUDA)
        before = torch.cuda.memory_allocated(CUDA)
        planner.trace(*workload, passes=1)
        gc.collect()
        assert torch.cuda.memory_allocated(CUDA) == before


def test_method_peak_includes_memory_of_its_own_cuda_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``torch.compile(mode="reduce-overhead")``: between replays the tensors of a graph are free to the allocator."""
    monkeypatch.setattr(Benchmark, "_measure_rounding", lambda *_: None)  # draws on the device, which only a real one can
    made_bytes = 3 * 2**20
    kept = []

    def with_a_graph(model: nn.Module, loss_fn: LossFn | None) -> TrainingStep:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            torch.empty(made_bytes, dtype=torch.uint8, device=CUDA).fill_(1)
        kept.append(graph)
        return TrainingStep(model, loss_fn)

    with cuda_device():
        benchmark = Benchmark(on_device(make("tied")))
        plain = benchmark.enter(Method("plain", TrainingStep))
        graphed = benchmark.enter(Method("graphed", with_a_graph))
        again = benchmark.enter(Method("again", TrainingStep))
        kept.clear()
    assert graphed.peak_bytes - plain.peak_bytes == 20 * 2**20  # a whole segment
    assert again.peak_bytes == plain.peak_bytes  # another method's graph is not its own


@pytest.mark.parametrize("current", [1, *slow(0)])
@pytest.mark.parametrize("place", ["cuda:0", "cuda:1"])
def test_ops_are_timed_on_the_device_of_the_model(place: str, current: int) -> None:
    with cuda_device(devices=2), torch.cuda.device(current):
        workload = on_device(make("tied"), place)
        captured = profile_capture(capture(*workload), workload, PlanSettings(passes=1))
        assert all(op.time_s > 1e-6 for op in captured.graph.ops if op.outputs)
        step = Executor(captured, keep_everything(captured.graph), workload.model, workload.loss_fn)
        timer = OpTimer(step, steps=1)
        for done in (False, True):  # the second one for the host
            get_loss(step(*workload.batch)).backward()
            assert timer.done is done
        assert timer.compute_times_s() == pytest.approx({op.id: op.time_s for op in captured.graph.ops})


def test_allocation_rounding_does_not_exclude_ops_from_other_devices() -> None:
    with cuda_device():
        workload = make("tied")
        captured = profile_capture(capture(*workload), workload, PlanSettings(passes=1))
        static = collect_static(captured, TrainingStep(workload.model, workload.loss_fn), workload.batch)
        (other,) = profile_other_devices(captured, static, ["cuda:0"], passes=1)
        small = [op for op in captured.graph.program if any(captured.graph.tensors[t].size_bytes % 512 for t in op.outputs)]
        assert small and any(other.times_s[op.id] is not None for op in small)


@pytest.mark.parametrize("current", [1, *slow(0)])
def test_other_device_is_timed_on_that_device(current: int) -> None:
    with cuda_device(devices=2), torch.cuda.device(current):
        workload = on_device(make("tied"), "cuda:0")
        captured = profile_capture(capture(*workload), workload, PlanSettings(passes=1))
        static = collect_static(captured, TrainingStep(workload.model, workload.loss_fn), workload.batch)
        (other,) = profile_other_devices(captured, static, ["cuda:1"], passes=1)
        able = {op.id: op.time_s for op, time_s in zip(captured.graph.program, other.times_s, strict=True) if time_s is not None}
        assert len(able) > len(captured.graph.ops) // 2
        assert {op: other.times_s[op] for op in able} == pytest.approx(able)
        assert other.exact == tuple(able) and other.differs == ""
