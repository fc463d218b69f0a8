"""Row 15: ops that are executed at all, with inputs that have been produced. A relaxation.

u[i]  op i, which need not be executed, is executed at all: in its place or elsewhere, in any window

Rows 1 to 3 state this window by window, where fractions may add up: half an execution, offloaded in each of two windows, is a
whole tensor on the host; and half an execution in each of two windows is a whole one, for which half an input was produced.
"""

from collections.abc import Sequence

from planner.solvers.windows.relaxation.draft import NONE, ModelDraft


def add_executed_at_all(draft: ModelDraft) -> None:
    """Add row 15, for tensors without a sure producer.

    u[i] >= z[i], R[k,i] and Q[k,i]; u[i] <= their sum; sum of u[p] over the producers p of t >= 1 if a sure op reads t, >= u[i]
    if op i does, and >= the sum of first_c over the alternatives c of a place that do.
    """
    problem, places = draft.problem, draft.problem.places
    if not (unsure := [i for i, sure in enumerate(places.sure) if not sure]):
        return
    recomputed: dict[int, list[int]] = {}
    for (_, i), column in draft.recomputed.items():
        recomputed.setdefault(i, []).append(column)
    for i in unsure:
        _add_use(draft, i, recomputed.get(i, []))
    read: set[int] = set()
    for i, inputs in enumerate(problem.inputs):
        for t in inputs:
            if not problem.producers[t] or any(places.sure[p] for p in problem.producers[t]):
                continue
            if i in draft.used:
                draft.add_only_with(draft.used[i], _list_uses(draft, [p for p in problem.producers[t] if p != i]))
            elif places.sure[i] and t not in read:
                read.add(t)
                draft.add_at_most((1.0, [], []), _list_uses(draft, problem.producers[t]), NONE)
    _add_places(draft, unsure)


def _add_use(draft: ModelDraft, i: int, recomputed: Sequence[int]) -> None:
    """Add the column of u[i], between each execution of i and their sum; none if i has no execution."""
    constant, columns, values = draft.get_execution(i)
    if not (constant or columns or recomputed):
        return
    used = draft.used[i] = draft.add_column()
    for column in recomputed:
        draft.add_only_with(column, [used])
    draft.add_at_most((constant, columns, values), [used], NONE)
    draft.add_only_with(used, list(recomputed), (constant, columns, values))


def _add_places(draft: ModelDraft, unsure: Sequence[int]) -> None:
    """Add the rows for tensors that several alternatives of a place read, at most one of which is executed."""
    problem, places = draft.problem, draft.problem.places
    readers: dict[tuple[int, int], list[int]] = {}
    for i in unsure:
        for t in () if places.optional[i] else problem.inputs[i]:
            if problem.producers[t] and not any(places.sure[p] for p in problem.producers[t]):
                readers.setdefault((places.last[i], t), []).append(i)
    for (_, t), ops in readers.items():
        if len(ops) > 1:
            draft.add_at_most(draft.sum_executions(ops), _list_uses(draft, problem.producers[t]), NONE)


def _list_uses(draft: ModelDraft, ops: Sequence[int]) -> list[int]:
    return [draft.used[p] for p in ops if p in draft.used]
