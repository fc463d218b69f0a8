"""Solves of a step: until the plan is good enough to begin with, and then while it trains."""

import math
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from graphs.errors import PlannerError
from graphs.ir import Graph
from planner.background import Job
from planner.budgets import allowed_overhead
from planner.plans.plan import Plan
from planner.progress.stages import StageReport
from planner.solving import solve
from solvers.result import SolveProgress

_FORM = re.compile(r"(\d+(?:\.\d+)?)\s*(%|s|m|work)")
SWAPS = ("exact", "any", "never")
_GAP, _SECONDS = 0.01, 3.0  # what is waited for by default, whichever comes first


@dataclass(frozen=True, slots=True)
class Wait:
    """The quality that a plan must have before ``planner.compile`` returns; it fits in any case.

    Attributes:
        gap: of the plan; None: any.
        seconds: of solving, after which any gap will do; None: as long as it takes.
        work: of solving (``solvers.clock.WorkClock``), in place of seconds.
    """

    gap: float | None = _GAP
    seconds: float | None = _SECONDS
    work: float | None = None

    @property
    def reproducible(self) -> bool:
        """True if the same costs lead to the same plan on every run: it depends on no clock, and is not replaced later."""
        return self.seconds is None

    @staticmethod
    def of(value: "Wait | str | float | None") -> "Wait":
        """Read what users write: seconds as a number or ``10s``; a gap as ``1%``; ``20 work``; None for the default.

        Raises:
            PlannerError: it is none of these.
        """
        if value is None or isinstance(value, Wait):
            return value or Wait()
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0:
            return Wait(gap=None, seconds=float(value))
        match = _FORM.fullmatch(value.strip()) if isinstance(value, str) else None
        if match is None:
            raise PlannerError(f"wait is {value!r}: must be seconds (10 or '10s'), a gap ('1%') or work ('20 work')")
        amount, unit = float(match[1]), match[2]
        if unit == "%":
            return Wait(gap=amount / 100, seconds=None)
        if unit == "work":
            return Wait(gap=None, seconds=None, work=amount)
        return Wait(gap=None, seconds=amount * (60 if unit == "m" else 1))


@dataclass(frozen=True, slots=True)
class Search:
    """Settings for the solves of a step.

    Attributes:
        settings: keyword arguments of ``planner.solving.solve``.
        wait: when the first plan is good enough.
        swap: which better plans take the place of the first one: ``exact`` for those that make the same bits, ``any``, or
            ``never``.
    """

    settings: Mapping[str, Any]
    wait: Wait = Wait()
    swap: str = "exact"

    def __post_init__(self) -> None:
        if self.swap not in SWAPS:
            raise PlannerError(f"swap is {self.swap!r}: choose {', '.join(SWAPS)}")

    @property
    def goes_on(self) -> bool:
        """True if better plans are looked for while the step trains."""
        return self.swap != "never" and not self.wait.reproducible

    @property
    def any_rounding(self) -> bool:
        """True if plans may take each other's place that round otherwise."""
        return self.swap == "any"

    def first_plan(self, graph: Graph, budget: str | int, stage: StageReport | None = None) -> Plan:
        """Return a plan that is good enough to begin with; the solve is reported to `stage`, if there is one.

        Raises:
            InfeasibleError, LimitError, BudgetError: as ``planner.solving.solve``.
        """
        latest = SolveProgress(0.0, "", None, None)
        began = time.monotonic()
        seeks_budget = allowed_overhead(budget) is not None
        limit_s = None if seeks_budget else self.wait.seconds
        tell = None if stage is None else stage.solving(base_s=graph.time_s, limit_s=limit_s)

        def note(progress: SolveProgress) -> None:
            nonlocal latest
            latest = progress
            if tell is not None:
                tell(progress)

        def is_good_enough() -> bool:
            if latest.best_s is None:
                return False
            wait = self.wait
            close = wait.gap is not None and latest.gap is not None and latest.gap <= wait.gap
            return close or (wait.seconds is not None and time.monotonic() - began >= wait.seconds)

        stop = None if seeks_budget else is_good_enough
        limit = self.settings["time_limit_s"] if self.wait.work is None else self.wait.work
        work = {"work_limit": limit} if self.wait.reproducible else {}
        return solve(graph, budget, on_progress=note, should_stop=stop, **{**self.settings, **work})

    def job(self, graph: Graph, budget_bytes: int) -> Job:
        """Return the solve that goes on beside the training, until its tolerance or its time limit."""
        return Job(graph, budget_bytes, self.settings)
