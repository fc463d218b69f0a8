"""The solve: look at the relaxation, refine it where its solution does not fit, and find schedules that do meanwhile."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial

import numpy as np

from solvers.clock import Beside, left
from solvers.eviction.engine import WORK_PER_EVICTION
from solvers.eviction.least_peak import least_evicting_schedule
from solvers.eviction.rules import EvictionRule
from solvers.problem import OBJECTIVE_SCALE
from solvers.registry import get_solver
from solvers.request import Request
from solvers.windows.decoding.decode import Order, Trial, late_writers, order_of
from solvers.windows.decoding.refinement import halved
from solvers.windows.relaxation.discretization import Discretization
from solvers.windows.search import Search
from solvers.windows.strategies.evicted import evicted, with_prices
from solvers.windows.strategies.parts import POLL, PartBeside, end_beside, start_beside
from solvers.windows.strategies.portfolio import Portfolio
from solvers.windows.strategies.refinement import refine
from solvers.windows.strategies.sending import sending_orders
from solvers.windows.strategies.state_space import shortest
from solvers.windows.strategies.with_options import run_with_options

_WORK_PER_STATES = 2e-2  # a thousand of them


def run(search: Search) -> None:
    """Search until solved, stopped, or nothing is left to refine."""
    whole = search.problem.whole
    if not search.problem.places.plain:
        run_with_options(search, _run, run)
        return
    with ExitStack() as stack:
        apart = without_copies = None
        if whole.writes_over_inputs:
            apart = stack.enter_context(PartBeside(search, whole.out_of_place(), run, partial(_take_apart, search)))
            apart.tell()
        if search.problem.copies is not None:
            without_copies = stack.enter_context(PartBeside(search, search.problem.graph, run, search.incumbent.take))
        _run(search, without_copies, apart)


def _take_apart(search: Search, trial: Trial) -> None:
    """Keep a schedule that writes over nothing: it fits as it is, and better where it may."""
    search.incumbent.take(trial)
    search.offer(trial.order, Discretization((search.problem.ops - 1,)))


def _run(search: Search, without_copies: PartBeside | None = None, apart: PartBeside | None = None) -> None:
    """The same for a graph with nothing to choose but when to execute the program's ops, and round trips to the host.

    Args:
        without_copies: the graph without these. Its schedules count once those with them were looked for: beside a good
            schedule that sends nothing, a rough one that does, and would come to more when improved, is given up.
        apart: the graph where no op writes over what it reads.
    """
    ops = search.problem.ops
    whole = Discretization((ops - 1,))
    trial = search.offer(order_of(whole, range(ops)), whole)
    peak = int(np.argmax(trial.memory_bytes))
    coarse = Discretization(tuple(sorted({peak, ops - 1})))
    if search.stopping.solved():
        return
    beside = None
    first, trips = search.params.first_schedule, search.params.round_trips
    rules = with_prices(search.problem, first.rules, trips.prices)
    if search.problem.copies is not None:
        beside = start_beside(search, Portfolio(search, coarse, coarse, without_copies).find)
    else:
        _follow_rules(search, rules, first.early_rules_limit, until_found=True)
    try:
        # From nothing, while others look for schedules: its solutions are to be other ones than theirs.
        detail, _ = refine(search, coarse, search.params.bound.first_slice, is_relaxation=True, from_best=False)
        _follow_rules(search, rules, first.rules_limit if search.problem.copies is None else trips.rules_limit)
        if not (search.stopping.solved() or search.stopping.stopped()):
            beside = beside or start_beside(search, Portfolio(search, coarse, detail).find)
            _go_on(search, detail, beside)
        for part in filter(None, (without_copies, apart)):
            part.finish()
    finally:
        search.stopping.halt()
        if beside is not None:
            end_beside(beside)
        search.incumbent.close()


def _go_on(search: Search, detail: Discretization, beside: Beside) -> None:
    """Offer what takes longer, and refine the relaxation, while schedules are looked for beside that."""
    if search.problem.copies is not None:
        _send(search)
    if search.incumbent.best is None:
        _evict(search)
    imitate(search)
    _bound(search, detail)
    while beside.running and not search.stopping.enough():
        search.progress.tell()
        beside.wait(POLL)
    if search.problem.copies is None and not (search.stopping.solved() or search.stopping.stopped()):
        _decide(search)


def _follow_rules(search: Search, rules: Iterator[EvictionRule], limit: float, *, until_found: bool = False) -> None:
    """Offer what rules of eviction come to until a short time is up, or there is a schedule; the others stay in `rules`."""
    until, most = search.clock.now + limit, search.params.first_schedule.few_executions
    while not (
        search.stopping.solved()
        or search.stopping.stopped()
        or search.clock.now >= until
        or (until_found and search.incumbent.best is not None)
    ):
        if (rule := next(rules, None)) is None:
            return
        stopped = search.stopping.polled(WORK_PER_EVICTION, search.stopping.stopped)
        _offer(search, evicted(search.problem, rule, max_factor=most, should_stop=stopped))


def _evict(search: Search) -> None:
    """Offer what rules of eviction find however much they repeat; failing that, what they find that needs least memory."""
    params = search.params.first_schedule
    began = search.clock.now
    until = began + params.eviction_limit

    def ended() -> bool:
        search.progress.tell()
        return search.incumbent.best is not None or search.clock.now > until or search.stopping.stopped()

    should_stop = search.stopping.polled(WORK_PER_EVICTION, ended)
    for rule in with_prices(search.problem, (*params.rules, *params.tight_rules), search.params.round_trips.prices):
        if should_stop():
            return
        # At every price the rules may take longer than there is: half of it is for what needs least memory.
        if search.problem.copies is not None and search.clock.now > (began + until) / 2:
            break
        _offer(search, evicted(search.problem, rule, should_stop=should_stop))
    least = least_evicting_schedule(search.problem.graph, search.clock, should_stop=ended)
    if least is not None and not should_stop():
        _offer_program(search, least.computed)


def _send(search: Search) -> None:
    """Offer orders in which what is not needed now is on the host, and the rest is computed again by rules of eviction."""
    until = search.clock.now + search.params.first_schedule.sending_limit
    whole = Discretization((search.problem.ops - 1,))

    def ended() -> bool:
        search.progress.tell("sending what is not needed now")
        return search.stopping.enough() or search.clock.now > until

    for order in sending_orders(search.problem, should_stop=search.stopping.polled(WORK_PER_EVICTION, ended)):
        if ended():
            return
        if not late_writers(search.problem, order):
            search.offer(order, whole)


def imitate(search: Search) -> None:
    """Offer what other methods do: no schedule is slower than theirs."""
    clock = search.clock.part(search.params.first_schedule.imitation_limit)
    for name in search.params.first_schedule.imitated:
        if search.stopping.solved() or search.stopping.stopped() or left(clock) <= 0:
            return
        search.progress.tell(f"trying {name}")
        request = Request(search.problem.graph, search.budget_bytes, clock=clock, should_stop=search.stopping.stopped)
        found = get_solver(name)(request)
        if found.schedule is not None:
            _offer_program(search, found.schedule.computed)


def _offer(search: Search, order: Order | None) -> None:
    if order is not None:
        search.offer(order, Discretization((search.problem.ops - 1,)))


def _offer_program(search: Search, computed: Sequence[int] | None) -> None:
    """Offer what executes ops of the program only, unless something reads there what has been written over."""
    if computed is None:
        return
    order = order_of(Discretization((search.problem.ops - 1,)), computed)
    if not late_writers(search.problem, order):
        _offer(search, order)


def _bound(search: Search, detail: Discretization) -> None:
    """Refine the relaxation for as long as that may help."""
    params = search.params.bound
    limit = params.first_slice
    while not (search.stopping.solved() or search.stopping.stopped()):
        limit *= params.longer
        detail, exhausted = refine(search, detail, limit, is_relaxation=True)
        if exhausted:
            if search.problem.ops <= params.small_ops or len(detail.ends) == search.problem.ops:
                return
            detail = halved(detail)


def _decide(search: Search) -> None:
    """Small graphs: search all states."""

    def ended() -> bool:
        search.progress.tell("searching all states")
        return search.stopping.stopped()

    problem = search.problem
    should_stop = search.stopping.polled(_WORK_PER_STATES, ended)
    found = shortest(problem, search.params.bound.max_states, below_s=search.incumbent.best_s, should_stop=should_stop)
    _offer_program(search, found.computed)
    search.incumbent.infeasible = found.decided and search.incumbent.best is None
    if not search.incumbent.infeasible and problem.base_s > 0:
        search.incumbent.raise_bound((found.bound_s / problem.base_s - 1) * OBJECTIVE_SCALE)
