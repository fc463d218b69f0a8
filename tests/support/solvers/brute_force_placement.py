"""Optima of tiny graphs with placement, by trying everything: the serial sum in XEngine's class, the makespan of any schedule."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, combinations, product

from planner.graphs.ir import Graph
from planner.graphs.options.placement import get_placement
from planner.graphs.schedule import Compute, Free, Step
from tests.support.solvers.best_first import find_fastest
from tests.support.solvers.brute_force import may_repeat

Places = frozenset[tuple[int, int]]  # (device, tensor of the program)


def fastest_serial(graph: Graph, budget_bytes: int, *, stay: bool = False) -> float | None:
    """The least sum of executions and copies, None if nothing fits.

    In a stage each op is executed once at most on each device, in program order, the new op on one device. What is missing is
    copied there before its first reader, from a device that has it or makes it in the stage. A tensor leaves a device after its
    last use of the stage there, unless it is handed on; with `stay` copies may be. What is kept stays on the main device.
    """
    search = _Search(graph, budget_bytes, stay=stay)
    found: dict[Places, float] = {frozenset(): 0.0}
    for stage in range(len(search.program.ops)):
        after: dict[Places, float] = {}
        for before, spent_s in found.items():
            for handed_on, more_s in search.stages(stage, before):
                if spent_s + more_s < after.get(handed_on, float("inf")):
                    after[handed_on] = spent_s + more_s
        found = after
    return min(found.values(), default=None)


class _Search:
    def __init__(self, graph: Graph, budget_bytes: int, *, stay: bool) -> None:
        self.placement = get_placement(graph)
        self.whole, self.program, self.stay = graph, self.placement.program, stay
        self.devices = range(len(graph.pools))
        self.room = [budget_bytes - graph.static_bytes, *(pool.capacity_bytes for pool in graph.pools[1:])]

    def stages(self, stage: int, before: Places) -> Iterator[tuple[Places, float]]:
        """What may be handed on by stage `stage`, and what the stage takes."""
        last = stage == len(self.program.ops) - 1
        again = [
            (op.id, d)
            for op in self.program.ops[:stage]
            for d in self.devices
            if self.placement.runs[d][op.id] is not None and may_repeat(self.program, op.id, stage)
        ]
        for new in (d for d in self.devices if self.placement.runs[d][stage] is not None):
            for executed in _subsets(again):
                turns = [*executed, (stage, new)]
                if last:
                    turns.append((len(self.program.ops), 0))
                for copied in self._copies(turns, before):
                    seconds = self._seconds(turns, copied)
                    for handed_on in self._fitting(turns, copied, before, last=last):
                        yield handed_on, seconds

    def _reads(self, op: int) -> Iterable[int]:
        return sorted(self.program.kept) if op == len(self.program.ops) else self.program.ops[op].inputs

    def _copies(self, turns: list[tuple[int, int]], before: Places) -> Iterator[list[tuple[int, int, int, int]]]:
        """Ways to bring what is missing: (turn, from, to, tensor)."""
        there = set(before) | {(0, t.id) for t in self.program.tensors if t.static}
        missing: list[tuple[int, int, int]] = []
        choices: list[list[int]] = []
        for place, (op, d) in enumerate(turns):
            for x in self._reads(op):
                if (d, x) not in there:
                    made = {e for f, e in turns[:place] if f < op and x in self.program.ops[f].outputs}
                    made |= {e for e in self.devices if (e, x) in before or (e == 0 and self.program.tensors[x].static)}
                    missing.append((place, d, x))
                    choices.append([e for e in made if (e, d, x) in self.placement.copies])
                    there.add((d, x))
            if op < len(self.program.ops):
                there |= {(d, x) for x in self.program.ops[op].outputs}
        for sources in product(*choices):
            yield [(place, e, d, x) for (place, d, x), e in zip(missing, sources, strict=True)]

    def _seconds(self, turns: list[tuple[int, int]], copied: list[tuple[int, int, int, int]]) -> float:
        runs = [self.placement.runs[d][op] for op, d in turns if op < len(self.program.ops)]
        copies = [self.placement.copies[e, d, x] for _, e, d, x in copied]
        return sum(self.whole.ops[op].time_s for op in [*runs, *copies] if op is not None)

    def _fitting(
        self, turns: list[tuple[int, int]], copied: list[tuple[int, int, int, int]], before: Places, *, last: bool
    ) -> Iterator[Places]:
        """What can be handed on while all fits."""
        made = {(d, x) for op, d in turns if op < len(self.program.ops) for x in self.program.ops[op].outputs}
        arrived = {(d, x) for _, _, d, x in copied}
        kept = {(0, x) for x in self.program.kept} & (before | made | arrived)
        if last:
            if self._fits(turns, copied, before, frozenset(kept)):
                yield frozenset(kept)
            return
        free = sorted((before | made | (arrived if self.stay else set())) - kept)
        for some in _subsets(free):
            handed_on = frozenset(some) | kept
            if self._fits(turns, copied, before, handed_on):
                yield handed_on

    def _fits(
        self, turns: list[tuple[int, int]], copied: list[tuple[int, int, int, int]], before: Places, handed_on: Places
    ) -> bool:
        last_use: dict[tuple[int, int], int] = {}
        for place, (op, d) in enumerate(turns):
            outputs = self.program.ops[op].outputs if op < len(self.program.ops) else ()
            last_use |= dict.fromkeys([(d, x) for x in (*self._reads(op), *outputs)], place)
            last_use |= {(e, x): place for at, e, _, x in copied if at == place}
        there = dict.fromkeys(before, 1)
        for place, (op, d) in enumerate(turns):
            there |= {(e, x): 1 for at, _, e, x in copied if at == place}
            outputs = self.program.ops[op].outputs if op < len(self.program.ops) else ()
            workspace = self.program.ops[op].workspace_bytes if outputs or op < len(self.program.ops) else 0
            for x in outputs:
                there[d, x] = there.get((d, x), 0) + 1
            for e in self.devices:
                used = sum(self._size(e, x) * times for (f, x), times in there.items() if f == e)
                room = self.room[e]
                if room is not None and used + (workspace if e == d else 0) > room:
                    return False
            there = {
                spot: 1
                for spot in there
                if spot in handed_on or last_use.get(spot, len(turns)) > place or (spot[0] == 0 and spot[1] in self.program.kept)
            }
        return True

    def _size(self, d: int, x: int) -> int:
        return 0 if d == 0 and self.program.tensors[x].static else self.program.tensors[x].size_bytes


def _subsets(things: list[tuple[int, int]]) -> Iterator[tuple[tuple[int, int], ...]]:
    return chain.from_iterable(combinations(things, size) for size in range(len(things) + 1))


@dataclass(frozen=True)
class Issued:
    """What has been issued: how many of the program's ops for the first time, what is there, and times.

    Attributes:
        freed: the last tensor freed, -1 after an op: frees are in ascending order.
        clocks: by stream.
        ready: by tensor that is there when it is.
        busy: by tensor that is there and stream when the last op with it ends there.
    """

    done: int
    there: frozenset[int]
    freed: int
    clocks: tuple[float, ...]
    ready: tuple[tuple[int, float], ...]
    busy: tuple[tuple[int, int, float], ...]


def fastest_overlapped(graph: Graph, budget_bytes: int, most: int = 150_000) -> float | None:
    """The least makespan of all schedules with first executions in program order, None if nothing fits.

    Raises:
        TimeoutError: more than `most` states.
    """
    start = Issued(0, frozenset(), -1, (0.0,) * len(graph.streams), (), ())
    found = find_fastest(_Overlapped(graph, budget_bytes), start, most)
    return None if found is None else found[0]


class _Overlapped:
    def __init__(self, graph: Graph, budget_bytes: int) -> None:
        self.graph = graph
        self.streams = {name: i for i, name in enumerate(graph.streams)}
        self.pool = {pool.name: place for place, pool in enumerate(graph.pools)}
        self.owner = [self.streams[graph.pools[self.pool[t.pool]].owner] for t in graph.tensors]
        self.room = [budget_bytes - graph.static_bytes, *(pool.capacity_bytes for pool in graph.pools[1:])]
        self.of_pool = [[t.id for t in graph.tensors if t.pool == name and not t.static] for name in self.pool]

    def at_least(self, now: Issued) -> float:
        return max(now.clocks)

    def count_done(self, now: Issued) -> int:
        return now.done

    def is_over(self, now: Issued) -> bool:
        return now.done == len(self.graph.program) and self.graph.kept <= now.there

    def split(self, now: Issued) -> tuple[object, tuple[float, ...]]:
        ready, busy = dict(now.ready), {(t, s): end_s for t, s, end_s in now.busy}
        times = (
            *now.clocks,
            *(ready.get(t, 0.0) for t in sorted(now.there)),
            *(busy.get((t, s), 0.0) for t in sorted(now.there) for s in range(len(self.streams))),
        )
        return (now.done, now.there, now.freed), times

    def fits(self, there: frozenset[int], op: int) -> bool:
        graph = self.graph
        for pool, tensors, limit in zip(graph.pools, self.of_pool, self.room, strict=True):
            used = sum(graph.tensors[t].size_bytes * ((t in there) + (t in graph.ops[op].outputs)) for t in tensors)
            used += graph.ops[op].workspace_bytes if pool.owner == graph.ops[op].stream else 0
            if limit is not None and used > limit:
                return False
        return True

    def moves(self, now: Issued) -> Iterator[tuple[tuple[Step, ...], Issued]]:
        graph, owner = self.graph, self.owner
        ready, busy = dict(now.ready), {(t, s): end_s for t, s, end_s in now.busy}
        for t in sorted(now.there):
            if t > now.freed and t not in graph.kept and self.room[self.pool[graph.tensors[t].pool]] is not None:
                clock = max([now.clocks[owner[t]], *(end_s for (u, _), end_s in busy.items() if u == t)])
                clocks = tuple(clock if s == owner[t] else c for s, c in enumerate(now.clocks))
                yield (Free(t),), _known(replace(now, there=now.there - {t}, freed=t, clocks=clocks), ready, busy)
        for op in graph.ops:
            (place,) = op.replaces or ((op.id,) if not op.optional else (-1,))
            again = place < now.done
            if place > now.done or (place >= 0 and again and not may_repeat(graph, place, now.done)):
                continue
            new = [t for t in op.outputs if t not in now.there]
            if any(t not in now.there and not graph.tensors[t].static for t in op.inputs) or (again and not new):
                continue
            if not self.fits(now.there, op.id):
                continue
            stream = self.streams[op.stream]
            start_s = max(
                [now.clocks[stream], *(now.clocks[owner[t]] for t in op.outputs), *(ready.get(t, 0.0) for t in op.inputs)]
            )
            end_s = start_s + op.time_s
            more = {(t, stream): end_s for t in (*op.inputs, *new) if not graph.tensors[t].static}
            kept = {key: value for key, value in busy.items() if key[0] not in new}
            clocks = tuple(end_s if s == stream else c for s, c in enumerate(now.clocks))
            after = replace(now, done=max(now.done, place + 1), there=now.there | set(new), freed=-1, clocks=clocks)
            yield (Compute(op.id),), _known(after, ready | dict.fromkeys(new, end_s), kept | more)


def _known(now: Issued, ready: dict[int, float], busy: dict[tuple[int, int], float]) -> Issued:
    """`now` with the times of what is there; those before every clock are over."""
    least = min(now.clocks)
    return replace(
        now,
        ready=tuple(sorted((t, at) for t, at in ready.items() if t in now.there and at > least)),
        busy=tuple(sorted((t, s, at) for (t, s), at in busy.items() if t in now.there and at > least)),
    )
