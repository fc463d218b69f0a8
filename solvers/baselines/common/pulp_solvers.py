"""Solution of PuLP's programs: by HiGHS with callbacks, or by any other solver of PuLP."""

import inspect
from dataclasses import dataclass
from typing import Any

import highspy
import pulp

from graphs.errors import PlannerError
from solvers import highs
from solvers.baselines.common.checkmate_program import CheckmateModel
from solvers.clock import Clock, measure_rest
from solvers.highs.program import Option, Outcome
from solvers.request import Request

HIGHS = "HiGHS"
_TELL_S = 0.2  # interval of progress reports between better solutions
OUTCOMES = {  # by PuLP's words for the status
    # PuLP 4
    "Optimal": Outcome.OPTIMAL,
    "GapLimit": Outcome.OPTIMAL,
    "Infeasible": Outcome.INFEASIBLE,
    "TimeLimit": Outcome.STOPPED,
    "MemoryLimit": Outcome.STOPPED,
    "NodeLimit": Outcome.STOPPED,
    "IterationLimit": Outcome.STOPPED,
    "SolutionLimit": Outcome.STOPPED,
    "Interrupted": Outcome.STOPPED,
    "Stopped": Outcome.STOPPED,
    "NotSolved": Outcome.STOPPED,
    "Unbounded": Outcome.FAILED,  # never: every variable has bounds
    "Undefined": Outcome.FAILED,
    "NumericalError": Outcome.FAILED,
    # PuLP 3, the newest for Python 3.11
    "Optimal Solution Found": Outcome.OPTIMAL,
    "Solution Found": Outcome.STOPPED,
    "No Solution Found": Outcome.STOPPED,
    "No Solution Exists": Outcome.INFEASIBLE,
    "Solution is Unbounded": Outcome.FAILED,
}


@dataclass(frozen=True, slots=True)
class PulpAnswer:
    """The result of a solve.

    Attributes:
        outcome: interpretation of the solver's status.
        found: True if the variables hold a solution.
        bound_s: lower bound on the seconds of all solutions; None if unknown.
        detail: the solver's own status.
    """

    outcome: Outcome
    found: bool
    bound_s: float | None
    detail: str

    @classmethod
    def unfinished(cls) -> "PulpAnswer":
        """Return the answer if the time ran out while the program was built."""
        return cls(Outcome.STOPPED, False, None, "the program was not written to its end")


def check_milp_solver(name: str) -> None:
    """Raise an error, before work is spent, unless PuLP can call the solver `name`.

    Raises:
        PlannerError: it cannot; lists those it can.
    """
    if name not in pulp.listSolvers(onlyAvailable=True):
        known = "is not installed" if name in pulp.listSolvers() else "is none that PuLP knows"
        raise PlannerError(f"solver {name!r} {known}: choose one of {', '.join(pulp.listSolvers(onlyAvailable=True))}")


def check_clock(clock: Clock) -> None:
    """Raise an error for a clock that cannot limit PuLP's solvers.

    Raises:
        PlannerError: it counts work.
    """
    if clock.counts_work:
        raise PlannerError("solvers that PuLP calls cannot be limited by work: give a time limit, or use the solver windows")


def read_versions(name: str) -> dict[str, str]:
    """Return the versions of the libraries that solve programs with the solver `name`."""
    return {"pulp": pulp.__version__, **({"highs": highs.read_version()} if name == HIGHS else {})}


def solve_model(model: CheckmateModel, name: str, absolute_gap_s: float, request: Request) -> PulpAnswer:
    """Solve `model` with the solver `name` until it is within the gap, the time is up, or the caller stops it."""
    if request.is_stopped():
        return PulpAnswer(Outcome.STOPPED, False, None, "no time left")
    absolute_gap = absolute_gap_s / model.time_unit
    if name == HIGHS:
        return _run_highs(model, absolute_gap, request)
    return _run_other(model, name, absolute_gap, request)


def _run_highs(model: CheckmateModel, absolute_gap: float, request: Request) -> PulpAnswer:
    """Solve the model that PuLP builds with HiGHS itself, which reports more than PuLP does."""
    solver, engine = pulp.getSolver(HIGHS), highs.SilentHighs()  # type: ignore[no-untyped-call]
    settings: dict[str, Option] = {
        "time_limit": measure_rest(request.clock),
        "mip_abs_gap": absolute_gap,
        "mip_rel_gap": 0.0,
        "mip_feasibility_tolerance": 1e-6,
        "parallel": "off",
    }
    for option, value in settings.items():
        engine.setOptionValue(option, value)
    model.program.solverModel = engine
    kinds = highspy.cb.HighsCallbackType
    error: list[BaseException] = []

    told = 0.0

    def handle_callback(kind: Any, message: str, out: Any, into: Any, data: Any) -> None:
        nonlocal told
        try:
            if request.is_stopped() and into is not None:
                into.user_interrupt = True
            if model.is_mip and (kind == kinds.kCallbackMipImprovingSolution or request.clock.seconds - told > _TELL_S):
                told = request.clock.seconds
                request.tell(
                    "solving Checkmate's program",
                    convert_to_seconds(out.mip_primal_bound),
                    convert_to_seconds(out.mip_dual_bound),
                )
        except BaseException as raised:  # noqa: BLE001 (raised again once HiGHS has let go)
            error.append(raised)
            if into is not None:
                into.user_interrupt = True

    def convert_to_seconds(objective: float) -> float | None:
        return model.graph.time_s + objective * model.time_unit if abs(objective) < highspy.kHighsInf else None

    engine.setCallback(handle_callback, None)
    for kind in (
        kinds.kCallbackMipImprovingSolution,
        kinds.kCallbackMipInterrupt,
        kinds.kCallbackSimplexInterrupt,
        kinds.kCallbackIpmInterrupt,
    ):
        engine.startCallback(kind)
    solver.buildSolverModel(model.program)
    solver.callSolver(model.program)
    if error:
        raise error[0]
    status, info = engine.getModelStatus(), engine.getInfo()
    outcome, detail = highs.OUTCOMES[status], engine.modelStatusToString(status)
    found = info.primal_solution_status == highspy.kSolutionStatusFeasible and outcome is not Outcome.INFEASIBLE
    if found:
        # PuLP 4 also lists variables that are in no row.
        columns = getattr(model.program, "exported_variables", model.program.variables)()
        for variable, value in zip(columns, engine.getSolution().col_value, strict=True):
            variable.varValue = value
    if model.is_mip:
        bound_s = convert_to_seconds(info.mip_dual_bound)
    else:
        bound_s = convert_to_seconds(info.objective_function_value) if outcome is Outcome.OPTIMAL else None
    return PulpAnswer(outcome, found, bound_s if outcome is not Outcome.INFEASIBLE else None, detail)


def _run_other(model: CheckmateModel, name: str, absolute_gap: float, request: Request) -> PulpAnswer:
    """Solve without callbacks; a bound is known only if the solve ended within the gap."""
    wanted = {"msg": False, "timeLimit": max(1.0, measure_rest(request.clock)), "gapAbs": absolute_gap, "gapRel": 0.0}
    accepted = inspect.signature(type(pulp.getSolver(name, msg=False)).__init__).parameters
    solver = pulp.getSolver(name, **{option: value for option, value in wanted.items() if option in accepted})
    try:
        stats = model.program.solve(solver)
    except pulp.PulpSolverError as error:
        return PulpAnswer(Outcome.FAILED, False, None, str(error))
    if isinstance(stats, int):  # of PuLP 3, which keeps the rest in the program
        status = model.program.sol_status
        word, found = pulp.LpSolution[status], status in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible)
    else:
        word, found = stats.status.name, stats.has_solution
    outcome = OUTCOMES[word]
    bound_s = None
    if outcome is Outcome.OPTIMAL:
        bound_s = model.compute_solution_s() - absolute_gap * model.time_unit
    return PulpAnswer(outcome, found, bound_s, word)
