"""The optimum of small graphs with transfers, copies to the host and collectives, by trying everything on all streams."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import inf

from planner.graphs.ir import Graph, Op
from planner.graphs.pools import COLLECTIVES, COMPUTE, DEVICE_TO_HOST, HOST, HOST_TO_DEVICE
from planner.graphs.schedule import Compute, Free, Schedule, Step
from tests.support.solvers.best_first import find_fastest
from tests.support.solvers.brute_force import BEGINNING, Progress, executions, promises, ways_to_overwrite

Times = tuple[tuple[int, float], ...]  # tensor and time, in ascending order
STREAMS = (COMPUTE, COLLECTIVES, DEVICE_TO_HOST, HOST_TO_DEVICE)


@dataclass(frozen=True)
class State:
    """What has been issued.

    Attributes:
        progress: how far the program is, without gathers.
        gathered: gathers that have been issued for the first time.
        live: tensors on the device and on the host.
        freed: last tensor freed, by pool, -1 after an op: frees are in ascending order, before an op that takes memory there.
        clocks: of the streams.
        ready: when tensors are made or have come; busy: when the channels' last use of them ends.
        lent: transfers whose workspaces are still in memory; read: tensors that a channel has read since they came there.
    """

    progress: Progress = BEGINNING
    gathered: int = 0
    live: frozenset[int] = frozenset()
    freed: tuple[int, int] = (-1, -1)
    clocks: tuple[float, ...] = (0.0, 0.0, 0.0, 0.0)
    ready: Times = ()
    busy: Times = ()
    lent: frozenset[int] = frozenset()
    read: frozenset[int] = frozenset()


def fastest_with_transfers(graph: Graph, budget_bytes: int, most: int = 200_000) -> tuple[float, Schedule] | None:
    """Time and steps of the fastest of all schedules; None if none fits.

    First executions are in program order, with optional ops in the order of places, but for transfers of the program that read
    static tensors only: these may be issued at any time, for the first time in program order among each other. Only this is
    assumed: a tensor is freed when memory or its absence is wanted next, as a wait is no shorter before; and none is transferred
    to where it is.

    Raises:
        TimeoutError: more than `most` states.
    """
    return find_fastest(_Search(graph, budget_bytes), State(), most)


class _Search:
    def __init__(self, graph: Graph, budget_bytes: int) -> None:
        self.graph, pools = graph, {pool.name: pool.capacity_bytes for pool in graph.pools}
        self.static = {t.id for t in graph.tensors if t.static}
        self.size = [0 if t.static else t.size_bytes for t in graph.tensors]
        self.pool = [int(t.pool == HOST) for t in graph.tensors]
        self.room = (budget_bytes - graph.static_bytes, inf if (host_bytes := pools.get(HOST)) is None else host_bytes)
        self.owner = (STREAMS.index(COMPUTE), STREAMS.index(DEVICE_TO_HOST))
        self.gathers = [op.id for op in graph.program if op.is_transfer and self.static.issuperset(op.inputs)]
        self.overwritten = frozenset(t for op in graph.ops for _, t in op.overwrites)
        # Where an op may stand for others, nothing is said of what is left.
        plain = not any(op.replaces for op in graph.ops)
        times = [op.time_s * (plain and op.stream == COMPUTE) for op in graph.program]
        self.rest = [sum(times[done:]) for done in range(len(times) + 1)]

    def at_least(self, state: State) -> float:
        return max(state.clocks[0] + self.rest[state.progress.done], *state.clocks[1:])

    def count_done(self, state: State) -> int:
        return state.progress.done

    def is_over(self, state: State) -> bool:
        return self.pass_gathers(state.progress).done == len(self.graph.program) and state.freed == (-1, -1)

    def split(self, state: State) -> tuple[object, tuple[float, ...]]:
        ready, busy = dict(state.ready), dict(state.busy)
        times = (*state.clocks, *(table.get(t, 0.0) for table in (ready, busy) for t in sorted(state.live)))
        return (state.progress, state.gathered, state.live, state.freed, state.lent, state.read), times

    def pass_gathers(self, progress: Progress) -> Progress:
        """Gathers are not waited for in their places."""
        while progress.done in self.gathers:
            progress = replace(progress, done=progress.done + 1)
        return progress

    def executions(self, state: State) -> Iterator[tuple[Op, Progress, int]]:
        """The ops that may be executed, each with how far the program and its gathers are then."""
        progress, gathers = self.pass_gathers(state.progress), self.gathers
        yield from ((op, reached, state.gathered) for op, reached in executions(self.graph, progress) if op.id not in gathers)
        for place, op_id in enumerate(gathers[: state.gathered + 1]):
            yield self.graph.ops[op_id], progress, max(state.gathered, place + 1)

    def moves(self, state: State) -> list[tuple[tuple[Step, ...], State]]:
        found: list[tuple[tuple[Step, ...], State]] = [
            ((), replace(state, progress=reached)) for reached in promises(self.graph, self.pass_gathers(state.progress))
        ]
        found += (((Free(t),), self.free(state, t)) for t in sorted(state.live - self.graph.kept) if self.may_free(state, t))
        for op, progress, gathered in self.executions(state):
            pool, made = self.pool[op.outputs[0]] if op.outputs else 0, state.live.intersection(op.outputs)
            if state.freed[1 - pool] >= 0 or (op.is_transfer and made) or not self.static.union(state.live).issuperset(op.inputs):
                continue
            if pool and state.progress.done == len(self.graph.program):
                continue
            lent = state.lent
            if not op.is_transfer:
                lent = frozenset(one for one in lent if set(self.graph.ops[one].outputs).isdisjoint(op.inputs))
            held = sum(self.size[t] for t in state.live if self.pool[t] == pool)
            held += sum(self.graph.ops[one].workspace_bytes for one in lent) * (not pool) + op.workspace_bytes
            for over in ways_to_overwrite(op):
                new_bytes = sum(self.size[t] for t in op.outputs) - sum(self.size[t] for t in over)
                if held + new_bytes <= self.room[pool] and state.read.isdisjoint(over):
                    after = State(progress, gathered, state.live.union(op.outputs).difference(over), lent=lent)
                    found.append(((Compute(op.id), *map(Free, over)), self.execute(state, after, op)))
        return found

    def may_free(self, state: State, t: int) -> bool:
        """On the host only if its room is limited, and the program is not over."""
        pool = self.pool[t]
        wanted = not pool or (self.room[1] < inf and state.progress.done < len(self.graph.program))
        return wanted and state.freed[1 - pool] < 0 and t > state.freed[pool]

    def free(self, state: State, t: int) -> State:
        owner, freed, clocks = self.owner[self.pool[t]], [*state.freed], [*state.clocks]
        freed[self.pool[t]] = t
        clocks[owner] = max(clocks[owner], dict(state.ready).get(t, 0.0), dict(state.busy).get(t, 0.0))
        lent = frozenset(op for op in state.lent if t not in {*self.graph.ops[op].inputs, *self.graph.ops[op].outputs})
        after = State(state.progress, state.gathered, state.live - {t}, (freed[0], freed[1]), lent=lent)
        return self.set_times(after, clocks, dict(state.ready), dict(state.busy), state.read)

    def execute(self, state: State, after: State, op: Op) -> State:
        """Return the state `after` an op, with its times."""
        ready, busy, clocks, stream = dict(state.ready), dict(state.busy), [*state.clocks], STREAMS.index(op.stream)
        begins = [clocks[stream], *(clocks[self.owner[self.pool[t]]] for t in op.outputs)]  # the owner of memory gives it
        clocks[stream] = end = max(*begins, 0.0, *(ready.get(t, 0.0) for t in op.inputs)) + op.time_s
        ready |= {t: end for t in op.outputs if t not in state.live}
        if not op.is_transfer:
            return self.set_times(after, clocks, ready, busy, state.read)
        busy |= {t: max(end, busy.get(t, 0.0)) for t in op.inputs}
        after = replace(after, lent=after.lent | {op.id}) if op.workspace_bytes else after
        return self.set_times(after, clocks, ready, busy, state.read | self.overwritten.intersection(op.inputs))

    def set_times(
        self, state: State, clocks: list[float], ready: dict[int, float], busy: dict[int, float], read: frozenset[int]
    ) -> State:
        """Return `state` with times, but for those that are in the past of all that would wait for them."""
        now, channel, out, back = clocks
        return State(
            state.progress,
            state.gathered,
            state.live,
            state.freed,
            (now, max(now, channel), out, max(now, back)),
            tuple(sorted((t, s) for t, s in ready.items() if t in state.live and s > min(now, out))),
            tuple(sorted((t, s) for t, s in busy.items() if t in state.live and s > (now, out)[self.pool[t]])),
            state.lent,
            read & state.live,
        )
