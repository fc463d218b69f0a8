"""Rows 1 to 4: the inputs of each execution are available. Relaxations."""

from planner.solvers.windows.relaxation.draft import NONE, ModelDraft


def add_inputs_of_new(draft: ModelDraft, k: int) -> None:
    """Add row 1: S[k,t] + R[k,p(t)] >= 1 for old t, not kept, read by a new op of window k; with offloading V + Y in place of S.

    If t has several producers, the left side sums over them, including those of the window that are executed in their places
    before the reader. If the reader may not be executed, the right side is its execution.
    """
    problem, places = draft.problem, draft.problem.places
    readers: dict[int, list[int]] = {}
    for v in range(draft.starts[k], draft.discretization.ends[k] + 1):
        if not places.optional[v]:
            for t in problem.inputs[v]:
                readers.setdefault(t, []).append(v)
    for t, ops in sorted(readers.items()):
        if draft.is_made(k, t):
            continue
        sources = draft.list_sources(k, t)
        sure = next((v for v in ops if places.sure[v]), None)
        if sure is not None and not any(draft.starts[k] <= p <= sure for p in problem.producers[t]):
            draft.add_at_most((1.0, [], []), sources, NONE)
            continue
        by_place: dict[int, list[int]] = {}
        for v in ops:
            by_place.setdefault(places.last[v], []).append(v)
        for of_place in by_place.values():
            # At most one op is executed in a place.
            draft.add_at_most(
                draft.sum_executions(of_place), sources, draft.sum_productions(k, t, places.find_first(of_place[0]))
            )


def add_inputs_of_recomputed(draft: ModelDraft, k: int) -> None:
    """Add row 2: R[k,i] <= S[k,t] + R[k,p(t)] for old t in in(i) that are not kept; Q[k,i] likewise."""
    end = draft.discretization.ends[k]
    for i in range(end + 1):
        column = draft.recomputed.get((k, i))
        if column is None:
            continue
        for t in draft.problem.inputs[i]:
            if not draft.is_made(k, t):
                draft.add_only_with(column, draft.list_sources(k, t), draft.sum_productions(k, t, end + 1))


def add_beginnings_of_circles(draft: ModelDraft, k: int) -> None:
    """Add row 2 for ops that depend on each other: R[k,i] <= sum of S[k,t] + R[k,p] over their shared tensors t.

    Here p is a producer of t that does not depend on them. The first of these ops that is executed in window k reads a tensor
    that was in memory, or that p has produced.
    """
    problem = draft.problem
    for circle in problem.circles:
        recomputations = [draft.recomputed[k, i] for i in circle if (k, i) in draft.recomputed]
        if not recomputations:
            continue
        inside = {t for i in circle for t in problem.inputs[i]} & {t for i in circle for t in problem.outputs[i]}
        if any(draft.is_settled(k, t) for t in inside):
            continue
        outside = sorted({p for t in inside for p in problem.producers[t]}.difference(circle))
        sources = [column for t in sorted(inside) for column in draft.list_held(k, t)]
        sources += [draft.recomputed[k, p] for p in outside if (k, p) in draft.recomputed]
        also = draft.sum_executions(p for p in outside if draft.starts[k] <= p <= draft.discretization.ends[k])
        for column in recomputations:
            draft.add_only_with(column, sources, also)


def add_hand_over(draft: ModelDraft, k: int) -> None:
    """Add rows 3 and 4: S[k+1,t] <= S[k,t] + R[k,p(t)] for old t. Kept tensors stay in memory once they are produced."""
    end = draft.discretization.ends[k]
    for i in range(end + 1):
        for t in draft.problem.outputs[i]:
            column = draft.handed.get((k + 1, t))
            if column is None or column == draft.handed.get((k, t)) or i != draft.problem.producer[t]:
                continue
            if not draft.is_made(k, t):
                draft.add_only_with(column, draft.list_memory_columns(k, t), draft.sum_productions(k, t, end + 1))
