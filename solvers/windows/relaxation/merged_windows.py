"""Row 8: rows 1 to 3 for merged windows: consecutive ones, taken as one. A relaxation.

    U[w,i]  op i, old in the first window of the merged window w, is recomputed in it
    E[w,t]  memory for t is allocated in it, to be filled from the host
    F[w,t]  the part of a reload of t that is done in it

For integers it follows from rows 1 to 3, but not for fractions, where half a tensor could be used again in every window.
"""

from planner.solvers.windows.relaxation.discretization import list_halves
from planner.solvers.windows.relaxation.draft import NONE, ModelDraft


def add_merged_windows(draft: ModelDraft) -> None:
    """Add row 8 for half of all windows, a quarter of them, and so on, and for windows that have been split.

    Without the latter the linear relaxation of a finer model may be the weaker one.
    """
    discretization = draft.discretization
    split = {(discretization.find_window(start), discretization.find_window(end)) for start, end in discretization.merged}
    for first, last in sorted({*split, *list_halves(1, draft.windows - 1)}):
        if first >= 1:
            _MergedWindows(draft, first, last).add()


class _MergedWindows:
    """Windows first..last as one window: "old" means old in the first, "new" means new in any."""

    def __init__(self, draft: ModelDraft, first: int, last: int) -> None:
        self.draft = draft
        self.first = first
        self.last = last
        self.start, self.end = draft.starts[first], draft.discretization.ends[last]
        self.columns: dict[int, int | None] = {}
        self.copied: dict[tuple[bool, int], list[int]] = {}

    def add(self) -> None:
        self.add_inputs_of_new()
        self.add_inputs_of_recomputed()
        self.add_hand_over()

    def add_inputs_of_new(self) -> None:
        """Add S[first,t] + U[p(t)] >= 1 for old t, not kept, read by a new op."""
        inputs, places = self.draft.problem.inputs, self.draft.problem.places
        for t in sorted({t for v in range(self.start, self.end + 1) if places.sure[v] for t in inputs[v]}):
            if self.is_old(t):
                self.draft.add_at_most((1.0, [], []), self.list_sources(t), NONE)

    def add_inputs_of_recomputed(self) -> None:
        """Add U[i] <= S[first,t] + U[p(t)] for old t in in(i) that are not kept; Q of a new i likewise."""
        draft = self.draft
        for i in range(self.end + 1):
            column = (
                self.require_recomputed(i) if i < self.start else draft.recomputed.get((draft.discretization.find_window(i), i))
            )
            if column is None:
                continue
            for t in draft.problem.inputs[i]:
                if self.is_old(t):
                    draft.add_only_with(column, self.list_sources(t))

    def add_hand_over(self) -> None:
        """Add S[last+1,t] <= S[first,t] + U[p(t)] for old t (+ E[t]); V likewise, + F[t]."""
        draft = self.draft
        for i in range(self.start):
            for t in draft.problem.outputs[i]:
                column = draft.handed.get((self.last + 1, t))
                if column is None or not self.is_old(t) or draft.problem.producer[t] != i:
                    continue
                if (self.first, t) not in draft.taken:
                    draft.add_only_with(column, self.list_sources(t))
                    continue
                draft.add_only_with(column, [draft.handed[self.first, t], *self.list_recomputing(t), *self.copy(t, whole=False)])
                draft.add_only_with(draft.valid[self.last + 1, t], self.list_sources(t))

    def list_sources(self, t: int) -> list[int]:
        """Return the columns of S[first,t] or V[first,t] and, if they exist, of U[p(t)] and F[t]."""
        draft = self.draft
        handed = draft.valid.get((self.first, t), draft.handed[self.first, t])
        return [handed, *self.list_recomputing(t), *(self.copy(t, whole=True) if draft.fetched else ())]

    def list_recomputing(self, t: int) -> list[int]:
        """Return the columns of U[p], if they exist, for the producers p of old t."""
        return [column for p in self.draft.problem.producers[t] if (column := self.require_recomputed(p)) is not None]

    def is_old(self, t: int) -> bool:
        """Return True if t is old and not settled, and no op first produces it in these windows."""
        return self.draft.is_handed(self.first, t) and self.draft.problem.producers[t][-1] < self.start

    def copy(self, t: int, *, whole: bool) -> list[int]:
        """Return the column of F[t] (`whole`) or E[t] for old t; an empty list if t is not reloaded.

        F <= sum of Y, E <= sum of A, over these windows; E and, if the host's capacity is unlimited, F <= W[first,t] + sum of X.
        """
        key = (whole, t)
        draft, windows = self.draft, range(self.first, self.last + 1)
        if key not in self.copied:
            parts = draft.fetched if whole else draft.taken
            columns = [parts[k, t] for k in windows if (k, t) in parts]
            self.copied[key] = []
            if columns:
                column = draft.add_column()
                self.copied[key] = [column]
                draft.add_only_with(column, columns)
                if not whole or draft.problem.host_bytes is None:
                    stored = [draft.stored[k, t] for k in windows if (k, t) in draft.stored]
                    draft.add_only_with(column, [draft.hosted[self.first, t], *stored])
        return self.copied[key]

    def require_recomputed(self, i: int) -> int | None:
        """Return the column of U[i] <= sum of R[k,i] over these windows, None if i cannot be recomputed there."""
        if i not in self.columns:
            draft = self.draft
            recomputations = [draft.recomputed[k, i] for k in range(self.first, self.last + 1) if (k, i) in draft.recomputed]
            self.columns[i] = None
            if recomputations:
                column = self.columns[i] = draft.add_column()
                draft.add_only_with(column, recomputations)
        return self.columns[i]
