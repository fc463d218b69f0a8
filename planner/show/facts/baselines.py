"""Baselines of a plan by simulation: keep everything, and checkpoint every block."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from planner.graphs.ir import Graph
from planner.graphs.options import extract_eager_program
from planner.graphs.schedule import Compute, Schedule, keep_everything
from planner.graphs.simulate import simulate
from planner.memory.reserved import predict_reserved_bytes
from planner.plans.record import PlanRecord
from planner.settings.counted_memory import CountedMemory
from planner.solvers.baselines.common.blocks import find_blockings
from planner.solvers.baselines.common.recomputation import recompute_groups


@dataclass(frozen=True, slots=True)
class Baseline:
    """A step by the plan, or by another schedule, as the judge and the model of PyTorch's allocator predict it.

    Attributes:
        peak_bytes, time_s: as the judge predicts them.
        reserved_bytes: bytes that PyTorch's allocator reserves on CUDA, as the budget of the plan counts it; None on the CPU.
        counted_bytes: peak or reserved bytes, whichever the budget of the plan counts.
        recomputed: executions beyond the first of each op.
        times_s, memory_bytes: start of each execution, and memory during it; empty for the plan.
    """

    name: str
    peak_bytes: int
    reserved_bytes: int | None
    counted_bytes: int
    time_s: float
    recomputed: int
    times_s: tuple[float, ...] = field(default=(), repr=False, compare=False)
    memory_bytes: tuple[int, ...] = field(default=(), repr=False, compare=False)


def build_baselines(graph: Graph, plan: PlanRecord) -> tuple[Baseline, ...]:
    """Return keeping everything, and checkpointing blocks if the model has blocks.

    Of all divisions into blocks, the fastest that fits the budget of `plan` is chosen, or the one that needs least if none
    fits. Graph options are disabled, as in eager PyTorch.
    """
    program = extract_eager_program(graph)
    memory = plan.memory
    kept = _judge_baseline("keep everything", program, keep_everything(program), memory)
    blocks = [
        _judge_baseline("checkpoint blocks", program, recompute_groups(program, way.blocks), memory)
        for way in find_blockings(program)
    ]
    if not blocks:
        return (kept,)
    fitting = [one for one in blocks if one.counted_bytes <= plan.budget_bytes]
    best = min(fitting, key=lambda one: one.time_s) if fitting else min(blocks, key=lambda one: one.counted_bytes)
    return kept, best


def _judge_baseline(name: str, graph: Graph, schedule: Schedule, memory: CountedMemory) -> Baseline:
    found, reserved_bytes = simulate(graph, schedule), predict_reserved_bytes(graph, schedule, memory)
    times_s, memory_bytes = zip(*_iterate_executions(graph, schedule, found.memory_bytes), strict=True)
    return Baseline(
        name=name,
        peak_bytes=found.peak_bytes,
        reserved_bytes=reserved_bytes,
        counted_bytes=found.peak_bytes if reserved_bytes is None or memory is CountedMemory.ALLOCATED else reserved_bytes,
        time_s=found.time_s,
        recomputed=found.recomputed,
        times_s=times_s,
        memory_bytes=memory_bytes,
    )


def _iterate_executions(graph: Graph, schedule: Schedule, memory_bytes: tuple[int, ...]) -> Iterator[tuple[float, int]]:
    now_s = 0.0
    for step, size_bytes in zip(schedule.steps, memory_bytes, strict=True):
        if isinstance(step, Compute):
            yield now_s, size_bytes
            now_s += graph.ops[step.op].time_s
