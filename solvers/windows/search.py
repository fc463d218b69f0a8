"""The solve: look at the relaxation, refine it where its solution does not fit, and find schedules that do."""

import threading
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from graphs.ir import Graph
from solvers.highs import Answer, Floats, Outcome, Watch, solve_program
from solvers.result import Progress
from solvers.windows.advance import advance
from solvers.windows.chains import build_relaxation
from solvers.windows.detail import OBJECTIVE_SCALE, Detail, Model
from solvers.windows.evict import RULES, evicting_order
from solvers.windows.expand import Choice, Order, Trial, expand, late_writers, order_of, read_choice, try_out
from solvers.windows.model import Builder
from solvers.windows.narrow import Known, NarrowBuilder, tight_windows
from solvers.windows.ordered import build_ordered
from solvers.windows.orders import choice_of, start_values, without_needless
from solvers.windows.problem import Problem, problem_of, without_small
from solvers.windows.refine import halved, refined, with_stages_in_order
from solvers.windows.repair import Repairs
from solvers.windows.states import shortest
from solvers.windows.stretch import improve_all

_FIRST_SLICE_S = 2.0  # for each model in the first round; twice as much in each further one
_TELL_S = 0.4
_GRACE_S = 0.5  # how long the end of a solve waits for the thread that looks for schedules
_SMALL = 30  # ops of a graph for which searching all states comes before more windows
_INNER = 0.8  # a model is solved to this part of the tolerance,
_CLOSE = 0.05  # or this once the tolerance is reached
_MAX_STATES = 1_000_000  # about a gigabyte
_ADVANCE_S = 30.0
_PLACE_S = 4.0  # for each model on the way
_PLACE_GAP = 5e-3  # of the whole step, likewise
_RUNS = 20  # of eviction at a time
_IDLE_RUNS = 200  # of these without better, and it is given a rest
_SMALL_SHARE = 5e-4  # of the capacity: what tensors that are taken to be always there may take together
_COARSE_CAPACITIES = (1.0, 0.95, 0.9, 0.85, 0.8, 0.7)  # of the capacity: what coarse models are solved for
_COARSE_S = 2.0  # for each of them
_NARROW_S = 5.0  # for each narrow model at first
_NARROW_SIZE = 150_000  # windows of a narrow model times tensors that count
_NARROW_FEW = 40  # windows that it may have in any case
_NARROW_ROUNDS = 6  # of solving and looking closer
_STRETCH_S = 2.0  # for each model of a stretch
_STRETCH_GAP = 1e-4  # of the whole step, likewise; what is gained less is left


class Search:
    """One solve: the best schedule, the bound, and the clock."""

    def __init__(
        self,
        graph: Graph,
        budget_bytes: int,
        tolerance: float,
        time_limit_s: float,
        on_progress: Callable[[Progress], None] | None,
        should_stop: Callable[[], bool] | None,
    ) -> None:
        self.began = time.monotonic()
        self.problem: Problem = problem_of(graph, budget_bytes)
        self.budget_bytes = budget_bytes
        self.tolerance = tolerance
        self.deadline = self.began + time_limit_s
        self.best: Trial | None = None
        self.bound_s = graph.time_s
        self.repairs = Repairs(self.problem, budget_bytes, lambda: self.best.time_s if self.best else np.inf, self.improve_order)
        self.infeasible = False
        self.solved_at: float | None = None
        self.activity = "keeping everything"
        self.largest = (0, 0)  # rows and columns of a program that was solved
        self._on_progress = on_progress
        self._should_stop = should_stop
        self._told = 0.0
        # Schedules are looked for in a second thread; the caller is spoken to from its own.
        self._owner = threading.current_thread()
        self._lock = threading.Lock()
        self._halted = False
        self._closed = False
        self._news = False
        self._error: Exception | None = None

    # The state of the solve.

    @property
    def seconds(self) -> float:
        """Since the solve began."""
        return time.monotonic() - self.began

    @property
    def left_s(self) -> float:
        """Until the time limit."""
        return self.deadline - time.monotonic()

    def stopped(self) -> bool:
        """Whether the caller or the clock ends the solve."""
        if self._owner is threading.current_thread() and self._should_stop is not None and self._should_stop():
            self._halted = True
        return self._halted or self.left_s <= 0

    def satisfied(self) -> bool:
        """Whether the solve has also had its time to do better than the tolerance asks for.

        Half as long again as it took to get there: solutions are often within the tolerance long
        before they are as good as they get, and the rest costs little.
        """
        if not self.solved():
            return False
        now = time.monotonic()
        self.solved_at = self.solved_at or now
        return self.infeasible or now - self.solved_at > 0.5 * (self.solved_at - self.began)

    def solved(self) -> bool:
        """Whether nothing is left to find out: proved infeasible, or within the tolerance."""
        if self.infeasible:
            return True
        return self.best is not None and self.best.time_s <= self.bound_s * (1 + self.tolerance)

    def tell(self, *, news: bool = False) -> None:
        """Report progress: at once when there is news, else twice a second."""
        self._news |= news
        now = time.monotonic()
        if self._owner is not threading.current_thread() or self._on_progress is None:
            return
        if self._news or now - self._told > _TELL_S:
            self._news = False
            self._told = now
            best = self.best
            self._on_progress(Progress(self.seconds, self.activity, best.time_s if best else None, self.bound_s))

    def offer(self, order: Order, detail: Detail) -> Trial:
        """Try an order out and keep it if it fits and is the fastest so far."""
        trial = try_out(self.problem, order)
        if trial.peak_bytes <= self.budget_bytes and self._take(trial):
            self._take(without_needless(self.problem, detail, trial, self.budget_bytes, self.stopped))
        return trial

    def _take(self, trial: Trial) -> bool:
        """Keep a trial that fits if it is the fastest so far; whether it is."""
        with self._lock:
            better = not self._closed and (self.best is None or trial.time_s < self.best.time_s)
            if better:
                self.best = trial
        if better:
            self.tell(news=True)
        return better

    def raise_bound(self, overhead: float) -> None:
        """Take note that no schedule has less overhead than this, in units of the objective."""
        bound_s = self.problem.base_s * (1 + overhead / OBJECTIVE_SCALE)
        if np.isfinite(bound_s) and bound_s > self.bound_s:
            self.bound_s = bound_s
            self.tell(news=True)

    # The two models.

    def solve_model(self, model: Model, *, until: float, is_relaxation: bool, from_best: bool = True) -> tuple[Answer, Detail]:
        """Solve, offering every solution on the way; comes with what the last one says is to be refined."""
        closer = [model.detail]
        self.largest = max(self.largest, model.program.matrix.shape)

        def try_solution(values: Floats, objective: float) -> bool:
            choice = read_choice(model, values)
            self.repairs.solutions.append((model.detail, choice))
            closer[0] = self.try_choice(model, choice)
            return self.satisfied()

        def on_bound(overhead: float) -> None:
            if is_relaxation:
                self.raise_bound(overhead)
            self.tell()

        start = None
        if self.best is not None and from_best:
            start = start_values(model, choice_of(self.problem, model.detail, self.best.order.computed))
        answer = solve_program(
            model.program,
            time_limit_s=min(until, self.deadline) - time.monotonic(),
            absolute_gap=(_CLOSE if self.solved() else _INNER) * self.tolerance * OBJECTIVE_SCALE,
            start=start,
            watch=Watch(should_stop=lambda: self.stopped() or self.satisfied(), on_incumbent=try_solution, on_bound=on_bound),
        )
        if is_relaxation:
            if answer.outcome is Outcome.INFEASIBLE:
                self.infeasible = self.best is None
            else:
                self.raise_bound(answer.bound)
        if answer.values is not None:
            try_solution(answer.values, 0.0)
        return answer, closer[0]

    def try_choice(self, model: Model, choice: Choice) -> Detail:
        """Expand a solution and offer it; returns the model's detail, closer where it does not fit."""
        detail = model.detail
        order = order_of(detail, expand(model.problem, detail, choice))
        if writers := late_writers(self.problem, order):
            return replace(detail, ends=tuple(sorted({*detail.ends, *writers})))
        trial = self.offer(order, detail)
        if trial.peak_bytes <= self.budget_bytes:
            return detail
        closer = refined(detail, trial, self.budget_bytes)
        return with_stages_in_order(closer, trial, self.budget_bytes)

    def run(self) -> None:
        """Search until solved, stopped, or nothing is left to refine."""
        whole = Detail((self.problem.ops - 1,))
        trial = self.offer(order_of(whole, range(self.problem.ops)), whole)
        peak = int(np.argmax(trial.memory_bytes))
        coarse = Detail(tuple(sorted({peak, self.problem.ops - 1})))
        if self.solved():
            return
        detail, _ = self.refine(coarse, _FIRST_SLICE_S, is_relaxation=True)
        self.evict(whole)
        if self.solved() or self.stopped():
            return
        finder = threading.Thread(target=self._find, args=(coarse, detail, peak), daemon=True, name="search for schedules")
        finder.start()
        try:
            self.bound(detail)
            while finder.is_alive() and not (self.satisfied() or self.stopped()):
                self.tell()
                finder.join(0.05)
            if not (self.solved() or self.stopped()):
                self.decide()
        finally:
            self._halted = True
            # It may be in the middle of building a large model; it looks up after that, and changes nothing then.
            finder.join(_GRACE_S)
            self._closed = True
        if self._error is not None:
            raise self._error

    def bound(self, detail: Detail) -> None:
        """Refine the relaxation for as long as that may help."""
        slice_s = _FIRST_SLICE_S
        while not (self.solved() or self.stopped()):
            detail, exhausted = self.refine(detail, slice_s, is_relaxation=True)
            if exhausted:
                if self.problem.ops <= _SMALL or len(detail.ends) == self.problem.ops:
                    return
                detail = halved(detail)
            slice_s *= 2

    def _find(self, coarse: Detail, detail: Detail, peak: int) -> None:
        try:
            self.find(coarse, detail, peak)
        except Exception as error:  # noqa: BLE001 (the thread of the solve raises it)
            self._error = error

    def find(self, coarse: Detail, detail: Detail, peak: int) -> None:
        """Look for schedules until the model that looks for them has no better one."""
        self.narrow(coarse, _NARROW_S, from_best=False)
        if self.best is None:
            self.advance(coarse, peak)
        self.improve()
        self.narrow(coarse, 2 * _NARROW_S, from_best=True)
        self.repair()
        self.improve()
        slice_s = _FIRST_SLICE_S
        exhausted = False
        while not (exhausted or self.satisfied() or self.stopped()):
            detail, exhausted = self.refine(detail, slice_s, is_relaxation=False)
            slice_s *= 2

    def narrow(self, coarse: Detail, slice_s: float, *, from_best: bool) -> None:
        """Search among the choices that coarse solutions make, with windows where memory is tight.

        Args:
            slice_s: for each model.
            from_best: also among those of the best schedule, and start from it.
        """
        small = without_small(self.problem, _SMALL_SHARE, charged=True)
        known = Known()
        trials = self.coarse_trials(small, coarse, known)
        if self.best is not None and from_best:
            known.learn_order(self.best.order)
            trials.append(self.best)
        counted = sum(size > 0 and not kept for size, kept in zip(small.sizes, small.kept, strict=True))
        limit = max(_NARROW_FEW, _NARROW_SIZE // max(1, counted))
        detail = tight_windows(self.problem, trials, self.budget_bytes, limit)
        for _ in range(_NARROW_ROUNDS):
            if self.enough():
                return
            self.activity = f"searching in {len(detail.ends)} windows"
            self.tell()
            model = NarrowBuilder(small, detail, known).build()
            until = time.monotonic() + slice_s
            _, closer = self.solve_model(model, until=until, is_relaxation=False, from_best=from_best)
            if closer == detail:
                return
            detail = closer

    def coarse_trials(self, small: Problem, coarse: Detail, known: Known) -> list[Trial]:
        """What solutions of coarse models look like, for several capacities."""
        trials: list[Trial] = []
        self.activity = "looking for what is worth executing again"
        for share in _COARSE_CAPACITIES:
            if self.enough():
                break
            self.tell()
            model = Builder(replace(small, capacity_bytes=int(share * small.capacity_bytes)), coarse).build()
            answer = solve_program(
                model.program,
                time_limit_s=min(self.left_s, _COARSE_S),
                absolute_gap=self.tolerance * OBJECTIVE_SCALE,
                watch=Watch(should_stop=self.enough),
            )
            if answer.values is None:
                break
            choice = read_choice(model, answer.values)
            known.learn(choice)
            order = order_of(coarse, expand(model.problem, coarse, choice))
            if not late_writers(self.problem, order):
                trials.append(self.offer(order, coarse))
        return trials

    def evict(self, whole: Detail) -> None:
        """Offer what simple rules of eviction find."""
        for rule in RULES:
            if self.solved() or self.stopped():
                return
            computed = evicting_order(self.problem.graph, self.budget_bytes, rule)
            if computed is not None and not late_writers(self.problem, order := order_of(whole, computed)):
                self.offer(order, whole)

    def refine(self, detail: Detail, slice_s: float, *, is_relaxation: bool) -> tuple[Detail, bool]:
        """Solve and refine in turn; False with it if time was up before there was nothing left to refine."""
        until = time.monotonic() + slice_s
        done = self.solved if is_relaxation else self.satisfied
        while not (done() or self.stopped()):
            if is_relaxation:
                self.activity = f"bounding with {len(detail.ends)} windows"
                model = build_relaxation(self.problem, detail)
            else:
                self.activity = f"searching in {len(detail.ends)} windows"
                model = build_ordered(self.problem, detail)
            self.tell()
            answer, closer = self.solve_model(model, until=until, is_relaxation=is_relaxation)
            if is_relaxation:
                closer = replace(closer, ordered=detail.ordered)
            if self.solved():
                # Within the tolerance: a moment more often makes it as good as it gets.
                self.solve_model(model, until=time.monotonic() + self.seconds / 2, is_relaxation=is_relaxation)
                return detail, False
            if answer.outcome is not Outcome.OPTIMAL:
                return closer, answer.outcome is Outcome.INFEASIBLE
            if closer == detail:
                return detail, True
            detail = closer
        return detail, False

    def advance(self, coarse: Detail, peak: int) -> None:
        """Go from the first op to the last, settling what fits; first without repeating ops after the peak."""
        graph, budget_bytes = self.problem.graph, self.budget_bytes
        for repeatable, slice_s in ((range(peak + 1), _ADVANCE_S), (None, 2 * _ADVANCE_S)):
            problem = problem_of(graph, budget_bytes, repeatable=repeatable)
            until = min(self.deadline, time.monotonic() + slice_s)
            if self.stopped() or advance(problem, budget_bytes, coarse, self.solve_place, self.offer, until):
                return

    def repair(self) -> None:
        """Evict, in many ways, until that leads no further."""
        self.activity = "trying rules of eviction"
        idle = 0
        while idle < _IDLE_RUNS and not (self.stopped() or self.satisfied()):
            before = self.best.time_s if self.best else np.inf
            self.repairs.guided(self.enough)
            self.repairs.varied(_RUNS, self.enough)
            after = self.best.time_s if self.best else np.inf
            idle = 0 if after < before * (1 - _STRETCH_GAP) else idle + _RUNS

    def enough(self) -> bool:
        """Whether to stop looking for better schedules."""
        return self.stopped() or self.satisfied()

    def improve_order(self, order: Order, detail: Detail, limit_s: float) -> Trial | None:
        """The trial of an order that fits, less what is needless; None where it does not, or takes longer than `limit_s`."""
        trial = try_out(self.problem, order)
        if trial.peak_bytes > self.budget_bytes or trial.time_s > limit_s:
            return None
        self._take(trial)
        trial = without_needless(self.problem, detail, trial, self.budget_bytes, self.stopped)
        self._take(trial)
        return trial

    def improve(self) -> None:
        """Choose anew in one stretch of the best schedule after another."""
        if self.best is not None:
            improve_all(self.problem, self.best_trial, self.budget_bytes, self.solve_stretch, self.offer, self.enough)

    def best_trial(self) -> Trial:
        """The best schedule; there is one."""
        assert self.best is not None
        return self.best

    def solve_stretch(self, model: Model, choice: Choice, below_s: float) -> Choice | None:
        """A solution of the model of a stretch that costs less than `below_s`."""
        self.activity = f"improving ops {model.detail.ends[0] + 1} to {model.detail.ends[-1]}"
        self.tell()
        scale = OBJECTIVE_SCALE / self.problem.base_s if self.problem.base_s > 0 else 0.0
        below = below_s * scale - _STRETCH_GAP * OBJECTIVE_SCALE
        bound = [-np.inf]
        answer = solve_program(
            model.program,
            time_limit_s=min(self.left_s, _STRETCH_S),
            absolute_gap=_STRETCH_GAP * OBJECTIVE_SCALE,
            start=start_values(model, choice),
            watch=Watch(
                should_stop=lambda: self.stopped() or bound[0] >= below, on_bound=lambda value: bound.__setitem__(0, value)
            ),
        )
        if answer.values is None or answer.objective is None or answer.objective >= below:
            return None
        return read_choice(model, answer.values)

    def solve_place(self, model: Model, left_s: float) -> Choice | None:
        """A solution of one of the models of ``advance``, good enough to go on from."""
        self.activity = f"searching from op {model.detail.ends[0] if model.detail.ends else 0} on"
        self.tell()
        answer = solve_program(
            model.program,
            time_limit_s=min(left_s, _PLACE_S),
            absolute_gap=_PLACE_GAP * OBJECTIVE_SCALE,
            watch=Watch(should_stop=self.stopped, on_bound=lambda _: self.tell()),
        )
        return None if answer.values is None else read_choice(model, answer.values)

    def decide(self) -> None:
        """Small graphs: search all states."""
        self.activity = "searching all states"

        def should_stop() -> bool:
            self.tell()
            return self.stopped()

        below_s = self.best.time_s if self.best else np.inf
        found = shortest(self.problem, _MAX_STATES, below_s=below_s, should_stop=should_stop)
        if found.computed is not None:
            whole = Detail((self.problem.ops - 1,))
            self.offer(order_of(whole, found.computed), whole)
        self.infeasible = found.decided and self.best is None
        if not self.infeasible and self.problem.base_s > 0:
            self.raise_bound((found.bound_s / self.problem.base_s - 1) * OBJECTIVE_SCALE)
