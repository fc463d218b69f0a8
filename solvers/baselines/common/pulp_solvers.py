"""Solution of programs by HiGHS with callbacks, or by any other solver of PuLP."""

import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pulp

from planner.graphs.errors import PlannerError
from planner.solvers import highs
from planner.solvers.baselines.common.checkmate_program import StageProgram
from planner.solvers.clock import Clock, measure_rest
from planner.solvers.highs.program import Answer, Floats, Outcome, SolveCallbacks
from planner.solvers.request import Request

HIGHS = "HiGHS"
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


def check_milp_solver(name: str) -> None:
    """Raise a PlannerError, before work is spent, unless PuLP can call the solver `name`; it lists those it can."""
    if name not in pulp.listSolvers(onlyAvailable=True):
        known = "is not installed" if name in pulp.listSolvers() else "is none that PuLP knows"
        raise PlannerError(f"solver {name!r} {known}: choose one of {', '.join(pulp.listSolvers(onlyAvailable=True))}")


def check_clock(clock: Clock) -> None:
    """Raise a PlannerError for a clock that counts work, which cannot limit PuLP's solvers."""
    if clock.counts_work:
        raise PlannerError("solvers that PuLP calls cannot be limited by work: give a time limit, or use the solver windows")


def read_versions(name: str) -> dict[str, str]:
    """Return the versions of the libraries that solve programs with the solver `name`."""
    return {"pulp": pulp.__version__, **({"highs": highs.read_version()} if name == HIGHS else {})}


def solve_model(program: StageProgram, name: str, absolute_gap_s: float, request: Request) -> Answer:
    """Solve `program` with the solver `name` until it is within the gap, the time is up, or the caller stops it."""
    if request.is_stopped():
        return Answer(Outcome.STOPPED, None, None, -np.inf, "no time left")
    if name != HIGHS:
        return _run_other(program, name, absolute_gap_s / program.unit_s, request)
    reports = _Reports(program, request)
    watch = SolveCallbacks(request.is_stopped, reports.keep, reports.tell)
    callbacks = watch if program.whole else SolveCallbacks(request.is_stopped)
    gap = absolute_gap_s / program.unit_s
    return highs.solve_program(program.build_milp(), clock=request.clock, absolute_gap=gap, callbacks=callbacks)


@dataclass(slots=True)
class _Reports:
    program: StageProgram
    request: Request
    best_s: float | None = None

    def keep(self, _: Floats, objective: float) -> bool:
        self.best_s = self.program.convert_to_seconds(objective)
        self.tell(-np.inf)
        return False

    def tell(self, bound: float) -> None:
        self.request.tell("solving Checkmate's program", self.best_s, self.program.convert_to_seconds(bound))


def _run_other(program: StageProgram, name: str, absolute_gap: float, request: Request) -> Answer:
    """Solve without callbacks; a bound is known only if the solve ended within the gap."""
    wanted = {"msg": False, "timeLimit": max(1.0, measure_rest(request.clock)), "gapAbs": absolute_gap, "gapRel": 0.0}
    accepted = inspect.signature(type(pulp.getSolver(name, msg=False)).__init__).parameters
    solver = pulp.getSolver(name, **{option: value for option, value in wanted.items() if option in accepted})
    problem, columns = write_with_pulp(program)
    try:
        stats = problem.solve(solver)
    except pulp.PulpSolverError as error:
        return Answer(Outcome.FAILED, None, None, -np.inf, str(error))
    if isinstance(stats, int):  # of PuLP 3, which keeps the rest in the program
        status = problem.sol_status
        word, found = pulp.LpSolution[status], status in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible)
    else:
        word, found = stats.status.name, stats.has_solution
    outcome = OUTCOMES[word]
    if not found:
        return Answer(outcome, None, None, -np.inf, word)
    values = np.array([column.varValue or 0.0 for column in columns])  # 0 where it is in no row
    objective = float(np.array(program.cost) @ values)
    return Answer(outcome, values, objective, objective - absolute_gap if outcome is Outcome.OPTIMAL else -np.inf, word)


def write_with_pulp(program: StageProgram) -> tuple[pulp.LpProblem, list[Any]]:
    """Return `program` in PuLP, and its columns."""
    milp, problem = program.build_milp(), pulp.LpProblem("checkmate", pulp.LpMinimize)
    columns = [
        problem.add_variable(program.names.get(c, f"x_{c}"), low, high, "Integer" if whole else "Continuous")
        for c, (low, high, whole) in enumerate(zip(milp.lower, milp.upper, milp.integer, strict=True))
    ]
    problem.setObjective(_sum((columns[c], weight) for c, weight in enumerate(milp.cost) if weight))
    matrix = milp.matrix
    for row, (low, high) in enumerate(zip(milp.row_lower, milp.row_upper, strict=True)):
        entries = slice(matrix.starts[row], matrix.starts[row + 1])
        total = _sum((columns[c], weight) for c, weight in zip(matrix.columns[entries], matrix.values[entries], strict=True))
        problem.addConstraint(total == low if low == high else total <= high, f"c{row}")
    return problem, columns


def _sum(terms: Iterable[tuple[Any, float]]) -> Any:
    total = pulp.lpSum([])  # PuLP 3 and 4 have no constructor in common
    for column, weight in terms:
        total.addterm(column, float(weight))
    return total
