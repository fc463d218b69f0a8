"""Batch norms and counters that update buffers in place, as eager PyTorch's do."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.models.parts import FunctionModule
from graphs.ir import Graph, Phase
from planner.capture.step import TrainingStep
from planner.capture.trace import capture
from planner.capture.workload.models import Workload
from planner.measure.steps import measure_outcome
from planner.measure.tracing import profile_capture
from planner.native.library import wait_for_library
from planner.native.passes import use_python_passes
from planner.runtime.executor import Executor
from planner.settings.plan import PlanSettings
from tests.support.models.steps import classes, random_schedule, schedule_of

IN_PLACE, FUNCTIONAL = "aten._native_batch_norm_legit.default", "aten._native_batch_norm_legit_functional.default"


def _norms() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))


def _count_targets(graph: Graph) -> Counter[str]:
    return Counter(op.target for op in graph.ops if op.phase is Phase.FORWARD)


def _capture(model: nn.Module) -> Graph:
    return capture(*classes(model, torch.randn(24, 8))).graph


def test_batch_norms_write_their_statistics_and_may_be_recomputed() -> None:
    graph = _capture(_norms())
    targets = _count_targets(graph)
    assert targets[IN_PLACE] == targets["aten.add_.Tensor"] == 2
    assert not targets.keys() & {FUNCTIONAL, "aten.copy_.default", "aten.add.Tensor"}
    norms = [op for op in graph.ops if op.target == IN_PLACE]
    assert all(op.recomputable and len(op.mutates) == 2 and not {*op.mutates} & {*op.inputs} for op in norms)
    assert not any(op.recomputable for op in graph.ops if op.target == "aten.add_.Tensor")


@pytest.mark.parametrize("native", [True, False])
def test_statistics_are_updated_once_however_often_a_batch_norm_is_executed(native: bool) -> None:
    workload = classes(_norms(), torch.randn(24, 8))
    captured = profile_capture(capture(*workload), workload, PlanSettings())
    graph = captured.graph
    computed: list[int] = []
    for op in graph.ops:
        norms = [other.id for other in graph.ops[: op.id] if other.target == IN_PLACE]
        computed += norms if op.phase is Phase.BACKWARD or op.target == "aten.addmm.default" else []
        computed.append(op.id)
    assert wait_for_library()
    with use_python_passes() if not native else torch.enable_grad():
        planned = Executor(captured, schedule_of(graph, computed), workload.model, workload.loss_fn)
        found = measure_outcome(planned, workload.model, workload.batch)
    expected = measure_outcome(TrainingStep(workload.model, workload.loss_fn), workload.model, workload.batch)
    assert expected.list_differences(found) == ()
    assert "_native_batch_norm_legit_no_stats" in planned.launched.source


def _return_mean(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.b(m.norm(m.a(x))) + m.norm.running_mean.sum()


def _read_mean_first(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.b(m.norm(m.a(x)) * m.norm.running_mean)


def _norm_twice(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.b(m.norm(m.a(m.norm(m.a(x)))))


@pytest.mark.parametrize("function", [_return_mean, _read_mean_first, _norm_twice])
@pytest.mark.parametrize("seed", range(3))
def test_statistics_that_others_read_are_written_by_copies(function: Any, seed: int) -> None:
    model = FunctionModule(function, norm=nn.BatchNorm1d(8), a=nn.Linear(8, 8), b=nn.Linear(8, 3))
    workload: Workload = classes(model, torch.randn(24, 8))
    captured = profile_capture(capture(*workload), workload, PlanSettings())
    assert IN_PLACE not in _count_targets(captured.graph)
    planned = Executor(captured, random_schedule(captured.graph, seed), *workload[:2])
    expected = measure_outcome(TrainingStep(*workload[:2]), model, workload.batch)
    assert expected.list_differences(measure_outcome(planned, model, workload.batch)) == ()


def _add_one(steps: torch.Tensor) -> None:
    steps.add_(1)


def _add_half(steps: torch.Tensor) -> None:
    steps.copy_(steps + 0.5)  # which rounds down: the sum is of another type


@pytest.mark.parametrize(("count", "in_place"), [(_add_one, True), (_add_half, False)])
def test_counters_are_counted_in_place_unless_their_type_changes(count: Any, in_place: bool) -> None:
    def run(m: Any, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = m.b(x) * (m.steps + 1)
        count(m.steps)
        return y

    model = FunctionModule(run, b=nn.Linear(8, 3))
    model.register_buffer("steps", torch.zeros((), dtype=torch.int64))
    assert ("aten.add_.Tensor" in _count_targets(_capture(model))) is in_place
