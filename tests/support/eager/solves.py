"""Solves in the process of the test."""

from math import inf

from planner.plans.background import Ended, SolveJob, solve_here
from planner.plans.plan import Plan


class SolvedWhenWaitedFor:
    """A solve in this process, in place of one in another that is ready earlier or later; it is done where it is waited for."""

    def __init__(self, job: SolveJob) -> None:
        self.ended: Ended | None = None
        self._job = job

    def receive(self, most_s: float = 0.0) -> Plan | None:
        if most_s == 0 or self.ended is not None:
            return None
        self.ended = solve_here(self._job, inf)
        return self.ended.plan

    def stop(self) -> None:
        self.ended = Ended(failure="it was stopped")
