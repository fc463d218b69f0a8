"""``torch.compile(backend="planner")`` with round trips to the host: exact, within both budgets, one error where copies fail."""

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

from graphs.errors import CopyError, PlannerError
from graphs.schedule import Compute
from graphs.simulate import simulate
from planner.choices import choices_of
from planner.runtime.channels import ThreadChannels
from planner.runtime.codegen import boundary
from planner.runtime.host_memory import HostMemory
from planner.runtime.measure import measure_memory
from planner.torch_compile import round_trips
from planner.torch_compile.planned_graph import PlannedGraph
from planner.torch_compile.rest_of_step import keeping_all
from planner.torch_compile.round_trips import RoundTrips, host_room
from planner.torch_compile.shared_budget import SharedBudget
from tests.support.copies import with_random_copies

pytestmark = [pytest.mark.usefixtures("fresh_compiler"), pytest.mark.filterwarnings("ignore::UserWarning")]

CPU = torch.device("cpu")


def layers(norm: type[nn.Module] = nn.LayerNorm) -> nn.Sequential:
    """Layers with dropout."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), norm(64), nn.GELU(), nn.Dropout(0.2)) for _ in range(4)))


class Broken(nn.Module):
    """Three graphs: Dynamo does not look into what lies between."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = layers(), layers(), layers()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of the same shape."""
        x = self.first(x)
        torch._dynamo.graph_break()
        x = self.second(x)
        torch._dynamo.graph_break()
        return self.third(x)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[PlannedGraph]:
    """The graphs that were planned."""
    found: list[PlannedGraph] = []
    add = SharedBudget.add

    def noted(budget: SharedBudget, graph: PlannedGraph, *args: Any, **options: Any) -> None:
        add(budget, graph, *args, **options)
        found.append(graph)

    monkeypatch.setattr(SharedBudget, "add", noted)
    return found


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[ThreadChannels]:
    """The channels that were opened."""
    found: list[ThreadChannels] = []

    def noted(device: torch.device, host_bytes: int | None) -> ThreadChannels:
        found.append(ThreadChannels(HostMemory(host_bytes)))
        return found[-1]

    monkeypatch.setattr(round_trips, "open_channels", noted)
    return found


def compiled(model: nn.Module, budget: str | int, **options: object) -> Callable[..., Any]:
    given = {"budget": budget, "time_limit": 2, "tolerance": 0.05, "options": ["offload"], "link": 1e12, **options}
    return torch.compile(model, backend="planner", dynamic=False, options=given)


def train(model: nn.Module, run: Callable[..., Any], steps: int = 3) -> dict[str, torch.Tensor]:
    """What some steps of AdamW leave behind."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(5)
    x, left = torch.randn(256, 64), {}
    for i in range(steps):
        optimizer.zero_grad()
        loss = run(x).square().mean()
        loss.backward()
        left[f"loss {i}"] = loss.detach()
        left |= {f"gradient {i} of {name}": p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
    left |= {name: value.detach().clone() for name, value in model.state_dict().items()}
    left["random state"] = torch.get_rng_state()
    return left


def assert_trains_as_eager(model: nn.Module, run: Callable[[nn.Module], Callable[..., Any]]) -> None:
    twin = copy.deepcopy(model)
    wanted, found = train(model, model), train(twin, run(twin))
    assert wanted.keys() == found.keys()
    assert [name for name in wanted if not torch.equal(wanted[name], found[name])] == []


def host_peak(graph: PlannedGraph) -> int:
    return graph.on_host[0]


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.BatchNorm1d])
def test_it_trains_as_eager_does_within_both_budgets(
    norm: type[nn.Module], graphs: list[PlannedGraph], opened: list[ThreadChannels]
) -> None:
    torch.manual_seed(0)
    model, x = layers(norm), torch.randn(256, 64)
    assert_trains_as_eager(model, lambda twin: compiled(twin, "60%"))
    (graph,), (channels,) = graphs, opened
    assert channels.memory.peak_bytes == host_peak(graph) > 0
    assert channels.memory.used_bytes == 0
    step = compiled(model, "60%")
    step(x).sum().backward()
    model.zero_grad()
    predicted = simulate(graph.captured.graph, graph.schedule).peak_bytes
    static = sum(t.nbytes for t in (x, *model.parameters(), *model.buffers()))
    measured = measure_memory(lambda x: step(x).sum(), (x,), static_bytes=static, device=CPU).peak_bytes
    whole = simulate(graph.captured.graph, keeping_all(graph.captured.graph)).peak_bytes
    assert measured <= predicted + 1024 < 0.61 * whole


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.BatchNorm1d])
def test_copies_may_be_anywhere_and_under_way_between_the_passes(
    norm: type[nn.Module], graphs: list[PlannedGraph], opened: list[ThreadChannels]
) -> None:
    torch.manual_seed(0)
    model, x = layers(norm), torch.randn(256, 64)
    twin = copy.deepcopy(model)
    step = compiled(twin, "100%")
    step(x).sum().backward()
    twin.load_state_dict(model.state_dict())
    twin.zero_grad()
    (graph,), (channels,) = graphs, opened
    offered, between = graph.captured.graph, 0
    for seed in range(6):
        graph.schedule = with_random_copies(offered, keeping_all(offered), seed)
        channels.memory.peak_bytes = 0
        for run, of in ((model, model), (step, twin)):
            of.zero_grad()
            torch.manual_seed(seed)
            run(x).square().sum().backward()
        assert_same_state(model, twin)
        assert channels.memory.peak_bytes == host_peak(graph) and channels.memory.used_bytes == 0
        between += graph.on_host[1]
    assert between


def assert_same_state(model: nn.Module, twin: nn.Module) -> None:
    pairs = zip(model.named_parameters(), twin.parameters(), strict=True)
    assert [name for (name, a), b in pairs if not torch.equal(a.grad, b.grad)] == []  # type: ignore[arg-type]
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), twin.buffers(), strict=True))


@pytest.mark.parametrize("host_budget", ["1GB", "700kB"])
def test_graphs_share_the_hosts_memory(host_budget: str, graphs: list[PlannedGraph], opened: list[ThreadChannels]) -> None:
    torch.manual_seed(0)
    assert_trains_as_eager(Broken(), lambda twin: compiled(twin, "60%", host_budget=host_budget))
    (channels,) = opened
    assert len(graphs) == 3 and sum(graph.on_host[0] > 0 for graph in graphs) > 1
    assert 0 < channels.memory.peak_bytes <= channels.memory.capacity_bytes
    assert channels.memory.used_bytes == 0


def test_the_hosts_memory_of_graphs_that_follow_each_other() -> None:
    taken = {"a": (60, 50), "b": (30, 0)}
    assert host_room(["a"], "a", {}, 100) == 100
    assert host_room(["a", "b"], "b", taken, 100) == 50
    assert host_room(["a", "b", "c"], "c", taken, 100) == 50
    assert host_room(["c", "b"], "c", taken, 100) == 70
    assert host_room(["c", "c"], "c", {}, 100) == 50
    assert host_room(["c", "a", "c"], "c", taken, 100) == 25
    assert host_room(["a", "a", "c"], "c", taken, 80) == 0


def trained_once(step: Callable[..., Any], x: torch.Tensor) -> None:
    step(x).sum().backward()


def test_a_loss_that_is_dropped_gives_back_what_is_on_the_host(opened: list[ThreadChannels], graphs: list[PlannedGraph]) -> None:
    step, x = compiled(layers(), "60%"), torch.randn(256, 64)
    trained_once(step, x)
    (graph,), (channels,) = graphs, opened
    graph.schedule = with_random_copies(graph.captured.graph, keeping_all(graph.captured.graph), 1)
    out = step(x)
    assert channels.memory.used_bytes == graph.on_host[1] > 0
    del out
    gc.collect()
    assert channels.memory.used_bytes == 0


def test_a_backward_pass_may_come_twice(graphs: list[PlannedGraph], opened: list[ThreadChannels]) -> None:
    model, x = layers(), torch.randn(256, 64)
    step = compiled(model, "60%")
    out = step(x).sum()
    out.backward(retain_graph=True)
    (graph,), (channels,) = graphs, opened
    assert channels.memory.used_bytes == graph.on_host[1] > 0
    first = [p.grad.clone() for p in model.parameters()]  # type: ignore[union-attr]
    out.backward()
    assert all(torch.equal(2 * g, p.grad) for g, p in zip(first, model.parameters(), strict=True))  # type: ignore[arg-type]
    assert channels.memory.used_bytes == 0


def test_hooks_on_what_is_saved_are_refused(graphs: list[PlannedGraph]) -> None:
    step, x = compiled(layers(), "60%"), torch.randn(256, 64)
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda saved: saved):
        out = step(x).sum()
    assert graphs[0].on_host[1]
    with pytest.raises(PlannerError, match=r"hooks on saved tensors .* leave them out"):
        out.backward()


@pytest.mark.parametrize("when", ["forward", "backward"])
def test_a_copy_that_fails_is_one_error_and_the_step_can_be_called_again(
    when: str, graphs: list[PlannedGraph], opened: list[ThreadChannels], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model, x = layers(nn.BatchNorm1d), torch.randn(256, 64)
    twin = copy.deepcopy(model)
    step = compiled(twin, "60%")
    trained_once(step, x)
    before = {name: value.clone() for name, value in twin.state_dict().items()}
    twin.zero_grad()
    (graph,), (channels,) = graphs, opened
    steps = graph.schedule.steps[: boundary(graph.captured.graph, graph.schedule)]
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


def test_a_host_that_is_too_small_for_two_passes_is_one_error(graphs: list[PlannedGraph], opened: list[ThreadChannels]) -> None:
    step, x = compiled(layers(), "60%"), torch.randn(256, 64)
    trained_once(step, x)
    opened[0].memory.capacity_bytes = graphs[0].on_host[0]
    first = step(x)
    with pytest.raises(CopyError, match=r"call backward\(\) before the next forward pass, or raise host_budget="):
        step(x)
    first.sum().backward()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"options": ["compress"]}, "there is no option 'compress': choose of offload"),
        ({"options": "offload"}, r"options is 'offload': must be a list of names, \['offload'\]"),
        ({"options": (), "link": "25GB/s"}, r"link given, but no option that copies: add options=\['offload'\]"),
        ({"host_budget": "much"}, "much"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(BackendCompilerFailed, match=message) as caught:
        compiled(nn.Linear(8, 1), "1GB", **options)(torch.randn(3, 8)).sum().backward()
    assert isinstance(caught.value.inner_exception, PlannerError)


def test_graphs_on_several_devices_are_refused() -> None:
    choices = choices_of(["offload"], None, "1GB")
    assert choices is not None
    trips = RoundTrips(choices)
    assert trips.channels(CPU) is trips.channels(CPU)
    with pytest.raises(PlannerError, match=r"graphs of the model run on cpu and on meta, .* leave out"):
        trips.channels(torch.device("meta"))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor compiles for the CPU with g++")
@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.BatchNorm1d])
def test_what_inductors_kernels_make_may_go_to_the_host(
    norm: type[nn.Module], graphs: list[PlannedGraph], opened: list[ThreadChannels]
) -> None:
    torch.manual_seed(0)
    model, x = layers(norm), torch.randn(256, 64)
    twin = copy.deepcopy(model)
    wanted = train(model, torch.compile(model, dynamic=False))
    torch.compiler.reset()
    step = compiled(twin, "75%", compile="inductor")
    found = train(twin, step)
    assert [name for name in wanted if not torch.equal(wanted[name], found[name])] == []
    (graph,), (channels,) = graphs, opened
    assert channels.memory.peak_bytes == graph.on_host[0] > 0
    offered = graph.captured.graph
    state = copy.deepcopy(twin.state_dict())
    gradients = []
    for schedule in (graph.schedule, *(with_random_copies(offered, keeping_all(offered), seed) for seed in range(3))):
        graph.schedule = schedule
        twin.load_state_dict(state)
        twin.zero_grad()
        torch.manual_seed(1)
        trained_once(step, x)
        gradients.append([p.grad for p in twin.parameters()])
    assert all(torch.equal(a, b) for others in gradients[1:] for a, b in zip(gradients[0], others, strict=True))  # type: ignore[arg-type]
    assert channels.memory.used_bytes == 0
