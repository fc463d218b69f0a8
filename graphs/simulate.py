"""The simulation that judges every plan: the memory, in bytes, and the time, in seconds, of a schedule on a graph.

It shares no code with solvers, so that it finds their mistakes. Memory is counted in the order of the steps, so that the peak
does not depend on the timing of streams; ``planner.graphs.clocks`` has the times on several streams.

Conventions that solvers, writers and the runtime follow: inputs, outputs and workspace of an op are in memory at once; an output
that is in memory already counts twice while its op runs; an output takes the memory of an input only if the next steps free that
input; the workspace of a transfer is in memory until the computation waits for it. Memory is that of tensors; what an allocator
reserves beyond them is in ``planner.graphs.allocators``.

Known weakness: `time_s`, which is minimized, does not know the host; `step_s` does.
"""

import math
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

from planner.graphs.clocks import run_clocks
from planner.graphs.errors import ScheduleError
from planner.graphs.ir import Graph, Op
from planner.graphs.pools import Pool
from planner.graphs.schedule import Compute, Free, Schedule

_REMEMBERED = 32  # schedules of a graph: solves for several budgets try the same ones, and end with them
_known: dict[int, Callable[[Schedule], "Simulation"]] = {}  # by the id of a graph, as long as it exists


@dataclass(frozen=True, slots=True)
class Simulation:
    """The memory and time of a schedule.

    Attributes:
        peak_bytes: most memory held on the device at any step, including static memory.
        time_s: seconds until the last stream is done; with one stream, the sum over all executions.
        step_s: the same if no op starts before the host has issued it, and with what it takes around the ops; `time_s` if neither
            is known.
        peak_step: index of the first step that reaches the peak.
        recomputed: number of executions beyond the first of each op.
        pool_memory_bytes: for each of ``Graph.pools``, the device's first, the memory during (Compute) or after (Free) each step.
        clocks_s: for each of ``Graph.streams``, the time at which it is done.
    """

    peak_bytes: int
    time_s: float
    step_s: float
    peak_step: int
    recomputed: int
    pool_memory_bytes: tuple[tuple[int, ...], ...]
    clocks_s: tuple[float, ...]

    @property
    def memory_bytes(self) -> tuple[int, ...]:
        """Memory of the device during (Compute) or after (Free) each step."""
        return self.pool_memory_bytes[0]

    @property
    def pool_peaks_bytes(self) -> tuple[int, ...]:
        """Most memory held in each of ``Graph.pools``, the device's first."""
        return tuple(map(max, self.pool_memory_bytes))


def simulate(graph: Graph, schedule: Schedule) -> Simulation:
    """Run `schedule` on `graph` with sizes instead of tensors.

    During a Compute step, the memory of a pool is static + live tensors + the op's outputs + its workspace. That of a transfer on
    a stream that owns no pool stays in the device's pool until an op there reads one of its outputs, or a tensor that it reads or
    makes is freed. An output that is
    live already counts twice during the step, and once afterwards. An output that may overwrite an input takes no memory of its
    own if that input is freed directly after the step, unless another stream has read the input since it was produced: it may
    still be reading.

    Raises:
        ScheduleError: an unknown op or tensor; an op that reads a tensor that is not in memory, runs again though it must not,
            runs on the wrong side of a write in place or out of order with another random op, produces a tensor that is already
            in a pool of another stream, or exceeds a pool's capacity; a free of a tensor that is not in memory or must be kept;
            an op of the program that is neither executed nor replaced; a kept tensor missing at the end; ops that use more of a
            resource than the graph allows.
    """
    remembered = _known.get(id(graph))
    if remembered is None:
        weakref.finalize(graph, _known.pop, id(graph), None).atexit = False
        remembered = _known[id(graph)] = lru_cache(_REMEMBERED)(partial(_simulate, weakref.ref(graph)))
    return remembered(schedule)


def _simulate(reference: weakref.ref[Graph], schedule: Schedule) -> Simulation:
    graph = reference()
    assert graph is not None  # the caller has it
    judge = _Judge(graph)
    for index, step in enumerate(schedule.steps):
        if isinstance(step, Compute):
            judge.compute(index, step.op, _find_freed_after(graph, schedule, index))
        elif isinstance(step, Free):
            judge.free(index, step.tensor)
        else:
            raise ScheduleError(f"step {index} is {step!r}, which is not a step of a schedule")
    judge.finish()
    memory = judge.memories[0].at_step_bytes
    peak = max(memory)
    times = [graph.ops[op].time_s for op in judge.computed]
    clocks_s = (math.fsum(times),) if len(graph.streams) == 1 else run_clocks(graph, schedule).clocks_s
    issued_s = run_clocks(graph, schedule, issued=True).clocks_s if graph.has_host_times else clocks_s
    return Simulation(
        peak_bytes=peak,
        time_s=max(clocks_s),
        step_s=max(issued_s) + graph.around_s,
        peak_step=memory.index(peak),
        recomputed=len(judge.computed) - len(set(judge.computed)),
        pool_memory_bytes=tuple(tuple(pool.at_step_bytes) for pool in judge.memories),
        clocks_s=clocks_s,
    )


def _find_freed_after(graph: Graph, schedule: Schedule, index: int) -> set[int]:
    """Return the tensors freed directly after step `index`; an empty set if its op may not overwrite inputs."""
    steps = schedule.steps
    step, freed = steps[index], set[int]()
    if isinstance(step, Compute) and 0 <= step.op < len(graph.ops) and graph.ops[step.op].overwrites:
        while (index := index + 1) < len(steps) and isinstance(later := steps[index], Free):
            freed.add(later.tensor)
    return freed


@dataclass(frozen=True, slots=True)
class _Lent:
    """The workspace of a transfer, until one of the tensors that it makes is read, or one that it uses is freed."""

    makes: frozenset[int]
    uses: frozenset[int]
    size_bytes: int


class _Memory:
    """The memory of a pool: `live_bytes` after a step, `now_bytes` during it, `at_step_bytes` during each.

    The tensors in `given` have lost their memory to the outputs of the last op.
    """

    def __init__(self, graph: Graph, pool: Pool) -> None:
        self.pool = pool
        self.sizes = [t.size_bytes if t.pool == pool.name else 0 for t in graph.tensors]
        self.limit_bytes = math.inf if pool.capacity_bytes is None else pool.capacity_bytes
        self.owners = [p.owner for p in graph.pools]
        self.works_for = self.owners.index(pool.owner) == graph.pools.index(pool)
        self.lends = graph.pools.index(pool) == 0
        self.live_bytes = self.now_bytes = graph.static_bytes_by_pool[pool.name]
        self.at_step_bytes: list[int] = []
        self.given: set[int] = set()
        self.lent: list[_Lent] = []

    def compute(self, op: Op, new: Sequence[int], goes: Collection[int]) -> None:
        """Add the bytes of the outputs of `op`, permanently if they are `new`, and its workspace.

        Args:
            goes: tensors that are freed directly after it, and may be overwritten.
        """
        sizes = self.sizes
        made_bytes = sum([sizes[t] for t in op.outputs])
        if self.lent and op.stream == self.pool.owner:
            self._release([one for one in self.lent if not one.makes.isdisjoint(op.inputs)])
        self.given = {t for _, t in op.overwrites if t in goes}
        self.live_bytes -= sum([sizes[t] for t in self.given])
        self.now_bytes = self.live_bytes + made_bytes
        if self.works_for and op.stream == self.pool.owner:
            self.now_bytes += op.workspace_bytes
        elif self.lends and op.workspace_bytes and op.stream not in self.owners:
            self.lent.append(_Lent(frozenset(op.outputs), frozenset((*op.inputs, *op.outputs)), op.workspace_bytes))
            self.live_bytes += op.workspace_bytes
            self.now_bytes += op.workspace_bytes
        self.at_step_bytes.append(self.now_bytes)
        # A second copy of an output that was in memory goes at the end of the step.
        self.live_bytes += made_bytes if len(new) == len(op.outputs) else sum([sizes[t] for t in new])

    def free(self, t: int) -> None:
        if self.lent:
            self._release([one for one in self.lent if t in one.uses])
        if t not in self.given:
            self.live_bytes -= self.sizes[t]
        self.now_bytes = self.live_bytes
        self.at_step_bytes.append(self.now_bytes)

    def _release(self, workspaces: Iterable[_Lent]) -> None:
        """Free workspaces of transfers, which the owner of the pool waits for."""
        for one in workspaces:
            self.lent.remove(one)
            self.live_bytes -= one.size_bytes


class _Judge:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.memories = [_Memory(graph, pool) for pool in graph.pools]
        self.owner = {pool.name: pool.owner for pool in graph.pools}
        self.there = [not t.producers for t in graph.tensors]
        self.computed: list[int] = []
        self.lent: set[int] = set()  # live tensors that another stream than the owner of their pool has read
        self.done = [False] * len(graph.ops)  # executed, or replaced
        self.random_ops = [op.id for op in graph.program if op.random]
        self.random_done = 0
        self.writers: dict[int, list[int]] = {}
        for op in graph.program:
            for t in op.mutates:
                self.writers.setdefault(t, []).append(op.id)

    def compute(self, index: int, op_id: int, goes: Collection[int]) -> None:
        if not 0 <= op_id < len(self.graph.ops):
            raise ScheduleError(f"step {index} computes op {op_id}, but the graph has {len(self.graph.ops)} ops")
        op = self.graph.ops[op_id]
        there = self.there
        for t in op.inputs:
            if not there[t]:
                raise ScheduleError(
                    f"step {index} computes {op.name!r}, but its input {self.graph.tensors[t].name!r} is not in memory"
                )
        for place in (*op.replaces, op_id):
            self._follow_order(index, op, self.graph.ops[place])
            self.done[place] = True
        new = [t for t in op.outputs if not there[t]]
        if len(new) < len(op.outputs):
            self._check_double(index, op)
        for t in new:
            there[t] = True
        if len(self.graph.streams) > 1:
            self.lent.update(t for t in op.inputs if self.owner[self.graph.tensors[t].pool] != op.stream)
            goes = {t for t in goes if t not in self.lent}
        for memory in self.memories:
            memory.compute(op, new, goes)
            if memory.now_bytes > memory.limit_bytes:
                raise ScheduleError(
                    f"step {index} computes {op.name!r}, which takes pool {memory.pool.name!r} to {memory.now_bytes} bytes: "
                    f"its capacity is {memory.limit_bytes}"
                )
        self.computed.append(op_id)

    def _follow_order(self, index: int, op: Op, place: Op) -> None:
        """Note that `op` runs as `place`, itself or an op of the program that it replaces; raise an error if it may not."""
        if self.done[place.id]:
            if not place.recomputable:
                instead = "" if place is op else f" in place of {place.name!r}"
                raise ScheduleError(f"step {index} computes {op.name!r}{instead} again, but it must be executed only once")
        elif place.random and not place.optional:
            expected = self.random_ops[self.random_done]
            if expected != place.id:
                raise ScheduleError(
                    f"step {index} computes {op.name!r} before {self.graph.ops[expected].name!r}: "
                    "random ops must keep their order"
                )
            self.random_done += 1
        if not self.writers or place.optional:
            return
        for t in (*op.inputs, *op.mutates):
            for writer in self.writers.get(t, ()):
                if writer != place.id and writer not in op.replaces and self.done[writer] != (writer < place.id):
                    side = "before" if writer < place.id else "after"
                    raise ScheduleError(
                        f"step {index} computes {op.name!r} {side} {self.graph.ops[writer].name!r} writes "
                        f"{self.graph.tensors[t].name!r}, but the program has the opposite order"
                    )

    def _check_double(self, index: int, op: Op) -> None:
        """Raise an error if an output is already in a pool of another stream, which cannot know when the second copy is freed."""
        for t in op.outputs:
            tensor = self.graph.tensors[t]
            if self.there[t] and self.owner[tensor.pool] != op.stream:
                raise ScheduleError(
                    f"step {index} computes {op.name!r} on the stream {op.stream!r}, but {tensor.name!r} is in memory already, "
                    f"in pool {tensor.pool!r} of the stream {self.owner[tensor.pool]!r}: free it first"
                )

    def free(self, index: int, t: int) -> None:
        if not 0 <= t < len(self.graph.tensors):
            raise ScheduleError(f"step {index} frees tensor {t}, but the graph has {len(self.graph.tensors)} tensors")
        tensor = self.graph.tensors[t]
        if t in self.graph.kept or not tensor.producers:
            raise ScheduleError(f"step {index} frees {tensor.name!r}, which must stay in memory")
        if not self.there[t]:
            raise ScheduleError(f"step {index} frees {tensor.name!r}, which is not in memory")
        self.there[t] = False
        self.lent.discard(t)
        for memory in self.memories:
            memory.free(t)

    def finish(self) -> None:
        for op in self.graph.program:
            if not self.done[op.id]:
                instead = " or an op that replaces it" if any(op.id in other.replaces for other in self.graph.ops) else ""
                raise ScheduleError(f"the schedule never computes {op.name!r}{instead}")
        for t in self.graph.kept:
            if not self.there[t]:
                raise ScheduleError(f"the schedule ends without {self.graph.tensors[t].name!r}, which must be kept")
        if not self.graph.allows(self.computed):
            used = [(f"{self.graph.used(name, self.computed):.3g} of {name!r}", limit) for name, limit in self.graph.limits]
            raise ScheduleError(
                f"the schedule executes ops that use {' and '.join(f'{amount} (limit {limit:.3g})' for amount, limit in used)}"
            )
