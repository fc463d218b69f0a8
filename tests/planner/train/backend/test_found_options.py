"""Packed keeping and other kernels, found inside the graphs of a compiled model."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from graphs.ir import Graph
from graphs.schedule import Schedule
from graphs.simulate import simulate
from planner.capture.step import TrainingStep
from planner.capture.workload.models import Workload, build
from planner.measure.steps import StepOutcome, measure_outcome
from planner.train.backend.planned_graph import PlannedGraph
from tests.support.models.backend import measured_bytes
from tests.support.models.other_kernels import ops_by, schedule_by, ways_of
from tests.support.models.packed import does, mixed, packing

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
