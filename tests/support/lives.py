"""From when to when each tensor is in memory, in steps and in seconds. The schedule is one that ``simulate`` accepts."""

from dataclasses import dataclass

from graphs.clocks import run_clocks
from graphs.ir import Graph
from graphs.schedule import Compute, Schedule


@dataclass(frozen=True, slots=True)
class Life:
    """A stay of a tensor in memory; one that is made again after it was freed has several.

    Attributes:
        first_step: index of the step that makes it.
        end_step: index of the step that frees it; the number of steps if none does.
        start_s: when the op that makes it starts.
        end_s: when its bytes are free; the end of the whole step if it stays.
    """

    first_step: int
    end_step: int
    start_s: float
    end_s: float


def lives(graph: Graph, schedule: Schedule) -> tuple[tuple[Life, ...], ...]:
    """For each tensor of `graph` its stays in memory, first ones first; none for static tensors, which are always there."""
    clocks = run_clocks(graph, schedule)
    found: list[list[Life]] = [[] for _ in graph.tensors]
    since: dict[int, int] = {}
    for index, step in enumerate(schedule.steps):
        if isinstance(step, Compute):
            for t in graph.ops[step.op].outputs:
                since.setdefault(t, index)
        else:
            first = since.pop(step.tensor)
            found[step.tensor].append(Life(first, index, clocks.starts_s[first], clocks.ends_s[index]))
    for t, first in since.items():
        found[t].append(Life(first, len(schedule.steps), clocks.starts_s[first], max(clocks.clocks_s)))
    return tuple(map(tuple, found))
