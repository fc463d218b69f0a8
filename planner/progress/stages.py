"""Progress of planning: the stages, how far each has advanced, and an estimate of the time left.

``Stages`` receives the reports of planning. It turns each into a ``Progress`` and passes it to the views, which show it.

Time left is estimated from the stages that take longer for a longer step, and not before one of them has run: from capture, 89 s
were said to be left where 11 were. Known weaknesses: a solve ends at its gap, at a time that nobody knows, and the shares of the
stages (``_WEIGHTS``) are typical ones, not this model's.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from types import TracebackType
from typing import Self, TypeAlias

from planner.solvers.result import SolveProgress, compute_gap


class Stage(StrEnum):
    """A stage of planning; the stages follow each other in this order."""

    COMPILE = "compile"
    CAPTURE = "capture"
    MEASURE = "measure"
    SOLVE = "solve"
    CHECK = "check"
    COMPARE = "compare"

    @property
    def activity(self) -> str:
        """The stage in words."""
        return _ACTIVITIES[self]


_ACTIVITIES = {
    Stage.COMPILE: "compiling the C++ library, once on this machine",
    Stage.CAPTURE: "capturing the training step",
    Stage.MEASURE: "measuring ops",
    Stage.SOLVE: "looking for a schedule",
    Stage.CHECK: "rehearsing the plan",
    Stage.COMPARE: "comparing with eager PyTorch",
}
# Typical seconds of the stages that take longer for a longer step, in proportion to each other. Capture is not among them: it
# takes as long for a small batch as for a large one, and the first one imports Dynamo.
_WEIGHTS = {Stage.MEASURE: 5.0, Stage.SOLVE: 2.0, Stage.CHECK: 2.0, Stage.COMPARE: 7.0}
_LEAST_FRACTION = 0.05  # fraction of a stage from which its speed is extrapolated


class Event(StrEnum):
    """The reason for a report."""

    BEGIN = "begin"  # a stage begins
    ADVANCE = "advance"  # it has advanced
    END = "end"  # it has ended
    DONE = "done"  # planning has ended
    FAILED = "failed"  # planning was ended by an error or an interrupt


@dataclass(frozen=True, slots=True)
class Progress:
    """State of planning at one moment. Unknown values are None.

    Attributes:
        event: the reason for the report.
        stage: the present stage, or the last one.
        activity: the present work, in words.
        fraction: fraction of the stage that is done.
        overall: estimate of the fraction of all stages that is done; it never falls.
        seconds, stage_seconds: since the begin of planning, and of the stage.
        left_s: estimate of the seconds until planning ends.
        best_s, bound_s: step time of the best schedule so far, and its lower bound, in the stage ``solve``.
        base_s: step time of keeping everything, in the stage ``solve`` of one plan.
        summary: the plan in one line at the end; "" before.
    """

    event: Event
    stage: Stage
    activity: str
    fraction: float | None
    overall: float
    seconds: float
    stage_seconds: float
    left_s: float | None
    best_s: float | None = None
    bound_s: float | None = None
    base_s: float | None = None
    summary: str = ""

    @property
    def gap(self) -> float | None:
        """Gap of the best schedule so far, relative to its lower bound."""
        return compute_gap(self.best_s, self.bound_s)


View: TypeAlias = Callable[[Progress], object]


class StageReport:
    """The reports of one stage."""

    def __init__(self, report: Callable[["StageReport"], None], activity: str, began_s: float) -> None:
        self.activity = activity
        self.began_s = began_s
        self.fraction: float | None = None
        self.solve: SolveProgress | None = None
        self.base_s: float | None = None
        self._report = report

    def advance(self, done: int, count: int) -> None:
        """Report that `done` of `count` equal parts are done. A smaller fraction than before is not reported."""
        self.fraction = max(self.fraction or 0.0, min(1.0, done / max(1, count)))
        self._report(self)

    def report_activity(self, activity: str) -> None:
        """Report the present work, in words."""
        self.activity = activity
        self._report(self)

    def report_solve(self, *, base_s: float, limit_s: float | None = None) -> Callable[[SolveProgress], None]:
        """Return the function that a solve reports to.

        Args:
            base_s: step time of keeping everything.
            limit_s: seconds after which the solve ends with a schedule; None if it ends at its gap, at an unknown time.
        """
        self.base_s = base_s
        return partial(self._note_solve, limit_s)

    def _note_solve(self, limit_s: float | None, progress: SolveProgress) -> None:
        self.solve, self.activity = progress, progress.activity or self.activity
        if limit_s is not None:
            self.fraction = max(self.fraction or 0.0, min(1.0, progress.seconds / max(limit_s, 1e-9)))
        self._report(self)


class Stages:
    """The stages of one planning, reported to views; a context manager that reports its end.

    Args:
        views: called with each ``Progress``, in the thread that plans.
        stages: the expected stages; some may be left out.
        clock: returns increasing seconds.
    """

    def __init__(self, *views: View, stages: Sequence[Stage] = tuple(Stage), clock: Callable[[], float] = time.monotonic) -> None:
        self._views, self._stages, self._clock = views, tuple(stages), clock
        self._began_s = clock()
        self._expected_s: dict[Stage, float] = {}
        self._ended_s = self._ended_weight = 0.0  # seconds of the stages with weights that have ended, and their weights
        self._present: tuple[Stage, StageReport] | None = None
        self._overall = 0.0
        self._finished = False

    def restart(self) -> "Stages":
        """Return the stages of another planning that begins now, for the same views."""
        return Stages(*self._views, stages=self._stages, clock=self._clock)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if kind is not None and not self._finished and self._present is not None:
            self._report(Event.FAILED, *self._present)

    @contextmanager
    def run_stage(self, stage: Stage, activity: str = "") -> Iterator[StageReport]:
        """Report that `stage` begins, and at the end, if there is no error, that it has ended."""
        report = StageReport(lambda report: self._report(Event.ADVANCE, stage, report), activity or stage.activity, self._clock())
        self._present = stage, report
        self._report(Event.BEGIN, stage, report)
        yield report
        report.fraction = 1.0
        if stage in _WEIGHTS:
            self._ended_s += self._clock() - report.began_s
            self._ended_weight += _WEIGHTS[stage]
        self._report(Event.END, stage, report)

    def expect(self, seconds: Mapping[Stage, float]) -> None:
        """Set the `seconds` by which later stages are estimated."""
        self._expected_s |= seconds

    def finish(self, summary: str = "") -> None:
        """Report that planning is done; `summary` describes the plan, without the time that planning took."""
        if self._present is None:
            return
        self._finished = True
        took = f", {self._clock() - self._began_s:.1f} s" if summary else ""
        self._report(Event.DONE, *self._present, summary=summary + took)

    def _report(self, event: Event, stage: Stage, report: StageReport, *, summary: str = "") -> None:
        if not self._views:
            return
        now_s = self._clock()
        seconds, stage_seconds = now_s - self._began_s, now_s - report.began_s
        left_s = 0.0 if event is Event.DONE else self._estimate_left_s(stage, report.fraction, stage_seconds)
        if left_s is not None:
            # The rest may be estimated as 0 too early; only the end reaches 1.
            share = 1.0 if event is Event.DONE else min(0.99, seconds / max(1e-9, seconds + left_s))
            self._overall = max(self._overall, share)
        solve = report.solve
        progress = Progress(
            event=event,
            stage=stage,
            activity=report.activity,
            fraction=report.fraction,
            overall=self._overall,
            seconds=seconds,
            stage_seconds=stage_seconds,
            left_s=left_s,
            best_s=None if solve is None else solve.best_s,
            bound_s=None if solve is None else solve.bound_s,
            base_s=report.base_s,
            summary=summary,
        )
        for view in self._views:
            view(progress)

    def _estimate_left_s(self, stage: Stage, fraction: float | None, stage_seconds: float) -> float | None:
        """Return an estimate of the seconds left: of this stage from its speed, of later ones as expected."""
        known_s, known_weight = self._ended_s, self._ended_weight
        if fraction is not None and fraction >= _LEAST_FRACTION:
            rest_s = stage_seconds * (1 - fraction) / fraction
            if fraction < 1 and stage in _WEIGHTS:
                known_s, known_weight = known_s + stage_seconds + rest_s, known_weight + _WEIGHTS[stage]
        elif (expected_s := self._estimate_stage_s(stage, known_s, known_weight)) is not None:
            rest_s = max(0.0, expected_s - stage_seconds)
        else:
            return None
        for later in self._stages:
            if list(Stage).index(later) > list(Stage).index(stage):
                expected_s = self._estimate_stage_s(later, known_s, known_weight)
                if expected_s is None:
                    return None
                rest_s += expected_s
        return rest_s

    def _estimate_stage_s(self, stage: Stage, known_s: float, known_weight: float) -> float | None:
        """Return the expected seconds of a stage: as set, or in proportion to the weights of the stages measured so far."""
        if stage in self._expected_s:
            return self._expected_s[stage]
        return _WEIGHTS[stage] * known_s / known_weight if known_weight and stage in _WEIGHTS else None
