"""The optimum of small graphs whose collectives are on a channel, by trying everything on two streams."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from graphs.ir import Graph, Op
from graphs.schedule import Compute, Free, Schedule, Step
from tests.support.solvers.best_first import find_fastest

Times = tuple[tuple[int, float], ...]  # tensor and time, in ascending order


@dataclass(frozen=True)
class State:
    """What has been issued.

    Attributes:
        done: ops of the program, without gathers, that have been executed for the first time.
        gathered: gathers that have been issued for the first time.
        freed: last tensor freed, -1 after an op: frees are in ascending order, before an op.
        clocks: compute, channel.
        ready: when tensors are made or have come; busy: when the channel's last use of them ends.
        lent: transfers whose workspaces are still in memory.
    """

    done: int = 0
    gathered: int = 0
    live: frozenset[int] = frozenset()
    freed: int = -1
    clocks: tuple[float, float] = (0.0, 0.0)
    ready: Times = ()
    busy: Times = ()
    lent: frozenset[int] = frozenset()


def fastest_with_collectives(graph: Graph, budget_bytes: int, most: int = 200_000) -> tuple[float, Schedule] | None:
    """Time and steps of the fastest of all schedules; None if none fits.

    First executions are in program order, but for transfers that read static tensors only: these may be issued at any time, for
    the first time in program order among each other.

    Raises:
        TimeoutError: more than `most` states.
    """
    return find_fastest(_Search(graph, budget_bytes), State(), most)


class _Search:
    def __init__(self, graph: Graph, budget_bytes: int) -> None:
        self.graph = graph
        self.made = [not t.static for t in graph.tensors]
        self.size = [t.size_bytes if made else 0 for t, made in zip(graph.tensors, self.made, strict=True)]
        self.room = budget_bytes - graph.static_bytes
        self.gathers = [op for op in graph.ops if op.is_transfer and not any(self.made[t] for t in op.inputs)]
        self.others = [op for op in graph.ops if op not in self.gathers]
        times = [0.0 if op.is_transfer else op.time_s for op in self.others]
        self.rest = [sum(times[done:]) for done in range(len(times) + 1)]

    def at_least(self, state: State) -> float:
        return max(state.clocks[0] + self.rest[state.done], state.clocks[1])

    def count_done(self, state: State) -> int:
        return state.done

    def is_over(self, state: State) -> bool:
        return state.done == len(self.others) and state.freed < 0

    def split(self, state: State) -> tuple[object, tuple[float, ...]]:
        ready, busy = dict(state.ready), dict(state.busy)
        times = (*state.clocks, *(table.get(t, 0.0) for table in (ready, busy) for t in sorted(state.live)))
        return (state.done, state.gathered, state.live, state.freed, state.lent), times

    def uses(self, op: int) -> set[int]:
        return {*self.graph.ops[op].inputs, *self.graph.ops[op].outputs}

    def executions(self, state: State) -> Iterator[tuple[Op, dict[str, int]]]:
        """The ops that may be executed, each with how far the program is then."""
        for count, (ops, done) in {"done": (self.others, state.done), "gathered": (self.gathers, state.gathered)}.items():
            yield from ((op, {}) for op in ops[:done] if op.recomputable)
            yield from ((op, {count: done + 1}) for op in ops[done : done + 1])

    def moves(self, state: State) -> list[tuple[tuple[Step, ...], State]]:
        now, channel = state.clocks
        ready, busy = dict(state.ready), dict(state.busy)
        found: list[tuple[Step, State]] = []
        for t in sorted(state.live - self.graph.kept):
            if t > state.freed:
                clock = max(now, ready.get(t, 0.0), busy.get(t, 0.0))
                lent = frozenset(one for one in state.lent if t not in self.uses(one))
                found.append((Free(t), replace(state, freed=t, live=state.live - {t}, clocks=(clock, channel), lent=lent)))
        for op, reached in self.executions(state):
            made = frozenset(op.outputs)
            if any(self.made[t] and t not in state.live for t in op.inputs) or (op.is_transfer and made & state.live):
                continue
            lent = state.lent
            if not op.is_transfer:
                lent = frozenset(one for one in lent if set(self.graph.ops[one].outputs).isdisjoint(op.inputs))
            held = sum(self.size[t] for t in state.live) + sum(self.graph.ops[one].workspace_bytes for one in lent)
            if held + sum(self.size[t] for t in made) + op.workspace_bytes > self.room:
                continue
            end = max(now, channel if op.is_transfer else 0.0, *(ready.get(t, 0.0) for t in op.inputs), 0.0) + op.time_s
            new = dict.fromkeys(made - state.live, end)
            after = replace(
                state,
                freed=-1,
                live=state.live | made,
                clocks=(now, end) if op.is_transfer else (end, channel),
                ready=tuple({**ready, **new}.items()),
                busy=tuple({**busy, **(dict.fromkeys(op.inputs, end) if op.is_transfer else {})}.items()),
                lent=lent | {op.id} if op.is_transfer and op.workspace_bytes else lent,
                **reached,
            )
            found.append((Compute(op.id), after))
        return [((step,), _simplify(after)) for step, after in found]


def _simplify(state: State) -> State:
    """Without times that are in the past of the computation, and so of the channel."""
    now, channel = state.clocks
    return replace(
        state,
        clocks=(now, max(now, channel)),
        ready=tuple(sorted((t, s) for t, s in state.ready if t in state.live and s > now)),
        busy=tuple(sorted((t, s) for t, s in state.busy if t in state.live and s > now)),
    )
