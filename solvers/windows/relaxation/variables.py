"""The variables of every program: recomputations in a window, and tensors handed over into it.

"Old" is an op or tensor of an earlier window, "new" one of window k.

    R[k,i]  old op i is recomputed in window k
    Q[k,i]  op i, new in window k and not its last, is executed once more in that window
    z[b]    b is executed in place of the ops that it replaces, at the last of them
    S[k,t]  tensor t, produced before window k, is handed over: it is in memory when e_(k-1) executes
            and stays until window k begins; kept tensors have S = 1 and no variable

Families of rows add their own, which their modules describe.
"""

from collections.abc import Callable, Iterable

import numpy as np

from planner.solvers.windows.relaxation.draft import ModelDraft

RecomputableOps = Callable[[ModelDraft, int], Iterable[int]]  # ops that may be recomputed in a window, in program order


def list_ops(draft: ModelDraft, k: int) -> Iterable[int]:
    """Return all ops that are old or new in window k."""
    return range(draft.discretization.ends[k] + 1)


def write_variables(recomputable: RecomputableOps, draft: ModelDraft) -> None:
    """Write z, R, Q and S, with R and Q for the `recomputable` ops."""
    _add_alternatives(draft)
    for k in range(draft.windows):
        _add_recomputations(draft, k, recomputable(draft, k))
        _add_handed(draft, k)


def _add_alternatives(draft: ModelDraft) -> None:
    """Add z[b], at the time of b less that of its group; at most one op replaces each op."""
    problem, places = draft.problem, draft.problem.places
    for b, group in enumerate(places.replaces):
        if group:
            seconds = problem.time_s[b] - sum(problem.time_s[i] for i in group)
            fits = problem.own_bytes[b] <= problem.capacity_bytes
            draft.instead[b] = draft.add_column(integer=True, cost=problem.convert_to_units(seconds), upper=float(fits))
    for group in sorted({of_op for of_op in places.replaced_by if len(of_op) > 1}):
        draft.add_row([draft.instead[b] for b in group], [1.0] * len(group), -np.inf, 1.0)
    for alternatives, is_executed in sorted(draft.discretization.decided):
        draft.add_row([draft.instead[b] for b in alternatives], [1.0] * len(alternatives), float(is_executed), float(is_executed))


def _add_recomputations(draft: ModelDraft, k: int, recomputable: Iterable[int]) -> None:
    """Add R[k,i] if i is old in k and useful in k or later; Q[k,i] if i is new in k, and not executed at its end.

    Neither is added if an input of i has been written in place by then. An optional op that must run only once does so in one
    window.
    """
    problem, places, start = draft.problem, draft.problem.places, draft.starts[k]
    for i in recomputable:
        if i < start:
            worth = problem.last_worth[i] >= start
        elif places.sure[i]:
            # A second execution of a new op is useful only for the ops in between.
            worth = places.last[i] < draft.discretization.ends[k] and problem.last_worth[i] >= i + 2
        else:
            worth = not places.replaces[i] or places.last[i] < draft.discretization.ends[k]
        if worth and problem.recomputable[i] and problem.recompute_before[i] >= start:
            draft.recomputed[k, i] = draft.add_column(integer=True, cost=problem.convert_to_units(problem.time_s[i]))
            if places.optional[i] and not problem.graph.ops[places.ids[i]].recomputable:
                earlier = [draft.recomputed[j, i] for j in range(k) if (j, i) in draft.recomputed]
                draft.add_row([draft.recomputed[k, i], *earlier], [1.0] * (1 + len(earlier)), -np.inf, 1.0)


def _add_handed(draft: ModelDraft, k: int) -> None:
    """Add S[k,t] if p(t) is before window k, t is not kept or not settled yet, and t is needed in window k or later.

    Consecutive windows share the variable if t is idle in between.
    """
    problem, start = draft.problem, draft.starts[k]
    for i in range(start):
        for t in problem.outputs[i]:
            if i == problem.producer[t] and not draft.is_settled(k, t) and problem.last_use[t] >= start:
                same = draft.handed.get((k - 1, t)) if _is_idle(draft, k - 1, t) else None
                # Tensors without size are handed over whenever possible.
                whole = not problem.placed or problem.sizes[t] > 0
                draft.handed[k, t] = draft.add_column(integer=whole) if same is None else same


def _is_idle(draft: ModelDraft, k: int, t: int) -> bool:
    """Return True if old t is neither produced, read nor transferred in window k, so that it is handed over on or was useless."""
    if t in draft.problem.round_trips:
        return False
    if k <= 0 or draft.list_recomputing(k, t):
        return False
    start, end = draft.starts[k], draft.discretization.ends[k]
    if any(start <= p <= end for p in draft.problem.producers[t]):
        return False
    return not any(start <= c <= end or (k, c) in draft.recomputed for c in draft.problem.consumers[t])
