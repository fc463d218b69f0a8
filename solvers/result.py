"""The result of a solver, and its progress."""

from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass, field, fields, replace
from enum import StrEnum
from functools import cached_property
from typing import Any

from planner.graphs.documents import RecordedMapping
from planner.graphs.errors import BudgetError
from planner.graphs.ir import Graph
from planner.graphs.schedule import Schedule
from planner.graphs.simulate import simulate


class Status(StrEnum):
    """The way in which a solve ended."""

    OPTIMAL = "optimal"  # a schedule, and its gap is within the tolerance and at most ``OPTIMAL_GAP``
    WITHIN = "within tolerance"  # a schedule, and its gap is within the tolerance, which allows more than that
    FEASIBLE = "feasible"  # a schedule, and a bound that leaves a larger gap; see ``Ending``
    INFEASIBLE = "infeasible"  # proved: no schedule fits the budget
    LIMIT = "limit"  # nothing found, nothing proved; see ``Reason``
    ERROR = "error"  # the solver failed; see `message`


SOLVED = (Status.OPTIMAL, Status.WITHIN)  # a schedule that needs no more search
OPTIMAL_GAP = 1e-3  # no wider tolerance makes a schedule with a larger gap optimal
_ROUNDING = 1e-9  # tolerance on the gap for floating-point errors


class Ending(StrEnum):
    """The reason why a solve ended with a gap above the tolerance."""

    LIMIT = "limit"  # the time or work limit was reached
    STOPPED = "stopped"  # by the caller
    EXHAUSTED = "exhausted"  # nothing was left to try: more time is of no use
    MEMORY = "memory"  # its programs have reached the limit on the memory of the solver


def is_within(time_s: float | None, bound_s: float | None, tolerance: float) -> bool:
    """Return True if a schedule of `time_s` has a gap of at most `tolerance`."""
    gap = compute_gap(time_s, bound_s)
    return gap is not None and gap <= tolerance + _ROUNDING


def decide_status(time_s: float | None, bound_s: float | None, tolerance: float | None) -> Status:
    """Return the status of a solve that ended with a schedule; this alone defines what is optimal."""
    if not is_within(time_s, bound_s, OPTIMAL_GAP if tolerance is None else tolerance):
        return Status.FEASIBLE
    return Status.OPTIMAL if is_within(time_s, bound_s, OPTIMAL_GAP) else Status.WITHIN


@dataclass(frozen=True, eq=False)
class SolveSettings(RecordedMapping):
    """The settings of a solve, as used, and what it has recorded for later ones; as a mapping, what files have.

    Files have the fields in this order, without those that are None; for `limit`, `method` and `options` their entries.

    Attributes:
        tolerance: the gap at which the solve was settled; None for methods that prove nothing.
        limit: ``time_limit_s`` or ``work_limit``.
        method: other settings of the solver, for people.
        schedules: the class of schedules that the bound is for; None: all that first execute the ops in the same order.
        serial_s, serial_bound_s: least sum of the times of executed ops, and the bound on it, of ``xengine``.
        windows: as in ``planner.solvers.request.Start``.
        arena_solves: how many solves an arena took.
        arena_bytes, outside_arena_bytes: as in ``planner.plans.record.PlanRecord``, predicted.
        arena_offsets: offsets of the buffers, in the order of ``ArenaRules.divide_buffers``.
        max_overhead: asked for in place of a budget.
        least_budget_proved_bytes: no schedule needs less for that.
        reordered: True if the order of first executions is not that of the program.
        allocated_budget_bytes: the budget of allocated bytes that one of reserved bytes was solved for.
        no_arena: why a step runs in no arena although memory is tight.
        options: those of the graph (``planner.settings.option_settings``).
    """

    tolerance: int | float | None = None
    limit: Mapping[str, float | None] = field(default_factory=dict)
    method: Mapping[str, object] = field(default_factory=dict)
    schedules: str | None = None
    serial_s: float | None = None
    serial_bound_s: float | None = None
    windows: Sequence[int] | None = None
    arena_solves: int | None = None
    arena_bytes: int | None = None
    outside_arena_bytes: int | None = None
    arena_offsets: tuple[int, ...] | None = None
    max_overhead: int | float | None = None
    least_budget_proved_bytes: int | None = None
    reordered: bool | None = None
    allocated_budget_bytes: int | None = None
    no_arena: str | None = None
    options: Mapping[str, object] = field(default_factory=dict)

    @cached_property
    def recorded(self) -> Mapping[str, object]:
        """The settings as in files."""
        recorded: dict[str, object] = {}
        for one in fields(self):
            value = getattr(self, one.name)
            if value is not None:
                recorded |= value if isinstance(value, Mapping) else {one.name: value}
        return recorded


class Reason(StrEnum):
    """The reason why a solve with status LIMIT found nothing."""

    INAPPLICABLE = "inapplicable"  # the method does not support such a graph at any budget
    MEMORY = "memory"  # the method needs more than the budget
    THRASHING = "thrashing"  # it recomputed for longer than allowed
    SIZE = "size"  # the graph is too large for the method: it was not tried
    TIME = "time"  # the time limit was reached, or the solve was stopped


@dataclass(frozen=True, slots=True)
class SolveProgress:
    """The state of a running solve: seconds so far, activity, best schedule and bound (None: none yet)."""

    seconds: float
    activity: str
    best_s: float | None
    bound_s: float | None

    @property
    def gap(self) -> float | None:
        """The gap as in ``Result.gap``."""
        return compute_gap(self.best_s, self.bound_s)


@dataclass(frozen=True, slots=True)
class Result:
    """A solver's result for one graph and one budget; unknown values are None.

    Time and peak are those of the simulated schedule, never the solver's own figures. A result is judged when it is made with
    its graph, and mapped (``map_to``) where a problem was changed and is changed back.

    Attributes:
        graph: to judge the schedule on; None if it was judged, and its time and peak are given.
        budget_bytes: including static bytes.
        status: the way in which the solve ended.
        schedule: present if and only if the status is OPTIMAL, WITHIN or FEASIBLE.
        bound_s: lower bound on the time of all feasible schedules of the class that the solver searches.
        solver: its name in the registry.
        seconds: wall time of the solve.
        settings: as used.
        versions: of the libraries that did the work.
        model_rows, model_columns: of the largest program solved, if any.
        reason: for LIMIT, the reason if the solver states one.
        ended: for FEASIBLE, why there was no more search; None if the solver does not search for a bound.
        message: for INFEASIBLE, LIMIT and ERROR: the problem, the value, the limit and the way out; for FEASIBLE: the error that
            ended the solve after the schedule was found, if any.
        time_s, peak_bytes: of the schedule; given only where it was judged.

    Raises:
        BudgetError: the schedule's simulated peak is over the budget.
        ScheduleError: the schedule does not run on the graph.
        ValueError: status, schedule, time and reason are inconsistent.
    """

    graph: InitVar[Graph | None]
    budget_bytes: int
    status: Status
    schedule: Schedule | None
    bound_s: float | None
    solver: str
    seconds: float
    settings: SolveSettings = field(default_factory=SolveSettings)
    versions: Mapping[str, str] = field(default_factory=dict)
    message: str = ""
    model_rows: int | None = None
    model_columns: int | None = None
    reason: Reason | None = None
    ended: Ending | None = None
    time_s: float | None = None
    peak_bytes: int | None = None

    def __post_init__(self, graph: Graph | None) -> None:
        if graph is not None:
            judged = None if self.schedule is None else simulate(graph, self.schedule)
            object.__setattr__(self, "time_s", None if judged is None else judged.time_s)
            object.__setattr__(self, "peak_bytes", None if judged is None else judged.peak_bytes)
        if (self.schedule is not None) != (self.time_s is not None and self.peak_bytes is not None):
            raise ValueError("a schedule and its time and peak come together: give the graph to judge it on")
        if self.peak_bytes is not None and self.peak_bytes > self.budget_bytes:
            raise BudgetError(
                f"{self.solver} made a schedule with a peak of {self.peak_bytes} B for a budget of {self.budget_bytes} B"
            )
        if (self.schedule is not None) != (self.status in (*SOLVED, Status.FEASIBLE)):
            raise ValueError(f"a result that is {self.status} {'has' if self.schedule else 'lacks'} a schedule")
        if self.reason is not None and self.status is not Status.LIMIT:
            raise ValueError(f"a result that is {self.status} has a reason to have found nothing: {self.reason}")

    def map_to(self, **changes: Any) -> "Result":
        """Return this result with other fields, without judging it again: a new schedule has the same time and peak.

        ``planner.plans.solve`` judges each plan, at the end of the chain of changed problems.
        """
        return replace(self, graph=None, **changes)

    @property
    def gap(self) -> float | None:
        """The gap (time - bound) / bound, relative to the whole step."""
        return compute_gap(self.time_s, self.bound_s)


def describe_class(graph: Graph, schedules: str) -> str:
    """Return `schedules`, the class of a solver that ignores overwriting, and say so if the graph has overwritten inputs."""
    return f"{schedules}, and its outputs beside its inputs" if graph.writes_over_inputs else schedules


def compute_gap(time_s: float | None, bound_s: float | None) -> float | None:
    """Return (time - bound) / bound, 0 if both are 0, None if one is unknown."""
    if time_s is None or bound_s is None:
        return None
    if bound_s > 0:
        return max(0.0, (time_s - bound_s) / bound_s)
    return 0.0 if time_s <= 0 else None
