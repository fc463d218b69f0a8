"""Models solved, and refined where their solutions do not fit, in turn (dynamic discretization discovery)."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from solvers.clock import Clock
from solvers.highs import solve_program
from solvers.highs.program import Answer, Floats, Milp, Outcome, Watch
from solvers.memory import give_back
from solvers.problem import OBJECTIVE_SCALE
from solvers.windows.formulation.draft import POLL_EVERY, StoppedError
from solvers.windows.formulation.granularity import Discretization, Model
from solvers.windows.formulation.models import build_ordered, build_relaxation
from solvers.windows.incumbent import Search
from solvers.windows.solution.decode import decoded, late_writers, read_choice
from solvers.windows.solution.encode import choice_of_trial, start_values
from solvers.windows.solution.expand import Choice
from solvers.windows.solution.refine import refined, where_it_waits, with_stages_in_order

_WORK_PER_ENTRY = 2e-6  # of building a model


def solve_part(
    search: Search,
    program: Milp,
    limit: float,
    *,
    gap: float,
    start: Floats | None = None,
    below: float = np.inf,
    should_stop: Callable[[], bool] | None = None,
    on_incumbent: Callable[[Floats, float], bool] | None = None,
) -> Answer:
    """Solve a program of those that look for schedules.

    Args:
        search: on whose clock.
        program: what is solved.
        limit: that it may take.
        gap: at which it ends, as a share of the whole step.
        start: values to start from.
        below: a bound that is no lower ends it (in units of the objective).
        should_stop: ends it; by default, ``Search.enough``.
        on_incumbent: as in ``solvers.highs.program.Watch``.
    """
    search.clock.spend(_WORK_PER_ENTRY * program.matrix.nnz)  # of building it
    stop = should_stop or search.enough
    bound = -np.inf

    def on_bound(value: float) -> None:
        nonlocal bound
        bound = value
        search.tell()

    return solve_program(
        program,
        clock=search.clock.part(limit),
        absolute_gap=gap * OBJECTIVE_SCALE,
        start=start,
        watch=Watch(lambda: stop() or bound >= below, on_incumbent, on_bound, search.interrupted),
        options={"mip_pscost_minreliable": search.params.portfolio.pscost_minreliable},
    )


def refine(
    search: Search, detail: Discretization, limit: float, *, is_relaxation: bool, from_best: bool = True
) -> tuple[Discretization, bool]:
    """Solve and refine in turn; False with it if time was up before there was nothing left to refine.

    Args:
        from_best: start from the best schedule, where it is known what that is in the model.
    """
    clock = search.clock.part(limit)
    done = search.solved if is_relaxation else search.satisfied
    while not (done() or search.stopped()):
        try:
            model = _build(search, detail, is_relaxation=is_relaxation)
        except StoppedError:
            return detail, False
        answer, closer = _solve_model(search, model, clock, is_relaxation=is_relaxation, from_best=from_best)
        in_time = clock.now < limit
        if is_relaxation:
            closer = replace(closer, ordered=detail.ordered)
        if search.solved():
            more = search.clock.part(search.more(search.clock.now))
            _solve_model(search, model, more, is_relaxation=is_relaxation, from_best=from_best)
            return detail, False
        if answer.outcome is not Outcome.OPTIMAL:
            # The bound of a finer model, which takes longer, would lag behind for long: this one is given more time.
            # Where it was not time that ended it, but memory, more of it is of no use.
            again = is_relaxation and not in_time
            return (detail if again else closer), answer.outcome is Outcome.INFEASIBLE
        if closer == detail:
            return detail, True
        detail = closer
    return detail, False


def _build(search: Search, detail: Discretization, *, is_relaxation: bool) -> Model:
    stopped = search.spending(_WORK_PER_ENTRY * POLL_EVERY, search.stopped)
    if is_relaxation:
        search.tell(f"bounding with {len(detail.ends)} windows")
        return build_relaxation(search.problem, detail, stopped)
    search.tell(f"searching in {len(detail.ends)} windows")
    return build_ordered(search.problem, detail, should_stop=stopped)


def _solve_model(
    search: Search, model: Model, clock: Clock, *, is_relaxation: bool, from_best: bool
) -> tuple[Answer, Discretization]:
    """Solve, offering every solution on the way; comes with what the last one says is to be refined."""
    closer = [model.detail]
    search.largest = max(search.largest, model.program.matrix.shape)

    def try_solution(values: Floats, objective: float) -> bool:
        choice = read_choice(model, values)
        search.solutions.append((model.detail, choice))
        closer[0] = _offer(search, model, choice)
        return search.satisfied()

    def on_bound(overhead: float) -> None:
        if is_relaxation:
            search.raise_bound(overhead)
        search.tell()

    start = None
    # What a schedule with both optional ops and round trips is in a model is known of its plain graph only.
    if from_best and search.best is not None and (search.problem.copies is None or search.problem.places.plain):
        start = start_values(model, choice_of_trial(search.problem, model.detail, search.best))
    params = search.params.bound
    answer = solve_program(
        model.program,
        clock=clock,
        absolute_gap=(params.close_gap if search.solved() else params.inner_gap) * search.tolerance * OBJECTIVE_SCALE,
        start=start,
        watch=Watch(lambda: search.enough() or search.crowded(), try_solution, on_bound, search.interrupted),
    )
    give_back()
    if is_relaxation:
        if answer.outcome is Outcome.INFEASIBLE and search.best is not None:
            search.fail(
                f"the relaxation in {len(model.detail.ends)} windows is infeasible, though a schedule within the budget is "
                "known: a row of the program is no relaxation, or the arithmetic of HiGHS failed"
            )
        elif answer.outcome is Outcome.INFEASIBLE:
            search.infeasible = True
        else:
            search.raise_bound(answer.bound)
    if answer.values is not None:
        try_solution(answer.values, 0.0)
    return answer, closer[0]


def _offer(search: Search, model: Model, choice: Choice) -> Discretization:
    """Expand a solution and offer it; returns the model's detail, closer where it does not fit."""
    detail, params = model.detail, search.params.refinement
    order = decoded(model.problem, detail, choice)
    if writers := late_writers(search.problem, order):
        return detail.split(writers)
    if not search.problem.allows(order.computed):
        return detail  # what the solution does not say how to make came by ops that it does not execute
    trial = search.offer(order, detail)
    if trial.peak_bytes <= search.budget_bytes:
        return where_it_waits(detail, trial, params)
    closer = refined(detail, trial, search.budget_bytes, params)
    return with_stages_in_order(closer, trial, search.budget_bytes, params)
