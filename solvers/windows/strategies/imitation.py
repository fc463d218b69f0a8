"""Imitation of baselines, so that none finds a faster schedule than the exact solver."""

from solvers.clock import left
from solvers.registry import get_solver
from solvers.request import Request
from solvers.windows.strategies.eviction import offer_program
from solvers.windows.strategies.strategy import Strategy


class Imitation(Strategy):
    """The schedules of the baselines in ``FirstScheduleParams.imitated``, one after another."""

    def step(self, limit: float) -> bool:
        """Run the baselines for at most `limit` and offer their schedules; return False."""
        search, clock = self.search, self.search.clock.part(limit)
        for name in search.params.first_schedule.imitated:
            if search.stopping.solved() or search.stopping.stopped() or left(clock) <= 0:
                break
            search.progress.tell(f"trying {name}")
            request = Request(search.problem.graph, search.budget_bytes, clock=clock, should_stop=search.stopping.stopped)
            found = get_solver(name)(request)
            if found.schedule is not None:
                offer_program(search, found.schedule.computed)
        return False
