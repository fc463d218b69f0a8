"""Baselines of a plan by simulation: keep everything, and checkpoint every block."""

from collections.abc import Iterator
from dataclasses import dataclass

from graphs.ir import Graph
from graphs.options import without_options
from graphs.schedule import Compute, Schedule, keep_everything
from graphs.simulate import simulate
from planner.plans.record import PlanRecord
from solvers.baselines.common.blocks import blockings
from solvers.baselines.common.recomputation import recompute_groups


@dataclass(frozen=True, slots=True)
class Baseline:
    """A step that runs by another schedule than the plan's.

    Attributes:
        name: name for display.
        peak_bytes, time_s: as the judge predicts them.
        recomputed: executions beyond the first of each op.
        times_s, memory_bytes: start of each execution, and memory during it.
    """

    name: str
    peak_bytes: int
    time_s: float
    recomputed: int
    times_s: tuple[float, ...]
    memory_bytes: tuple[int, ...]


def baselines(graph: Graph, plan: PlanRecord) -> tuple[Baseline, ...]:
    """Return keeping everything, and checkpointing blocks if the model has blocks.

    Of all divisions into blocks, the fastest that fits the budget of `plan` is chosen, or the one with the lowest peak if none
    fits. Graph options are disabled, as in eager PyTorch.
    """
    program = without_options(graph).out_of_place()
    kept = _judged("keep everything", program, keep_everything(program))
    blocks = [_judged("checkpoint blocks", program, recompute_groups(program, way.blocks)) for way in blockings(program)]
    if not blocks:
        return (kept,)
    fitting = [one for one in blocks if one.peak_bytes <= plan.budget_bytes]
    best = min(fitting, key=lambda one: one.time_s) if fitting else min(blocks, key=lambda one: one.peak_bytes)
    return kept, best


def _judged(name: str, graph: Graph, schedule: Schedule) -> Baseline:
    found = simulate(graph, schedule)
    times_s, memory_bytes = zip(*_executions(graph, schedule, found.memory_bytes), strict=True)
    return Baseline(name, found.peak_bytes, found.time_s, found.recomputed, times_s, memory_bytes)


def _executions(graph: Graph, schedule: Schedule, memory_bytes: tuple[int, ...]) -> Iterator[tuple[float, int]]:
    now_s = 0.0
    for step, size_bytes in zip(schedule.steps, memory_bytes, strict=True):
        if isinstance(step, Compute):
            yield now_s, size_bytes
            now_s += graph.ops[step.op].time_s
