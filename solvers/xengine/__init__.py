"""The reference for placement: XEngine's program (Schuler et al., ACM TACO 2022), and the same with clocks, by HiGHS.

``program.py`` has the program and says what was published otherwise. Its objective is a serial sum: no two devices, and no copy
and device, ever work at the same time. ``clocks.py`` puts the makespan by the judge's clocks in its place, for schedules that may
also hold a copy for later stages and make it ahead of time; the best serial schedule is where that search begins.

Both programs grow with the square of the ops, for each device: they are for small graphs.
"""

from dataclasses import dataclass, replace

import numpy as np

from graphs.options.placement import Placement, placement_of
from graphs.schedule import Schedule
from graphs.simulate import simulate
from graphs.units import format_bytes
from solvers import highs
from solvers.clock import Clock, left
from solvers.highs.program import Answer, Floats, Milp, Outcome, Watch
from solvers.request import Request
from solvers.result import Reason, Result, Status, status_of
from solvers.xengine.clocks import add_clocks
from solvers.xengine.program import BEGIN, MOST_COLUMNS, Class, XEngineProgram
from solvers.xengine.steps import lazy_schedule, serial_schedule

_ONE_HALF = 0.5
_ROUNDING = 1e-6  # of the makespan of a known schedule, in floating point
_SERIAL_SHARE = 0.3  # of the time that is left, for the serial program, where it is not the one that is asked for
_ONCE_SHARE = 0.5  # of what is left then, for schedules that execute each op once, where all may be looked for


@dataclass(frozen=True, slots=True)
class XEngineParams:
    """Which schedules are looked for.

    Attributes:
        stay: copies may be handed on to the next stage; published: they go with the stage. For the makespan they always may.
        again: ops may be executed more than once, as published; without, only where each runs is chosen.
    """

    stay: bool = False
    again: bool = True


@dataclass(frozen=True, slots=True)
class _Found:
    """A schedule: what all of it takes one after the other, and a bound on that; and a bound on its makespan, if known."""

    schedule: Schedule
    serial_s: float
    serial_bound_s: float
    bound_s: float | None = None


def solve(request: Request, *, overlapped: bool = False) -> Result:
    """As ``solvers.registry.Solver``, for graphs with placement; LIMIT for others, and where the program is too large.

    The time of the result is the makespan by the judge. The serial objective says nothing of that: it has no bound there, and
    the settings have the sum (``serial_s``) with its bound. An infeasible program is LIMIT, since schedules of other classes
    may fit.

    Args:
        request: its parameters are ``XEngineParams``.
        overlapped: minimise the makespan, from the best serial schedule with copies that stay; the bound then covers
            schedules that execute each op at most once per stage and device, in program order (just once, without ``again``).

    Raises:
        GraphError: the graph has other choices than placement.
    """
    params = request.params_of(XEngineParams())
    params = replace(params, stay=params.stay or overlapped)
    placement = placement_of(request.graph)
    if len(placement.pools) == 1:
        why = "the graph has one device: give it the option placement, or use the solver checkmate"
        return _result(request, why, Reason.INAPPLICABLE, overlapped=overlapped)
    program = XEngineProgram(placement, request.budget_bytes, Class(stay=params.stay, again=params.again))
    if not program.build():
        return _result(request, _too_large(placement), Reason.SIZE, overlapped=overlapped)
    program.count_seconds()
    clock = request.clock.part(_SERIAL_SHARE * left(request.clock)) if overlapped else request.clock
    request.tell("solving XEngine's program", None, None)
    answer = _solved(program.milp(), request, clock, program.unit_s, request.tolerance.first)
    if answer.values is None:
        return _nothing(request, answer, overlapped=overlapped)
    executed = serial_schedule(program, answer.values)
    serial_s = sum(request.graph.ops[op].time_s for op in executed.computed)
    found = _Found(executed, serial_s, min(serial_s, answer.bound * program.unit_s))
    if overlapped:
        ahead = _overlapped(request, program, answer.values, found)
        if ahead is None:
            return _result(request, _too_large(placement), Reason.SIZE, overlapped=True)
        found = ahead
    return _result(request, overlapped=overlapped, found=found, params=params)


def _overlapped(request: Request, serial: XEngineProgram, values: Floats, found: _Found) -> _Found | None:
    """The best makespan, from the solution `values` of the serial program; None if the program with clocks is too large.

    Where each op is executed once, that is looked at first: it is a far smaller program.
    """
    wanted = serial.schedules.again
    once = not any(t > i and values[column] > _ONE_HALF for (_, t, i), column in serial.R.items())
    known = serial
    for again in (False, True) if once and wanted else (wanted,):
        horizon_s = simulate(request.graph, found.schedule).time_s
        program = XEngineProgram(
            serial.placement, request.budget_bytes, Class(stay=True, ahead=True, again=again), whole_frees=True
        )
        if not program.build():
            return None
        add_clocks(program, horizon_s * (1 + _ROUNDING))
        if len(program.cost) > MOST_COLUMNS:
            return None
        request.tell("solving XEngine's program with clocks", horizon_s, None)
        clock = request.clock.part(_ONCE_SHARE * left(request.clock)) if again is not wanted else request.clock
        milp = program.milp()
        started = _solved(_like(known, values, program, milp), request, clock, program.unit_s, 1.0)
        answer = _solved(milp, request, clock, program.unit_s, request.tolerance.first, started.values)
        if answer.values is not None:
            known, values = program, answer.values
            schedule = lazy_schedule(program, values)
            if simulate(request.graph, schedule).time_s < horizon_s:
                found = replace(found, schedule=schedule)
        if again is wanted:
            found = replace(found, bound_s=max(0.0, answer.bound * program.unit_s))
    return found


def _like(known: XEngineProgram, values: Floats, program: XEngineProgram, milp: Milp) -> Milp:
    """`milp` of `program` with what is executed, copied and handed on as in a solution of a program with fewer schedules."""
    chosen = dict.fromkeys((*program.R.values(), *program.A.values(), *program.S.values()), 0.0)
    for theirs, ours in ((known.R, program.R), (known.S, program.S)):
        chosen |= {ours[key]: values[column] for key, column in theirs.items() if key in ours}
    for (d, e, t, x, turn), column in known.A.items():
        key = (d, e, t, x, turn)
        # Where a stage has one op only, it begins just before that.
        target = program.A.get(key, program.A.get((d, e, t, x, BEGIN)))
        if target is not None and values[column] > _ONE_HALF:
            chosen[target] = 1.0
    lower, upper = milp.lower.copy(), milp.upper.copy()
    columns = list(chosen)
    lower[columns] = upper[columns] = np.round(list(chosen.values()))
    return replace(milp, lower=lower, upper=upper)


def _solved(milp: Milp, request: Request, clock: Clock, unit_s: float, tolerance: float, start: Floats | None = None) -> Answer:
    def tell(bound: float) -> None:
        request.tell("solving XEngine's program", None, bound * unit_s)

    watch = Watch(should_stop=request.interrupted, on_bound=tell, interrupted=request.interrupted)
    gap = tolerance * request.graph.time_s / unit_s
    return highs.solve_program(milp, clock=clock, absolute_gap=gap, start=start, watch=watch)


def _too_large(placement: Placement) -> str:
    ops, devices = len(placement.program.ops), len(placement.pools)
    return (
        f"XEngine's program for {ops:,} ops on {devices} devices has more than {MOST_COLUMNS:,} variables, which this solver "
        "takes on: give it a smaller graph"
    )


def _nothing(request: Request, answer: Answer, *, overlapped: bool) -> Result:
    budget = format_bytes(request.budget_bytes)
    if answer.outcome is Outcome.INFEASIBLE:
        why = f"no schedule of XEngine's class fits {budget} and the other memories ({answer.detail}): raise the budget"
        return _result(request, why, Reason.MEMORY, overlapped=overlapped)
    limit = request.clock.amount(request.clock.limit)
    why = f"XEngine's program found nothing within {limit} ({answer.detail}): raise the time limit or the budget"
    return _result(request, why, Reason.TIME, overlapped=overlapped)


def _result(
    request: Request,
    message: str = "",
    reason: Reason | None = None,
    *,
    overlapped: bool,
    found: _Found | None = None,
    params: XEngineParams | None = None,
) -> Result:
    status, settings = Status.LIMIT, dict(request.settings)
    bound_s = None
    if found is not None and params is not None:
        time_s = simulate(request.graph, found.schedule).time_s
        bound_s = None if found.bound_s is None else min(found.bound_s, time_s)
        status = Status.FEASIBLE if bound_s is None else status_of(time_s, bound_s, request.tolerance.first)
        settings |= {
            "objective": "makespan" if overlapped else "serial sum",
            "copies": "stay, and are made ahead" if overlapped else "stay" if params.stay else "for a stage",
            "executed": "again where it helps" if params.again else "once",
            "serial_s": found.serial_s,
            "serial_bound_s": found.serial_bound_s,
        }
    return Result(
        request.graph,
        budget_bytes=request.budget_bytes,
        status=status,
        schedule=None if found is None else found.schedule,
        bound_s=bound_s,
        solver="xengine-overlapped" if overlapped else "xengine",
        seconds=request.clock.seconds,
        settings=settings,
        versions={"highs": highs.version()},
        message=message,
        reason=reason,
    )
