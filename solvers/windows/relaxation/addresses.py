"""Row 21: tensors whose addresses do not fit the arena are not in memory together. A relaxation of each conflict."""

import numpy as np

from solvers.conflicts import Residency, Stay
from solvers.windows.relaxation.draft import ModelDraft

Literals = set[tuple[int, bool]]  # columns, and the values at which a stay may be broken


def add_conflicts(draft: ModelDraft) -> None:
    """Add row 21 for each conflict of residency: sum over its stays of (1 - S) and (R or Q) in their windows >= 1."""
    for conflict in draft.problem.conflicts:
        if isinstance(conflict, Residency):
            found = [_list_breaks(draft, stay) for stay in conflict.stays]
            literals = sorted({literal for breaks in found if breaks for literal in breaks})
            if all(breaks is not None for breaks in found):
                signs = [1.0 if value else -1.0 for _, value in literals]
                draft.add_row([column for column, _ in literals], signs, 1.0 - signs.count(-1.0), np.inf)


def _list_breaks(draft: ModelDraft, stay: Stay) -> Literals | None:
    """Return columns and values such that with all others the tensor stays; None if it never does.

    In the windows from that of the first op to that of the last one, t stays if it is handed over, S[k+1,t] = 1, and not
    executed again, R[k,p(t)] = 0 or Q; in the last one also if a new op there that is not before the last op reads it. Where the
    window ends with the first op it is enough that it is there at the end.
    """
    problem, discretization, t = draft.problem, draft.discretization, stay.tensor
    if problem.kept[t]:
        return set()
    found: Literals = set()
    for k in range(discretization.find_window(stay.first), discretization.find_window(stay.last) + 1):
        end = discretization.ends[k]
        begins_at_end = end == stay.first
        if not begins_at_end and (k, problem.producer[t]) in draft.recomputed:
            found.add((draft.recomputed[k, problem.producer[t]], True))
        if stay.last <= end:
            if begins_at_end and t in (*problem.inputs[end], *problem.outputs[end]):
                continue
            if not begins_at_end and any(stay.last <= c <= end for c in problem.consumers[t]):
                continue
        if (k + 1, t) not in draft.handed:
            return None
        found.add((draft.handed[k + 1, t], False))
    return found
