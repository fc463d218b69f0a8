"""Row 9: precedence cuts: memory that recomputations before another one leave occupied. A relaxation.

Row 7 considers each recomputation by itself. But if x is recomputed so that z can be, and an output t of x is to stay, then t is
in memory while z executes, unless x is recomputed once more. With

    D[k,x]    1 if x is recomputed twice or more in window k, at the cost of its time
    P[k,x,z]  at least "every execution of old z in window k comes after one of x"
    G[k,t,z]  at least "x = p(t) is executed in window k, and t is in memory whenever z executes there"

for old x and z this holds for every schedule, whatever the order inside the window:

    P[x,z] >= R[z] - S[k,t]                     t in out(x) and in(z): only x can have produced t for z
    P[x,z] >= P[x,y] + R[z] - 1 - S[k,u]        u in in(z), produced by an old y other than x
    G[t,z] >= wanted(t) + P[x,z] - 1 - D[x]     wanted(t): S[k+1,t], or 1 if the window is {v} and v reads t

With offloading, A[k,t] is added to S[k,t] and A[k,u] to S[k,u] above, and subtracted in the last row.
"""

from solvers.windows.relaxation.draft import ModelDraft
from solvers.windows.relaxation.memory import sum_recomputation_memory


def add_precedence_cuts(draft: ModelDraft) -> None:
    """Add row 9 for `discretization.precedences`: row 7 of z, with b_t G[k,t,z] for the outputs t of its x that may be needed."""
    sources: dict[tuple[int, int], list[int]] = {}
    for end, x, z in sorted(draft.discretization.precedences):
        sources.setdefault((end, z), []).append(x)
    cuts = _PrecedenceCuts(draft)
    for (end, z), ops in sources.items():
        cuts.add_memory(draft.discretization.find_window(end), z, ops)


class _PrecedenceCuts:
    def __init__(self, draft: ModelDraft) -> None:
        self.draft = draft
        self.follows: dict[tuple[int, int, int], int | None] = {}

    def add_memory(self, k: int, z: int, sources: list[int]) -> None:
        draft, problem = self.draft, self.draft.problem
        if (k, z) not in draft.recomputed or z >= draft.starts[k]:
            return
        columns, values, taken = sum_recomputation_memory(draft, k, z)
        own = problem.held[z]
        for x in sources:
            for t in problem.outputs[x]:
                if t not in own and problem.sizes[t] and not problem.kept[t] and len(problem.producers[t]) == 1:
                    column = self.add_stay(k, x, t, z)
                    if column is not None:
                        columns.append(column)
                        values.append(problem.sizes[t])
        draft.add_memory(k, columns, values, taken)

    def add_stay(self, k: int, x: int, t: int, z: int) -> int | None:
        """Return the column of G[k,t,z], None if it is 0."""
        draft = self.draft
        after = self.require_later(k, x, z)
        start = draft.starts[k]
        read = draft.discretization.is_single(k) and draft.problem.places.sure[start] and t in draft.problem.inputs[start]
        handed = draft.handed.get((k + 1, t))
        if after is None or (not read and handed is None):
            return None
        column = draft.add_column()
        columns, values = [column, after, self.require_executed_twice(k, x)], [1.0, -1.0, 1.0]
        if (k, t) in draft.taken:
            columns, values = [*columns, draft.taken[k, t]], [*values, 1.0]
        if read:
            draft.add_row(columns, values, 0.0, float("inf"))
        elif handed is not None:
            draft.add_row([*columns, handed], [*values, -1.0], -1.0, float("inf"))
        return column

    def require_executed_twice(self, k: int, x: int) -> int:
        """Return the column of D[k,x]."""
        draft = self.draft
        if (k, x) not in draft.twice:
            draft.twice[k, x] = draft.add_column(integer=True, cost=draft.cost[draft.recomputed[k, x]])
        return draft.twice[k, x]

    def require_later(self, k: int, x: int, z: int) -> int | None:
        """Return the column of P[k,x,z], None if it is not bounded from below."""
        key = (k, x, z)
        if key in self.follows:
            return self.follows[key]
        self.follows[key] = None
        draft, problem = self.draft, self.draft.problem
        if (k, x) not in draft.recomputed or (k, z) not in draft.recomputed:
            return None
        column: int | None = None
        recomputed = draft.recomputed[k, z]
        for u in problem.inputs[z]:
            y = problem.producer[u]
            if y < x or problem.kept[u] or len(problem.producers[u]) > 1:
                continue
            there = [draft.handed[k, u], *([draft.taken[k, u]] if (k, u) in draft.taken else [])]
            earlier = None if y == x else self.require_later(k, x, y)
            if y != x and earlier is None:
                continue
            if column is None:
                column = draft.add_column()
            if earlier is None:
                draft.add_row([column, recomputed, *there], [1.0, -1.0] + [1.0] * len(there), 0.0, float("inf"))
            else:
                draft.add_row([column, earlier, recomputed, *there], [1.0, -1.0, -1.0] + [1.0] * len(there), -1.0, float("inf"))
        self.follows[key] = column
        return column
