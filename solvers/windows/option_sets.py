"""Selection of the smaller sets of options that are searched in the background of a solve with all options."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from typing import Self

from planner.graphs.ir import Graph
from planner.graphs.options.placement import remove_placement
from planner.graphs.options.selection import get_option_name, remove_ops
from planner.graphs.options.transfers import find_transfers
from planner.graphs.pools import COMPUTE
from planner.solvers.windows.decoding.decode import Trial
from planner.solvers.windows.parts import AFTER, LAST, OwnProcess, Part
from planner.solvers.windows.search import Search
from planner.solvers.windows.strategies.commitments import Commitments


def make_plain_parts(search: Search) -> list[Part]:
    """Return the graph without overwriting, on one stream, and without transfers to the host.

    Schedules of the latter count once those with transfers have been searched (``Incumbent.reserve``).
    """
    whole = search.problem.whole
    parts = [Part(search, whole.out_of_place(), partial(_take_out_of_place, search))] if whole.writes_over_inputs else []
    if search.problem.placed:
        parts.append(Part(search, _weigh_transfers(whole), partial(_offer_again, search)))
    if search.problem.round_trips:
        parts.append(Part(search, search.problem.graph, search.incumbent.reserve))
    return parts


def _take_out_of_place(search: Search, trial: Trial) -> None:
    """Take a trial as it is, and offer its order again with overwriting."""
    search.incumbent.take(trial)
    _offer_again(search, trial)


def _offer_again(search: Search, trial: Trial) -> None:
    """Offer an order that was found with its transfers on the main device; here they are issued earlier."""
    search.offer(trial.order)


def _weigh_transfers(graph: Graph) -> Graph:
    """Return `graph` with its program on one stream, its transfers and other ops weighted by what the times of each sum to.

    With q = G / (C + G), where G and C are these sums, times are q g and (1 - q) c. So a transfer costs the less the more of
    them can be in parallel with computation. A schedule takes at least as long as either stream works, so the weighted time of
    each is a lower bound of its time in parallel. Transfers to the host and back take (1 - q) of their times.
    """
    total_s = graph.time_s or 1.0
    share = 1 - graph.compute_s / total_s
    transfers = find_transfers(graph)
    moved = {op for op, transfer in transfers.items() if transfer.must_run}
    ops = (replace(op, time_s=(share if op.id in moved else 1 - share) * op.time_s) for op in graph.ops)
    return replace(graph, ops=tuple(replace(op, stream=COMPUTE) if op.id in moved else op for op in ops))


def make_option_parts(search: Search, commitments: Commitments) -> list[Part]:
    """Return graphs with smaller sets of options.

    If some of several options are lossy: all lossless ones, as if there were no others, and each lossy one alone. Otherwise: all
    on one stream, if there are collectives; the program with its transfers to the host, if any; everything without transfers; and
    each of several options alone. An option alone is searched without overwriting. If ops may run on other devices and there are
    other options: these without placement, as if there were no others, and placement alone.
    """
    whole, problem, kinds = search.problem.whole, search.problem, _Kinds.of(search.problem.whole)
    lossy, placed = kinds.several_with_lossy, kinds.has_devices_and_others(search)
    sets: list[tuple[Graph, Callable[[Trial], object], bool]] = []  # the last one is ``Part.alone``
    if lossy:
        faithful = _keep_options(whole, kinds.exact)
        sets.append((faithful, commitments.lift_from(faithful), False))
    elif placed:
        here, moved = remove_placement(whole), _keep_options(problem.graph.out_of_place(), ())
        sets += [(here, commitments.lift_from(here), False), (moved, commitments.lift_from(moved), True)]
    else:
        if problem.placed and not problem.has_devices:
            sets.append((_weigh_transfers(whole), partial(_offer_again, search), False))
        if problem.round_trips:
            sets.append((problem.graph, commitments.keep_without_offloading, False))
        program = commitments.program
        sets.append((program.plain.graph, lambda trial: commitments.take(program, trial), False))
    for kind in kinds.apart:
        only = _keep_options(whole.out_of_place(), (kind,))
        sets.append((only, commitments.lift_from(only), True))
    # The first most often has the best schedule. If it has no lossy options it starts at once, and lossy ones start last, so
    # that it finds the same schedules as without them, also on few cores.
    begins, after = (0, LAST) if lossy else (1, AFTER)
    own = [OwnProcess(begins + n, len(sets), 0 if n == 0 or (placed and n == 1) else after) for n in range(len(sets))]
    own[0] = replace(own[0], starts_others=lossy or placed)
    return [
        Part(search, graph, receive, alone=alone, process=process)
        for (graph, receive, alone), process in zip(sets, own, strict=True)
    ]


def goes_last(search: Search) -> bool:
    """Return True if the search with all options starts after a smaller set: if some of several options are lossy."""
    return _Kinds.of(search.problem.whole).several_with_lossy and not search.clock.counts_work


@dataclass(frozen=True, slots=True)
class _Kinds:
    """The options of ops on the compute stream, lossless and lossy ones."""

    exact: tuple[str, ...]
    lossy: tuple[str, ...]

    @classmethod
    def of(cls, graph: Graph) -> Self:
        """Return the options of `graph`."""
        computed = [op for op in graph.ops if op.optional and op.stream == COMPUTE]
        lossy = {get_option_name(op): None for op in computed if op.uses}
        return cls(tuple(dict.fromkeys(kind for kind in map(get_option_name, computed) if kind not in lossy)), tuple(lossy))

    def has_devices_and_others(self, search: Search) -> bool:
        """Return True if ops may run on other devices and there are other options, unless some of several are lossy."""
        some = bool(self.exact or self.lossy or search.problem.round_trips)
        return search.problem.has_devices and some and not self.several_with_lossy

    @property
    def several_with_lossy(self) -> bool:
        """True if there are both lossy and lossless options."""
        return bool(self.exact and self.lossy)

    @property
    def apart(self) -> tuple[str, ...]:
        """The options to be searched alone: of several options, those that no smaller set covers."""
        if self.several_with_lossy:
            return self.lossy
        kinds = (*self.exact, *self.lossy)
        return kinds if len(kinds) > 1 else ()


def _keep_options(graph: Graph, kinds: Collection[str]) -> Graph:
    """Return `graph` with only the options `kinds` on the compute stream."""
    return remove_ops(graph, lambda op: op.stream == COMPUTE and get_option_name(op) not in kinds)
