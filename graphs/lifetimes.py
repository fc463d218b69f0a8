"""Lifetimes of tensors in a schedule that ``simulate`` accepts, in steps and in seconds."""

from dataclasses import dataclass

from graphs.clocks import run_clocks
from graphs.ir import Graph
from graphs.schedule import Compute, Schedule


@dataclass(frozen=True, slots=True)
class Lifetime:
    """An interval in which a tensor is in memory; a recomputed tensor has several.

    Attributes:
        first_step: index of the step that produces it.
        end_step: index of the step that frees it; the number of steps if none does.
        start_s: start of the op that produces it.
        end_s: time at which its bytes are free; the end of the schedule if they stay.
    """

    first_step: int
    end_step: int
    start_s: float
    end_s: float


def find_lifetimes(graph: Graph, schedule: Schedule) -> tuple[tuple[Lifetime, ...], ...]:
    """Return the lifetimes of each tensor of `graph`, in order; static tensors have none."""
    clocks = run_clocks(graph, schedule)
    found: list[list[Lifetime]] = [[] for _ in graph.tensors]
    since: dict[int, int] = {}
    for index, step in enumerate(schedule.steps):
        if isinstance(step, Compute):
            for t in graph.ops[step.op].outputs:
                since.setdefault(t, index)
        else:
            first = since.pop(step.tensor)
            found[step.tensor].append(Lifetime(first, index, clocks.starts_s[first], clocks.ends_s[index]))
    for t, first in since.items():
        found[t].append(Lifetime(first, len(schedule.steps), clocks.starts_s[first], max(clocks.clocks_s)))
    return tuple(map(tuple, found))
