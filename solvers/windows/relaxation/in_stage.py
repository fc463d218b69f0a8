"""Checkmate's memory rows inside chosen stages. A restriction, not a relaxation.

They assume that a stage {v} executes each op at most once more, in program order, and then v. That excludes schedules, so the
optimum of a program with these rows is no bound and its infeasibility no proof; but its solutions fit where the relaxation's do
not.

    W[k,t,c]  at least "t is needed in window k by c, a consumer that is recomputed, or after it"

In a prototype these rows excluded all schedules of three of 400 random graphs of four to seven ops that have some. So they are in
no model that proves a bound.
"""

from solvers.windows.relaxation.draft import ModelDraft


def add_memory_in_order(draft: ModelDraft) -> None:
    """Add for `discretization.ordered`: again(x) R[k,x] + sum over old t outside held(x) of b_t live(t, x) <= M, window k = {v}.

    live(t, x) = S[k,t] if p(t) > x, else 1 if t is needed after x: by v, by a recomputed consumer between x and v, or to be
    handed over (Checkmate, equations 5 to 8).
    """
    stages = _Stages(draft)
    for v, x in sorted(draft.discretization.ordered):
        stages.add_memory(draft.discretization.find_window(v), v, x)


class _Stages:
    def __init__(self, draft: ModelDraft) -> None:
        self.draft = draft
        self.wanted: dict[tuple[int, int, int], int] = {}

    def add_memory(self, k: int, v: int, x: int) -> None:
        draft, problem = self.draft, self.draft.problem
        column = draft.recomputed.get((k, x))
        if column is None:
            return
        own = problem.held[x]
        read = set(problem.inputs[v])
        columns, values = [column], [float(problem.recompute_bytes[x])]
        taken = 0
        for i in range(v):
            for t in problem.outputs[i]:
                size = problem.sizes[t]
                if t in own or not size:
                    continue
                if problem.kept[t] or (i < x and t in read):
                    taken += size
                    continue
                live = draft.handed.get((k, t)) if i > x else self.require_wanted_after(k, t, x)
                if live is not None:
                    columns.append(live)
                    values.append(size)
        draft.add_memory(k, columns, values, taken)

    def require_wanted_after(self, k: int, t: int, x: int) -> int | None:
        """Return the column of: t, which the new op does not read, is read in window k after x or is handed over."""
        draft = self.draft
        reader = next((c for c in draft.problem.graph.consumers[t] if c > x and (k, c) in draft.recomputed), None)
        if reader is None:
            return draft.handed.get((k + 1, t))
        key = (k, t, reader)
        if key not in self.wanted:
            column = self.wanted[key] = draft.add_column()
            draft.add_row([column, draft.recomputed[k, reader]], [1.0, -1.0], 0.0, float("inf"))
            later = self.require_wanted_after(k, t, reader)
            if later is not None:
                draft.add_row([column, later], [1.0, -1.0], 0.0, float("inf"))
        return self.wanted[key]
