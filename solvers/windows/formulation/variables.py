"""The variables that every program has: what is executed again in a window, and what is handed over into it.

"Old" is an op or tensor of an earlier window, "new" one of window k.

    R[k,i]  old op i is executed again in window k
    Q[k,i]  op i, new in window k and not its last, is executed once more in that window
    S[k,t]  tensor t, made before window k, is handed over: it is in memory when e_(k-1) executes
            and stays until window k begins; kept tensors have S = 1 and no variable

Families of rows add their own: H (``memory.py``), U (``spans.py``), D, P and G (``chains.py``), W (``in_stage.py``);
A, Y, V, X and another W (``copies.py``).
"""

from collections.abc import Callable, Iterable

from solvers.windows.formulation.draft import Family, ModelDraft

Choices = Callable[[ModelDraft, int], Iterable[int]]  # ops that may be executed again in a window, in program order


def every_op(draft: ModelDraft, k: int) -> Iterable[int]:
    """All ops that are old or new in window k, but for its last."""
    return range(draft.detail.ends[k])


def variables(choices: Choices) -> Family:
    """The family of R, Q and S, with R and Q for `choices`."""

    def add_variables(draft: ModelDraft) -> None:
        for k in range(draft.first_window, draft.windows):
            _add_repeats(draft, k, choices(draft, k))
            _add_handed(draft, k)
        _add_frame(draft)

    return add_variables


def _add_repeats(draft: ModelDraft, k: int, choices: Iterable[int]) -> None:
    """R[k,i]: i old in k and worth executing in k or later; Q[k,i]: i new in k, i < e_k.

    Neither where what i reads has been written over by then.
    """
    problem, start = draft.problem, draft.starts[k]
    for i in choices:
        # A new op is worth executing once more only for the sake of what comes between.
        worth = problem.last_worth[i] >= (start if i < start else i + 2)
        if worth and problem.recomputable[i] and problem.last_again[i] >= start:
            draft.again[k, i] = draft.column(cost=problem.units(problem.time_s[i]))


def _add_handed(draft: ModelDraft, k: int) -> None:
    """S[k,t]: p(t) < a_k, t not kept, and wanted in window k or later.

    From one window to the next it is the same variable if nothing can happen to t in between.
    """
    problem, start = draft.problem, draft.starts[k]
    for i in range(start):
        for t in problem.outputs[i]:
            if not problem.kept[t] and problem.last_use[t] >= start:
                same = draft.handed.get((k - 1, t)) if _is_idle(draft, k - 1, t) else None
                draft.handed[k, t] = draft.column() if same is None else same


def _is_idle(draft: ModelDraft, k: int, t: int) -> bool:
    """Whether old t is neither made, read nor copied in window k: handed into it, it is handed on, or was for nothing."""
    copies = draft.problem.copies
    if copies is not None and t in copies.trips:
        return False
    if k <= draft.first_window or (k, draft.problem.producers[t]) in draft.again:
        return False  # what enters the first window may be settled, wanted or not
    start, end = draft.starts[k], draft.detail.ends[k]
    return not any(start <= c <= end or (k, c) in draft.again for c in draft.problem.graph.consumers[t])


def _add_frame(draft: ModelDraft) -> None:
    """S of what is settled: 1 or 0 for what enters the first window, 1 for what the last one must hand on."""
    entering, leaving = draft.frame.entering, draft.frame.leaving
    if entering is not None:
        for (k, t), column in draft.handed.items():
            if k == draft.first_window:
                draft.lower[column] = draft.upper[column] = float(t in entering)
    for t in sorted(leaving or ()):
        draft.handed[draft.windows, t] = draft.column(lower=1.0)
