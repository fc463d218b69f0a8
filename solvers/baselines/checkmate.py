"""Checkmate's 0-1 program as published (Jain et al., MLSys 2020), as the reference.

``common/checkmate_program.py`` has the families of its rows, adapted to several outputs per op, kept tensors and workspaces;
``common/pulp_solvers.py`` solves it with HiGHS or, by PuLP, another solver.

Its schedules execute each op at most once per stage, in program order; a stage ends with the first execution of an op. Others
exist, and at tight budgets one of them may be the only feasible one, or faster: the optimum is no bound on all schedules.
"""

import math
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from planner.graphs.errors import BudgetError, PlannerError
from planner.graphs.io.files import check_writable, write_text
from planner.graphs.ir import Graph
from planner.graphs.schedule import schedule_of
from planner.graphs.units import format_bytes
from planner.solvers.baselines.common.checkmate_program import StageProgram, get_value
from planner.solvers.baselines.common.program_size import ProgramSize
from planner.solvers.baselines.common.pulp_solvers import (
    HIGHS,
    check_clock,
    check_milp_solver,
    read_versions,
    solve_model,
    write_with_pulp,
)
from planner.solvers.baselines.common.verdicts import Verdict, build_result, judge
from planner.solvers.bounds import bound_least_budget, describe_too_small
from planner.solvers.highs.program import Answer, Floats, Outcome
from planner.solvers.request import Request
from planner.solvers.result import Reason, Result, Status, describe_class

CLASS = "each op at most once per stage, in program order"
MOST_BINARIES = 500_000  # of R and S: a program of more takes several GB
# Seconds to write the program and solve its relaxation once: half of what 1,600 to 12,000 variables R and S took on a busy core.
# The first schedule takes ten times as long and more.
_LEAST_S, _LEAST_POWER = 1e-4, 1.2
_WHOLE = 1e-4  # tolerance on binaries
NOT_WRITTEN = Answer(Outcome.STOPPED, None, None, -math.inf, "the program was not written to its end")


@dataclass(frozen=True, slots=True)
class CheckmateParams:
    """Parameters of the program and its solution.

    Attributes:
        milp_solver: any solver of PuLP, such as HiGHS or PULP_CBC_CMD.
    """

    milp_solver: str = HIGHS


class CheckmateProgram(StageProgram):
    """The program of a graph and the bytes for its produced tensors."""

    def __init__(self, graph: Graph, capacity_bytes: int, *, whole: bool = True) -> None:
        super().__init__(graph, [capacity_bytes], split_frees=False, whole=whole)

    def build(self, is_over: Callable[[], bool] = lambda: False) -> bool:
        """Add variables, objective and rows; return False if `is_over` returned True before the end."""
        families = (self.add_inputs, self.add_handover, partial(self.add_memory, 0))
        return self.add_all((self.add_decisions,), is_over) and self.add_all(families, is_over)

    @property
    def size(self) -> ProgramSize:
        """Its size; nothing is built."""
        count = self.count_decisions()
        what = f"Checkmate's program for {self.ops:,} ops has {count:,} variables R and S"
        return ProgramSize(what, count, MOST_BINARIES, _LEAST_S * count**_LEAST_POWER)

    def read_executions(self, values: Floats) -> list[int] | None:
        """Return the ops in the order of a solution's schedule; None if a binary is neither 0 nor 1."""
        order: list[int] = []
        for t in range(self.ops):
            for i in range(t):
                value = get_value(self.r(0, t, i), values)
                if min(value, 1 - value) > _WHOLE:
                    return None
                if value > 0.5:
                    order.append(i)
            order.append(t)
        return order


def measure_program(graph: Graph, budget_bytes: int) -> ProgramSize | None:
    """Return the size of the program of a graph; None if no schedule fits."""
    if budget_bytes < bound_least_budget(graph).budget_bytes:
        return None
    return CheckmateProgram(graph, budget_bytes - graph.static_bytes).size


def solve(request: Request) -> Result:
    """Return the optimal schedule of Checkmate's program; the parameters are ``CheckmateParams``.

    The bound, and status OPTIMAL, refer to schedules that execute each op at most once per stage, in program order, without
    overwriting. An infeasible program gives LIMIT, not INFEASIBLE, since other schedules may fit. Only HiGHS reports progress,
    polls `should_stop` while it runs, and returns its bound when it ends early.

    Raises:
        PlannerError: PuLP has no such solver, or it is not installed; or the clock counts work, which PuLP cannot.
    """
    graph, budget_bytes, tolerance = request.graph, request.budget_bytes, request.tolerance.first
    params = request.get_params(CheckmateParams())
    check_milp_solver(params.milp_solver)
    check_clock(request.clock)
    least = bound_least_budget(graph)
    verdict = Verdict(Status.INFEASIBLE, message=describe_too_small(graph, budget_bytes, least))
    if budget_bytes >= least.budget_bytes:
        model = CheckmateProgram(graph, budget_bytes - graph.static_bytes)
        if (refusal := model.size.find_refusal(request.clock.limit)) is not None:
            verdict = Verdict(Status.LIMIT, None, graph.time_s, *refusal)
        else:
            request.tell("writing Checkmate's program", None, graph.time_s)
            written = model.build(request.is_stopped)
            answer = solve_model(model, params.milp_solver, tolerance * graph.time_s, request) if written else NOT_WRITTEN
            verdict = _judge(model, answer, request)
    method = {"milp_solver": params.milp_solver}
    settings = replace(request.settings, method=method, schedules=describe_class(graph, CLASS))
    return build_result(request, "checkmate", verdict, settings=settings, versions=read_versions(params.milp_solver))


def write_model(graph: Graph, budget_bytes: int, path: str | os.PathLike[str]) -> None:
    """Write the program to the file `path` atomically, for other solvers: ``.lp`` or ``.mps``.

    Its objective is the time of recomputation in thousandths of the step without any; memory is in units of the 10,000th part of
    the budget without static memory.

    Raises:
        BudgetError: an op alone needs more than the budget.
        OutputError: the file cannot be written.
        PlannerError: another suffix, or a program that is too large.
    """
    ending = Path(path).suffix.lower()
    if ending not in (".lp", ".mps"):
        raise PlannerError(f"{path} must end in .lp or .mps, which says how the program is written")
    check_writable(path)
    least = bound_least_budget(graph)
    if budget_bytes < least.budget_bytes:
        raise BudgetError(describe_too_small(graph, budget_bytes, least))
    model = CheckmateProgram(graph, budget_bytes - graph.static_bytes)
    if (refusal := model.size.find_refusal(math.inf)) is not None:
        raise PlannerError(refusal[0])
    model.build()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "model")
        problem, _ = write_with_pulp(model)
        if ending == ".lp":
            problem.writeLP(str(file))
        else:
            problem.writeMPS(str(file))
        write_text(path, file.read_text())


def _judge(model: CheckmateProgram, answer: Answer, request: Request) -> Verdict:
    clock = request.clock
    budget, spent = format_bytes(request.budget_bytes), clock.format_amount(clock.now)
    # Every op is executed once at least, whatever the solver knows.
    bound_s = max(model.graph.time_s, model.convert_to_seconds(answer.bound) or 0.0)
    if answer.values is not None:
        executed = model.read_executions(answer.values)
        if executed is None:
            return Verdict(Status.ERROR, message="the solver returned a binary variable that is neither 0 nor 1")
        return judge(request, schedule_of(model.graph, executed), bound_s)
    if answer.outcome is Outcome.INFEASIBLE:
        return Verdict(
            Status.LIMIT,
            None,
            None,
            f"no schedule that executes {describe_class(model.graph, CLASS)}, fits {budget}: Checkmate's program is infeasible "
            f"({answer.detail}). "
            "Others may fit: use the solver windows, or raise the budget",
            Reason.MEMORY,
        )
    if answer.outcome is Outcome.STOPPED:
        return Verdict(
            Status.LIMIT,
            None,
            bound_s,
            f"no schedule within {budget} was found in {spent} (limit {clock.format_amount(clock.limit)}): {answer.detail}. "
            "Raise the time limit or the budget, or use the solver windows",
            Reason.TIME,
        )
    return Verdict(Status.ERROR, None, None, f"the solver gave up after {spent}: {answer.detail}")
