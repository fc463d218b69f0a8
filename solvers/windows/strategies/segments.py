"""Large-neighbourhood search: improvement of a schedule segment by segment.

A segment is a run of new ops a..b. Executions before the first one of a and after that of b stay, and so do the tensors in memory
at both ends; in between a restricted model is solved (Shaw, CP 1998, for the principle). Only executions and tensors that may be
useful in the segment have variables.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from solvers.problem import Problem
from solvers.windows.decoding.decode import Trial, late_writers, order_of, read_solution
from solvers.windows.decoding.encode import solution_of, start_values
from solvers.windows.decoding.expand import Solution, expand
from solvers.windows.decoding.refinement import refined, with_stages_in_order
from solvers.windows.relaxation.discretization import Discretization, Frame, Model
from solvers.windows.relaxation.models import build_ordered
from solvers.windows.strategies.refinement import solve_part
from solvers.windows.strategies.strategy import SteppedStrategy


@dataclass(frozen=True, slots=True)
class OrderSegment:
    """A part of an order of executions.

    Attributes:
        first, last: new ops a >= 1 and b.
        before, inside, after: executions up to that of a - 1, up to that of b, and the rest.
        entering, leaving: tensors in memory at both ends that are read later, without kept ones.
    """

    first: int
    last: int
    before: tuple[int, ...]
    inside: tuple[int, ...]
    after: tuple[int, ...]
    entering: frozenset[int]
    leaving: frozenset[int]


def segment_of(problem: Problem, computed: Sequence[int], first: int, last: int) -> OrderSegment:
    """Return the segment of `computed` from new op `first` (1 or more) to new op `last`."""
    begin, end = _first_execution(computed, first - 1) + 1, _first_execution(computed, last) + 1
    return OrderSegment(
        first,
        last,
        tuple(computed[:begin]),
        tuple(computed[begin:end]),
        tuple(computed[end:]),
        _wanted(problem, computed[begin:]),
        _wanted(problem, computed[end:]),
    )


class Segments(SteppedStrategy):
    """Improvement of one segment of the best schedule after another; longer ones when no other improves."""

    def steps(self) -> Iterator[None]:
        """Improve segments, the costly ones first."""
        search, problem, params = self.search, self.search.problem, self.search.params.segments
        if search.incumbent.best is None:
            return
        length = params.first_length
        settled: set[OrderSegment] = set()
        while length < params.longer * problem.ops:
            better = False
            for first, last in _costly(problem, search.incumbent.best_trial, length):
                if search.stopping.enough():
                    return
                trial = search.incumbent.best_trial
                segment = segment_of(problem, trial.order.computed, first, last)
                alone = replace(segment, before=(), after=())
                if alone in settled:
                    continue
                settled.add(alone)
                better |= self._improve(trial, segment)
                yield
            if not better:
                length = int(length * params.longer)

    def _improve(self, trial: Trial, segment: OrderSegment) -> bool:
        """Solve `segment` of `trial`, which fits, again; return True if that is better."""
        search, problem, params = self.search, self.search.problem, self.search.params
        first, last = segment.first, segment.last
        spent_s = sum(problem.time_s[i] for i in segment.inside) - sum(problem.time_s[first : last + 1])
        part = _part(problem, segment)
        detail = _first_detail(segment, trial, params.segments.tight_share * problem.budget_bytes)
        for _ in range(params.segments.rounds):
            whole = detail if last == problem.ops - 1 else replace(detail, ends=(*detail.ends, problem.ops - 1))
            start = solution_of(problem, whole, trial.order.computed)
            model = build_ordered(part, detail, Frame(segment.entering, segment.leaving))
            solution = self._solve(model, start, spent_s)
            if solution is None:
                return False
            inside = expand(problem, detail, solution, first_window=1)
            order = order_of(problem, segment.before + inside + segment.after, detail=whole)
            if late_writers(problem, order):
                return False
            tried = search.offer(order, whole)
            if tried.peak_bytes <= problem.budget_bytes:
                return tried.time_s < trial.time_s
            closer = refined(detail, tried, problem.budget_bytes, params.refinement)
            closer = with_stages_in_order(closer, tried, problem.budget_bytes, params.refinement)
            if closer == detail:
                return False
            detail = closer
        return False

    def _solve(self, model: Model, solution: Solution, below_s: float) -> Solution | None:
        """Return a solution that costs less than `below_s`, starting from `solution`; None if none is found."""
        search, params = self.search, self.search.params.portfolio
        search.progress.tell(f"improving ops {model.detail.ends[0] + 1} to {model.detail.ends[-1]}")
        below = search.problem.units(below_s - params.segment_gap * search.problem.base_s)
        answer = solve_part(
            search,
            model.program,
            params.segment_limit,
            gap=params.segment_gap,
            start=start_values(model, solution),
            below=below,
            should_stop=search.stopping.stopped,
        )
        if answer.values is None or answer.objective is None or answer.objective >= below:
            return None
        return read_solution(model, answer.values)


def _costly(problem: Problem, trial: Trial, length: int) -> list[tuple[int, int]]:
    """Return overlapping runs of `length` new ops, those with the longest recomputations first."""
    again_s = [0.0] * problem.ops
    done = 0
    for op, first in zip(trial.order.computed, trial.order.first, strict=True):
        if not first:
            again_s[min(done, problem.ops - 1)] += problem.time_s[op]
        done += first
    spans = [(a, min(a + length, problem.ops) - 1) for a in range(1, problem.ops, max(1, length // 2))]
    costs = {(a, b): sum(again_s[a : b + 1]) for a, b in spans}
    return sorted((span for span in spans if costs[span] > 0), key=lambda span: (-costs[span], span))


def _first_execution(computed: Sequence[int], op: int) -> int:
    return computed.index(op)  # first executions come before all others of the same op


def _wanted(problem: Problem, computed: Iterable[int]) -> frozenset[int]:
    """Return the tensors that `computed` reads before it produces them."""
    made: set[int] = set()
    wanted: set[int] = set()
    for op in computed:
        wanted.update(t for t in problem.inputs[op] if t not in made and not problem.kept[t])
        made.update(problem.outputs[op])
    return frozenset(wanted)


def _first_detail(segment: OrderSegment, trial: Trial, tight_bytes: float) -> Discretization:
    """Return a window for each new op that needs much memory, or has recomputations before it."""
    begin = len(segment.before)
    ends = {segment.first - 1, segment.last}
    ordered: set[tuple[int, int]] = set()
    again: list[int] = []
    for position, op in enumerate(segment.inside, begin):
        if not trial.order.first[position]:
            again.append(op)
            continue
        if again or trial.memory_bytes[position] > tight_bytes:
            ends.update((op - 1, op))
        ordered.update((op, x) for x in again)
        again = []
    return Discretization(tuple(sorted(ends)), ordered=frozenset(ordered))


def _part(problem: Problem, segment: OrderSegment) -> Problem:
    """Return `problem` with those executions and tensors that may be useful in the segment.

    Recomputable are ops that are in the segment, that are recomputed there now, or that produced a tensor that enters it,
    provided that their inputs can be in memory.
    """
    first, last = segment.first, segment.last
    again = {i for i in segment.inside if problem.recomputable[i]}
    again |= {problem.producer[t] for t in segment.entering if problem.recomputable[problem.producer[t]]}
    again |= {i for i in range(first, last) if problem.recomputable[i]}

    def may_be_there(t: int) -> bool:
        producer = problem.producer[t]
        return problem.kept[t] or t in segment.entering or producer >= first or producer in again

    while lost := {i for i in again if not all(map(may_be_there, problem.inputs[i]))}:
        again -= lost
    last_use = [-1] * len(problem.sizes)
    last_worth = [-1] * problem.ops
    for t in segment.leaving:
        last_use[t] = last
    for i in range(last, -1, -1):
        last_worth[i] = max((last_use[t] for t in problem.outputs[i] if not problem.kept[t] and may_be_there(t)), default=-1)
        if i >= first or i in again:
            latest = max(i, last_worth[i]) if i in again else i
            for t in problem.inputs[i]:
                last_use[t] = max(last_use[t], latest)
    return replace(
        problem,
        recomputable=tuple(i in again for i in range(problem.ops)),
        last_use=tuple(last_use),
        last_worth=tuple(last_worth),
    )
