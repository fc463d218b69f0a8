"""The one place that talks to HiGHS: bounded 0-1 and linear programs in, values and bounds out.

A solve runs in a thread of its own while the caller's thread looks after it: it hands over each
incumbent, reports progress, and polls `should_stop`. So a stop takes effect at once even where HiGHS
does not ask (presolve, a long factorisation), and Python's signal handlers keep running.
"""

import atexit
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import highspy
import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

from graphs.errors import PlannerError

Floats = NDArray[np.float64]
Option = bool | int | float | str
_POLL_S = 0.05  # how often the caller's thread looks up
_GRACE_S = 2.0  # how long a stopped solve may take to return before it is left behind
_LAST_GRACE_S = 10.0  # how long the end of the process waits for one left behind
_FEASIBILITY = 1e-6  # by how much a row may be violated, and an integer be off


class Outcome(StrEnum):
    """How HiGHS ended."""

    OPTIMAL = "optimal"  # within the gap asked for
    INFEASIBLE = "infeasible"
    STOPPED = "stopped"  # by a limit or by the caller; there may be values
    FAILED = "failed"  # HiGHS could not cope; there may be nothing


_Status = highspy.HighsModelStatus
OUTCOMES: dict[highspy.HighsModelStatus, Outcome] = {
    _Status.kOptimal: Outcome.OPTIMAL,
    _Status.kModelEmpty: Outcome.OPTIMAL,
    _Status.kInfeasible: Outcome.INFEASIBLE,
    _Status.kUnboundedOrInfeasible: Outcome.INFEASIBLE,  # every variable has finite bounds: never unbounded
    _Status.kObjectiveBound: Outcome.STOPPED,
    _Status.kObjectiveTarget: Outcome.STOPPED,
    _Status.kTimeLimit: Outcome.STOPPED,
    _Status.kIterationLimit: Outcome.STOPPED,
    _Status.kSolutionLimit: Outcome.STOPPED,
    _Status.kMemoryLimit: Outcome.STOPPED,
    _Status.kInterrupt: Outcome.STOPPED,
    _Status.kUnbounded: Outcome.FAILED,
    _Status.kUnknown: Outcome.FAILED,
    _Status.kNotset: Outcome.FAILED,
    _Status.kLoadError: Outcome.FAILED,
    _Status.kModelError: Outcome.FAILED,
    _Status.kPresolveError: Outcome.FAILED,
    _Status.kSolveError: Outcome.FAILED,
    _Status.kPostsolveError: Outcome.FAILED,
}


# Not in the type stubs of highspy.
OUTCOMES[_Status.__members__["kHighsInterrupt"]] = Outcome.STOPPED


class HighsError(PlannerError):
    """HiGHS refused a model or an option."""


@dataclass(frozen=True, slots=True)
class Program:
    """Minimise cost . x over lower <= x <= upper and row_lower <= matrix x <= row_upper.

    Attributes:
        integer: for each variable whether it must be whole. All bounds on variables are finite.
        matrix: one row per constraint, no column twice in a row.
    """

    cost: Floats
    lower: Floats
    upper: Floats
    integer: NDArray[np.bool_]
    matrix: csr_array
    row_lower: Floats
    row_upper: Floats

    def __post_init__(self) -> None:
        if not (np.isfinite(self.lower).all() and np.isfinite(self.upper).all()):
            raise HighsError("a variable has no finite bounds: give each a lower and an upper one")
        if self.matrix.shape != (len(self.row_lower), len(self.cost)):
            raise HighsError(f"the matrix is {self.matrix.shape} for {len(self.row_lower)} rows and {len(self.cost)} variables")
        # With a column twice in a row HiGHS has run past its time limit without an answer.
        self.matrix.sum_duplicates()


@dataclass(frozen=True, slots=True)
class Answer:
    """What HiGHS found.

    Attributes:
        values: the best x, None if there is none.
        objective: of `values`, None without.
        bound: no x has a lower objective (inf: proved infeasible, -inf: nothing known).
        detail: HiGHS's own word for how it ended.
        row_duals: of a linear program solved to the end, else None.
    """

    outcome: Outcome
    values: Floats | None
    objective: float | None
    bound: float
    detail: str
    row_duals: Floats | None = None


@dataclass(slots=True)
class Watch:
    """What the caller's thread does while HiGHS runs; each may be left out.

    Attributes:
        should_stop: polled; True ends the solve with the best so far.
        on_incumbent: gets (values, objective) of each better x; True ends the solve.
        on_bound: gets the bound, whenever it moved and about ten times a second.
    """

    should_stop: Callable[[], bool] | None = None
    on_incumbent: Callable[[Floats, float], bool] | None = None
    on_bound: Callable[[float], None] | None = None


def version() -> str:
    """HiGHS's version, e.g. ``1.15.1``."""
    return f"{highspy.HIGHS_VERSION_MAJOR}.{highspy.HIGHS_VERSION_MINOR}.{highspy.HIGHS_VERSION_PATCH}"


def solve_program(
    program: Program,
    *,
    time_limit_s: float,
    absolute_gap: float = 0.0,
    start: Floats | None = None,
    watch: Watch | None = None,
    options: Mapping[str, Option] | None = None,
) -> Answer:
    """Solve a 0-1 program, or a linear one if no variable is whole.

    Args:
        absolute_gap: stop once the best x is proved within this of the optimum.
        start: values to start from, NaN where unknown; HiGHS completes them if it can.
        options: further HiGHS options.

    Raises:
        HighsError: HiGHS refuses the model or an option.
    """
    if time_limit_s <= 0:
        return Answer(Outcome.STOPPED, None, None, -np.inf, "no time left")
    if not len(program.cost):
        return _without_variables(program)
    solver = _load(program)
    settings: dict[str, Option] = {
        "time_limit": float(time_limit_s),
        "mip_abs_gap": max(0.0, absolute_gap),
        "mip_rel_gap": 0.0,
        "mip_feasibility_tolerance": _FEASIBILITY,
        **(options or {}),
    }
    for name, value in settings.items():
        _check(solver.setOptionValue(name, value), f"option {name} = {value!r}")
    if start is not None:
        known = np.flatnonzero(~np.isnan(start)).astype(np.int32)
        if len(known):
            solver.setSolution(len(known), known, start[known])
    run = _Run(solver, is_mip=bool(program.integer.any()))
    if not run.finish(watch or Watch(), time_limit_s):
        # HiGHS is deep in something that does not look up; its thread ends by itself once it does.
        return Answer(Outcome.STOPPED, run.values, run.objective, run.bound, "left behind")
    return _read(run, program)


def _load(program: Program) -> highspy.Highs:
    solver: highspy.Highs = highspy.Highs()  # type: ignore[no-untyped-call]
    solver.setOptionValue("output_flag", False)
    solver.setOptionValue("log_to_console", False)
    # Parallel HiGHS shares one process-wide scheduler; on a program of this kind it gains nothing.
    solver.setOptionValue("parallel", "off")
    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = len(program.cost), len(program.row_lower)
    lp.col_cost_, lp.col_lower_, lp.col_upper_ = program.cost, program.lower, program.upper
    lp.row_lower_, lp.row_upper_ = program.row_lower, program.row_upper
    lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    lp.a_matrix_.start_ = program.matrix.indptr
    lp.a_matrix_.index_ = program.matrix.indices
    lp.a_matrix_.value_ = program.matrix.data
    if program.integer.any():
        whole, real = highspy.HighsVarType.kInteger, highspy.HighsVarType.kContinuous
        lp.integrality_ = [whole if is_whole else real for is_whole in program.integer]
    _check(solver.passModel(lp), "the model")
    return solver


def _check(status: highspy.HighsStatus, what: str) -> None:
    if status == highspy.HighsStatus.kError:
        raise HighsError(f"HiGHS {version()} refuses {what}")


def _without_variables(program: Program) -> Answer:
    feasible = bool((program.row_lower <= _FEASIBILITY).all() and (program.row_upper >= -_FEASIBILITY).all())
    if not feasible:
        return Answer(Outcome.INFEASIBLE, None, None, np.inf, "no variables")
    return Answer(Outcome.OPTIMAL, np.zeros(0), 0.0, 0.0, "no variables")


class _Run:
    """One solve in its thread: what HiGHS has told so far, and whether it was asked to stop."""

    def __init__(self, solver: highspy.Highs, *, is_mip: bool) -> None:
        self.solver = solver
        self.is_mip = is_mip
        self.values: Floats | None = None
        self.objective: float | None = None
        self.bound = -np.inf
        self.incumbents: deque[tuple[Floats, float]] = deque()
        self.error: BaseException | None = None
        self._stop = False
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True, name="HiGHS")
        kinds = highspy.cb.HighsCallbackType
        # HiGHS holds the callback, where Python's collector does not see it: a reference back would keep all of a solve.
        this = weakref.ref(self)
        solver.setCallback(lambda *told: run._called(*told) if (run := this()) else None, None)
        if is_mip:
            solver.startCallback(kinds.kCallbackMipImprovingSolution)
            solver.startCallback(kinds.kCallbackMipInterrupt)
        else:
            solver.startCallback(kinds.kCallbackSimplexInterrupt)
            solver.startCallback(kinds.kCallbackIpmInterrupt)

    def finish(self, watch: Watch, time_limit_s: float) -> bool:
        """Run to the end; False if HiGHS had to be left behind."""
        # A thread inside HiGHS when the interpreter ends would abort the process.
        atexit.register(self._end)
        self._thread.start()
        try:
            self._look_after(watch, time.monotonic() + time_limit_s)
        finally:
            # Also where a callback of the caller has failed.
            self._stop = True
            if self._done.wait(_GRACE_S):
                atexit.unregister(self._end)
        if self._done.is_set():
            self._hand_over(watch)
        if self.error is not None:
            raise self.error
        return self._done.is_set()

    def _end(self) -> None:
        self._stop = True
        self._thread.join(_LAST_GRACE_S)

    def _look_after(self, watch: Watch, deadline: float) -> None:
        told = 0.0
        while not self._done.wait(_POLL_S):
            self._hand_over(watch)
            now = time.monotonic()
            if watch.on_bound and now - told > 0.1:
                told = now
                watch.on_bound(self.bound)
            if self._stop or now > deadline + _GRACE_S or (watch.should_stop and watch.should_stop()):
                return

    def _hand_over(self, watch: Watch) -> None:
        while self.incumbents:
            values, objective = self.incumbents.popleft()
            if watch.on_incumbent and watch.on_incumbent(values, objective):
                self._stop = True

    def _work(self) -> None:
        try:
            self.solver.run()
        except Exception as error:  # noqa: BLE001 (the caller's thread raises it)
            self.error = error
        finally:
            self._done.set()

    def _called(self, kind: Any, message: str, out: Any, into: Any, data: Any) -> None:
        if kind == highspy.cb.HighsCallbackType.kCallbackMipImprovingSolution:
            self.values = np.array(out.mip_solution, dtype=np.float64)
            self.objective = float(out.objective_function_value)
            self.incumbents.append((self.values, self.objective))
        if self.is_mip:
            self.bound = max(self.bound, float(out.mip_dual_bound))
        if into is not None and self._stop:
            into.user_interrupt = True


def _read(run: _Run, program: Program) -> Answer:
    solver = run.solver
    status = solver.getModelStatus()
    outcome = OUTCOMES[status]
    detail = solver.modelStatusToString(status)
    info = solver.getInfo()
    values = objective = None
    solution = solver.getSolution()
    if info.primal_solution_status == highspy.kSolutionStatusFeasible:
        values = np.array(solution.col_value, dtype=np.float64)
        objective = float(program.cost @ values)
    if outcome is Outcome.INFEASIBLE:
        return Answer(outcome, None, None, np.inf, detail)
    if run.is_mip:
        bound = max(float(info.mip_dual_bound), run.bound)
    else:
        bound = float(info.objective_function_value) if outcome is Outcome.OPTIMAL else -np.inf
    duals = np.array(solution.row_dual) if outcome is Outcome.OPTIMAL and not run.is_mip else None
    return Answer(outcome, values, objective, bound, detail, duals)
