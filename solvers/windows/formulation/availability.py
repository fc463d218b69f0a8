"""Rows 1 to 4: what an execution needs is there. Relaxations."""

from solvers.windows.formulation.draft import ModelDraft


def add_inputs_of_new(draft: ModelDraft, k: int) -> None:
    """Row 1: S[k,t] + R[k,p(t)] >= 1 for old t, not kept, read by a new op of window k; V + Y in place of S, with copies."""
    read = {t for v in range(draft.starts[k], draft.detail.ends[k] + 1) for t in draft.problem.inputs[v]}
    for t in sorted(read):
        if draft.is_handed(k, t):
            draft.add_one_of(draft.sources(k, t))


def add_inputs_of_repeated(draft: ModelDraft, k: int) -> None:
    """Row 2: R[k,i] <= S[k,t] + R[k,p(t)] for old t in in(i), kept ones apart; Q[k,i] likewise."""
    for i in range(draft.detail.ends[k]):
        column = draft.again.get((k, i))
        if column is None:
            continue
        for t in draft.problem.inputs[i]:
            if draft.is_handed(k, t):
                draft.add_only_with(column, draft.sources(k, t))


def add_hand_over(draft: ModelDraft, k: int) -> None:
    """Rows 3 and 4: S[k+1,t] <= S[k,t] + R[k,p(t)] for old t. Kept tensors are there from the first."""
    for i in range(draft.starts[k]):
        for t in draft.problem.outputs[i]:
            column = draft.handed.get((k + 1, t))
            if column is not None and column != draft.handed[k, t]:
                draft.add_only_with(column, draft.room(k, t))
