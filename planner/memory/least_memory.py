"""The least memory within an allowed overhead: bisection over budgets. Never imports torch."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from planner.graphs.options import remove_options
from planner.graphs.schedule import keep_everything
from planner.graphs.simulate import simulate
from planner.solvers.bounds import bound_least_budget
from planner.solvers.clock import measure_rest
from planner.solvers.registry import Solver
from planner.solvers.request import Request
from planner.solvers.result import Result, SolveProgress, Status, decide_status

_PRECISION = 0.01  # of the budget found: where the bisection ends
_SEARCH_SHARE = 0.75  # of the clock: the rest is for the fastest schedule at the budget found
_ROUNDING = 1e-9


def solve_least_memory(run: Solver, request: Request, max_overhead: float) -> Result:
    """Return the fastest schedule at the least budget where a step takes at most ``1 + max_overhead`` times its program.

    A budget is accepted when a schedule within the allowed time is found; the next budget is below that schedule's peak. It is
    rejected when the bound, or the best schedule at the end of the solve, exceeds the allowed time. Each solve ends as soon as
    its budget is decided. The result is as reproducible as the solves are.

    Args:
        request: what is solved at each budget, with the clock of the whole search. Its own budget is not used; once it is
            stopped, the least budget so far is the answer.
        max_overhead: 0 or more, as a fraction of the step that keeps everything.

    Returns:
        A result whose budget is the peak of a schedule within the price; its settings have ``max_overhead`` and
        ``least_budget_proved_bytes``, below which a schedule within the price was proved not to exist (in this order).
    """
    graph, clock = request.graph, request.clock
    limit_s = (graph.time_s + max_overhead * graph.step_s) * (1 + _ROUNDING)
    best = keep_everything(remove_options(graph))
    simulation = simulate(graph, best)
    best_s, high_bytes = simulation.time_s, simulation.peak_bytes
    low_bytes = proved_bytes = bound_least_budget(graph).budget_bytes - 1
    rounds = max(1, math.ceil(math.log2(max(2.0, (high_bytes - low_bytes) / max(1.0, _PRECISION * high_bytes)))))
    while high_bytes - low_bytes > _PRECISION * high_bytes + 1 and not request.is_interrupted():
        slice_s = _SEARCH_SHARE * clock.limit / rounds
        if measure_rest(clock) - slice_s <= (1 - _SEARCH_SHARE) * clock.limit / 2:
            break
        budget_bytes = (low_bytes + high_bytes) // 2
        decision = StopWhenDecided(limit_s, request.should_stop, request.on_progress)
        asked = replace(request, budget_bytes=budget_bytes, clock=clock.start_part(slice_s))
        result = run(replace(asked, on_progress=decision, should_stop=decision.is_reached))
        if result.time_s is not None and result.time_s <= limit_s:
            assert result.schedule is not None and result.peak_bytes is not None
            best, best_s, high_bytes = result.schedule, result.time_s, result.peak_bytes
            continue
        low_bytes = budget_bytes
        if result.status is Status.INFEASIBLE or decision.is_refuted(result.bound_s):
            proved_bytes = max(proved_bytes, budget_bytes)
    found = run(replace(request, budget_bytes=high_bytes, clock=clock.start_part(max(1e-3, measure_rest(clock)))))
    if found.time_s is None or found.time_s > best_s:
        status = decide_status(best_s, found.bound_s, found.settings.tolerance or 0.0)
        found = found.map_to(status=status, schedule=best, time_s=best_s, peak_bytes=high_bytes, reason=None, message="")
    settings = replace(found.settings, max_overhead=max_overhead, least_budget_proved_bytes=proved_bytes + 1)
    return found.map_to(settings=settings)


@dataclass(slots=True)
class StopWhenDecided:
    """A callback that ends a solve as soon as it is known whether a schedule takes at most `limit_s`, infinity for any time."""

    limit_s: float
    should_stop: Callable[[], bool] | None = None
    on_progress: Callable[[SolveProgress], None] | None = None
    decided: bool = False

    def __call__(self, progress: SolveProgress) -> None:
        """Update the answer from the progress of the current solve."""
        self.decided = (progress.best_s is not None and progress.best_s <= self.limit_s) or self.is_refuted(progress.bound_s)
        if self.on_progress is not None:
            self.on_progress(progress)

    def is_refuted(self, bound_s: float | None) -> bool:
        """Return True if the bound excludes every schedule that is fast enough."""
        return bound_s is not None and bound_s > self.limit_s

    def is_reached(self) -> bool:
        """Return True if to end the solve."""
        return self.decided or (self.should_stop is not None and self.should_stop())
