"""Schedules of other methods: none is faster than the solver's."""

from solvers.clock import left
from solvers.registry import get_solver
from solvers.request import Request
from solvers.windows.strategies.eviction import offer_program
from solvers.windows.strategies.strategy import Strategy


class Imitation(Strategy):
    """What the methods of ``FirstScheduleParams.imitated`` find, one after another."""

    def step(self, limit: float) -> bool:
        """As ``Strategy.step``."""
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
