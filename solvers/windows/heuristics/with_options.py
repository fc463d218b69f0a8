"""Search with optional ops: the bound of all of them, what its solutions commit to, and smaller sets of choices beside that."""

from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Self

from graphs.ir import Graph
from graphs.options.placement import without_placement
from graphs.options.selection import option_of, without
from graphs.pools import COMPUTE
from solvers.clock import Beside
from solvers.windows.branches import Branches
from solvers.windows.heuristics.commitments import Commitments, Run
from solvers.windows.heuristics.parts import AFTER, LAST, POLL, Own, PartBeside, end_beside, start_beside
from solvers.windows.heuristics.stand_ins import simple
from solvers.windows.incumbent import Search
from solvers.windows.solution.decode import Trial


def run_with_options(search: Search, run_plain: Run, run: Run) -> None:
    """Bound the graph with all its options, and look for schedules in what solutions commit to, in turn.

    Beside that smaller sets of choices are searched. Where some of several kinds of options are lossy: all that is not, as if
    no more was allowed, and each lossy kind alone. Else: the program, with its round trips to the host where there are some;
    all else without round trips; and each of several kinds alone. A kind alone writes nothing over anything. Where ops may run
    on other devices, and there are other options: all of these here, as if no more was allowed, and that alone.

    Args:
        search: of the graph.
        run_plain: solves a plain graph.
        run: solves any graph, and with it what has fewer choices.
    """
    if search.is_apart:  # whoever has started it sees to what is smaller
        _run_alone(search, run_plain)
        return
    found = _begin(search, run_plain)
    program = next(iter(found.all.values()))
    # The part that searches it needs no help where each does all its work; on few cores one of low priority does.
    program.closed = search.clock.counts_work
    whole = search.problem.whole
    kinds = _Kinds.of(whole)
    beside_lossy = kinds.several_with_lossy
    more = kinds.some or search.problem.copies is not None
    more_than_placed = search.problem.devices is not None and more and not beside_lossy
    smaller: list[tuple[Graph, Run, Callable[[Trial], None]]] = []
    if beside_lossy:
        faithful = _only(whole, kinds.exact)
        smaller.append((faithful, run, found.taking(faithful)))
    elif more_than_placed:
        here, placed = without_placement(whole), _only(search.problem.graph.out_of_place(), ())
        smaller.append((here, run, found.taking(here)))
        smaller.append((placed, partial(_run_alone, run_plain=run_plain), found.taking(placed)))
    else:
        if search.problem.copies is not None:
            smaller.append((search.problem.graph, run, found.take_fewer))
        smaller.append((program.plain.graph, run, lambda trial: found.take(program, trial)))
    for kind in kinds.apart:
        alone = _only(whole.out_of_place(), (kind,))
        smaller.append((alone, partial(_run_alone, run_plain=run_plain), found.taking(alone)))
    # The first most often has the best schedule. If it has no lossy options it begins at once, and what has some goes last, so
    # that on few cores too it finds what it would find without them.
    begins, after = (0, LAST) if beside_lossy else (1, AFTER)
    owns = [Own(begins, len(smaller), nice=0, starts_others=beside_lossy or more_than_placed)]
    owns += (Own(begins + n, len(smaller), 0 if more_than_placed and n == 1 else after) for n in range(1, len(smaller)))
    parts = [PartBeside(search, *one, own) for one, own in zip(smaller, owns, strict=True)]
    with ExitStack() as stack:
        for part_beside in parts:
            stack.enter_context(part_beside).tell()
        if beside_lossy and not search.clock.counts_work:
            _bound_and_commit_last(search, found)
        else:
            _bound_and_commit(search, found)
        _await(search, parts, search.solved)


def _run_alone(search: Search, run_plain: Run) -> None:
    """The same without a search beside it."""
    _bound_and_commit(search, _begin(search, run_plain))


def _begin(search: Search, run_plain: Run) -> Commitments:
    """With the program alone, nothing of it executed again."""
    found = Commitments(search, run_plain)
    kept = found.try_instead(frozenset())
    assert kept is not None  # the program alone runs
    return found


@dataclass(frozen=True, slots=True)
class _Kinds:
    """The options that ops on the computation's stream are of, by what they may differ."""

    exact: tuple[str, ...]
    lossy: tuple[str, ...]

    @classmethod
    def of(cls, graph: Graph) -> Self:
        """Those of `graph`."""
        computed = [op for op in graph.ops if op.optional and op.stream == COMPUTE]
        lossy = {option_of(op): None for op in computed if op.uses}
        return cls(tuple(dict.fromkeys(kind for kind in map(option_of, computed) if kind not in lossy)), tuple(lossy))

    @property
    def some(self) -> bool:
        """Whether there is one."""
        return bool(self.exact or self.lossy)

    @property
    def several_with_lossy(self) -> bool:
        """Whether there are lossy ones and others."""
        return bool(self.exact and self.lossy)

    @property
    def apart(self) -> tuple[str, ...]:
        """Those to be searched alone: of several, but for those that a smaller set is searched with, which sees to them."""
        if self.several_with_lossy:
            return self.lossy
        kinds = (*self.exact, *self.lossy)
        return kinds if len(kinds) > 1 else ()


def _only(graph: Graph, kinds: Collection[str]) -> Graph:
    """`graph` with no other options than `kinds` on the computation's stream."""
    return without(graph, lambda op: op.stream == COMPUTE and option_of(op) not in kinds)


def _bound_and_commit(search: Search, found: Commitments) -> None:
    """Refine the relaxation, and beside that solve what its solutions and others commit to, while there is anything to do."""
    branches = Branches(search)
    for instead in simple(search.problem):
        found.try_instead(instead)
    if search.best is None and search.problem.copies is None:
        found.try_least(search.params.bound.first_slice)
    placing = search.params.placing
    found.place(min(placing.first, placing.first_share * search.clock.limit))
    committing = start_beside(search, lambda: found.work_on(branches))
    try:
        branches.refine()
        _await(search, [committing], search.solved)
    except BaseException:
        search.halted = True
        raise
    finally:
        end_beside(committing)


def _bound_and_commit_last(search: Search, found: Commitments) -> None:
    """The same where others go first: in another thread, for the priority of this one could not be raised again."""
    bounding = start_beside(search, lambda: _bound_and_commit(search, found), nice=LAST)
    try:
        _await(search, [bounding], lambda: False)
    except BaseException:
        search.halted = True
        raise
    finally:
        end_beside(bounding)


def _await(search: Search, beside: Sequence[Beside | PartBeside], ended: Callable[[], bool]) -> None:
    """Wait until all beside this have ended, or `ended`, or the solve is stopped; meanwhile progress is reported."""
    while not (ended() or search.stopped()) and (running := [one for one in beside if one.running]):
        search.tell()
        running[0].wait(POLL)
