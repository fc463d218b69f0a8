"""Row 14: limited resources, of which each op that is executed at all uses some. A relaxation."""

import math

import numpy as np

from planner.solvers.windows.relaxation.draft import ModelDraft


def add_resources(draft: ModelDraft) -> None:
    """Add row 14 for each resource with a limit L: sum of v_i u_i <= L, with u of row 15; none if all ops together respect L.

    The row is in units of L. An op that exceeds L by itself has u = 0.
    """
    problem = draft.problem
    ops = [problem.graph.ops[op] for op in problem.places.ids]
    for resource, limit in problem.graph.limits:
        amounts = [op.used(resource) for op in ops]
        if math.fsum(amounts) <= limit:
            continue
        columns: list[int] = []
        shares: list[float] = []
        for i, amount in enumerate(amounts):
            if not amount or i not in draft.used:
                continue
            if amount > limit * (1 + _ROUNDING):
                draft.upper[draft.used[i]] = 0.0
            elif limit > 0:
                columns.append(draft.used[i])
                shares.append(amount / limit)
        draft.add_row(columns, shares, -np.inf, 1.0 + _ROUNDING)


_ROUNDING = 1e-9  # as in ``planner.graphs.ir``
