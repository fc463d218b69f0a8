"""Rows 16 to 21: other streams, which work in parallel with the main one. Relaxations; none for graphs with one device.

    idle    time from the end of the main device's work, with its waits, to the end of the step; costs 1
    end     end of the step, at most the step without recomputation plus the objective
    O[i]    op i is executed, but not in its place
    F[v]    at most the time of the first result of the program's op v, on any device
    E[v]    at most the end of the execution in the place of v
    C[d,v]  at most the time at which device d has finished its executions in places up to that of v

Memory of the main device is in rows 5 to 8, in the order of issue; tensors of other devices have no size there, and their ops no
cost.

Known weakness: rows with a large factor are weak while z are fractions, and effective once z are fixed. Most graphs of a few ops
are solved to optimality; for steps of a dozen ops and more the bound comes mainly from rows 18 and 19.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from planner.graphs.pools import COMPUTE
from planner.solvers.problem import OBJECTIVE_SCALE, Problem
from planner.solvers.streams import get_workspace_bytes, list_sizes
from planner.solvers.windows.relaxation.draft import ModelDraft, Sum
from planner.solvers.windows.relaxation.paths import Paths

TermsByColumn = dict[int, float]  # of a row: value by column
Over = tuple[int | None, int | None, float]


def add_kept(draft: ModelDraft, k: int) -> None:
    """Add row 16: S[k+1,t] >= S[k,t], R[k,p] and first_p for the producers p of a kept t that a pass end reads.

    Any of them may produce it first, at any time, and it stays from then on.
    """
    for t in sorted(draft.problem.requested):
        after = draft.handed.get((k + 1, t))
        if after is None:
            continue
        before = draft.handed.get((k, t))
        for column in (*([] if before in {None, after} else [before]), *draft.list_recomputing(k, t)):
            assert column is not None
            draft.add_row([after, column], [1.0, -1.0], 0.0, np.inf)
        constant, columns, values = draft.sum_productions(k, t, draft.discretization.ends[k] + 1)
        if constant or columns:
            draft.add_row([after, *columns], [1.0, *(-value for value in values)], constant, np.inf)


def add_memory_elsewhere(draft: ModelDraft, k: int) -> None:
    """Add row 17: the memory of another pool with a capacity when e_k executes, like row 5.

    own(v) first_v + sum over t outside io(v) of b_t S[k+1,t] <= its capacity, for each op v that may be executed in the place.
    """
    problem, end = draft.problem, draft.discretization.ends[k]
    for pool in problem.graph.pools[1:]:
        if pool.capacity_bytes is None:
            continue
        sizes, capacity_bytes = (
            list_sizes(problem.graph, pool),
            pool.capacity_bytes - problem.graph.static_bytes_by_pool[pool.name],
        )
        there = [t for t, size in enumerate(sizes) if size and (k + 1, t) in draft.handed]
        unit = max(1.0, capacity_bytes / 1e3)
        for v in problem.places.list_alternatives(end):
            row = LinearExpression()
            io = {*problem.inputs[v], *problem.outputs[v]}
            for t in there:
                if t not in io:
                    row.add(draft.handed[k + 1, t], sizes[t] / unit)
            op = problem.graph.ops[problem.places.ids[v]]
            if own_bytes := sum(sizes[t] for t in io) + get_workspace_bytes(pool, op):
                row.add_sum(draft.get_execution(v), own_bytes / unit)
            if row.terms:
                draft.add_row(*row.list_terms(), -np.inf, capacity_bytes / unit - row.constant)


def add_makespan(draft: ModelDraft) -> None:
    """Add rows 18 to 20 and the objective that they bound: the last family of a program, since it needs all costs."""
    if draft.problem.placed:
        _Makespan(draft).add()


@dataclass(slots=True)
class LinearExpression:
    """A sum of a constant and terms, with each column once."""

    constant: float = 0.0
    terms: TermsByColumn = field(default_factory=dict)

    def add(self, column: int, value: float) -> None:
        """Add a term."""
        self.terms[column] = self.terms.get(column, 0.0) + value

    def add_sum(self, total: Sum, weight: float = 1.0) -> None:
        """Add a sum, multiplied by `weight`."""
        self.constant += weight * total[0]
        for column, value in zip(total[1], total[2], strict=True):
            self.add(column, weight * value)

    def list_terms(self) -> tuple[list[int], list[float]]:
        """Return the columns and their values."""
        return list(self.terms), list(self.terms.values())


class _Makespan:
    """A builder of the rows.

    Attributes:
        recomputed: for each op the columns of its executions outside its place.
        paths: the tensors that each op of the program depends on, whichever alternative is executed.
    """

    def __init__(self, draft: ModelDraft) -> None:
        self.draft = draft
        self.problem = draft.problem
        self.recomputed: list[list[int]] = [[] for _ in range(self.problem.ops)]
        for (_, i), column in draft.recomputed.items():
            self.recomputed[i].append(column)
        self.paths = Paths(self.problem)
        seconds = sum(map(self.problem.get_seconds, range(self.problem.ops)))
        self.longest = self.problem.convert_to_units(seconds) * (
            2 * draft.windows + 1
        )  # all costs of R, Q and z, one after the other

    def convert_to_units(self, i: int) -> float:
        return self.problem.convert_to_units(self.problem.get_seconds(i))

    def time(self) -> int:
        """Add a variable for a point in time and return its column."""
        return self.draft.add_column(upper=self.longest)

    def add(self) -> None:
        draft = self.draft
        idle = draft.add_column(1.0, upper=self.longest)
        if self.problem.places.plain and not self.problem.round_trips:
            self.add_ends(idle)
        # The objective counts what the main device does and waits for, and then is idle: so much is the end at most.
        costs = {column: -cost for column, cost in enumerate(draft.cost) if cost}
        end = self.time()
        draft.add_row([end, *costs], [1.0, *costs.values()], -np.inf, OBJECTIVE_SCALE)
        for stream in self.problem.graph.streams:
            if stream != COMPUTE:
                self.add_stream([i for i, op in enumerate(self.paths.ops) if op.stream == stream], end)
        self.add_paths(end)

    def add_stream(self, ops: Iterable[int], end: int) -> None:
        """Add row 18: sum over the ops of a stream of their times, for each execution, <= end."""
        row = LinearExpression()
        for i in ops:
            if unit := self.convert_to_units(i):
                row.add_sum(self.draft.get_execution(i), unit)
                for column in self.recomputed[i]:
                    row.add(column, unit)
        row.add(end, -1.0)
        self.draft.add_row(*row.list_terms(), -np.inf, -row.constant)

    def add_ends(self, idle: int) -> None:
        """Add row 21: the main device waits for the first transfers, and the last ones begin when it has ended.

        idle + sum of c_i R[k,i] over the windows k behind the program's last op on the main device
            >= seconds of the transfers up to those that its first op there reads
             + seconds of the transfers from the first one on that reads an output of that last op

        Known weakness: without a window that ends with that op the last transfers do not count.
        """
        problem, draft = self.problem, self.draft
        head, tail, last = find_exposed(problem)
        row = LinearExpression()
        row.add(idle, 1.0)
        behind = [k for k in range(draft.windows) if draft.starts[k] > last]
        for (k, i), column in draft.recomputed.items():
            if k in behind:
                row.add(column, problem.convert_to_units(problem.time_s[i]))
        exposed = [*head, *(tail if behind and draft.starts[behind[0]] == last + 1 else ())]
        if least := sum(map(self.convert_to_units, exposed)):
            draft.add_row(*row.list_terms(), least, np.inf)

    def add_paths(self, end: int) -> None:
        """Add row 19 for each op of the program and its dependencies."""
        self.only = self.add_executed_elsewhere()
        times: dict[int, int] = {}
        followed: set[int] = set()
        for v in self.paths.program:
            times[v] = self.time()
            self.add_path(v, self.paths.find_longest_static(v), times)
            for t in self.paths.list_needed(v):
                producer = self.paths.producer[t]
                followed.add(producer)
                self.add_path(v, (t, None, 0.0), times)
                for device in self.paths.list_reading_devices(v, t):
                    if copied := self.paths.copied.get((t, device)):
                        self.add_path(v, (t, device, copied), times)
        for v, column in times.items():
            if v not in followed:
                self.draft.add_row([column, end], [1.0, -1.0], -np.inf, 0.0)
        self.add_turns(times, end)

    def add_turns(self, times: dict[int, int], end: int) -> None:
        """Add row 20 for each op of the program: executions in places on one device are in the order of the places."""
        done: dict[tuple[int, bool], int] = {}  # the column of C at the previous place
        for v in self.paths.program:
            ended = self.time()
            others = [self.only[b] for b in self.paths.list_with_replacements(v) if b in self.only]
            self.draft.add_row([ended, times[v], *others], [1.0, -1.0, *[-self.longest] * len(others)], -np.inf, 0.0)
            self.draft.add_row([ended, end], [1.0, -1.0], -np.inf, 0.0)
            for t in self.paths.list_needed(v):
                for device in self.paths.list_reading_devices(v, t):
                    self.add_path(v, (t, device, self.paths.copied.get((t, device), 0.0)), times, ended)
            for turn, alternatives in self.paths.group_by_turn(v).items():
                done[turn] = self.add_turn(alternatives, done.get(turn), ended)
        for column in done.values():
            self.draft.add_row([column, end], [1.0, -1.0], -np.inf, 0.0)

    def add_turn(self, alternatives: Iterable[int], before: int | None, ended: int) -> int:
        """Return the column of C[d,v], for the alternatives in the place of v on d, after `before`, that of the previous place.

        C[d,v] >= C[d,u] + seconds,  E[v] >= C[d,u] + seconds - M (1 - executed),  C[d,v] >= E[v] - M (1 - executed)
        """
        after, longest = self.time(), self.longest
        row, executed = LinearExpression(), LinearExpression()
        if before is not None:
            row.add(before, 1.0)
        for c in alternatives:
            row.add_sum(self.draft.get_execution(c), self.convert_to_units(c))
            executed.add_sum(self.draft.get_execution(c), longest)
        late = LinearExpression(row.constant + executed.constant - longest, dict(row.terms))
        for column, value in executed.terms.items():
            late.add(column, value)
        for one, later in ((row, after), (late, ended)):
            one.add(later, -1.0)
            self.draft.add_row(*one.list_terms(), -np.inf, -one.constant)
        executed.add(ended, 1.0)
        executed.add(after, -1.0)
        self.draft.add_row(*executed.list_terms(), -np.inf, longest - executed.constant)
        return after

    def add_executed_elsewhere(self) -> dict[int, int]:
        """Return the columns of O[i], for ops that may be executed outside their place only.

        O[i] <= sum of R[k,i], O[i] <= 1 - first_i
        """
        only: dict[int, int] = {}
        for i, recomputed in enumerate(self.recomputed):
            if recomputed and not (self.problem.places.sure[i] or self.problem.places.optional[i]):
                column = only[i] = self.draft.add_column()
                self.draft.add_only_with(column, list(dict.fromkeys(recomputed)))
                constant, columns, values = self.draft.get_execution(i)
                self.draft.add_row([column, *columns], [1.0, *values], -np.inf, 1.0 - constant)
        return only

    def add_path(self, v: int, over: Over, times: dict[int, int], ended: int | None = None) -> None:
        """Add row 19: F[p] + seconds of the op in the place of v + copied (first_c - first_q - O[q]) - (M - c_b) O[b] <= F[v].

        Here p produces t; c in the place of v reads t on a device; q ranges over the ops that produce t there; and b over the
        alternatives to v, with M the longest time of the first terms. If b is executed outside its place, at most F[p] + c_b <=
        F[v] is left. If M < c_b, M - c_b is 0.

        Args:
            over: t, the device, and the seconds of a transfer of t to it; None for no t, or no transfer.
            times: columns of F.
            ended: column of E[v], for the execution in its place, instead of F[v].
        """
        t, device, copied = over
        draft, paths, row = self.draft, self.paths, LinearExpression()
        alternatives = paths.list_alternatives(v)
        for c in alternatives:
            row.add_sum(draft.get_execution(c), self.convert_to_units(c))
            if t is not None and copied and device in paths.list_devices_of_read(c, t):
                row.add_sum(draft.get_execution(c), copied)
        if t is not None and copied:
            for q in paths.list_computing(t, device):
                row.add_sum(draft.get_execution(q), -copied)
                if q in self.only:
                    row.add(self.only[q], -copied)
        most = max(map(self.convert_to_units, alternatives)) + copied
        for b in paths.list_with_replacements(v) if ended is None else ():
            if b in self.only:
                row.add(self.only[b], min(0.0, self.convert_to_units(b) - most))
        if t in paths.producer:
            row.add(times[paths.producer[t]], 1.0)
        row.add(times[v] if ended is None else ended, -1.0)
        draft.add_row(*row.list_terms(), -np.inf, -row.constant)


def find_exposed(problem: Problem) -> tuple[list[int], list[int], int]:
    """Return the transfers before the first op on the main device, those after the last one, and this op.

    An op that takes no time does not count as the first. Transfers count from the first one on that reads an output of the last.
    """
    transfers = problem.streams.transfers
    moved = {i: transfers[op] for i, op in enumerate(problem.places.ids) if op in transfers}
    computing = [i for i in range(problem.ops) if i not in moved]
    first, last = next((i for i in computing if problem.time_s[i]), computing[-1]), computing[-1]
    read = {p for i in computing if i <= first for t in problem.inputs[i] for p in problem.producers[t]}
    early = [i for i, transfer in moved.items() if transfer.may_be_early]
    awaited = max(read.intersection(early), default=-1)
    sent = [i for i, transfer in moved.items() if not transfer.may_be_early]
    begin = next((i for i in sent if not set(problem.outputs[last]).isdisjoint(problem.inputs[i])), problem.ops)
    return [i for i in early if i <= awaited], [i for i in sent if i >= begin], last
