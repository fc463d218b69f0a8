"""Solves of a step: the first plan, and the search for better ones while it trains."""

import time
from dataclasses import dataclass, replace

from planner.graphs.ir import Graph
from planner.plans.background import SolveJob
from planner.plans.plan import Plan
from planner.plans.solve import solve_graph
from planner.progress.stages import StageReport
from planner.settings.budget import Budget, Bytes, Overhead
from planner.settings.plan import PlanSettings
from planner.solvers.request import Start
from planner.solvers.result import SolveProgress

# Least seconds, and steps, to wait for a plan in an arena that nobody has asked for. Without one, steps under a cap take their
# pages anew: those of ResNet-50 took 1.9 times as long. A longer search goes on while the step trains.
_PATIENCE_S, _PATIENCE_STEPS = 5.0, 2


@dataclass(frozen=True, slots=True)
class StepSearch:
    """The solves of a step.

    Attributes:
        settings: of each solve, with the quality of the first plan, and rules for its replacement.
        chose_arena: True if the step runs in an arena that nobody has asked for: the search for a first plan then ends soon,
            also if none was found.
    """

    settings: PlanSettings
    chose_arena: bool = False

    @property
    def any_rounding(self) -> bool:
        """True if a plan may be replaced by one that rounds differently."""
        return self.settings.swap == "any"

    def leave_arena(self, why: str) -> "StepSearch":
        """Return the search for plans in no arena, which name the reason."""
        return StepSearch(self.settings.leave_arena(why))

    def find_first_plan(self, graph: Graph, budget: Budget, stage: StageReport | None = None) -> Plan:
        """Return the first plan that is good enough; the solve is reported to `stage`, if there is one.

        Raises:
            InfeasibleError, LimitError, BudgetError: as ``planner.solve``.
        """
        latest = SolveProgress(0.0, "", None, None)
        began = time.monotonic()
        seeks_budget = isinstance(budget, Overhead)
        limit_s = None if seeks_budget else self.settings.wait.seconds
        tell = None if stage is None else stage.report_solve(base_s=graph.time_s, limit_s=limit_s)

        def note(progress: SolveProgress) -> None:
            nonlocal latest
            latest = progress
            if tell is not None:
                tell(progress)

        def is_good_enough() -> bool:
            wait, seconds = self.settings.wait, time.monotonic() - began
            if latest.best_s is None:
                return self.chose_arena and seconds >= max(_PATIENCE_S, _PATIENCE_STEPS * graph.time_s)
            close = wait.gap is not None and latest.gap is not None and latest.gap <= wait.gap
            return close or (wait.seconds is not None and seconds >= wait.seconds)

        stop = None if seeks_budget else is_good_enough
        settings, wait = self.settings, self.settings.wait
        if wait.reproducible:
            settings = replace(settings, work_limit=settings.time_limit_s if wait.work is None else wait.work)
        return solve_graph(graph, budget, settings, on_progress=note, should_stop=stop)

    def build_job(self, graph: Graph, budget_bytes: int, known: Plan, *, keeps_order: bool = False) -> SolveJob:
        """Return the background solve, which runs until its tolerance or its time limit.

        Args:
            known: a plan of the same step, perhaps at other costs, from which the solve starts; it settles for no larger gap.
            keeps_order: True to solve only in its order of first executions.
        """
        settings = self.settings
        if known.gap is not None:
            settings = replace(settings, tolerance=settings.tolerance.limit(known.gap))
        if keeps_order:
            settings = replace(settings, reorder=False)
        return SolveJob(graph, Bytes(budget_bytes), settings, Start.of(known.schedule, known.settings))
