"""Rows 5 to 7: memory, at moments at which it is known what is certainly there. Relaxations.

They have variables of their own: H[k,t] is at least S[k+1,t] - R[k,p(t)] (or - Q), so t, made before the step in
question, is there in all the window because it is handed on and not made again.
"""

from collections.abc import Container, Iterable, Iterator

import numpy as np

from solvers.windows.formulation.draft import ModelDraft


def add_memory_at_end(draft: ModelDraft, k: int) -> None:
    """Row 5: own(e_k) + sum over other t, p(t) < e_k, of b_t S[k+1,t] <= M, own = bytes(io) + w. Exact."""
    problem, end = draft.problem, draft.detail.ends[k]
    columns: list[int] = []
    values: list[float] = []
    taken = problem.own_bytes[end]
    for t in _beside(draft, end, range(end)):
        if problem.kept[t]:
            taken += problem.sizes[t]
        elif (column := draft.handed.get((k + 1, t))) is not None:
            columns.append(column)
            values.append(problem.sizes[t])
    draft.add_memory(k, columns, values, taken)


def add_memory_inside(draft: ModelDraft) -> None:
    """Row 6 for `detail.firsts`: own(v) + sum over other t, p(t) < v, of b_t h_t <= M for v inside window k.

    h_t = 1                                t is kept
        = 1 - R[k,p(t)], or 1 - Q[k,p(t)]  t has a consumer c, v < c <= e_k: it is there unless it is made again;
          - Y[k,t]                         or is fetched from the host
        = H[k,t]                           otherwise, if t can be handed on
    """
    problem = draft.problem
    for v in sorted(draft.detail.firsts):
        k = draft.detail.window_of(v)
        # What is before the first window is settled; at the end of a window row 5 is exact.
        if draft.first_window <= k < draft.windows and v != draft.detail.ends[k]:
            read = {t for c in range(v + 1, draft.detail.ends[k] + 1) for t in problem.inputs[c]}
            columns, values, taken = _certain(draft, k, _beside(draft, v, range(v)), read)
            draft.add_memory(k, columns, values, problem.own_bytes[v] + taken)


def add_memory_of_repeats(draft: ModelDraft) -> None:
    """Row 7 for `detail.repeats`, see ``memory_of_repeat``."""
    for end, x in sorted(draft.detail.repeats):
        k = draft.detail.window_of(end)
        if (k, x) in draft.again:
            draft.add_memory(k, *memory_of_repeat(draft, k, x))


def memory_of_repeat(draft: ModelDraft, k: int, x: int) -> tuple[list[int], list[float], int]:
    """Columns and bytes of row 7, again(x) R[k,x] + sum over old t outside io(x) of b_t h_t <= M, and the constant bytes.

    again(x) = bytes(io(x)) + w_x, and the kept outputs of x once more, which are in memory already and made a second time.

    h_t = 1                t is kept
        = 1 - R[k,p(t)]    the window is {v}, and v reads t (- Y[k,t])
        = H[k,t]           otherwise, if t can be handed on
    """
    problem, start = draft.problem, draft.starts[k]
    read = set(problem.inputs[start]) if draft.detail.is_single(k) else set()
    columns, values, taken = _certain(draft, k, _beside(draft, x, range(start)), read)
    return [draft.again[k, x], *columns], [float(problem.again_bytes[x]), *values], taken


def _beside(draft: ModelDraft, op: int, makers: Iterable[int]) -> Iterator[int]:
    """Tensors of some size that `makers` make, but for what `op` reads or makes."""
    problem = draft.problem
    own = {*problem.inputs[op], *problem.outputs[op]}
    return (t for i in makers for t in problem.outputs[i] if t not in own and problem.sizes[t])


def _certain(draft: ModelDraft, k: int, tensors: Iterable[int], read: Container[int]) -> tuple[list[int], list[float], int]:
    """The sum of b_t h_t: columns, bytes, and the constant bytes.

    Args:
        read: what is read at the end of window k, or at least later than the step in question.
    """
    problem = draft.problem
    columns: list[int] = []
    values: list[float] = []
    taken = 0
    for t in tensors:
        size = problem.sizes[t]
        if problem.kept[t]:
            taken += size
        elif t in read:
            taken += size
            columns += (anew := draft.brought(k, t))
            values += [-size] * len(anew)
        elif (k + 1, t) in draft.handed:
            columns.append(_lasts(draft, k, t))
            values.append(size)
    return columns, values, taken


def _lasts(draft: ModelDraft, k: int, t: int) -> int:
    """Column of H[k,t] >= S[k+1,t] - R[k,p(t)] - A[k,t]: S itself where p(t) is not executed again, nor t fetched."""
    anew = draft.made_anew(k, t)
    if not anew:
        return draft.handed[k + 1, t]
    if (k, t) not in draft.lasting:
        column = draft.lasting[k, t] = draft.column(integer=False)
        draft.rows.add([column, draft.handed[k + 1, t], *anew], [1.0, -1.0] + [1.0] * len(anew), 0.0, np.inf)
    return draft.lasting[k, t]
