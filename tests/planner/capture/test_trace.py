"""Capture of training steps: eager PyTorch's ops with its bits, buffers updated in place, and errors for what is refused."""

import os
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.models.parts import FunctionModule
from planner.capture.rewrites.layouts import copy_with_strides
from planner.capture.step import TrainingStep
from planner.capture.trace import capture
from planner.capture.workload.models import Workload
from planner.graphs.errors import TraceError
from planner.graphs.ir import Graph, Kind, Op, Phase
from planner.graphs.schedule import keep_everything
from planner.graphs.simulate import simulate
from planner.measure.steps import get_loss, measure_memory
from planner.measure.tracing import profile_capture
from planner.native.library import wait_for_library
from planner.native.passes import use_python_passes
from planner.runtime.executor import Executor
from planner.settings.plan import PlanSettings
from tests.support.marks import slow, slow_among
from tests.support.models.eager_ops import Last, captured_as_eager, on_parameter, weighted
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


RESIZES = [
    ("linear", (2, 3, 7), {"size": 5, "align_corners": True}, torch.float32),
    ("bilinear", (2, 3, 7, 9), {"scale_factor": 2}, torch.float32),
    ("bilinear", (2, 3, 7, 9), {"size": 5, "align_corners": True}, torch.bfloat16),
    ("bilinear", (2, 3, 9, 9), {"size": 5, "antialias": True}, torch.float32),
    ("bicubic", (2, 3, 7, 9), {"scale_factor": 1.7}, torch.float32),
    ("trilinear", (1, 2, 4, 5, 6), {"scale_factor": 2}, torch.float32),
    ("nearest", (2, 3, 7, 9), {"scale_factor": 1.7}, torch.float32),
    ("nearest-exact", (2, 3, 7), {"size": 12}, torch.float32),
]


@pytest.mark.parametrize(("mode", "shape", "kwargs", "dtype"), RESIZES)
def test_interpolation_is_one_kernel(mode: str, shape: tuple[int, ...], kwargs: dict[str, Any], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = on_parameter(lambda x: weighted(F.interpolate(x, mode=mode, **kwargs)), *shape).to(dtype)
    _, eager, captured = captured_as_eager(model, None, ())
    assert captured == eager
    assert any("upsample" in name for name in captured)


def in_place_on_columns(x: Tensor) -> Tensor:
    gates = (x * 2).unsafe_chunk(3, 1)
    return gates[0].sigmoid_() * gates[1] + gates[2].tanh()


FUNCTIONS: dict[str, tuple[Callable[..., Tensor], tuple[int, ...], tuple[Tensor, ...]]] = {
    "multi margin": (lambda x, t: F.multi_margin_loss(x, t), (6, 9), (torch.tensor([1, 2, 3, 4, 5, 8]),)),
    "multi margin, squared": (lambda x, t: F.multi_margin_loss(x, t, p=2, reduction="sum"), (2, 9), (torch.tensor([1, 8]),)),
    "shrink": (lambda x: F.hardshrink(x) + F.softshrink(x), (6, 9), ()),
    "addcdiv": (lambda x: torch.addcdiv(x, x, x.abs() + 1, value=0.3), (6, 9), ()),
    "addcmul in place": (lambda x: (x * 2).addcmul_(x, x, value=0.3), (6, 9), ()),
    "in place on strided views": (in_place_on_columns, (5, 99), ()),
}


def penalty(norm: nn.Module, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(norm(x.bfloat16()).sum(), x, create_graph=True)
    return gradient.square().sum()


@pytest.mark.parametrize(
    ("norm", "call"),
    [
        (lambda: nn.LayerNorm(9), lambda norm, x: norm(x.bfloat16()).float().square().sum()),
        (lambda: nn.LayerNorm(9), penalty),
        (lambda: nn.GroupNorm(3, 9), lambda norm, x: norm(x.bfloat16()).float().square().sum()),
        (lambda: nn.BatchNorm1d(9), lambda norm, x: norm(x.bfloat16()).float().square().sum()),
    ],
)
def test_norms_of_half_precision_save_float32(norm: Callable[[], nn.Module], call: Callable[..., Tensor]) -> None:
    torch.manual_seed(0)
    model = FunctionModule(lambda m, x: call(m.norm, x * m.norm.weight), norm=norm())
    captured, _, _ = captured_as_eager(model, None, (torch.randn(6, 9),))
    norms = [[captured.graph.tensors[i].dtype for i in op.outputs] for op in captured.graph.ops if "norm" in op.target]
    assert norms
    assert all(first == "bfloat16" and set(rest) <= {"float32"} for first, *rest in norms)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_are_bitwise_equal_to_eager(name: str) -> None:
    torch.manual_seed(0)
    function, shape, inputs = FUNCTIONS[name]
    model = on_parameter(lambda *given: weighted(function(*given)), *shape)
    _, eager, captured = captured_as_eager(model, None, inputs)
    assert captured == eager


def turn_spectrum(phase: Tensor, signal: Tensor) -> Tensor:
    window = torch.hann_window(64)
    spectrum = torch.stft(signal, 64, 16, window=window, return_complex=True)
    return torch.istft(spectrum * torch.polar(torch.ones_like(phase), phase), 64, 16, window=window, length=512)


def test_gradients_of_istft_are_bitwise_equal_to_eager() -> None:
    torch.manual_seed(0)
    captured_as_eager(on_parameter(lambda *given: weighted(turn_spectrum(*given)), 33, 1), None, (torch.randn(4, 512),))


@pytest.mark.parametrize("zeros", [0, 1, 3])
@pytest.mark.parametrize("kwargs", [{}, {"dim": 1}, {"dim": 0, "keepdim": True, "dtype": torch.float64}], ids=str)
def test_prod_gradient_is_bitwise_equal_to_eager(zeros: int, kwargs: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = on_parameter(lambda x: weighted(x.prod(**kwargs)), 6, 9)
    with torch.no_grad():
        model.value.flatten()[:zeros] = 0
    captured = capture(model, None, ())
    assert [op.target for op in captured.graph.ops].count("planner.prod_backward.default") == 1
    step = Executor(captured, keep_everything(captured.graph), model, None)
    assert_exact(step, model, ())
    with torch.no_grad():
        model.value[2] = 0  # the same plan, zeros elsewhere
    assert_exact(step, model, ())


class Segmentation(nn.Module):
    """A small encoder and decoder that resizes between them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.down = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.up, self.head = nn.Conv2d(16, 8, 3, padding=1), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = torch.tanh(self.stem(x))
        small = torch.tanh(self.down(first))
        large = F.interpolate(self.up(small), size=first.shape[-2:], mode="bilinear", align_corners=False)
        return F.interpolate(self.head(first + large), scale_factor=2, mode="bicubic")


def test_segmentation_net_needs_as_much_memory_as_eager() -> None:
    torch.manual_seed(0)
    model, batch = Segmentation(), (torch.randn(2, 3, 32, 32), torch.randint(4, (2, 64, 64)))
    captured, eager, ops = captured_as_eager(model, F.cross_entropy, batch)
    assert ops == eager
    peaks = []
    for step in (
        TrainingStep(model, F.cross_entropy),
        Executor(captured, keep_everything(captured.graph), model, F.cross_entropy),
    ):
        model.zero_grad()
        peaks.append(measure_memory(step, batch, static_bytes=0, device=torch.device("cpu")).peak_bytes)
    assert peaks[1] <= 1.01 * peaks[0]


def test_capture_restores_pytorch() -> None:
    ops = (torch.ops.aten.upsample_bilinear2d.vec, torch.ops.aten.gru.input, torch.ops.aten.prod.default)
    before = [dict(op.py_kernels) for op in ops]
    capture(on_parameter(lambda x: F.interpolate(x, scale_factor=2, mode="bilinear").sum(), 1, 1, 3, 3), None, ())
    with pytest.raises(TraceError):
        capture(on_parameter(lambda x: x[torch.rand_like(x) > 0.5].sum(), 3), None, ())
    assert [dict(op.py_kernels) for op in ops] == before


@pytest.mark.parametrize("strides", [(99, 1), (1, 5), (0, 1), (1, 0)])
def test_copy_with_strides_keeps_values(strides: tuple[int, int]) -> None:
    value = torch.arange(15.0).reshape(5, 3) if 0 not in strides else torch.ones(5, 3)
    copied = copy_with_strides(value, strides)
    assert torch.equal(copied, value)
    assert copied.stride() == strides


@pytest.mark.parametrize("name", ["is_compiling", "is_dynamo_compiling"])
def test_model_that_checks_for_a_compiler_computes_as_in_eager(name: str) -> None:
    question = getattr(torch.compiler, name)
    model = on_parameter(lambda x: (x.sin() * 3 / 7 if question() else x.sin() * (3 / 7)).exp().sum(), 99)
    captured_as_eager(model, None, ())


def in_part(x: Tensor) -> Tensor:
    if not torch.compiler.is_compiling():
        x = x * float(os.environ.get("NOT_SET", "1"))  # some way or other this can be captured
        LOG.append(x.sum().item())
    return x + 1


LOG: list[float] = []


def test_code_that_asks_for_the_compiler_is_captured() -> None:
    captured = capture(on_parameter(lambda x: in_part(x).exp().sum(), 7), None, ())
    assert "aten.exp.default" in {str(node.target) for node in captured.nodes if node is not None}


def test_data_read_only_in_eager_is_no_condition() -> None:
    def masked(x: Tensor, mask: Tensor) -> Tensor:
        if not torch.compiler.is_compiling() and bool(mask.all()):
            return x.exp().sum()
        return (x * mask).exp().sum()

    model, mask = on_parameter(masked, 7), torch.ones(7, dtype=torch.bool)
    captured = capture(model, None, (mask,))
    assert captured.conditions is None  # another mask can follow
    mask[3] = False
    assert_exact(Executor(captured, keep_everything(captured.graph), model, None), model, (mask,))


@pytest.mark.parametrize("fill", ["bernoulli_", "uniform_", "exponential_", "normal_", "log_normal_", "cauchy_"])
def test_random_numbers_have_the_order_of_eager(fill: str) -> None:
    def noisy(x: Tensor) -> Tensor:
        y = x.reshape(5, 7, 33).transpose(0, 1) * 2
        return weighted(y * getattr(torch.empty_like(y), fill)().clamp(-3, 3))

    captured, *_ = captured_as_eager(on_parameter(noisy, 5 * 7 * 33), None, ())
    assert any(op.random and op.recomputable for op in captured.graph.ops)


def test_in_place_random_op_still_reads_its_input() -> None:
    def model(x: Tensor) -> Tensor:
        y = x.reshape(5, 7, 3).transpose(0, 1) * 2
        return weighted(F.rrelu(y, training=True, inplace=True))

    captured_as_eager(on_parameter(model, 5 * 7 * 3), None, ())


# 33 is no multiple of the widths of vectors: the last elements of a row are computed by other instructions.
NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[tuple[int, ...], ...]]] = {
    "GRU": (lambda: nn.GRU(17, 33), ((3, 5, 17),)),
    "GRU, layers": (lambda: nn.GRU(17, 33, 2, dropout=0.4, batch_first=True), ((4, 2, 17),)),
    "GRU, both ways": (lambda: nn.GRU(17, 33, bidirectional=True, bias=False), ((2, 5, 17), (2, 5, 33))),
    "RNN, layers": (lambda: nn.RNN(17, 33, 2, dropout=0.4), ((3, 5, 17),)),
    "LSTM": (lambda: nn.LSTM(17, 33), ((6, 5, 17),)),
    "LSTM, layers": (lambda: nn.LSTM(17, 33, 2, dropout=0.4, batch_first=True, bidirectional=True), ((5, 6, 17),)),
    "LSTM, projected": (lambda: nn.LSTM(17, 33, proj_size=9), ((3, 5, 17),)),
    "LSTM, one sequence": (lambda: nn.LSTM(17, 33, bias=False), ((6, 17),)),
}


@pytest.mark.parametrize("name", slow_among(NETWORKS, "GRU, layers", "GRU, both ways", "RNN, layers"))
def test_recurrent_networks_are_bitwise_equal_to_eager(name: str) -> None:
    torch.manual_seed(0)
    make, shapes = NETWORKS[name]
    captured, eager, ops = captured_as_eager(Last(make()), None, tuple(torch.randn(shape) for shape in shapes))
    # The fused dropout is captured, which draws and rounds as the three ops do that run on the CPU.
    dropouts = ops.pop("native_dropout", 0)
    assert dropouts == eager.pop("bernoulli", 0) == ops.pop("native_dropout_backward", 0)
    assert dropouts == ("layers" in name)
    assert ops == eager - Counter({"div": dropouts, "mul": 2 * dropouts})
    if name in ("LSTM", "LSTM, one sequence"):
        targets = {op.target for op in captured.graph.ops}
        assert {"aten.mkldnn_rnn_layer.default", "aten.mkldnn_rnn_layer_backward.default"} <= targets


def test_lstm_gives_the_same_graph_every_time() -> None:
    """PyTorch remembers what kernels return, but not that two results were one tensor."""
    model, batch = Last(nn.LSTM(17, 33)), (torch.randn(6, 5, 17),)
    first, second = capture(model, None, batch), capture(model, None, batch)
    assert first.graph.fingerprint == second.graph.fingerprint
    for captured in (first, second):
        model.zero_grad()
        get_loss(Executor(captured, keep_everything(captured.graph), model, None)(*batch)).backward()
        assert model.inner.bias_ih_l0.grad.data_ptr() != model.inner.bias_hh_l0.grad.data_ptr()


def test_lstm_accepts_initial_states_and_autocast() -> None:
    torch.manual_seed(0)
    lstm = Last(nn.LSTM(17, 33))
    states = (torch.randn(1, 5, 33), torch.randn(1, 5, 33))
    captured_as_eager(lstm, None, (torch.randn(6, 5, 17), states))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        try:
            lstm(torch.randn(6, 5, 17), states)
        except RuntimeError as error:
            pytest.skip(f"eager PyTorch has no such LSTM on this processor: {error}")
        captured_as_eager(lstm, None, (torch.randn(6, 5, 17), states))


def test_weights_are_cast_once_under_autocast() -> None:
    """Gradients of a weight that is used at each position are added in half precision, as eager PyTorch adds them."""
    torch.manual_seed(0)
    model = FunctionModule(lambda m, x: m.b(m.b(m.a(x)[0])).float().sum(), a=nn.GRU(17, 33), b=nn.Linear(33, 33))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, eager, ops = captured_as_eager(model, None, (torch.randn(3, 5, 17),))
    assert ops == eager


def test_recurrent_cells_are_bitwise_equal_to_eager() -> None:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        hidden, state = None, None
        for item in x:
            hidden = m.cell(item, hidden)
            state = m.second(hidden, state)
        return state[0].square().sum() + hidden.sum()

    torch.manual_seed(0)
    model = FunctionModule(forward, cell=nn.GRUCell(17, 33), second=nn.LSTMCell(33, 9))
    _, eager, ops = captured_as_eager(model, None, (torch.randn(3, 5, 17),))
    assert ops == eager


def test_lstm_captured_for_cuda_raises() -> None:
    with pytest.raises(TraceError, match="cuDNN"):
        capture(Last(nn.LSTM(17, 33)), None, (torch.randn(6, 5, 17),), as_on_cuda=True)
