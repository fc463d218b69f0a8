"""``torch.compile(backend="planner")`` with transfers to the host: exact, and within both budgets."""

import copy
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from graphs.simulate import simulate
from planner.measure.steps import measure_memory
from planner.runtime.transfers.channels import HostChannels
from planner.train.backend.planned_graph import PlannedGraph
from planner.train.backend.rest_of_step import build_keep_everything
from planner.train.backend.shared_channels import compute_host_room
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
