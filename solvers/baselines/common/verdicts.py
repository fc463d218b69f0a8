"""Results of baselines: of a verdict, and the fastest schedule of their trials, or the reason why there is none."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from planner.graphs.schedule import Schedule
from planner.graphs.simulate import simulate
from planner.graphs.units import format_bytes
from planner.solvers.request import Request
from planner.solvers.result import Reason, Result, SolveSettings, Status, decide_status

_WORK_PER_STEP = 8e-6  # per step of a schedule and its simulation


@dataclass(frozen=True, slots=True)
class Candidate:
    """A schedule of a policy, with the settings that produced it."""

    schedule: Schedule
    settings: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome of a baseline: the fields of ``Result`` that depend on its search."""

    status: Status
    schedule: Schedule | None = None
    bound_s: float | None = None
    message: str = ""
    reason: Reason | None = None


def build_result(
    request: Request, solver: str, verdict: Verdict, *, settings: SolveSettings, versions: Mapping[str, str] | None = None
) -> Result:
    """Return the result of `solver`, the name in the registry, with a verdict."""
    return Result(
        request.graph,
        budget_bytes=request.budget_bytes,
        status=verdict.status,
        schedule=verdict.schedule,
        bound_s=verdict.bound_s,
        solver=solver,
        seconds=request.clock.seconds,
        settings=settings,
        versions=versions or {},
        message=verdict.message,
        reason=verdict.reason,
    )


def judge(request: Request, schedule: Schedule, bound_s: float) -> Verdict:
    """Return the verdict on the schedule of a program's solution; no schedule of the program's is faster than the bound."""
    found = simulate(request.graph, schedule)
    if found.peak_bytes > request.budget_bytes:
        over = f"{found.peak_bytes - request.budget_bytes} B over the budget"
        return Verdict(Status.ERROR, message=f"the solver's arithmetic is not exact enough: its schedule is {over}")
    return Verdict(decide_status(found.time_s, bound_s, request.tolerance.first), schedule, min(bound_s, found.time_s))


def answer(
    request: Request, solver: str, trials: Iterable[Candidate], *, what: str, settings: Mapping[str, object] | None = None
) -> Result:
    """Return the fastest of `trials` that fits; LIMIT if none does, or the time ran out before.

    A policy proves nothing: its bound is the step without recomputation, or None if it fails.

    Args:
        solver: name in the registry.
        trials: consumed lazily.
        what: subject of the message about the budget: "keeping everything".
        settings: in addition to those of the trial.
    """
    best: tuple[float, int, Candidate] | None = None
    least: int | None = None
    ended = ""
    for trial in trials:
        simulation = simulate(request.graph, trial.schedule)
        peak_bytes = simulation.peak_bytes
        least = peak_bytes if least is None else min(least, peak_bytes)
        if peak_bytes <= request.budget_bytes and (best is None or (simulation.time_s, peak_bytes) < best[:2]):
            best = (simulation.time_s, peak_bytes, trial)
        request.clock.spend(_WORK_PER_STEP * len(trial.schedule.steps))
        request.tell(solver, best[0] if best else None, request.graph.time_s)
        if ended := request.explain_end():
            break
    if least is None:
        why = f"{what} does not apply: the graph has no forward pass"
        return build_failure(request, solver, why, Reason.INAPPLICABLE, settings=settings)
    if best is None:
        found = f"{what} needs {format_bytes(least)}" + (f" (of what was tried before {ended})" if ended else "")
        budget = format_bytes(request.budget_bytes)
        why = f"{found}, over the budget of {budget}: use a solver that chooses, such as windows"
        return build_failure(request, solver, why, Reason.TIME if ended else Reason.MEMORY, settings=settings)
    status = decide_status(best[0], request.graph.time_s, request.tolerance.first)
    verdict = Verdict(status, best[2].schedule, request.graph.time_s)
    return build_result(request, solver, verdict, settings=SolveSettings(method={**(settings or {}), **best[2].settings}))


def build_failure(
    request: Request, solver: str, why: str, reason: Reason, *, settings: Mapping[str, object] | None = None
) -> Result:
    """Return the result of a policy that found nothing, which proves nothing about other schedules."""
    verdict = Verdict(Status.LIMIT, message=why, reason=reason)
    return build_result(request, solver, verdict, settings=SolveSettings(method=settings or {}))
