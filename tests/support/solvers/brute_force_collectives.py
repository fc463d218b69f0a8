"""The optimum of small graphs whose collectives are on a channel, by trying everything on two streams; with offload, on four."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from graphs.ir import Graph, Op
from graphs.pools import COLLECTIVES, COMPUTE, DEVICE, DEVICE_TO_HOST, HOST, HOST_TO_DEVICE
from graphs.schedule import Compute, Free, Schedule, Step
from tests.support.solvers.best_first import find_fastest

Times = tuple[tuple[int, float], ...]  # tensor and time, in ascending order
STREAMS = (COMPUTE, COLLECTIVES, DEVICE_TO_HOST, HOST_TO_DEVICE)


@dataclass(frozen=True)
class State:
    """What has been issued.

    Attributes:
        done: ops of the program, without gathers, that have been executed for the first time.
        gathered: gathers that have been issued for the first time.
        freed: last tensor freed, -1 after an op: frees are in ascending order, before an op. The host has room for all.
        clocks: of the streams.
        ready: when tensors are made or have come; busy: when the channels' last use of them ends.
        lent: transfers whose workspaces are still in memory.
    """

    done: int = 0
    gathered: int = 0
    live: frozenset[int] = frozenset()
    freed: int = -1
    clocks: tuple[float, ...] = (0.0, 0.0, 0.0, 0.0)
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
        self.size = [t.size_bytes if t.producers and t.pool == DEVICE else 0 for t in graph.tensors]
        self.stored = {t.id for t in graph.tensors if t.pool == HOST}
        self.room = budget_bytes - graph.static_bytes
        self.gathers = [op for op in graph.program if op.is_transfer and not any(self.made[t] for t in op.inputs)]
        self.others = [op for op in graph.program if op not in self.gathers]
        times = [0.0 if op.is_transfer else op.time_s for op in self.others]
        self.rest = [sum(times[done:]) for done in range(len(times) + 1)]

    def at_least(self, state: State) -> float:
        return max(state.clocks[0] + self.rest[state.done], *state.clocks[1:])

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
        if state.done < len(self.others):
            yield from ((op, {}) for op in self.graph.ops[len(self.graph.program) :])

    def moves(self, state: State) -> list[tuple[tuple[Step, ...], State]]:
        now, *channels = state.clocks
        ready, busy = dict(state.ready), dict(state.busy)
        found: list[tuple[Step, State]] = []
        for t in sorted(state.live - self.graph.kept - self.stored):
            if t > state.freed:
                clock = max(now, ready.get(t, 0.0), busy.get(t, 0.0))
                lent = frozenset(one for one in state.lent if t not in self.uses(one))
                found.append((Free(t), replace(state, freed=t, live=state.live - {t}, clocks=(clock, *channels), lent=lent)))
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
            stream = STREAMS.index(op.stream)
            begins = (state.clocks[stream], 0.0 if made & self.stored else now)  # the owner of the device's memory gives it
            end = max(*begins, *(ready.get(t, 0.0) for t in op.inputs)) + op.time_s
            used = {t: max(end, busy.get(t, 0.0)) for t in op.inputs if op.is_transfer}
            after = replace(
                state,
                freed=-1,
                live=state.live | made,
                clocks=(*state.clocks[:stream], end, *state.clocks[stream + 1 :]),
                ready=tuple({**ready, **dict.fromkeys(made - state.live, end)}.items()),
                busy=tuple({**busy, **used}.items()),
                lent=lent | {op.id} if op.is_transfer and op.workspace_bytes else lent,
                **reached,
            )
            found.append((Compute(op.id), after))
        return [((step,), _simplify(after)) for step, after in found]


def _simplify(state: State) -> State:
    """Without times that are in the past of all that would wait for them."""
    now, channel, out, back = state.clocks
    return replace(
        state,
        clocks=(now, max(now, channel), out, max(now, back)),
        ready=tuple(sorted((t, s) for t, s in state.ready if t in state.live and s > min(now, out))),
        busy=tuple(sorted((t, s) for t, s in state.busy if t in state.live and s > now)),
    )
