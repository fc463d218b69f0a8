"""The optimum of small graphs with transfers to the host, by trying everything on three streams."""

from dataclasses import dataclass, replace

from graphs.ir import Graph
from graphs.options.offload import remove_offload
from graphs.schedule import Compute, Free, Schedule, Step
from tests.support.solvers.best_first import find_fastest
from tests.support.solvers.brute_force import BEGINNING, Progress, executions, promises, ways_to_overwrite

Times = tuple[tuple[int, float], ...]  # tensor and time, in ascending order


@dataclass(frozen=True)
class State:
    """What has been issued: how far the program is, tensors on the device and on the host, and the clocks.

    Attributes:
        freed: last tensor freed on the device (`host`: there), -1 after an op: frees are in ascending order, before an op
            that takes memory.
        clocks: compute, out, in.
        ready: when tensors on the device are made or have come in; left: when the copy-out that reads them ends.
        stored: when tensors on the host have come; back: when the copy-in that reads them ends.
        lent: tensors on the device that have been copied out since they came there.
    """

    progress: Progress = BEGINNING
    live: frozenset[int] = frozenset()
    host: frozenset[int] = frozenset()
    freed: int = -1
    host_freed: int = -1
    clocks: tuple[float, float, float] = (0.0, 0.0, 0.0)
    ready: Times = ()
    left: Times = ()
    stored: Times = ()
    back: Times = ()
    lent: frozenset[int] = frozenset()


def fastest_with_copies(graph: Graph, budget_bytes: int, most: int = 400_000) -> tuple[float, Schedule] | None:
    """Time and steps of the fastest of all schedules with first executions in program order; None if none fits.

    With optional ops besides, first executions come in the order of places. Only this is assumed: a tensor is freed when memory
    or its absence is wanted next, as a wait is no shorter before; and none is copied to where it is.

    Raises:
        TimeoutError: more than `most` states.
    """
    return find_fastest(_Search(graph, budget_bytes), State(), most)


class _Search:
    def __init__(self, graph: Graph, budget_bytes: int) -> None:
        self.program, offloads = remove_offload(graph)
        self.by_tensor = offloads.by_tensor
        self.host_bytes = next(pool.capacity_bytes for pool in graph.pools if pool.name == "host")
        self.size = [0 if t.static else t.size_bytes for t in self.program.tensors]
        self.room = budget_bytes - graph.static_bytes
        # Where an op may stand for others, nothing is said of what is left.
        times = [op.time_s * (len(self.program.ops) == len(self.program.program)) for op in self.program.program]
        self.rest = [sum(times[done:]) for done in range(len(times) + 1)]

    def at_least(self, state: State) -> float:
        return max(state.clocks[0] + self.rest[state.progress.done], *state.clocks[1:])

    def count_done(self, state: State) -> int:
        return state.progress.done

    def is_over(self, state: State) -> bool:
        return state.progress.done == len(self.program.program) and state.freed < 0 and state.host_freed < 0

    def split(self, state: State) -> tuple[object, tuple[float, ...]]:
        times = [*state.clocks]
        for table, tensors in (
            (state.ready, state.live),
            (state.left, state.live),
            (state.stored, state.host),
            (state.back, state.host),
        ):
            found = dict(table)
            times += [found.get(t, 0.0) for t in sorted(tensors)]
        return (state.progress, state.live, state.host, state.freed, state.host_freed, state.lent), tuple(times)

    def moves(self, state: State) -> list[tuple[tuple[Step, ...], State]]:
        now, out, back = state.clocks
        ready, left, stored, came = (dict(table) for table in (state.ready, state.left, state.stored, state.back))
        used = sum(self.size[t] for t in state.live)
        found: list[tuple[tuple[Step, ...], State]] = [
            ((), replace(state, progress=reached)) for reached in promises(self.program, state.progress)
        ]

        def add(*steps: Step, freed: int = -1, host_freed: int = -1, **changes: object) -> None:
            after = replace(state, freed=freed, host_freed=host_freed, **changes)  # type: ignore[arg-type]
            found.append((steps, _canonical(after)))

        if state.host_freed < 0:
            for t in sorted(state.live):
                if t > state.freed and t not in self.program.kept:
                    clock = max(now, ready.get(t, 0.0), left.get(t, 0.0))
                    add(Free(t), freed=t, live=state.live - {t}, clocks=(clock, out, back))
            for op, reached in executions(self.program, state.progress):
                made = set(op.outputs)
                if any(self.size_known(t) and t not in state.live for t in op.inputs):
                    continue
                clock = max([now, *(ready.get(t, 0.0) for t in op.inputs)]) + op.time_s
                new = dict.fromkeys(made - state.live, clock)
                for over in ways_to_overwrite(op):
                    made_bytes = sum(self.size[t] for t in made) - sum(self.size[t] for t in over)
                    if used + made_bytes + op.workspace_bytes <= self.room and state.lent.isdisjoint(over):
                        add(
                            Compute(op.id),
                            *map(Free, over),
                            progress=reached,
                            live=(state.live | made).difference(over),
                            clocks=(clock, out, back),
                            ready=tuple({**ready, **new}.items()),
                            left=tuple((t, s) for t, s in state.left if t not in new),
                        )
            for t, transfers in self.by_tensor.items():
                if t in state.host and t not in state.live and used + self.size[t] <= self.room:
                    clock = max(back, now, stored.get(t, 0.0)) + transfers.reload_s
                    add(
                        Compute(transfers.reload_op),
                        live=state.live | {t},
                        clocks=(now, out, clock),
                        ready=tuple({**ready, t: clock}.items()),
                        left=tuple((u, s) for u, s in state.left if u != t),
                        back=tuple({**came, t: max(clock, came.get(t, 0.0))}.items()),
                    )
        if state.freed < 0 and state.progress.done < len(self.program.program):
            taken = sum(self.size[t] for t in state.host)
            for t in sorted(state.host):
                if t > state.host_freed and self.host_bytes is not None:
                    clock = max(out, stored.get(t, 0.0), came.get(t, 0.0))
                    add(Free(self.by_tensor[t].host_tensor), host_freed=t, host=state.host - {t}, clocks=(now, clock, back))
            for t, transfers in self.by_tensor.items():
                full = self.host_bytes is not None and taken + self.size[t] > self.host_bytes
                if t in state.live and t not in state.host and not full:
                    clock = max(out, ready.get(t, 0.0)) + transfers.offload_s
                    add(
                        Compute(transfers.offload_op),
                        host=state.host | {t},
                        clocks=(now, clock, back),
                        lent=state.lent | {t},
                        left=tuple({**left, t: clock}.items()),
                        stored=tuple({**stored, t: clock}.items()),
                        back=tuple((u, s) for u, s in state.back if u != t),
                    )
        return found

    def size_known(self, t: int) -> bool:
        return not self.program.tensors[t].static


def _canonical(state: State) -> State:
    """Without times that cannot matter any more: they are in the past of every stream that would wait for them."""
    now, out, back = state.clocks
    return replace(
        state,
        clocks=(now, out, max(back, now)),
        lent=state.lent & state.live,
        ready=tuple(sorted((t, s) for t, s in state.ready if t in state.live and s > min(now, out))),
        left=tuple(sorted((t, s) for t, s in state.left if t in state.live and s > now)),
        stored=tuple(sorted((t, s) for t, s in state.stored if t in state.host and s > now)),
        back=tuple(sorted((t, s) for t, s in state.back if t in state.host and s > out)),
    )
