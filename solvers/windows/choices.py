"""Which parts of the choices are searched beside all of them."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Self

from graphs.ir import Graph
from graphs.options.placement import without_placement
from graphs.options.selection import option_of, without
from graphs.pools import COMPUTE
from solvers.windows.decoding.decode import Trial
from solvers.windows.parts import AFTER, LAST, OwnProcess, Part
from solvers.windows.relaxation.discretization import Discretization
from solvers.windows.search import Search
from solvers.windows.strategies.commitments import Commitments


def parts_of_plain(search: Search) -> list[Part]:
    """Return the graph where no op writes over what it reads, and the graph without transfers to the host.

    Schedules of the latter count once those with transfers were looked for (``Incumbent.reserve``).
    """
    whole, incumbent = search.problem.whole, search.incumbent

    def take_out_of_place(trial: Trial) -> None:
        """It fits as it is, and better where it may write over what it reads."""
        incumbent.take(trial)
        search.offer(trial.order, Discretization((search.problem.ops - 1,)))

    parts = [Part(search, whole.out_of_place(), take_out_of_place)] if whole.writes_over_inputs else []
    if search.problem.copies is not None:
        parts.append(Part(search, search.problem.graph, incumbent.reserve))
    return parts


def parts_with_options(search: Search, commitments: Commitments) -> list[Part]:
    """Return smaller sets of choices.

    Where some of several kinds of options are lossy: all that is not, as if no more was allowed, and each lossy kind alone. Else:
    the program, with its transfers to the host where there are some; all else without transfers; and each of several kinds alone.
    A kind alone writes nothing over anything. Where ops may run on other devices, and there are other options: all of these
    here, as if no more was allowed, and that alone.
    """
    whole, problem, kinds = search.problem.whole, search.problem, _Kinds.of(search.problem.whole)
    lossy, placed = kinds.several_with_lossy, kinds.are_beside_devices(search)
    sets: list[tuple[Graph, Callable[[Trial], object], bool]] = []  # with whether it is searched alone
    if lossy:
        faithful = _only(whole, kinds.exact)
        sets.append((faithful, commitments.lift_from(faithful), False))
    elif placed:
        here, moved = without_placement(whole), _only(problem.graph.out_of_place(), ())
        sets += [(here, commitments.lift_from(here), False), (moved, commitments.lift_from(moved), True)]
    else:
        if problem.copies is not None:
            sets.append((problem.graph, commitments.keep_without_offloading, False))
        program = commitments.program
        sets.append((program.plain.graph, lambda trial: commitments.take(program, trial), False))
    for kind in kinds.apart:
        only = _only(whole.out_of_place(), (kind,))
        sets.append((only, commitments.lift_from(only), True))
    # The first most often has the best schedule. If it has no lossy options it begins at once, and what has some goes last, so
    # that on few cores too it finds what it would find without them.
    begins, after = (0, LAST) if lossy else (1, AFTER)
    own = [OwnProcess(begins + n, len(sets), 0 if n == 0 or (placed and n == 1) else after) for n in range(len(sets))]
    own[0] = replace(own[0], starts_others=lossy or placed)
    return [
        Part(search, graph, receive, alone=alone, process=process)
        for (graph, receive, alone), process in zip(sets, own, strict=True)
    ]


def goes_last(search: Search) -> bool:
    """Return True if what is searched with all choices goes after a part of them: where some of several kinds are lossy."""
    return _Kinds.of(search.problem.whole).several_with_lossy and not search.clock.counts_work


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

    def are_beside_devices(self, search: Search) -> bool:
        """Return True if ops may run on other devices, and there are other options, of which not only some are lossy."""
        some = bool(self.exact or self.lossy) or search.problem.copies is not None
        return search.problem.devices is not None and some and not self.several_with_lossy

    @property
    def several_with_lossy(self) -> bool:
        """True if there are lossy ones and others."""
        return bool(self.exact and self.lossy)

    @property
    def apart(self) -> tuple[str, ...]:
        """Those to be searched alone: of several, but for those that a smaller set is searched with, which sees to them."""
        if self.several_with_lossy:
            return self.lossy
        kinds = (*self.exact, *self.lossy)
        return kinds if len(kinds) > 1 else ()


def _only(graph: Graph, kinds: Collection[str]) -> Graph:
    """Return `graph` with no other options than `kinds` on the computation's stream."""
    return without(graph, lambda op: op.stream == COMPUTE and option_of(op) not in kinds)
