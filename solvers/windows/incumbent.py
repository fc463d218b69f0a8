"""The ground that bound and schedules are found on: the best schedule, the bound, the clock, and solves of models."""

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from graphs.ir import Graph
from graphs.units import format_seconds
from solvers.highs import Answer, Floats, Option, Outcome, Program, Watch, solve_program
from solvers.memory import give_back, resident_bytes
from solvers.problem import OBJECTIVE_SCALE, Problem, problem_of
from solvers.result import Progress
from solvers.tolerance import Tolerance
from solvers.windows.formulation.draft import StoppedError
from solvers.windows.formulation.granularity import Discretization, Model
from solvers.windows.formulation.models import build_ordered, build_relaxation
from solvers.windows.solution.decode import Choice, Order, Trial, expand, late_writers, order_of, read_choice, try_out
from solvers.windows.solution.encode import choice_of, start_values, without_needless
from solvers.windows.solution.refine import refined, with_stages_in_order

_TELL_S = 0.4
_INNER = 0.8  # a model is solved to this part of the tolerance,
_CLOSE = 0.05  # or this once the tolerance is reached
_MOMENT_S = 0.5
_ARITHMETIC = 1e-5  # of the step's time: how much above a schedule's time HiGHS's arithmetic may put its bound
_MOST_BYTES = 2_500_000_000  # that the process may grow by before a relaxation or an ordered model is given up
# Less strong branching than by default: what looks for schedules wants many nodes rather than a bound.
_EAGER: dict[str, Option] = {"mip_pscost_minreliable": 1}


class Search:
    """One solve: the best schedule, the bound, and the clock.

    Schedules are looked for in a second thread; the caller is spoken to from its own.
    """

    def __init__(
        self,
        graph: Graph,
        budget_bytes: int,
        tolerance: float | Tolerance,
        time_limit_s: float,
        on_progress: Callable[[Progress], None] | None,
        should_stop: Callable[[], bool] | None,
    ) -> None:
        self.began = time.monotonic()
        self.problem: Problem = problem_of(graph, budget_bytes)
        self.budget_bytes = budget_bytes
        self._tolerance = Tolerance.of(tolerance)
        self.deadline = self.began + time_limit_s
        self.best: Trial | None = None
        self.bound_s = graph.time_s
        self.least: Trial | None = None  # the one of least peak of all that were tried
        self.infeasible = False
        self.solved_s: float | None = None  # since it began, when it first was
        self.activity = "keeping everything"
        self.largest = (0, 0)  # rows and columns of a program that was solved
        self.solutions: deque[tuple[Discretization, Choice]] = deque(maxlen=3)  # of models, latest last
        self.halted = False
        self.closed = False
        self.failure = ""  # what must not happen, and did
        self._on_progress = on_progress
        self._should_stop = should_stop
        self._told = 0.0
        self._owner = threading.current_thread()
        self._lock = threading.Lock()
        self._news = False
        self._began_bytes = resident_bytes()

    # The clock.

    @property
    def seconds(self) -> float:
        """Since the solve began."""
        return time.monotonic() - self.began

    @property
    def left_s(self) -> float:
        """Until the time limit."""
        return self.deadline - time.monotonic()

    @property
    def tolerance(self) -> float:
        """On the gap, as it is now."""
        return self._tolerance.at(self.seconds)

    def stopped(self) -> bool:
        """Whether the caller or the clock ends the solve."""
        if self._owner is threading.current_thread() and self._should_stop is not None and self._should_stop():
            self.halted = True
        return self.halted or self.left_s <= 0

    def solved(self) -> bool:
        """Whether nothing is left to find out: proved infeasible, or within the tolerance."""
        if self.infeasible:
            return True
        return self.within(self.tolerance)

    def within(self, tolerance: float) -> bool:
        """Whether the best schedule is."""
        return self.best_s() <= self.bound_s * (1 + tolerance)

    def settled_for(self) -> float:
        """The least tolerance so far that the best schedule is within; the present one where it is within none."""
        begun = [tolerance for _, tolerance in self._tolerance.begun(self.seconds)]
        return next(filter(self.within, begun), begun[-1])

    def satisfied(self) -> bool:
        """Whether the solve has also had its time to do better than the tolerance asks for.

        Solutions are often within the tolerance long before they are as good as they get, and the rest costs
        little: half as long again as it took to get there, or a moment. Where it was the tolerance that came to
        them, the time before has been had already.
        """
        if not self.solved():
            return False
        if self.infeasible or self.within(_CLOSE * self.tolerance):
            return True
        seconds = self.seconds
        self.solved_s = self.solved_s or seconds
        widened_s, _ = self._tolerance.begun(self.solved_s)[-1]
        return seconds - self.solved_s > _more(self.solved_s - widened_s)

    def enough(self) -> bool:
        """Whether to stop looking for better schedules."""
        return self.stopped() or self.satisfied()

    def crowded(self) -> bool:
        """Whether the solve has taken as much memory as it may."""
        return resident_bytes() - self._began_bytes > _MOST_BYTES

    def tell(self, activity: str | None = None, *, news: bool = False) -> None:
        """Report progress: at once when there is news, else twice a second."""
        self.activity = activity or self.activity
        self._news |= news
        now = time.monotonic()
        if self._owner is not threading.current_thread() or self._on_progress is None:
            return
        if self._news or now - self._told > _TELL_S:
            self._news = False
            self._told = now
            best = self.best
            self._on_progress(Progress(self.seconds, self.activity, best.time_s if best else None, self.bound_s))

    def fail(self, message: str) -> None:
        """End the solve because of what must not happen; the best schedule so far is kept."""
        self.failure = self.failure or message
        self.halted = True

    # The best schedule and the bound.

    def best_trial(self) -> Trial:
        """The best schedule; there is one."""
        assert self.best is not None
        return self.best

    def best_s(self) -> float:
        """Time of the best schedule, inf if there is none."""
        return np.inf if self.best is None else self.best.time_s

    def offer(self, order: Order, detail: Discretization) -> Trial:
        """Try an order out and keep it if it fits and is the fastest so far."""
        trial = try_out(self.problem, order)
        if self.least is None or trial.peak_bytes < self.least.peak_bytes:
            self.least = trial
        if trial.peak_bytes <= self.budget_bytes and self._take(trial):
            self._take(without_needless(self.problem, detail, trial, self.budget_bytes, self.stopped))
        return trial

    def improve_order(self, order: Order, detail: Discretization, limit_s: float) -> Trial | None:
        """The trial of an order that fits, less what is needless; None where it does not, or takes longer than `limit_s`."""
        trial = try_out(self.problem, order)
        if trial.peak_bytes > self.budget_bytes or trial.time_s > limit_s:
            return None
        self._take(trial)
        trial = without_needless(self.problem, detail, trial, self.budget_bytes, self.stopped)
        self._take(trial)
        return trial

    def _take(self, trial: Trial) -> bool:
        """Keep a trial that fits if it is the fastest so far; whether it is."""
        with self._lock:
            better = not self.closed and (self.best is None or trial.time_s < self.best.time_s)
            if better:
                self.best = trial
                self._check_bound()
        if better:
            self.tell(news=True)
        return better

    def raise_bound(self, overhead: float) -> None:
        """Take note that no schedule has less overhead than this, in units of the objective."""
        bound_s = self.problem.base_s * (1 + overhead / OBJECTIVE_SCALE)
        if np.isfinite(bound_s) and bound_s > self.bound_s and not self.failure:
            with self._lock:
                self.bound_s = bound_s
                self._check_bound()
            self.tell(news=True)

    def _check_bound(self) -> None:
        """End the solve where a schedule refutes the bound, which is then forgotten."""
        if self.best is not None and self.best.time_s < self.bound_s * (1 - _ARITHMETIC):
            self.fail(
                f"the bound of {format_seconds(self.bound_s)} is above the time of a schedule within the budget, "
                f"{format_seconds(self.best.time_s)}: a row of the program is no relaxation, or the arithmetic of HiGHS failed"
            )
            self.bound_s = self.problem.graph.time_s

    # Solves.

    def solve_part(
        self,
        program: Program,
        seconds: float,
        *,
        gap: float,
        start: Floats | None = None,
        below: float = np.inf,
        should_stop: Callable[[], bool] | None = None,
        on_incumbent: Callable[[Floats, float], bool] | None = None,
    ) -> Answer:
        """Solve a program of those that look for schedules.

        Args:
            seconds: that it may take.
            gap: at which it ends, as a share of the whole step.
            below: a bound that is no lower ends it (in units of the objective).
            should_stop: ends it; by default, ``enough``.
            on_incumbent: as in ``solvers.highs.Watch``.
        """
        stop = should_stop or self.enough
        bound = -np.inf

        def on_bound(value: float) -> None:
            nonlocal bound
            bound = value
            self.tell()

        return solve_program(
            program,
            time_limit_s=min(self.left_s, seconds),
            absolute_gap=gap * OBJECTIVE_SCALE,
            start=start,
            watch=Watch(should_stop=lambda: stop() or bound >= below, on_incumbent=on_incumbent, on_bound=on_bound),
            options=_EAGER,
        )

    def solve_model(self, model: Model, *, until: float, is_relaxation: bool) -> tuple[Answer, Discretization]:
        """Solve, offering every solution on the way; comes with what the last one says is to be refined."""
        closer = [model.detail]
        self.largest = max(self.largest, model.program.matrix.shape)

        def try_solution(values: Floats, objective: float) -> bool:
            choice = read_choice(model, values)
            self.solutions.append((model.detail, choice))
            closer[0] = self.try_choice(model, choice)
            return self.satisfied()

        def on_bound(overhead: float) -> None:
            if is_relaxation:
                self.raise_bound(overhead)
            self.tell()

        start = None
        if self.best is not None:
            start = start_values(model, choice_of(self.problem, model.detail, self.best.order.computed))
        answer = solve_program(
            model.program,
            time_limit_s=min(until, self.deadline) - time.monotonic(),
            absolute_gap=(_CLOSE if self.solved() else _INNER) * self.tolerance * OBJECTIVE_SCALE,
            start=start,
            watch=Watch(should_stop=lambda: self.enough() or self.crowded(), on_incumbent=try_solution, on_bound=on_bound),
        )
        give_back()
        if is_relaxation:
            if answer.outcome is Outcome.INFEASIBLE and self.best is not None:
                self.fail(
                    f"the relaxation in {len(model.detail.ends)} windows is infeasible, though a schedule within the budget is "
                    "known: a row of the program is no relaxation, or the arithmetic of HiGHS failed"
                )
            elif answer.outcome is Outcome.INFEASIBLE:
                self.infeasible = True
            else:
                self.raise_bound(answer.bound)
        if answer.values is not None:
            try_solution(answer.values, 0.0)
        return answer, closer[0]

    def try_choice(self, model: Model, choice: Choice) -> Discretization:
        """Expand a solution and offer it; returns the model's detail, closer where it does not fit."""
        detail = model.detail
        order = order_of(detail, expand(model.problem, detail, choice))
        if writers := late_writers(self.problem, order):
            return detail.split(writers)
        trial = self.offer(order, detail)
        if trial.peak_bytes <= self.budget_bytes:
            return detail
        closer = refined(detail, trial, self.budget_bytes)
        return with_stages_in_order(closer, trial, self.budget_bytes)

    def refine(self, detail: Discretization, slice_s: float, *, is_relaxation: bool) -> tuple[Discretization, bool]:
        """Solve and refine in turn; False with it if time was up before there was nothing left to refine."""
        until = time.monotonic() + slice_s
        done = self.solved if is_relaxation else self.satisfied
        while not (done() or self.stopped()):
            try:
                if is_relaxation:
                    self.tell(f"bounding with {len(detail.ends)} windows")
                    model = build_relaxation(self.problem, detail, self.stopped)
                else:
                    self.tell(f"searching in {len(detail.ends)} windows")
                    model = build_ordered(self.problem, detail, should_stop=self.stopped)
            except StoppedError:
                return detail, False
            answer, closer = self.solve_model(model, until=until, is_relaxation=is_relaxation)
            in_time = time.monotonic() < until
            if is_relaxation:
                closer = replace(closer, ordered=detail.ordered)
            if self.solved():
                self.solve_model(model, until=time.monotonic() + _more(self.seconds), is_relaxation=is_relaxation)
                return detail, False
            if answer.outcome is not Outcome.OPTIMAL:
                # The bound of a finer model, which takes longer, would lag behind for long: this one is given more time.
                # Where it was not time that ended it, but memory, more of it is of no use.
                again = is_relaxation and not in_time
                return (detail if again else closer), answer.outcome is Outcome.INFEASIBLE
            if closer == detail:
                return detail, True
            detail = closer
        return detail, False


def _more(seconds: float) -> float:
    """How long a solve that took so long to get within the tolerance goes on."""
    return max(_MOMENT_S, seconds / 2)
