"""Online execution of a step: ops run in program order, and when memory runs out, tensors are evicted.

This is the runtime of dynamic tensor rematerialization (DTR, Kirisame et al., ICLR 2021), as in their simulator; a ``Heuristic``
chooses the evicted tensor. Before an op its inputs are touched and those in memory locked; missing ones are recomputed in order,
recursively, and locked. Then, while memory with the outputs (and the workspace) exceeds the budget, an unlocked tensor is
evicted. A recomputed op produces all its outputs; those still in memory count twice meanwhile, the others become evictable again.

Views that are ops of the graph (see ``planner.graphs.importers.simrd``) are evicted with their base, add to its cost, and are
recomputed when they are read. Never evicted are static and kept tensors (constants and outputs are pinned), and tensors that
cannot be recomputed.

Known weaknesses, both of the method: nothing is known of what comes, so a tensor may be evicted just before its next use; and
evictions during a recomputation may undo it, so that a run is ended when it recomputes too much (``thrash_factor``).
"""

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Self

from planner.graphs.ir import Graph, Op
from planner.graphs.schedule import Compute, Free, Schedule, Step
from planner.graphs.units import format_bytes
from planner.solvers.baselines.common.recomputation import find_last_needed, find_repeatable
from planner.solvers.baselines.common.verdicts import Candidate, answer, build_failure
from planner.solvers.online.heuristics import Heuristic
from planner.solvers.online.ledger import Deallocation, Ledger
from planner.solvers.request import Request
from planner.solvers.result import Reason, Result

_HOPES = (Reason.TIME, Reason.THRASHING, Reason.MEMORY)

_WORK_PER_OP = 5e-5  # of the evictions for an op and its execution


class Foresight(Heuristic):
    """A heuristic that looks at the rest of the program, which only a replay knows."""

    def follow(self, run: "OnlineRun") -> None:
        """Prepare for a run, in which nothing has been executed yet."""
        self.run = run


class OnlineFailedError(Exception):
    """The failure of a run, with its message and `reason`."""

    def __init__(self, message: str, reason: Reason) -> None:
        super().__init__(message)
        self.reason = reason

    @classmethod
    def out_of_memory(cls, op: Op, wanted_bytes: int, memory_bytes: int) -> Self:
        """Return the failure to make room for `wanted_bytes` beside `memory_bytes`."""
        needs = f"op {op.name!r} needs {format_bytes(wanted_bytes)} more, {format_bytes(memory_bytes)} are in use"
        return cls(f"out of memory: {needs}, and nothing is left to evict", Reason.MEMORY)


class OnlineRun:
    """One run of a graph within a budget; `run` may be called once.

    Attributes (indexed by tensor id):
        ledger: costs, uses and neighbourhoods of the tensors computed so far.
        storage: the id in the ledger of each tensor computed so far that is neither a view nor banished, otherwise -1.
        live: True if it is in memory.
        clock_s: seconds of execution so far, by the heuristic's estimate.
        now: the current op of the program.
        budget_bytes, memory_bytes: including static memory.
    """

    def __init__(
        self,
        graph: Graph,
        budget_bytes: int,
        heuristic: Heuristic,
        *,
        deallocation: Deallocation = Deallocation.EAGER,
        thrash_factor: float = math.inf,
        stop: Callable[[], str] = lambda: "",
    ) -> None:
        """Prepare a run.

        Args:
            budget_bytes: including static memory.
            heuristic: chooses the evicted tensors.
            deallocation: treatment of a tensor after its last use in the program.
            thrash_factor: the run fails once recomputation takes more than this factor less 1 times the step.
            stop: polled; a reason ends the run.
        """
        self.graph, self.budget_bytes, self.heuristic = graph, budget_bytes, heuristic
        self.deallocation, self.stop = deallocation, stop
        self.thrash_s = (thrash_factor - 1.0) * graph.time_s
        count = len(graph.tensors)
        moved_bytes = [sum(graph.tensors[t].size_bytes for t in (*op.inputs, *op.outputs)) for op in graph.ops]
        self.estimates_s = [heuristic.estimate_s(op.time_s, moved_bytes[op.id]) for op in graph.ops]
        self.ledger = Ledger(heuristic)
        self.storage = [-1] * count
        self.tensor: dict[int, int] = {}  # by storage
        self.noted = [-1] * len(graph.ops)  # the id of each op in the ledger
        self.live = [False] * count
        self.locks = [0] * count
        self.released = [False] * count
        self.banished = [False] * count
        self.clock_s = self.recomputed_s = 0.0
        self.memory_bytes = graph.static_bytes
        self.steps: list[Step] = []
        self.now = 0
        fit = find_repeatable(graph)
        self.evictable = [
            not t.static
            and t.id not in graph.kept
            and fit[t.producers[0]]
            and not heuristic.spares(t.size_bytes)
            and not (heuristic.keeps_random and any(graph.ops[p].random for p in t.producers))
            for t in graph.tensors
        ]
        # Of an imported graph: by tensor that the program holds beyond its last reader, the one that represents it from then on.
        self.held = {t.held_for: t.id for t in graph.tensors if t.held_for is not None}
        base = {t.id: t.view_of for t in graph.tensors if t.view_of is not None}
        self.base = [base.get(t, t) for t in range(count)]  # the base of a view; itself for other tensors
        self.views: dict[int, list[int]] = {}
        for view in base:
            self.views.setdefault(base[view], []).append(view)
            self.evictable[view] = False
        self.dies = self._find_deaths()
        if isinstance(heuristic, Foresight):
            heuristic.follow(self)

    def run(self) -> Schedule:
        """Return the schedule of the run.

        Raises:
            OnlineFailedError: out of memory, thrashing, or stopped.
        """
        of_references = {op_id for t in self.held.values() for op_id in self._hold_and_release(t)}
        for op in self.graph.ops:
            self.now = op.id
            if op.id not in of_references:
                self.execute(op.id)
                self.ledger.touch(self._list_storages(op.outputs), self.clock_s)
            for t in self.dies.get(op.id, ()):
                self._release(t)
        for t in tuple(self.held):
            self._leave(t)
        return Schedule(tuple(self.steps))

    def _find_deaths(self) -> dict[int, list[int]]:
        """Return by op the tensors whose last use it is; for those that are never evicted, the last possible use."""
        needed = find_last_needed(self.graph)
        of_references = set(self.held.values())
        dies: dict[int, list[int]] = {}
        for t in self.graph.tensors:
            if t.static or t.id in self.graph.kept or t.id in of_references or self.base[t.id] != t.id:
                continue
            uses = [t.producers[0], *(r if self.evictable[t.id] else needed[r] for r in self.graph.consumers[t.id])]
            if t.id in self.held:
                uses.append(self._hold_and_release(self.held[t.id])[1])
            dies.setdefault(max(uses), []).append(t.id)
        return dies

    # Executing.

    def execute(self, op_id: int) -> None:
        """Execute op `op_id` after recomputing its missing inputs; without recursion, since chains may be long."""
        stack = [(op_id, -1, self._begin(op_id))]
        while stack:
            op, wanted, missing = stack[-1]
            while missing and self.live[missing[-1]]:
                self._lock(missing.pop())
            if missing:
                producer = self.graph.tensors[missing[-1]].producers[0]
                stack.append((producer, missing[-1], self._begin(producer)))
                continue
            stack.pop()
            self._compute(op, wanted)
            for t in self._list_inputs(op):
                self._unlock(t)
                if self.deallocation is Deallocation.BANISH:
                    self._try_to_banish(self.base[t])
            self._go_on()
            if self.recomputed_s > self.thrash_s:
                raise OnlineFailedError(
                    f"it thrashes: recomputation takes more than {self.thrash_s / self.graph.time_s:.0%} of the step",
                    Reason.THRASHING,
                )

    def _go_on(self) -> None:
        if reason := self.stop():
            raise OnlineFailedError(reason, Reason.TIME)

    def _list_inputs(self, op_id: int) -> tuple[int, ...]:
        """Return the inputs of op `op_id`, without static tensors and bases of views that it reads."""
        inputs = [t for t in self.graph.ops[op_id].inputs if not self.graph.tensors[t].static]
        bases = {self.base[t] for t in inputs if self.base[t] != t}
        return tuple(t for t in inputs if t not in bases)

    def _begin(self, op_id: int) -> list[int]:
        """Touch the inputs and lock those in memory; return the others, the first one last."""
        inputs = self._list_inputs(op_id)
        used = (t for t in inputs if self.deallocation is not Deallocation.BANISH or not self.released[self.base[t]])
        self.ledger.touch(self._list_storages(used), self.clock_s)
        missing = [t for t in reversed(inputs) if not self.live[t]]
        for t in inputs:
            if self.live[t]:
                self._lock(t)
        return missing

    def _compute(self, op_id: int, wanted: int) -> None:
        """Execute op `op_id` for output `wanted`, -1 for the first time."""
        op = self.graph.ops[op_id]
        self._make_room(op_id, sum(self.graph.tensors[t].size_bytes for t in op.outputs) + op.workspace_bytes)
        self.steps.append(Compute(op_id))
        self.clock_s += self.estimates_s[op_id]
        if wanted >= 0:
            self.recomputed_s += op.time_s
        asked = wanted if wanted >= 0 else op.outputs[0] if op.outputs else -1
        for place, t in enumerate(op.outputs):
            self._add(t, (op_id, place))
        for t in (*(t for t in op.outputs if t != asked), *((asked,) if asked >= 0 else ())):
            if self.live[t]:
                continue
            if self.banished[t] or (wanted >= 0 and t != wanted and not self.heuristic.keeps_siblings):
                self.steps.append(Free(t))
                continue
            self.live[t] = True
            self.memory_bytes += self.graph.tensors[t].size_bytes
            if self.base[t] == t:
                self.ledger.note_computed(self.storage[t])
        self._note(op_id)

    def _add(self, t: int, origin: tuple[int, int]) -> None:
        """Add tensor `t` to the ledger when it is computed for the first time, at `origin`: an op and a place in its outputs."""
        if self.base[t] == t and self.storage[t] < 0 and not self.banished[t]:
            self.storage[t] = storage = self.ledger.add_storage(self.graph.tensors[t].size_bytes, origin)
            self.tensor[storage] = t
            if not self.evictable[t]:
                self.ledger.pin(storage)

    def _note(self, op_id: int) -> None:
        """Add op `op_id` to the ledger, or note that it ran again; views add to the cost of their base, not to its neighbours."""
        if self.noted[op_id] >= 0:
            self.ledger.note_recomputed(self.noted[op_id])
            return
        outputs = self.graph.ops[op_id].outputs
        made = self._list_storages(t for t in outputs if self.base[t] == t)
        for viewed in self._list_storages(t for t in outputs if self.base[t] != t):
            self.noted[op_id] = self.ledger.add_op([viewed], [viewed], self.estimates_s[op_id])
        if made:
            inputs = self._list_storages(self._list_inputs(op_id))
            self.noted[op_id] = self.ledger.add_op(inputs, made, self.estimates_s[op_id])

    def _list_storages(self, tensors: Iterable[int]) -> list[int]:
        """Return the storages of `tensors`, or of their bases, that are in the ledger."""
        return [storage for t in tensors if (storage := self.storage[self.base[t]]) >= 0]

    def _make_room(self, op_id: int, wanted_bytes: int) -> None:
        while self.memory_bytes + wanted_bytes > self.budget_bytes:
            victim = self.ledger.choose_victim(self.clock_s)
            if victim is None:
                raise OnlineFailedError.out_of_memory(self.graph.ops[op_id], wanted_bytes, self.memory_bytes)
            self.free(self.tensor[victim])
            self._go_on()  # an op may need hundreds of evictions, each as long as its execution

    # Tensors.

    def _lock(self, t: int) -> None:
        self.locks[self.base[t]] += 1
        for storage in self._list_storages((t,)):
            self.ledger.pin(storage)

    def _unlock(self, t: int) -> None:
        self.locks[self.base[t]] -= 1
        for storage in self._list_storages((t,)):
            self.ledger.unpin(storage)

    def free(self, t: int) -> None:
        """Free tensor `t`, which may be recomputed."""
        self._leave(t)
        self.ledger.note_evicted(self.storage[t])

    def _leave(self, t: int) -> None:
        """Remove `t` and its views from memory; the first time, release the reference that the program held."""
        for view in self.views.get(t, ()):
            if self.live[view]:
                self.live[view] = False
                self.steps.append(Free(view))
        if self.live[t]:
            self.live[t] = False
            self.memory_bytes -= self.graph.tensors[t].size_bytes
            self.steps.append(Free(t))
        if (held := self.held.pop(t, None)) is not None:
            self.steps += [*map(Compute, self._hold_and_release(held)), Free(held)]

    def _hold_and_release(self, held: int) -> tuple[int, int]:
        """Return the ops that produce and read a tensor that represents another one."""
        return self.graph.tensors[held].producers[0], self.graph.consumers[held][0]

    # The program has no further use for a tensor.

    def _release(self, t: int) -> None:
        self.released[t] = True
        if self.deallocation is Deallocation.EAGER and self.live[t]:
            self.free(t)
        if self.deallocation is Deallocation.BANISH:
            self._try_to_banish(t)

    def _try_to_banish(self, t: int) -> None:
        """Banish `t` if the program has released it and all outputs of its readers are in memory."""
        if not self.released[t] or self.banished[t] or self.locks[t] or self.ledger.is_needed(self.storage[t]):
            return
        self._leave(t)
        self.banished[t] = True
        self.ledger.drop(self.storage[t])
        self.storage[t] = -1


def solve_online(
    request: Request,
    solver: str,
    rules: Iterable[tuple[Heuristic, Mapping[str, object]]],
    *,
    deallocation: Deallocation,
    thrash_factor: float,
    settings: Mapping[str, object],
) -> Result:
    """Return the fastest of the runs that end, one for each of `rules`: heuristics with their settings. See ``OnlineRun``."""
    graph, budget_bytes = request.graph, request.budget_bytes
    trials: list[Candidate] = []
    failures: list[OnlineFailedError] = []
    stop = partial(request.explain_end, _WORK_PER_OP)
    for rule, own in rules:
        run = OnlineRun(graph, budget_bytes, rule, deallocation=deallocation, thrash_factor=thrash_factor, stop=stop)
        try:
            trials.append(Candidate(run.run(), own))
        except OnlineFailedError as error:
            failures.append(error)
        if request.explain_end():
            break
    if trials:
        return answer(request, solver, trials, what=solver, settings=settings)
    # With more time, or a larger thrash factor, it might have ended; out of memory it cannot.
    nearest = min(failures, key=lambda failed: _HOPES.index(failed.reason))
    why = f"{solver} fails at {format_bytes(budget_bytes)}: {nearest}. Raise the budget, or use the solver windows"
    return build_failure(request, solver, why, nearest.reason, settings=settings)
