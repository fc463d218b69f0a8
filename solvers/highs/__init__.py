"""The interface to HiGHS, for bounded 0-1 and linear programs.

A solve runs in its own thread while the caller's thread watches it: it hands over incumbents, reports progress, and polls
`should_stop`. So a stop takes effect at once even if HiGHS does not poll (presolve, a long factorisation), and Python's signal
handlers keep running.

Settings that were found by measuring: gaps are absolute, since one relative to the objective, the recomputation alone, took 200
times as long in a prototype; HiGHS's parallel mode is off. A row must not have a column twice: HiGHS 1.15 ran past its time limit
on such rows, so ``Milp`` adds them up.
"""

from collections.abc import Mapping

import highspy
import numpy as np

from planner.solvers.clock import Clock, measure_rest
from planner.solvers.highs.program import Answer, Floats, HighsError, Milp, Option, Outcome, SolveCallbacks
from planner.solvers.highs.run import HighsRun

_FEASIBILITY = 1e-6  # by how much a row may be violated, and an integer be off

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


def read_version() -> str:
    """Return HiGHS's version, e.g. ``1.15.1``."""
    return f"{highspy.HIGHS_VERSION_MAJOR}.{highspy.HIGHS_VERSION_MINOR}.{highspy.HIGHS_VERSION_PATCH}"


class SilentHighs(highspy.Highs):
    """A HiGHS without output: 1.16 prints its name and licence in the constructor, before options can be set."""

    def enableCallbacks(self) -> None:  # noqa: N802 (the first method that is called, by the constructor)
        """Turn the output off first."""
        self.setOptionValue("output_flag", False)
        super().enableCallbacks()  # type: ignore[no-untyped-call]


def solve_program(
    program: Milp,
    *,
    clock: Clock,
    absolute_gap: float = 0.0,
    start: Floats | None = None,
    callbacks: SolveCallbacks | None = None,
    options: Mapping[str, Option] | None = None,
) -> Answer:
    """Solve a 0-1 program, or a linear one if no variable is whole.

    Args:
        clock: ends the solve at its limit. A clock of work ends it only at points that do not depend on time.
        absolute_gap: stop once the best x is proved within this of the optimum.
        start: values to start from, NaN where unknown; HiGHS completes them if it can.
        options: further HiGHS options.

    Raises:
        HighsError: HiGHS refuses the model or an option.
    """
    if measure_rest(clock) <= 0:
        return Answer(Outcome.STOPPED, None, None, -np.inf, "no time left")
    if not len(program.cost):
        return _answer_without_variables(program)
    solver = _load(program)
    settings: dict[str, Option] = {
        "time_limit": highspy.kHighsInf if clock.counts_work else max(0.0, measure_rest(clock)),  # minus the time of loading
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
    run = HighsRun(solver, program)
    if not run.finish(callbacks or SolveCallbacks(), clock):
        # HiGHS is in a phase that does not poll; its thread ends by itself once it does.
        return Answer(Outcome.STOPPED, run.values, run.objective, run.bound, "left behind")
    return _read(run, program)


def _load(program: Milp) -> highspy.Highs:
    solver = SilentHighs()  # type: ignore[no-untyped-call]
    # Parallel HiGHS shares one process-wide scheduler; on a program of this kind it gains nothing.
    solver.setOptionValue("parallel", "off")
    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = len(program.cost), len(program.row_lower)
    lp.col_cost_, lp.col_lower_, lp.col_upper_ = program.cost, program.lower, program.upper
    lp.row_lower_, lp.row_upper_ = program.row_lower, program.row_upper
    lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    lp.a_matrix_.start_ = program.matrix.starts
    lp.a_matrix_.index_ = program.matrix.columns
    lp.a_matrix_.value_ = program.matrix.values
    if program.integer.any():
        whole, real = highspy.HighsVarType.kInteger, highspy.HighsVarType.kContinuous
        lp.integrality_ = [whole if is_whole else real for is_whole in program.integer]
    _check(solver.passModel(lp), "the model")
    return solver


def _check(status: highspy.HighsStatus, what: str) -> None:
    if status == highspy.HighsStatus.kError:
        raise HighsError(f"HiGHS {read_version()} refuses {what}")


def _answer_without_variables(program: Milp) -> Answer:
    feasible = bool((program.row_lower <= _FEASIBILITY).all() and (program.row_upper >= -_FEASIBILITY).all())
    if not feasible:
        return Answer(Outcome.INFEASIBLE, None, None, np.inf, "no variables")
    return Answer(Outcome.OPTIMAL, np.zeros(0), 0.0, 0.0, "no variables")


def _read(run: HighsRun, program: Milp) -> Answer:
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
    return Answer(outcome, values, objective, bound, detail)
