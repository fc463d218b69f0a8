"""Transfers under ``torch.compile(backend="planner")``: what goes back to the host's memory, and what is refused."""

import copy
import gc

import numpy as np
import pytest
import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed

from graphs.errors import CopyError, PlannerError
from graphs.schedule import Compute, find_boundary
from planner.runtime.transfers.channels import HostChannels
from planner.train.backend.planned_graph import PlannedGraph
from planner.train.backend.rest_of_step import build_keep_everything
from planner.train.backend.shared_channels import SharedChannels
from tests.support.models.backend import assert_same_state, compiled_with_offload, layers, trained_once
from tests.support.models.offloaded import with_random_copies

pytestmark = [pytest.mark.usefixtures("fresh_compiler"), pytest.mark.filterwarnings("ignore::UserWarning")]

CPU = torch.device("cpu")


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


def test_a_host_that_is_too_small_for_two_passes_is_one_error(graphs: list[PlannedGraph], opened: list[HostChannels]) -> None:
    step, x = compiled_with_offload(layers(), "60%"), torch.randn(256, 64)
    trained_once(step, x)
    opened[0].memory.capacity_bytes = graphs[0].on_host[0]
    first = step(x)
    with pytest.raises(CopyError, match=r"call backward\(\) before the next forward pass, or raise host_budget="):
        step(x)
    first.sum().backward()


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
    assert shared.get_channels(CPU) is shared.get_channels(CPU)
    with pytest.raises(PlannerError, match=r"graphs of the model run on cpu and on meta, .* leave out"):
        shared.get_channels(torch.device("meta"))
