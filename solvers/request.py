"""The request to a solver, the same for all solvers."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Self, TypeVar, cast

from planner.graphs.ir import Graph
from planner.graphs.schedule import Schedule
from planner.solvers.clock import Clock, WallClock, measure_rest
from planner.solvers.result import Ending, SolveProgress, SolveSettings
from planner.solvers.tolerance import DEFAULT, Tolerance

Params = TypeVar("Params")


@dataclass(frozen=True, slots=True)
class Start:
    """What is known from a solve of the same graph, perhaps with other times: for ``windows``.

    Attributes:
        schedule: a schedule; used in solves whose order is that of its first executions.
        windows: last ops of the windows of the relaxation, in that order; () with optional ops other than transfers to the host.
    """

    schedule: Schedule
    windows: tuple[int, ...] = ()

    @classmethod
    def of(cls, schedule: Schedule, settings: SolveSettings) -> Self:
        """Return the start from a known schedule, with the windows that its solve has recorded in `settings`."""
        return cls(schedule, tuple(settings.windows or ()))


@dataclass(frozen=True, slots=True)
class Request:
    """A request for a schedule of `graph` within `budget_bytes`.

    Attributes:
        graph: the training step.
        budget_bytes: of the device, including static bytes; the capacities of other pools are in the graph.
        tolerance: on the gap, relative to the whole step. Solvers that do not improve their schedules over time use its first
            value.
        clock: started when it was created; its limit is that of the whole solve.
        on_progress: called as the solve advances, in the thread that solves.
        should_stop: polled there; once it returns True, the solver ends with its best schedule.
        params: parameters of the solver, of the class that the registry names; None: its defaults.
        on_schedule: called in the thread that solves with each better schedule of `graph` and the current lower bound, by solvers
            that improve schedules.
        start: a schedule of `graph`, and windows, to begin with; None if none are known.
    """

    graph: Graph
    budget_bytes: int
    tolerance: Tolerance = DEFAULT
    clock: Clock = field(default_factory=WallClock)
    on_progress: Callable[[SolveProgress], None] | None = None
    should_stop: Callable[[], bool] | None = None
    params: object = None
    on_schedule: Callable[[Schedule, float], None] | None = None
    start: Start | None = None

    def get_params(self, default: Params) -> Params:
        """Return the parameters, or `default` if there are none. They are of its class
        (``planner.solvers.registry.check_params``).
        """
        return default if self.params is None else cast("Params", self.params)

    def is_interrupted(self) -> bool:
        """Return True if the caller requests a stop."""
        return self.should_stop is not None and self.should_stop()

    def is_stopped(self) -> bool:
        """Return True if the caller requests a stop or the clock has reached its limit."""
        return self.is_interrupted() or measure_rest(self.clock) <= 0

    def explain_end(self, work: float = 0.0) -> str:
        """Spend `work`, and return why the solve must end, the limit or an interruption; "" if it may go on."""
        self.clock.spend(work)
        if measure_rest(self.clock) <= 0:
            return f"the limit of {self.clock.format_amount(self.clock.limit)} was reached"
        return "it was stopped" if self.is_interrupted() else ""

    def choose_ending(self, last: Ending | None = None) -> Ending:
        """Return why a solve ends now whose gap is above the tolerance; `last` is the reason of the last solve in it, if any."""
        if measure_rest(self.clock) <= 0:
            return Ending.LIMIT
        return Ending.STOPPED if self.is_interrupted() else last or Ending.EXHAUSTED

    def tell(self, activity: str, best_s: float | None, bound_s: float | None) -> None:
        """Report progress."""
        if self.on_progress is not None:
            self.on_progress(SolveProgress(self.clock.seconds, activity, best_s, bound_s))

    def map_to(
        self, graph: Graph, to_own: Callable[[Schedule], Schedule], of_own: Callable[[Schedule], Schedule] | None = None
    ) -> "Request":
        """Return this request for `graph`, whose schedules `to_own` maps to schedules of this request's graph.

        Args:
            of_own: maps them back; None: the start, if there is one, is dropped.
        """
        tell, start = self.on_schedule, None
        if self.start is not None and of_own is not None:
            start = replace(self.start, schedule=of_own(self.start.schedule))
        if tell is None:
            return replace(self, graph=graph, start=start)
        return replace(self, graph=graph, start=start, on_schedule=lambda schedule, bound_s: tell(to_own(schedule), bound_s))

    @property
    def settings(self) -> SolveSettings:
        """Limit and tolerance, as recorded in results."""
        limit = "work_limit" if self.clock.counts_work else "time_limit_s"
        return SolveSettings(self.tolerance.first, {limit: self.clock.limit})
