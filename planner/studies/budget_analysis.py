"""Analysis of a step within one time limit: its memory, the cost of smaller budgets, the gain of each option. No torch.

Before, the least budget was searched for again with each option, for as long as it took, and the solves had no time left: a row
then showed the schedule of the least budget, 23.5% slower for 0.4% less memory than another. Each part of the analysis has a
share of the limit now, and what the parts leave is for the budgets with the largest gaps.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from planner.capture.options import apply_options, get_option, list_options_to_try, needs
from planner.graphs.errors import UsageError
from planner.graphs.ir import Graph
from planner.graphs.options.option import Need
from planner.graphs.units import format_bytes, format_enough
from planner.memory.least_budget import LeastBudget, find_least_budget
from planner.memory.reserved import (
    choose_memory,
    get_context_bytes,
    is_on_cuda,
    predict_eager_bytes,
    predict_eager_memory,
    predict_eager_reserved_bytes,
)
from planner.plans.record import GraphSummary
from planner.plans.summary import summarize
from planner.settings.counted_memory import CountedMemory
from planner.settings.option_settings import build_option_settings
from planner.solvers.clock import Clock, WallClock, measure_rest
from planner.solvers.order.reorder import find_order
from planner.studies.advice import Advice, OptionAdvice, Price, Recommendation
from planner.studies.frontier import Frontier, Turns, divide_evenly
from planner.studies.workers import ignore, return_false

BETWEEN = 5  # budgets between the least one and eager PyTorch's peak
CHEAP = 0.1  # overhead that is recommended if nothing is known about a device
_TOLERANCE = 0.005
# Shares of the time limit.
_LEAST, _CURVE = 0.4, 0.3  # the rest is for options, and what they leave for the budgets again
_OPTION_LEAST = 0.5  # of the time of one option; the rest is for its solve


def advise_graph(  # noqa: PLR0913  # those of planner.advise
    graph: Graph,
    *,
    available_bytes: int | None = None,
    device: str = "",
    options: Sequence[str] | None = None,
    memory: CountedMemory | None = None,
    link: str | float | None = None,
    host_budget: str | int | None = None,
    time_limit_s: float = 45.0,
    on_activity: Callable[[str], object] = ignore,
    should_stop: Callable[[], bool] = return_false,
) -> Advice:
    """Return the memory that `graph` needs, the overhead at smaller budgets, and the budget to choose.

    Args:
        graph: traced with those of the options that are found in the step itself.
        available_bytes: bytes that a step may use on the device, without CUDA's context; None if unknown.
        device: its name, for people.
        options: options to try, each alone; None for ``list_options_to_try``.
        memory, link, host_budget: as in ``planner.solve``.
        should_stop: polled; once True, the results so far are returned.

    Raises:
        UsageError: an option cannot be tried alone, or the graph was traced without it.
    """
    counted, clock = choose_memory(graph, memory), WallClock(time_limit_s)
    if available_bytes is not None and counted.counts_context:
        available_bytes += get_context_bytes(graph)
    work = _Analysis(graph, counted, clock, on_activity, should_stop)
    names = list_options_to_try(graph) if options is None else tuple(options)
    for name in names:
        if Need.DEVICES in needs((name,)):
            raise UsageError(f"the option {name!r} runs ops on other devices, which advice is not given on: leave it out")
    least = work.least
    budgets = divide_evenly(least.found_bytes, max(least.found_bytes, work.eager_bytes), BETWEEN + 2)[1:-1]
    wanted = {least.found_bytes, *budgets}
    if available_bytes is not None and least.found_bytes <= available_bytes < work.eager_bytes:
        wanted.add(available_bytes)
    turns = work.solve(sorted(wanted))
    middle_bytes = budgets[len(budgets) // 2] if budgets else least.found_bytes
    offered = work.try_options(names, middle_bytes, link, host_budget)
    turns.clock = clock
    turns.run(should_stop)
    return Advice(
        graph=work.summary,
        memory=counted,
        eager_bytes=work.eager_bytes,
        device=device,
        available_bytes=available_bytes,
        least_proved_bytes=least.proved_bytes,
        least_stopped=least.stopped,
        least=work.get_price(least.found_bytes),
        between=tuple(work.get_price(budget) for budget in budgets),
        options=offered,
        recommended=_recommend(work, available_bytes, budgets, offered),
        eager_memory=predict_eager_memory(graph),
        seconds=work.clock.seconds,
    )


class _Analysis:
    """The analysis of the costs of a graph at several budgets, within one time limit."""

    def __init__(
        self,
        graph: Graph,
        memory: CountedMemory,
        clock: Clock,
        on_activity: Callable[[str], object],
        should_stop: Callable[[], bool],
    ) -> None:
        self.graph, self.memory, self.clock, self.tell, self.should_stop = graph, memory, clock, on_activity, should_stop
        plain = apply_options(graph, ())
        self.summary, self.eager_bytes = summarize(plain), predict_eager_bytes(plain, memory)
        self.tell("looking for the least budget")
        self.known, self.least = self._find_least(plain, clock.start_part(_LEAST * clock.limit))

    def _find_least(self, graph: Graph, clock: Clock) -> tuple[Frontier, LeastBudget]:
        """Return the least budget that is found before the limit, and what is known in an order of the ops, with its schedule."""
        known = Frontier(find_order(graph, clock), _TOLERANCE, self.memory)
        least = find_least_budget(graph, self.memory, should_stop=lambda: measure_rest(clock) <= 0 or self.should_stop())
        known.learn_least(least)
        return known, least

    def solve(self, budgets: Sequence[int]) -> Turns:
        """Solve for a short time at each budget; each result is used for all budgets."""
        return self._solve(self.known, budgets, self.clock.start_part(_CURVE * self.clock.limit))

    def _solve(self, known: Frontier, budgets: Sequence[int], clock: Clock) -> Turns:
        # What the other parts leave is for second turns.
        turns = Turns(known, tuple(budgets), clock=clock, time_limit_s=math.inf, on_activity=self.tell, first_share=1.0)
        turns.run(self.should_stop)
        return turns

    def get_price(self, budget_bytes: int) -> Price:
        """Return the known overhead at a budget."""
        return _get_price(self.known, budget_bytes, self.summary)

    def try_options(
        self, names: Sequence[str], budget_bytes: int, link: str | float | None, host_budget: str | int | None
    ) -> tuple[OptionAdvice, ...]:
        """Return the gain of each option alone."""
        found = []
        for done, name in enumerate(names):
            self.tell(f"trying {name}")
            copying = (link, host_budget) if Need.LINK in needs((name,)) else ()
            options = build_option_settings([name], *copying)
            clock = self.clock.start_part(max(0.1, measure_rest(self.clock) / (len(names) - done)))
            found.append(self._evaluate_option(name, options.apply(self.graph), budget_bytes, clock))
        return tuple(found)

    def _evaluate_option(self, name: str, graph: Graph, budget_bytes: int, clock: Clock) -> OptionAdvice:
        offered = [op for op in graph.ops if op.optional or op.overwrites]
        alone = self.get_price(budget_bytes)
        if not offered:
            return OptionAdvice(name, 0, True, self.least.proved_bytes, self.least.found_bytes, alone, self.least.stopped)
        known, least = self._find_least(graph, clock.start_part(_OPTION_LEAST * clock.limit))
        self._solve(known, [budget_bytes], clock)
        price = _get_price(known, budget_bytes, self.summary)
        if price.overhead is None or (alone.overhead is not None and alone.overhead < price.overhead):
            # A schedule without an option is valid with it.
            price = replace(price, overhead=alone.overhead, reserved_bytes=alone.reserved_bytes)
        exact = all(op.exact for op in offered) and not get_option(name).lossy
        return OptionAdvice(
            name=name,
            ops=len(offered),
            exact=exact,
            least_proved_bytes=min(least.proved_bytes, self.least.found_bytes),
            least_found_bytes=min(least.found_bytes, self.least.found_bytes),
            price=price,
            stopped=least.stopped,
        )


def _get_price(known: Frontier, budget_bytes: int, summary: GraphSummary) -> Price:
    point = known.get_point(budget_bytes, None)
    overhead, bound = map(summary.compute_overhead, (point.time_s, point.bound_s))
    return Price(budget_bytes, overhead, bound, point.reserved_bytes)


def _recommend(
    work: _Analysis, available_bytes: int | None, budgets: Sequence[int], offered: Sequence[OptionAdvice]
) -> Recommendation:
    whole_bytes, least_bytes = work.eager_bytes, work.least.found_bytes
    if available_bytes is None:
        prices = [work.get_price(budget) for budget in (least_bytes, *budgets, max(least_bytes, whole_bytes))]
        cheap = next(price for price in prices if price.overhead is not None and price.overhead <= CHEAP)
        reason = f"the least of these that takes at most {100 * CHEAP:.0f}% longer ({cheap}); nothing is known of a device"
        return Recommendation(cheap.budget_bytes, (), cheap.overhead, reason, cheap.reserved_bytes)
    available = f"{format_bytes(available_bytes)} are available"
    if whole_bytes <= available_bytes:
        reserved_bytes = predict_eager_reserved_bytes(work.graph, work.memory) if is_on_cuda(work.graph) else None
        return Recommendation(None, (), 0.0, f"no plan, for eager PyTorch fits: {available}", reserved_bytes)
    if least_bytes <= available_bytes:
        price = work.get_price(available_bytes)
        reason = f"all that is available ({price}); eager PyTorch does not fit"
        return Recommendation(available_bytes, (), price.overhead, reason, price.reserved_bytes)
    fitting = [option for option in offered if option.least_found_bytes <= available_bytes]
    if fitting:
        best = min(fitting, key=lambda option: (not option.exact, option.price.overhead or 0.0))
        reason = f"recomputation alone needs {format_enough(least_bytes)}, and {available}"
        return Recommendation(available_bytes, (best.name,), None, reason)
    least_bytes = min([least_bytes, *(option.least_found_bytes for option in offered)])
    reason = f"a smaller batch: {available}, and the least that a schedule is known for is {format_enough(least_bytes)}"
    return Recommendation(None, (), None, f"{reason} (planner max-batch finds the largest batch)")
