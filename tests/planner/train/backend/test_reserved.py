"""Budgets of reserved memory under ``torch.compile(model, backend="planner")``: the steps run on the CPU, and are modelled for
an H100.
"""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from planner.graphs.errors import UsageError
from planner.memory.reserved import predict_eager_reserved_bytes, predict_reserved_bytes
from planner.settings.budget import Share
from planner.settings.counted_memory import CountedMemory
from planner.train.backend import shared_budget
from planner.train.backend.planned_graph import PlannedGraph
from tests.support.models.backend import Broken, assert_same_state, compiled, only_budget, step_of

pytestmark = [pytest.mark.usefixtures("fresh_compiler"), pytest.mark.filterwarnings("ignore")]

ROWS, WIDTH = 24576, 128  # tensors of 12 MiB, each in a segment of its own


def stack(layers: int, width: int = WIDTH) -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width)) for _ in range(layers)))


def trained(model: nn.Module, x: torch.Tensor, budget: int | str, **options: object) -> nn.Module:
    """A copy of `model` after three steps within `budget`."""
    torch._dynamo.reset()
    twin = copy.deepcopy(model)
    step = step_of(compiled(twin, budget, roofline="h100", **options), (x,))
    for _ in range(3):
        twin.zero_grad()
        step()
    return twin


def reserved_together(graphs: list[PlannedGraph]) -> int:
    """What the graphs of the last step reserve by the model, as the backend has it."""
    budget = only_budget()
    order, seen = [run.graph for run in budget.forward_runs], [run.seen for run in budget.forward_runs]
    assert order == graphs
    return budget._predict_reserved(order, seen, [(graph.captured.graph, graph.schedule) for graph in graphs])


def test_single_graph_is_planned_within_a_reserved_budget(graphs: list[PlannedGraph]) -> None:
    torch.manual_seed(0)
    model, x = stack(4), torch.randn(ROWS, WIDTH)
    twin = trained(model, x, "80%", memory="reserved")
    (graph,) = (planned.captured.graph for planned in graphs)
    whole_bytes = predict_eager_reserved_bytes(graph, CountedMemory.RESERVED)
    reserved_bytes = predict_reserved_bytes(graph, graphs[0].schedule, CountedMemory.RESERVED)
    assert reserved_bytes <= 0.8 * whole_bytes
    assert len(graphs[0].schedule.computed) > len(graph.ops)
    model(x).sum().backward()
    assert_same_state(model, twin)


@pytest.mark.slow
def test_graphs_of_a_step_reserve_no_more_than_the_budget_together(graphs: list[PlannedGraph]) -> None:
    torch.manual_seed(0)
    model, x = Broken(stack(2), stack(2)), torch.randn(ROWS, WIDTH)
    trained(model, x, "10GB", memory="reserved")
    whole_bytes = reserved_together(graphs)
    for share in (0.9, 0.8):
        graphs.clear()
        budget_bytes = int(share * whole_bytes)
        twin = trained(model, x, budget_bytes, memory="reserved")
        assert reserved_together(graphs) <= budget_bytes
        model.zero_grad()
        model(x).sum().backward()
        assert_same_state(model, twin)


def test_percentage_refers_to_reserved_memory_of_the_whole_step(
    monkeypatch: pytest.MonkeyPatch, graphs: list[PlannedGraph]
) -> None:
    found: list[int] = []
    in_bytes = Share.resolve
    monkeypatch.setattr(Share, "resolve", lambda *given: found.append(given[1]) or in_bytes(*given))
    torch.manual_seed(0)
    trained(Broken(stack(2), stack(2)), torch.randn(ROWS, WIDTH), "100%", memory="reserved")
    assert max(found) == reserved_together(graphs)


@pytest.mark.slow
def test_graphs_reserving_more_than_the_budget_warn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_budget, "predict_reserved_for_passes", lambda *_: 10**12)
    with pytest.warns(
        UserWarning, match=r"the 2 graphs of the model reserve 1,000\.00 GB with a budget of 10\.00 GB.*memory='allocated'"
    ):
        trained(Broken(stack(2), stack(2)), torch.randn(ROWS, WIDTH), "10GB", memory="reserved")


@pytest.mark.parametrize(("kind", "counted"), [("cpu", CountedMemory.ALLOCATED), ("cuda", CountedMemory.RESERVED)])
def test_counted_memory_defaults_by_device(kind: str, counted: CountedMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_budget, "get_graph_device", lambda _: torch.device(kind))
    trained(stack(1, 8), torch.randn(4, 8), "1GB")
    assert only_budget().memory is counted


def test_reserved_memory_is_refused_on_the_cpu() -> None:
    run: Any = torch.compile(stack(1, 8), backend="planner", options={"budget": "1GB", "memory": "reserved"})
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as raised:
        run(torch.randn(4, 8))
    assert isinstance(raised.value.inner_exception, UsageError)
