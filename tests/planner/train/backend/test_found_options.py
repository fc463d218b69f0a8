"""Options inside the graphs of a compiled model: packed keeping, other kernels, ops that write over what they read."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from planner.capture.step import TrainingStep
from planner.capture.workload.models import Workload, build
from planner.graphs.errors import PlannerError
from planner.graphs.ir import Graph, Phase
from planner.graphs.schedule import Schedule, keep_everything, schedule_of
from planner.graphs.simulate import simulate
from planner.measure.steps import StepOutcome, measure_outcome
from planner.train.backend.planned_graph import PlannedGraph
from tests.support.marks import slow
from tests.support.models.backend import Thirds, measured_bytes
from tests.support.models.other_kernels import ops_by, schedule_by, ways_of
from tests.support.models.outcomes import assert_equal_steps
from tests.support.models.packed import does, mixed, packing
from tests.support.models.steps import make, random_schedule

pytestmark = [pytest.mark.usefixtures("fresh_compiler"), pytest.mark.filterwarnings("ignore::UserWarning")]


def in_turn(
    workload: Workload, option: str, schedules: Callable[[Graph], list[Schedule]], graphs: list[PlannedGraph]
) -> list[tuple[StepOutcome, StepOutcome]]:
    """What eager PyTorch leaves behind, and what the compiled step does by each schedule, within the memory predicted."""
    model, loss_fn, batch = workload
    twin = copy.deepcopy(model)
    options = {"budget": "100%", "options": [option], "tolerance": 0.5}
    eager: Any = TrainingStep(model, loss_fn)
    step = torch.compile(TrainingStep(twin, loss_fn), backend="planner", dynamic=False, options=options)
    for _ in range(2):
        step(*batch)
    (planned,) = graphs
    graph, found = planned.captured.graph, []
    for schedule in schedules(graph):
        assert any(graph.ops[op].optional for op in schedule.computed)
        planned.schedule = schedule
        twin.load_state_dict(model.state_dict())
        found.append((measure_outcome(eager, model, batch, seed=1), measure_outcome(step, twin, batch, seed=1)))
        assert measured_bytes(twin, batch, lambda: step(*batch)[0].backward()) <= simulate(graph, schedule).peak_bytes
    return found


def test_kept_tensors_are_packed_exactly(graphs: list[PlannedGraph]) -> None:
    def schedules(graph: Graph) -> list[Schedule]:
        return [packing(graph, does(graph, kind)) for kind in ("from_bits", "from_result")]

    for wanted, found in in_turn(mixed(), "pack", schedules, graphs):
        assert wanted.list_differences(found) == ()


def test_ops_are_computed_by_other_kernels(graphs: list[PlannedGraph]) -> None:
    torch.manual_seed(5)
    workload = build("gpt2", layers=1, width=32, heads=2, vocab=501, seq=32, batch=4, dropout=0.0)

    def schedules(graph: Graph) -> list[Schedule]:
        return [schedule_by(graph, ops_by(graph, way)) for way in ways_of(graph)]

    for wanted, found in in_turn(workload, "kernels", schedules, graphs):
        for name in wanted.list_differences(found):
            relative = wanted.compute_difference(name, found).relative
            assert relative is not None and relative < 2e-6, name


def compiled(step: Any) -> Callable[..., Any]:
    options = {"budget": "100%", "options": ["in-place"], "time_limit_s": 10, "tolerance": 0.05}
    return torch.compile(step, backend="planner", dynamic=False, options=options)


@pytest.mark.parametrize("name", ["tied", *slow("gpt2_written", "resnet18")])
def test_a_step_is_the_same_in_the_memory_that_is_predicted(name: str, graphs: list[PlannedGraph]) -> None:
    model, loss_fn, batch = make(name)
    twin = copy.deepcopy(model)
    eager, step = TrainingStep(model, loss_fn), compiled(TrainingStep(twin, loss_fn))
    for _ in range(2):
        step(*batch)
    twin.load_state_dict(model.state_dict())
    (planned,) = graphs
    graph = planned.captured.graph
    saved_bytes = 0
    for schedule in (keep_everything(graph), *(random_schedule(graph, seed) for seed in range(2))):
        planned.schedule = schedule
        assert measure_outcome(eager, model, batch, seed=1).list_differences(measure_outcome(step, twin, batch, seed=1)) == ()
        peak_bytes = simulate(graph, schedule).peak_bytes
        assert measured_bytes(twin, batch, lambda: step(*batch)[0].backward()) <= peak_bytes
        eager(*batch)[0].backward()
        # Not only at the peak, which is that of another op in some steps.
        saved_bytes += sum(simulate(graph.out_of_place(), schedule).memory_bytes) - sum(simulate(graph, schedule).memory_bytes)
    assert saved_bytes > 0


def test_graphs_that_share_a_budget_write_over_inputs_too(graphs: list[PlannedGraph]) -> None:
    torch.manual_seed(0)
    model = Thirds()
    twin, batch = copy.deepcopy(model), (torch.randn(128, 32),)
    step = compiled(twin)
    assert_equal_steps(step, twin, model, *batch, steps=3)  # the first one plans graph by graph, the second one together
    assert len(graphs) == 3 and all(op.overwrites for graph in graphs for op in graph.captured.graph.ops if op.name == "gelu")


def test_retain_graph_raises_if_the_plan_overwrites_saved_tensors(graphs: list[PlannedGraph]) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, 64), nn.Sigmoid(), nn.Linear(64, 8)), torch.randn(256, 64)
    step = compiled(model)
    step(x).sum().backward()
    model.zero_grad()
    twice = step(x).sum()
    twice.backward(retain_graph=True)  # by a plan that keeps everything
    twice.backward()
    wanted = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    (planned,) = graphs
    graph = planned.captured.graph
    (sigmoid,) = (op.id for op in graph.ops if op.name == "sigmoid")
    first = next(op.id for op in graph.ops if op.phase is Phase.BACKWARD)
    planned.schedule = schedule_of(graph, [*range(first), sigmoid, *range(first, len(graph.ops))])
    once = step(x).sum()
    with pytest.raises(
        PlannerError,
        match=r"backward\(retain_graph=True\) needs tensors that the plan overwrites: leave out retain_graph=True, or",
    ):
        once.backward(retain_graph=True)
    once.backward()
    assert all(torch.equal(g, 2 * p.grad) for g, p in zip(wanted, model.parameters(), strict=True) if p.grad is not None)
