"""Transfers under ``torch.compile(backend="planner")``: exact, within both budgets, freed, and refused in one line."""

import copy
import gc
import shutil
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed

from planner.graphs.errors import CopyError, PlannerError
from planner.graphs.schedule import Compute, find_boundary
from planner.graphs.simulate import simulate
from planner.measure.steps import measure_memory
from planner.runtime.transfers.channels import HostChannels
from planner.train.backend.planned_graph import PlannedGraph
from planner.train.backend.rest_of_step import build_keep_everything
from planner.train.backend.shared_channels import SharedChannels, compute_host_room
from tests.support.marks import slow
from tests.support.models.backend import BrokenTwice, assert_same_state, compiled_with_offload, layers, trained_once
from tests.support.models.offloaded import with_random_copies
from tests.support.models.outcomes import assert_same, train_by

pytestmark = [pytest.mark.usefixtures("fresh_compiler"), pytest.mark.filterwarnings("ignore::UserWarning")]

CPU = torch.device("cpu")


def train(model: nn.Module, run: Callable[..., Any]) -> dict[str, torch.Tensor]:
    torch.manual_seed(5)
    return train_by(lambda x: run(x).square().mean(), model, [(torch.randn(256, 64),)] * 3)


def assert_trains_as_eager(model: nn.Module, wrap: Callable[[nn.Module], Callable[..., Any]]) -> None:
    twin = copy.deepcopy(model)
    assert_same(train(model, model), train(twin, wrap(twin)))


def host_peak(graph: PlannedGraph) -> int:
    return graph.on_host[0]


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.BatchNorm1d])
def test_offloaded_training_equals_eager_within_both_budgets(
    norm: type[nn.Module], graphs: list[PlannedGraph], opened: list[HostChannels]
) -> None:
    torch.manual_seed(0)
    model, x = layers(norm), torch.randn(256, 64)
    assert_trains_as_eager(model, lambda twin: compiled_with_offload(twin, "60%"))
    (graph,), (channels,) = graphs, opened
    assert channels.memory.peak_bytes == host_peak(graph) > 0
    assert channels.memory.used_bytes == 0
    step = compiled_with_offload(model, "60%")
    step(x).sum().backward()
    model.zero_grad()
    predicted = simulate(graph.captured.graph, graph.schedule).peak_bytes
    static = sum(t.nbytes for t in (x, *model.parameters(), *model.buffers()))
    measured = measure_memory(lambda x: step(x).sum(), (x,), static_bytes=static, device=CPU).peak_bytes
    whole = simulate(graph.captured.graph, build_keep_everything(graph.captured.graph)).peak_bytes
    assert measured <= predicted + 1024 < 0.61 * whole


@pytest.mark.parametrize("norm", [nn.LayerNorm, *slow(nn.BatchNorm1d)])
def test_copies_may_be_anywhere_and_under_way_between_the_passes(
    norm: type[nn.Module], graphs: list[PlannedGraph], opened: list[HostChannels]
) -> None:
    torch.manual_seed(0)
    model, x = layers(norm), torch.randn(256, 64)
    twin = copy.deepcopy(model)
    step = compiled_with_offload(twin, "100%")
    step(x).sum().backward()
    twin.load_state_dict(model.state_dict())
    twin.zero_grad()
    (graph,), (channels,) = graphs, opened
    offered, between = graph.captured.graph, 0
    for seed in range(6):
        graph.schedule = with_random_copies(offered, build_keep_everything(offered), seed)
        channels.memory.peak_bytes = 0
        for run, of in ((model, model), (step, twin)):
            of.zero_grad()
            torch.manual_seed(seed)
            run(x).square().sum().backward()
        assert_same_state(model, twin)
        assert channels.memory.peak_bytes == host_peak(graph) and channels.memory.used_bytes == 0
        between += graph.on_host[1]
    assert between


@pytest.mark.parametrize("host_budget", ["1GB", *slow("700kB")])
def test_graphs_share_the_hosts_memory(host_budget: str, graphs: list[PlannedGraph], opened: list[HostChannels]) -> None:
    torch.manual_seed(0)
    assert_trains_as_eager(
        BrokenTwice(layers(), layers(), layers()), lambda twin: compiled_with_offload(twin, "60%", host_budget=host_budget)
    )
    (channels,) = opened
    assert len(graphs) == 3 and sum(graph.on_host[0] > 0 for graph in graphs) > 1
    assert 0 < channels.memory.peak_bytes <= channels.memory.capacity_bytes
    assert channels.memory.used_bytes == 0


def test_the_hosts_memory_of_graphs_that_follow_each_other() -> None:
    taken = {"a": (60, 50), "b": (30, 0)}
    assert compute_host_room(["a"], "a", {}, 100) == 100
    assert compute_host_room(["a", "b"], "b", taken, 100) == 50
    assert compute_host_room(["a", "b", "c"], "c", taken, 100) == 50
    assert compute_host_room(["c", "b"], "c", taken, 100) == 70
    assert compute_host_room(["c", "c"], "c", {}, 100) == 50
    assert compute_host_room(["c", "a", "c"], "c", taken, 100) == 25
    assert compute_host_room(["a", "a", "c"], "c", taken, 80) == 0


@pytest.mark.gpu
@pytest.mark.usefixtures("deterministic")
def test_offloaded_training_on_a_gpu_is_exact(graphs: list[PlannedGraph]) -> None:
    torch.manual_seed(0)
    model, x = layers().cuda(), torch.randn(256, 64, device="cuda")
    twin = copy.deepcopy(model)
    step = compiled_with_offload(twin, "60%", memory="allocated")
    for seed in range(4):
        for run, of in ((model, model), (step, twin)):
            of.zero_grad()
            torch.manual_seed(seed)
            run(x).square().sum().backward()
        assert_same_state(model, twin)
        (graph,) = graphs
        graph.schedule = with_random_copies(graph.captured.graph, build_keep_everything(graph.captured.graph), seed)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor compiles for the CPU with g++")
@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.BatchNorm1d])
def test_results_of_inductor_kernels_are_offloaded_exactly(
    norm: type[nn.Module], graphs: list[PlannedGraph], opened: list[HostChannels]
) -> None:
    torch.manual_seed(0)
    model, x = layers(norm), torch.randn(256, 64)
    twin = copy.deepcopy(model)
    wanted = train(model, torch.compile(model, dynamic=False))
    torch.compiler.reset()
    step = compiled_with_offload(twin, "75%", kernels="inductor")
    assert_same(wanted, train(twin, step))
    (graph,), (channels,) = graphs, opened
    assert channels.memory.peak_bytes == graph.on_host[0] > 0
    offered = graph.captured.graph
    state = copy.deepcopy(twin.state_dict())
    gradients = []
    for schedule in (graph.schedule, *(with_random_copies(offered, build_keep_everything(offered), seed) for seed in range(3))):
        graph.schedule = schedule
        twin.load_state_dict(state)
        twin.zero_grad()
        torch.manual_seed(1)
        trained_once(step, x)
        gradients.append([p.grad for p in twin.parameters()])
    assert all(torch.equal(a, b) for others in gradients[1:] for a, b in zip(gradients[0], others, strict=True))
    assert channels.memory.used_bytes == 0


def test_dropped_loss_releases_host_memory(opened: list[HostChannels], graphs: list[PlannedGraph]) -> None:
    step, x = compiled_with_offload(layers(), "60%"), torch.randn(256, 64)
    trained_once(step, x)
    (graph,), (channels,) = graphs, opened
    graph.schedule = with_random_copies(graph.captured.graph, build_keep_everything(graph.captured.graph), 1)
    out = step(x)
    assert channels.memory.used_bytes == graph.on_host[1] > 0
    del out
    gc.collect()
    assert channels.memory.used_bytes == 0


def test_a_backward_pass_may_come_twice(graphs: list[PlannedGraph], opened: list[HostChannels]) -> None:
    model, x = layers(), torch.randn(256, 64)
    step = compiled_with_offload(model, "60%")
    trained_once(step, x)
    model.zero_grad()
    out = step(x).sum()
    out.backward(retain_graph=True)
    (graph,), (channels,) = graphs, opened
    assert channels.memory.used_bytes == graph.on_host[1] > 0
    first = [p.grad.clone() for p in model.parameters()]
    out.backward()
    assert all(torch.equal(2 * g, p.grad) for g, p in zip(first, model.parameters(), strict=True))
    assert channels.memory.used_bytes == 0


def test_saved_tensor_hooks_raise(graphs: list[PlannedGraph]) -> None:
    step, x = compiled_with_offload(layers(), "60%"), torch.randn(256, 64)
    trained_once(step, x)
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda saved: saved):
        out = step(x).sum()
    assert graphs[0].on_host[1]
    with pytest.raises(PlannerError, match=r"hooks on saved tensors .* leave the hooks out"):
        out.backward()


@pytest.mark.parametrize("when", ["forward", "backward"])
def test_a_copy_that_fails_is_one_error_and_the_step_can_be_called_again(
    when: str, graphs: list[PlannedGraph], opened: list[HostChannels], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model, x = layers(nn.BatchNorm1d), torch.randn(256, 64)
    twin = copy.deepcopy(model)
    step = compiled_with_offload(twin, "60%")
    for _ in range(2):  # the first backward pass shows the layouts that the next plan follows
        trained_once(step, x)
    before = {name: value.clone() for name, value in twin.state_dict().items()}
    twin.zero_grad()
    (graph,), (channels,) = graphs, opened
    steps = graph.schedule.steps[: find_boundary(graph.captured.graph, graph.schedule)]
    first = sum(isinstance(s, Compute) and graph.captured.graph.ops[s.op].optional for s in steps)
    assert first
    left = first // 2 if when == "forward" else first

    def failing(target: np.ndarray, source: np.ndarray) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError("the link is down")
        copyto(target, source)

    copyto = np.copyto
    with monkeypatch.context() as patch:
        patch.setattr(np, "copyto", failing)
        out = None
        with pytest.raises(CopyError, match=r"a copy from .* failed: OSError: the link is down"):
            (out := step(x)).sum().backward()
    assert (out is None) == (when == "forward")
    assert all(p.grad is None for p in twin.parameters())
    if when == "forward":  # behind it, what it has computed is written
        assert all(torch.equal(before[name], value) for name, value in twin.state_dict().items())
    del out
    gc.collect()
    assert channels.memory.used_bytes == 0
    twin.load_state_dict(model.state_dict())
    for run in (model, step):
        torch.manual_seed(3)
        trained_once(run, x)
    assert_same_state(model, twin)


def test_a_second_pass_that_no_plan_expects_takes_no_host_memory(graphs: list[PlannedGraph], opened: list[HostChannels]) -> None:
    step, x = compiled_with_offload(layers(), "60%"), torch.randn(256, 64)
    for _ in range(2):  # the first backward pass shows the layouts that the next plan follows
        trained_once(step, x)
    opened[0].memory.capacity_bytes = graphs[0].on_host[0]
    first = step(x)
    (step(x) + first).sum().backward()
    assert opened[0].memory.used_bytes == graphs[0].on_host[0] == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"options": "offload"}, r"options is 'offload': must be a list of names, \['offload'\]"),
        ({"host_budget": "much"}, "much"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(BackendCompilerFailed, match=message) as caught:
        compiled_with_offload(nn.Linear(8, 1), "1GB", **options)(torch.randn(3, 8)).sum().backward()
    assert isinstance(caught.value.inner_exception, PlannerError)


def test_graphs_on_several_devices_are_refused() -> None:
    shared = SharedChannels(10**9)
    assert shared.open_channels(CPU) is shared.open_channels(CPU)
    with pytest.raises(PlannerError, match=r"graphs of the model run on cpu and on meta, .* leave out"):
        shared.open_channels(torch.device("meta"))
