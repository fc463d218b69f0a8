"""Capture of training steps: graphs, buffers updated in place as by eager PyTorch, and errors for what cannot be captured."""

from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.models.parts import FunctionModule
from graphs.errors import TraceError
from graphs.ir import Graph, Kind, Op, Phase
from graphs.schedule import keep_everything
from graphs.simulate import simulate
from planner.capture.step import TrainingStep
from planner.capture.trace import capture
from planner.capture.workload.models import Workload
from planner.measure.steps import get_loss
from planner.measure.tracing import profile_capture
from planner.native.library import wait_for_library
from planner.native.passes import use_python_passes
from planner.runtime.executor import Executor
from planner.settings.plan import PlanSettings
from tests.support.marks import slow, slow_among
from tests.support.models.outcomes import assert_exact
from tests.support.models.steps import STEPS, capture_of, classes, make, random_schedule, schedule_of


def ops_called(graph: Graph, target: str) -> list[Op]:
    return [op for op in graph.ops if op.target == target]


def test_perceptron_graph_op_by_op() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    graph = capture(model, F.mse_loss, (torch.randn(3, 4), torch.randn(3, 2))).graph
    forward = [(op.target, op.module) for op in graph.ops if op.phase is Phase.FORWARD]
    assert forward == [
        ("aten.addmm.default", "model.0"),
        ("aten.relu.default", "model.1"),
        ("aten.addmm.default", "model.2"),
        ("aten.mse_loss.default", ""),
    ]
    assert len(ops_called(graph, "aten.mm.default")) == 3  # two weight gradients, one activation gradient
    assert {graph.tensors[t].kind for t in graph.kept} == {Kind.OUTPUT, Kind.GRADIENT}
    parameters = 4 * (4 * 8 + 8 + 8 * 2 + 2)
    assert graph.static_bytes_by_kind == {Kind.PARAMETER: parameters, Kind.INPUT: 4 * (3 * 4 + 3 * 2 + 1)}
    assert sum(graph.tensors[t].size_bytes for t in graph.kept) == parameters + 4


def test_copies_before_in_place_writes_are_dropped() -> None:
    layers = (nn.Linear(4, 8), nn.Hardtanh(inplace=True), nn.Linear(8, 2))
    workload = Workload(nn.Sequential(*layers), F.mse_loss, (torch.randn(3, 4), torch.randn(3, 2)))
    captured = capture(*workload)
    assert ops_called(captured.graph, "aten.clone.default") == []
    planned = Executor(captured, random_schedule(captured.graph, 3), workload.model, workload.loss_fn)
    assert_exact(planned, workload.model, workload.batch, workload.loss_fn)


def test_returned_copies_and_copies_of_overwritten_values_stay() -> None:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))
            self.register_buffer("calls", torch.zeros(4))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            before = self.calls.clone()
            self.calls += 1
            hidden = x * self.weight
            return (hidden.sin() * before).sum(), hidden.clone()

    model, x = Counter(), torch.randn(4)
    captured = capture(model, None, (x,))
    assert len(ops_called(captured.graph, "aten.clone.default")) == 2
    step = Executor(captured, keep_everything(captured.graph), model, None)
    assert [step(x)[0].item() == 0 for _ in range(2)] == [True, False]


def test_views_are_neither_ops_nor_tensors() -> None:
    model = nn.Linear(6, 6)
    batch = (torch.randn(2, 6),)
    plain = capture(nn.Sequential(model), lambda y, x: (y * x).sum(), (*batch, *batch)).graph
    viewed = capture(nn.Sequential(model), lambda y, x: (y.t().reshape(6, 2).t() * x).sum(), (*batch, *batch)).graph
    assert [op.target for op in viewed.ops] == [op.target for op in plain.ops]


def test_outputs_of_one_op_are_separate_tensors() -> None:
    graph = capture_of("resnet18").graph
    (first, *_) = ops_called(graph, "aten._native_batch_norm_legit.default")
    assert len(first.outputs) == 3
    assert first.recomputable


def test_readers_of_overwritten_buffers_are_not_recomputed() -> None:
    graph = capture_of("mutated").graph
    mean = next(t.id for t in graph.tensors if t.name.endswith("mean"))
    assert any(mean in op.mutates for op in graph.ops)
    readers = [op for op in graph.ops if mean in op.inputs]
    assert len(readers) > 1
    assert not any(op.recomputable for op in readers)


def test_random_ops_are_marked_and_their_states_are_tensors() -> None:
    graph = capture_of("gpt2_sdpa").graph
    dropouts = ops_called(graph, "aten.native_dropout.default")
    assert dropouts
    for op in dropouts:
        assert op.random
        (state,) = [t for t in op.inputs if graph.tensors[t].kind is Kind.RANDOM_STATE]
        assert graph.tensors[state].size_bytes == torch.get_rng_state().numel()
        (producer,) = graph.tensors[state].producers
        assert not graph.ops[producer].recomputable


def test_tied_weights_are_counted_once() -> None:
    workload = make("tied")
    graph = capture(*workload).graph
    assert graph.static_bytes_by_kind[Kind.PARAMETER] == sum(p.nbytes for p in workload.model.parameters())


OPTIMIZERS = {
    "none": None,
    "sgd": torch.optim.SGD,
    "momentum": partial(torch.optim.SGD, momentum=0.9),
    "adamw": torch.optim.AdamW,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_state_and_old_gradients_are_static(name: str) -> None:
    workload = make("tied")
    state_bytes = 0
    if OPTIMIZERS[name] is not None:
        optimizer = OPTIMIZERS[name](workload.model.parameters(), lr=1e-3)
        get_loss(TrainingStep(*workload[:2])(*workload.batch)).backward()
        optimizer.step()
        state = [value for values in optimizer.state.values() for value in values.values()]
        state_bytes = sum(value.nbytes for value in state if isinstance(value, torch.Tensor))
    sizes = capture(*workload, optimizer=name, accumulate=True).graph.static_bytes_by_kind
    assert sizes.get(Kind.OPTIMIZER_STATE, 0) == state_bytes
    assert sizes[Kind.ACCUMULATED_GRADIENT] == sum(p.nbytes for p in workload.model.parameters())


def test_fingerprint_depends_on_structure_and_sizes() -> None:
    workload = make("tied")
    captured = capture_of("tied")
    again = capture(*make("tied"), optimizer="adamw")
    timed = profile_capture(captured, workload, PlanSettings(passes=1)).graph
    assert captured.graph.fingerprint == again.graph.fingerprint == timed.fingerprint
    assert captured.graph.fingerprint != capture_of("frozen").graph.fingerprint


@pytest.mark.parametrize("name", slow_among(STEPS, "unet", "llama", "vit", "gpt2_written"))
def test_profiling_does_not_change_the_model(name: str) -> None:
    workload = make(name)
    captured = capture_of(name)
    before = {key: value.clone() for key, value in workload.model.state_dict().items()}
    state = torch.get_rng_state()
    graph = profile_capture(captured, workload, PlanSettings(passes=2)).graph
    assert all(torch.equal(before[key], value) for key, value in workload.model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())
    assert all(p.grad is None for p in workload.model.parameters())
    assert all(op.time_s > 0 for op in graph.ops)
    assert graph.provenance["times"] == "measured"
    assert simulate(graph, keep_everything(graph)).peak_bytes >= simulate(captured.graph, keep_everything(graph)).peak_bytes


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        return y if y.sum() > 0 else -y


class Dynamic(Branches):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        return y[y > 0].sum()


X = torch.randn(3, 4)


@pytest.mark.parametrize(
    ("model", "loss_fn", "message"),
    [
        (nn.Linear(4, 4), None, r"the loss has shape \(3, 4\), not one element"),
        (nn.Linear(4, 4).requires_grad_(requires_grad=False), lambda y, x: y.sum(), "requires_grad=True"),
        (Branches(), lambda y, x: y.sum(), "cannot be captured as one graph"),
        (Dynamic(), None, "depends on the data"),
        *slow(
            (
                nn.Linear(5, 4),
                lambda y, x: y.sum(),
                "an op of the step fails on this batch: RuntimeError: a and b must have same",
            ),
            (nn.Linear(4, 4), lambda y, x: 3.0, "the step returns a float"),
            (nn.Linear(4, 4), lambda y, x: y.sum().item(), r"the step returns a float.*leave out \.item\(\)"),
            (nn.Linear(4, 4), lambda y, x: (y.sum(), y.sum().item()), r"the step returns a float.*leave out \.item\(\)"),
            (nn.Linear(4, 4), lambda y, x: None, "the step returns a NoneType"),
            (nn.Linear(4, 4), lambda y, x: {"cost": y.sum()}, "or a dict of tensors with a 'loss'"),
        ),
    ],
    ids=[
        "no scalar",
        "nothing trained",
        "control flow",
        "shapes by data",
        "wrong shapes",
        "a number",
        "an item",
        "an item to log",
        "none",
        "dictionary",
    ],
)
def test_unsupported_steps_raise_one_line_errors(model: nn.Module, loss_fn, message: str) -> None:
    batch = (X,) if loss_fn is None else (X, X)
    with pytest.raises(TraceError, match=message) as caught:
        capture(model, loss_fn, batch)
    assert "\n" not in str(caught.value)


def test_capture_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    capture(nn.Linear(4, 4), lambda y, x: y.sum(), (X, X))
    assert capfd.readouterr() == ("", "")


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
        assert_exact(planned, workload.model, workload.batch, workload.loss_fn)
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
    assert_exact(planned, model, workload.batch, workload.loss_fn)


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
