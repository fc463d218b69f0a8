"""One model under sets of its options: none, each alone, all that are exact, all that are not lossy, and all."""

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from benchmarks.common import provenance
from benchmarks.offload import HOST
from benchmarks.options_rows import LEAST, Bits, Offer, Row, bits_of, set_name
from benchmarks.solved import solved
from graphs.ir import Graph
from graphs.options.option import Need
from graphs.simulate import simulate
from planner.budgets import budget_in_bytes
from planner.capture.options import holding, needs, traced_options, with_options
from planner.choices import Choices, choices_of
from planner.solving import summarize
from solvers.clock import Clock
from solvers.least import least_budget
from solvers.order.reorder import reordered
from solvers.request import Request
from solvers.result import Status
from solvers.tolerance import Tolerance

SHARES = ("70%", "50%", "30%", "20%")  # of the peak of the program
BUDGETS = (LEAST, *SHARES)
TOLERANCE = 1e-3  # of each solve


def sets_of(offers: Sequence[Offer]) -> tuple[tuple[str, ...], ...]:
    """The sets of options that are solved for, each once: those that offer nothing are in none."""
    every = tuple(offer.option for offer in offers if offer.ops)
    exact = tuple(offer.option for offer in offers if offer.ops and offer.bits is Bits.EXACT)
    return tuple(dict.fromkeys(((), *((name,) for name in every), exact, faithful_of(offers), every)))


def faithful_of(offers: Sequence[Offer]) -> tuple[str, ...]:
    """All that offer something but lossy ones."""
    return tuple(offer.option for offer in offers if offer.ops and offer.bits is not Bits.LOSSY)


@dataclass(frozen=True)
class Case:
    """One model on one device.

    Attributes:
        model: its name.
        traced: the step, timed, with all options of `names` that are found in it.
        names: options, in the order of the registry.
        clock: makes one that starts then, for a solve or a search for the least budget.
        tolerance: of each solve.
    """

    model: str
    traced: Graph
    names: Sequence[str]
    clock: Callable[[], Clock]
    tolerance: float

    @cached_property
    def ordered(self) -> Graph:
        """The step in the order in which all sets are solved: what bounds one of them bounds those that it contains."""
        return reordered(holding(self.traced, traced_options(self.names))).graph

    @cached_property
    def offers(self) -> tuple[Offer, ...]:
        """What each option offers."""
        found = []
        for name in self.names:
            added = [op for op in self.offered((name,)).ops if op.optional or op.overwrites]
            found.append(Offer(self.model, name, len(added), bits_of(added), **provenance()))
        return tuple(found)

    def offered(self, options: Sequence[str]) -> Graph:
        """The step with a set of options."""
        choices = _choices(options)
        return with_options(self.ordered, ()) if choices is None else choices.offered(self.ordered)

    def rows(self, known: Collection[tuple[str, str, str]]) -> Iterator[Row]:
        """The rows that are not `known`."""
        for options in sets_of(self.offers):
            wanted = [budget for budget in BUDGETS if (self.model, set_name(options), budget) not in known]
            if wanted:
                graph, blank = self.offered(options), self._blank(options)
                yield from (self._row(graph, replace(blank, budget=budget)) for budget in wanted)

    def _blank(self, options: Sequence[str]) -> Row:
        choices = _choices(options)
        copies, limit = choices is not None and choices.host_bytes is not None, self.clock()
        return Row(
            model=self.model,
            options=set_name(options),
            budget="",
            status=str(Status.ERROR),
            reason="",
            message="",
            time_s=None,
            bound_s=None,
            base_s=self.traced.time_s,
            peak_bytes=None,
            budget_bytes=None,
            proved_bytes=None,
            base_peak_bytes=summarize(self.traced).keep_everything_peak_bytes,
            seconds=None,
            limit=limit.amount(limit.limit),
            link=str(choices.link(self.traced.provenance)) if choices is not None and copies else "",
            **provenance(),
        )

    def _row(self, graph: Graph, blank: Row) -> Row:
        if blank.budget == LEAST:
            return self._least(graph, blank)
        blank = replace(blank, budget_bytes=budget_in_bytes(blank.budget, blank.base_peak_bytes))
        assert blank.budget_bytes is not None
        row, _ = solved(blank, "windows", Request(graph, blank.budget_bytes, Tolerance.of(self.tolerance), self.clock()))
        return row

    def _least(self, graph: Graph, blank: Row) -> Row:
        begin = time.monotonic()
        bracket = least_budget(graph, clock=self.clock())
        judged = simulate(graph, bracket.schedule)
        return replace(
            blank,
            status=str(Status.FEASIBLE),
            time_s=judged.time_s,
            peak_bytes=judged.peak_bytes,
            budget_bytes=bracket.found_bytes,
            proved_bytes=bracket.proved_bytes,
            seconds=time.monotonic() - begin,
        )


def _choices(options: Sequence[str]) -> Choices | None:
    return choices_of(options, host_budget=HOST if Need.LINK in needs(options) else None)
