"""What a solver is asked for: one object, whichever solver it is."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TypeVar

from graphs.errors import PlannerError
from graphs.ir import Graph
from graphs.schedule import Schedule
from solvers.clock import Clock, WallClock, left
from solvers.result import SolveProgress
from solvers.tolerance import DEFAULT, Tolerance

Params = TypeVar("Params")


@dataclass(frozen=True, slots=True)
class Request:
    """A schedule of `graph` within `budget_bytes` is wanted.

    Attributes:
        graph: the training step.
        budget_bytes: of the device, static bytes included; what other pools hold stands in the graph.
        tolerance: on the gap, relative to the whole step; a number holds all the time. Solvers that do not look for better
            schedules as time goes by take the first.
        clock: runs from when it was made; its limit is that of the whole solve.
        on_progress: called as the solve advances, in the thread that solves.
        should_stop: polled there; once it returns True the solver ends with the best it has.
        params: of the solver that is asked, an object of the class that its module names; None: its defaults.
        on_schedule: called in the thread that solves with each better schedule of `graph` and the lower bound then, by solvers
            that improve one.
    """

    graph: Graph
    budget_bytes: int
    tolerance: Tolerance = DEFAULT
    clock: Clock = field(default_factory=WallClock)
    on_progress: Callable[[SolveProgress], None] | None = None
    should_stop: Callable[[], bool] | None = None
    params: object = None
    on_schedule: Callable[[Schedule, float], None] | None = None

    def params_of(self, default: Params) -> Params:
        """The parameters, which are of the class of `default`, or that.

        Raises:
            PlannerError: they are those of another solver.
        """
        if self.params is None:
            return default
        if not isinstance(self.params, type(default)):
            raise PlannerError(f"params is {self.params!r}: must be {type(default).__name__}, or None for its defaults")
        return self.params

    def interrupted(self) -> bool:
        """Whether the caller wants it to stop."""
        return self.should_stop is not None and self.should_stop()

    def stopped(self) -> bool:
        """Whether the caller wants it to stop, or the clock does."""
        return self.interrupted() or left(self.clock) <= 0

    def ended(self) -> str:
        """Why it must end; "" while it need not."""
        if left(self.clock) <= 0:
            return f"the limit of {self.clock.amount(self.clock.limit)} was reached"
        return "it was stopped" if self.interrupted() else ""

    def tell(self, activity: str, best_s: float | None, bound_s: float | None) -> None:
        """Report progress."""
        if self.on_progress is not None:
            self.on_progress(SolveProgress(self.clock.seconds, activity, best_s, bound_s))

    def on(self, graph: Graph, to_own: Callable[[Schedule], Schedule]) -> "Request":
        """Return the same request for `graph`, whose schedules `to_own` turns into schedules of this graph."""
        tell = self.on_schedule
        if tell is None:
            return replace(self, graph=graph)
        return replace(self, graph=graph, on_schedule=lambda schedule, bound_s: tell(to_own(schedule), bound_s))

    @property
    def settings(self) -> dict[str, object]:
        """Limit and tolerance, as results record them."""
        limit = "work_limit" if self.clock.counts_work else "time_limit_s"
        return {"tolerance": self.tolerance.first, limit: self.clock.limit}
