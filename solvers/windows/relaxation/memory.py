"""Rows 5 to 7: memory, at times at which some tensors are certainly in memory. Relaxations.

Their own variables are H[k,t] >= S[k+1,t] - R[k,p(t)] (or - Q): t, produced before the step in question, is in memory in the
whole window because it is handed over and not recomputed.

Rows 6 and 7 are written only where a schedule needed too much: they are dense, and for every op of a graph of a thousand ops they
are too many. Checkmate's memory inside a stage would be stronger, but is no relaxation: it assumes that a stage executes each op
at most once more, in program order. It excluded all schedules of three of 400 graphs of four to seven ops that have some.
"""

from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from planner.solvers.windows.relaxation.draft import ModelDraft, Sum

Total = tuple[int, list[int], list[float]]  # bytes, columns, and bytes for each


def add_memory_at_end(draft: ModelDraft, k: int) -> None:
    """Add row 5: own(e_k) + sum over other t, p(t) < e_k, of b_t S[k+1,t] <= M, own = bytes(held) + w. Exact.

    There is a row for each op that may be executed in the place at the end of window k.
    """
    problem, end = draft.problem, draft.discretization.ends[k]
    for v in problem.places.list_alternatives(end):
        columns: list[int] = []
        values: list[float] = []
        taken = 0
        counted: list[int] = []
        for t in _iterate_other_tensors(draft, v, range(end + 1)):
            if problem.kept[t] and problem.settled[t] <= end:
                taken += problem.sizes[t]
            elif (column := draft.handed.get((k + 1, t))) is not None:
                columns.append(column)
                values.append(problem.sizes[t])
            else:
                continue
            counted.append(t)
        _add_memory_of_place(draft, k, v, (taken, columns, values), counted)


def add_memory_inside(draft: ModelDraft) -> None:
    """Add row 6 for `discretization.firsts`: own(v) + sum over other t, p(t) < v, of b_t h_t <= M for v inside window k.

    h_t = 1                                t is kept
        = 1 - R[k,p(t)], or 1 - Q[k,p(t)]  t has a consumer c, v < c <= e_k: it is in memory unless it is recomputed;
          - Y[k,t]                         or is reloaded
        = H[k,t]                           otherwise, if t can be handed over

    If v or c need not be executed, the row is that of a place, and h_t is smaller accordingly.
    """
    places = draft.problem.places
    for v in sorted(draft.discretization.firsts):
        k = draft.discretization.find_window(v)
        last, end = places.last[v], draft.discretization.ends[k]
        if last != end:  # at the end of a window row 5 is exact
            read = _find_wanted(draft, range(last + 1, end + 1))
            others = _select_made_before(draft, _iterate_other_tensors(draft, v, range(last + 1)), range(last + 1, end + 1))
            _add_memory_of_place(draft, k, v, *_sum_certain(draft, k, others, read, last))


def _add_memory_of_place(draft: ModelDraft, k: int, v: int, terms: Total, tensors: Iterable[int]) -> None:
    """Add the row own(v) + `terms`, which are of `tensors` outside held(v), <= M.

    If there are alternatives in its place, own(c) of the executed one counts, without `tensors` that it reads or produces.
    """
    problem = draft.problem
    taken, columns, values = terms
    counted = set(tensors)
    for c in problem.places.list_alternatives(v):
        constant, of_c, ones = draft.get_execution(c)
        size = problem.own_bytes[c] - sum(problem.sizes[t] for t in problem.held[c] & counted)
        taken += int(constant) * size
        columns = [*columns, *of_c]
        values = [*values, *(size * one for one in ones)]
    draft.add_memory(k, columns, values, taken)


def add_memory_of_recomputations(draft: ModelDraft) -> None:
    """Add row 7 for `discretization.recomputations`, see ``sum_recomputation_memory``."""
    for end, x in sorted(draft.discretization.recomputations):
        k = draft.discretization.find_window(end)
        if (k, x) in draft.recomputed:
            draft.add_memory(k, *sum_recomputation_memory(draft, k, x))


def sum_recomputation_memory(draft: ModelDraft, k: int, x: int) -> tuple[list[int], list[float], int]:
    """Return the columns, their bytes and the constant bytes of row 7.

    again(x) R[k,x] + sum over old t outside held(x) of b_t h_t <= M, where again(x) = bytes(held(x)) + w_x, plus the kept outputs
    of x, which are in memory twice, and

    h_t = 1                t is kept
        = 1 - R[k,p(t)]    the window is {v}, and v reads t (- Y[k,t])
        = H[k,t]           otherwise, if t can be handed over
    """
    problem, places, start = draft.problem, draft.problem.places, draft.starts[k]
    window = range(start, draft.discretization.ends[k] + 1)
    read = _find_wanted(draft, window) if draft.discretization.is_single(k) else {}
    others = _select_made_before(draft, _iterate_other_tensors(draft, x, range(start)), window)
    (taken, columns, values), _ = _sum_certain(draft, k, others, read, start - 1)
    # Kept outputs are in memory twice, if they have certainly been produced.
    twice = [t for t in problem.outputs[x] if problem.kept[t]]
    if x < start or not places.sure[x]:
        twice = [t for t in twice if problem.settled[t] < start]
    recompute_bytes = problem.own_bytes[x] + sum(problem.sizes[t] for t in twice)
    return [draft.recomputed[k, x], *columns], [float(recompute_bytes), *values], taken


def _find_wanted(draft: ModelDraft, ops: range) -> dict[int, Sum]:
    """Return for the tensors that `ops` read in their places the executions that do: a sure op, or the ops of a place."""
    problem, places = draft.problem, draft.problem.places
    read: dict[int, Sum] = {}
    if places.plain:
        return dict.fromkeys((t for c in ops for t in problem.inputs[c]), (1.0, [], []))
    for c in ops:
        if not places.optional[c]:
            for t in problem.inputs[c]:
                if places.sure[c]:
                    read[t] = (1.0, [], [])
                elif t not in read:
                    read[t] = draft.sum_executions(i for i in places.list_alternatives(c) if t in problem.inputs[i])
    return read


def _select_made_before(draft: ModelDraft, tensors: Iterable[int], ops: range) -> Iterable[int]:
    """Return those of `tensors` that none of `ops` produces in its place."""
    problem, places = draft.problem, draft.problem.places
    if places.plain:
        return tensors
    return [t for t in tensors if not any(p in ops and not places.optional[p] for p in problem.producers[t])]


def _iterate_other_tensors(draft: ModelDraft, op: int, producers: Iterable[int]) -> Iterator[int]:
    """Return the nonempty tensors that `producers` produce first, outside held(op)."""
    problem = draft.problem
    own, first = problem.held[op], problem.producer
    return (t for i in producers for t in problem.outputs[i] if t not in own and problem.sizes[t] and first[t] == i)


def _sum_certain(
    draft: ModelDraft, k: int, tensors: Iterable[int], read: Mapping[int, Sum], done: int
) -> tuple[Total, list[int]]:
    """Return the sum of b_t h_t (the constant bytes, columns, and bytes for each) and its tensors.

    Args:
        read: tensors that are read at the end of window k, or at least later than the step in question.
        done: the last op before that step, or of its place: kept tensors that are settled by then are in memory.
    """
    problem = draft.problem
    columns: list[int] = []
    values: list[float] = []
    taken = 0
    counted: list[int] = []
    for t in tensors:
        size = problem.sizes[t]
        if problem.kept[t] and problem.settled[t] <= done:
            taken += size
        elif t in read:
            wanted, of_readers, ones = read[t]
            taken += size * int(wanted)
            columns += (allocated := draft.list_arrivals(k, t))
            values += [-size] * len(allocated)
            columns += of_readers
            values += [size * one for one in ones]
        elif (k + 1, t) in draft.handed:
            columns.append(_require_lasting(draft, k, t))
            values.append(size)
        else:
            continue
        counted.append(t)
    return (taken, columns, values), counted


def _require_lasting(draft: ModelDraft, k: int, t: int) -> int:
    """Return the column of H[k,t] >= S[k+1,t] - R[k,p(t)] - A[k,t], or of S if p(t) is not recomputed nor t reloaded."""
    allocated = draft.list_allocations(k, t)
    if not allocated:
        return draft.handed[k + 1, t]
    if (k, t) not in draft.lasting:
        column = draft.lasting[k, t] = draft.add_column()
        draft.add_row([column, draft.handed[k + 1, t], *allocated], [1.0, -1.0] + [1.0] * len(allocated), 0.0, np.inf)
    return draft.lasting[k, t]
