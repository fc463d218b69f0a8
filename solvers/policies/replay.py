"""What policies share: which ops may run again and for how long, segments that do, and the result of a policy."""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from graphs.ir import Graph
from graphs.plan import relative_gap
from graphs.schedule import Schedule
from graphs.simulate import simulate
from graphs.units import format_bytes
from solvers.result import Result, Status


def repeatable(graph: Graph) -> tuple[bool, ...]:
    """For each op whether it may run again at any time: nothing that it reads or writes is written in place later."""
    writers: dict[int, int] = {}
    for op in graph.ops:
        for t in op.mutates:
            writers[t] = op.id
    return tuple(op.recomputable and all(writers.get(t, -1) <= op.id for t in (*op.inputs, *op.mutates)) for op in graph.ops)


def last_needed(graph: Graph) -> tuple[int, ...]:
    """For each op the last op of the program for which it may have to run again, directly or for what that reads.

    An op that cannot run again, or all of whose outputs are kept, is needed for itself only.
    """
    fit = repeatable(graph)
    needed = list(range(len(graph.ops)))
    for op in reversed(graph.ops):
        if fit[op.id]:
            readers = (r for t in op.outputs if t not in graph.kept for r in graph.consumers[t])
            needed[op.id] = max((needed[r] for r in readers), default=op.id)
    return tuple(needed)


@dataclass(frozen=True, slots=True)
class Trial:
    """A schedule that a policy offers, with the settings that made it."""

    schedule: Schedule
    settings: Mapping[str, object] = field(default_factory=dict)


def answer(
    graph: Graph,
    budget_bytes: int,
    trials: Iterable[Trial],
    *,
    solver: str,
    start: float,
    tolerance: float,
    what: str,
    settings: Mapping[str, object] | None = None,
) -> Result:
    """The fastest of `trials` that fits; LIMIT when none does.

    A policy proves nothing: its bound is the step without recomputation, and where it fails none.

    Args:
        graph: what is planned.
        budget_bytes: static bytes included.
        trials: one or more.
        solver: name in the registry.
        start: ``time.perf_counter()`` when the solve began.
        tolerance: on the gap.
        what: does what the message says to need too much: "keeping everything".
        settings: besides those of the trial.
    """
    judged = [(trial, simulate(graph, trial.schedule)) for trial in trials]
    fitting = [pair for pair in judged if pair[1].peak_bytes <= budget_bytes]
    if not fitting:
        least = format_bytes(min(simulation.peak_bytes for _, simulation in judged))
        why = f"{what} needs {least}, over the budget of {format_bytes(budget_bytes)}: use a solver that chooses, such as windows"
        return failure(graph, budget_bytes, why, solver=solver, start=start, settings=settings)
    best, simulation = min(fitting, key=lambda pair: (pair[1].time_s, pair[1].peak_bytes))
    gap = relative_gap(simulation.time_s, graph.time_s)
    return Result(
        graph,
        budget_bytes=budget_bytes,
        status=Status.OPTIMAL if gap is not None and gap <= tolerance else Status.FEASIBLE,
        schedule=best.schedule,
        bound_s=graph.time_s,
        solver=solver,
        seconds=time.perf_counter() - start,
        settings={**(settings or {}), **best.settings},
    )


def failure(
    graph: Graph, budget_bytes: int, why: str, *, solver: str, start: float, settings: Mapping[str, object] | None = None
) -> Result:
    """The policy found nothing, which says nothing about other schedules."""
    return Result(
        graph,
        budget_bytes=budget_bytes,
        status=Status.LIMIT,
        schedule=None,
        bound_s=None,
        solver=solver,
        seconds=time.perf_counter() - start,
        settings=settings or {},
        message=why,
    )
