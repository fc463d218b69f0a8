"""The solve: look at the relaxation, refine it where its solution does not fit, and find schedules that do meanwhile."""

import threading
import traceback
from collections.abc import Sequence

import numpy as np

from solvers.eviction.engine import evicting_order
from solvers.eviction.least_peak import least_evicting_schedule
from solvers.eviction.rules import RULES, TIGHT_RULES
from solvers.problem import OBJECTIVE_SCALE
from solvers.registry import get_solver
from solvers.windows.formulation.granularity import Discretization
from solvers.windows.heuristics.portfolio import Portfolio
from solvers.windows.incumbent import Search
from solvers.windows.solution.decode import late_writers, order_of
from solvers.windows.solution.refine import halved
from solvers.windows.state_space import shortest

_FIRST_SLICE_S = 2.0  # for the relaxation in the first round
_LONGER = 3.0  # times as long in each further one: a model that was stopped begins anew
_FEW = 4.0  # times the ops of the graph: what a rule of eviction may execute while nothing else looks for schedules
_FIRST_RULES_S = 1.0  # for all of them
_EVICTION_S = 20.0  # for rules of eviction while something else does
# What tries most comes last.
_IMITATED = ("checkpoint_blocks", "sac-attention", "sac-every-second", "chen-sqrt", "dtr", "memory-budget", "chen-greedy", "sac")
_IMITATION_S = 4.0  # for all of these
_GRACE_S = 0.5  # how long the end of a solve waits for the thread that looks for schedules
_SMALL = 30  # ops of a graph for which searching all states comes before more windows
_MAX_STATES = 1_000_000  # about a gigabyte


def run(search: Search) -> None:
    """Search until solved, stopped, or nothing is left to refine."""
    ops = search.problem.ops
    whole = Discretization((ops - 1,))
    trial = search.offer(order_of(whole, range(ops)), whole)
    peak = int(np.argmax(trial.memory_bytes))
    coarse = Discretization(tuple(sorted({peak, ops - 1})))
    if search.solved():
        return
    detail, _ = search.refine(coarse, _FIRST_SLICE_S, is_relaxation=True)
    until = search.seconds + _FIRST_RULES_S
    for rule in RULES:
        if search.solved() or search.stopped():
            return
        if search.seconds < until:
            graph, budget_bytes = search.problem.graph, search.budget_bytes
            _offer(search, evicting_order(graph, budget_bytes, rule, max_factor=_FEW, should_stop=search.stopped))
    portfolio = Portfolio(search, coarse, detail)

    def find() -> None:
        try:
            portfolio.find()
        except Exception as error:  # noqa: BLE001 (what was found until then is still an answer)
            place = traceback.extract_tb(error.__traceback__)[-1]
            search.fail(f"looking for schedules failed: {type(error).__name__}: {error} ({place.filename}:{place.lineno})")

    thread = threading.Thread(target=find, daemon=True, name="search for schedules")
    thread.start()
    try:
        if search.best is None:
            _evict(search)
        imitate(search)
        _bound(search, detail)
        while thread.is_alive() and not search.enough():
            search.tell()
            thread.join(0.05)
        if not (search.solved() or search.stopped()):
            _decide(search)
    finally:
        search.halted = True
        # It may be in the middle of building a large model; it looks up after that, and changes nothing then.
        thread.join(_GRACE_S)
        search.closed = True


def _evict(search: Search) -> None:
    """Offer what rules of eviction find however much they repeat; failing that, what they find that needs least memory."""
    graph = search.problem.graph
    until = search.seconds + _EVICTION_S

    def should_stop() -> bool:
        search.tell()
        return search.best is not None or search.seconds > until or search.stopped()

    for rule in (*RULES, *TIGHT_RULES):
        if should_stop():
            return
        _offer(search, evicting_order(graph, search.budget_bytes, rule, should_stop=should_stop))
    least = least_evicting_schedule(graph, time_limit_s=until - search.seconds, should_stop=should_stop)
    if least is not None and not should_stop():
        _offer(search, least.computed)


def imitate(search: Search) -> None:
    """Offer what other methods do: no schedule is slower than theirs."""
    until = search.seconds + _IMITATION_S
    for name in _IMITATED:
        limit_s = min(search.left_s, until - search.seconds)
        if search.solved() or search.stopped() or limit_s <= 0:
            return
        search.tell(f"trying {name}")
        found = get_solver(name)(search.problem.graph, search.budget_bytes, time_limit_s=limit_s, should_stop=search.stopped)
        if found.schedule is not None:
            _offer(search, found.schedule.computed)


def _offer(search: Search, computed: Sequence[int] | None) -> None:
    if computed is None:
        return
    whole = Discretization((search.problem.ops - 1,))
    if not late_writers(search.problem, order := order_of(whole, computed)):
        search.offer(order, whole)


def _bound(search: Search, detail: Discretization) -> None:
    """Refine the relaxation for as long as that may help."""
    slice_s = _FIRST_SLICE_S
    while not (search.solved() or search.stopped()):
        slice_s *= _LONGER
        detail, exhausted = search.refine(detail, slice_s, is_relaxation=True)
        if exhausted:
            if search.problem.ops <= _SMALL or len(detail.ends) == search.problem.ops:
                return
            detail = halved(detail)


def _decide(search: Search) -> None:
    """Small graphs: search all states."""

    def should_stop() -> bool:
        search.tell("searching all states")
        return search.stopped()

    problem = search.problem
    found = shortest(problem, _MAX_STATES, below_s=search.best_s(), should_stop=should_stop)
    _offer(search, found.computed)
    search.infeasible = found.decided and search.best is None
    if not search.infeasible and problem.base_s > 0:
        search.raise_bound((found.bound_s / problem.base_s - 1) * OBJECTIVE_SCALE)
