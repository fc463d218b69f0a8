"""Two-phase rounding of Checkmate's linear relaxation (Jain et al., MLSys 2020, section 5).

The relaxation is solved for a fraction of the budget, which leaves space for the additions of rounding. Phase one rounds S, the
tensors that each stage hands over; phase two takes the cheapest R for that S: an op is executed if an output is handed over and
was not in memory before, or if an executed op reads it. The schedule frees as early as possible, and is simulated.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

from planner.graphs.schedule import Schedule, schedule_of
from planner.graphs.simulate import simulate
from planner.graphs.units import format_bytes, format_seconds
from planner.solvers.baselines import checkmate
from planner.solvers.baselines.checkmate import CLASS, NOT_WRITTEN, CheckmateProgram
from planner.solvers.baselines.common.pulp_solvers import HIGHS, check_clock, check_milp_solver, read_versions, solve_model
from planner.solvers.baselines.common.verdicts import Verdict, build_result
from planner.solvers.bounds import bound_least_budget, describe_too_small
from planner.solvers.highs.builder import ONE
from planner.solvers.highs.program import Answer, Floats, Outcome
from planner.solvers.request import Request
from planner.solvers.result import Reason, Result, Status, decide_status, describe_class

FRACTIONS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)
THRESHOLDS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)

Handed = dict[tuple[int, int], float]

measure_program = checkmate.measure_program


@dataclass(frozen=True, slots=True)
class RoundingParams:
    """Parameters of the method.

    Attributes:
        fractions: of the budget without static memory, for which the relaxation is solved in turn.
        thresholds: S above it counts as handed over.
        samples: random roundings at each fraction, in which S counts with a probability of its value.
        seed: of these.
        milp_solver: any solver of PuLP.
    """

    fractions: tuple[float, ...] = FRACTIONS
    thresholds: tuple[float, ...] = THRESHOLDS
    samples: int = 20
    seed: int = 0
    milp_solver: str = HIGHS


def solve(request: Request) -> Result:
    """Return the fastest schedule at the largest fraction at which one fits; LIMIT if none does.

    The bound is the relaxation's optimum for the whole budget, over the schedules of ``checkmate``. The parameters are
    ``RoundingParams``.

    Raises:
        PlannerError: PuLP has no such solver, or it is not installed; or the clock counts work, which PuLP cannot.
    """
    graph, budget_bytes = request.graph, request.budget_bytes
    params = request.get_params(RoundingParams())
    check_milp_solver(params.milp_solver)
    check_clock(request.clock)
    rounding = _Rounding(request, params, random.Random(params.seed))
    least = bound_least_budget(graph)
    if budget_bytes < least.budget_bytes:
        verdict = Verdict(Status.INFEASIBLE, message=describe_too_small(graph, budget_bytes, least))
    elif (refusal := rounding.make_program().size.find_refusal(request.clock.limit)) is not None:
        verdict = Verdict(Status.LIMIT, None, graph.time_s, *refusal)
    else:
        rounding.run()
        verdict = rounding.reach_verdict()
    method = {
        "milp_solver": params.milp_solver,
        "fraction": rounding.fraction,
        "thresholds": list(params.thresholds),
        "samples": params.samples,
        "seed": params.seed,
    }
    settings = replace(request.settings, method=method, schedules=describe_class(request.graph, CLASS))
    return build_result(request, "rounding", verdict, settings=settings, versions=read_versions(params.milp_solver))


@dataclass(slots=True)
class _Rounding:
    """One solve: relaxations for smaller and smaller fractions of the budget, until a rounded schedule fits."""

    request: Request
    params: RoundingParams
    draw: random.Random
    best: tuple[float, Schedule] | None = None
    bound_s: float | None = None
    fraction: float | None = None
    end: Answer | None = None

    def run(self) -> None:
        """Try the fractions of the budget in turn; the bound is that of the whole budget."""
        self.bound_s = self.request.graph.time_s
        for fraction in self.params.fractions:
            self.request.tell(f"rounding at {fraction:.0%} of the budget", None, self.bound_s)
            program = self.make_program(fraction)
            self.end = NOT_WRITTEN
            if program.build(self.request.is_stopped):
                self.end = solve_model(program, self.params.milp_solver, 0.0, self.request)
            if fraction == 1.0:
                self.bound_s = max(self.bound_s, program.convert_to_seconds(self.end.bound) or 0.0)
            if self.end.values is not None:
                self.round(program, self.end.values)
            if self.best is not None:
                self.fraction = fraction
            if self.best is not None or self.end.values is None or self.request.is_stopped():
                return

    def make_program(self, fraction: float = 1.0) -> CheckmateProgram:
        """Return the linear relaxation for `fraction` of the budget without static memory, still to be built."""
        graph, budget_bytes = self.request.graph, self.request.budget_bytes
        return CheckmateProgram(graph, int(fraction * (budget_bytes - graph.static_bytes)), whole=False)

    def round(self, model: CheckmateProgram, values: Floats) -> None:
        """Keep the fastest schedule that fits of all roundings of a solution."""
        relaxed = {(t, x): float(values[S]) for (_, t, x), S in model.S.items()}
        tried: set[tuple[int, ...]] = set()
        for handed in self.generate_roundings(relaxed):
            executed = find_cheapest_executions(model, handed)
            if tuple(executed) in tried:
                continue
            tried.add(tuple(executed))
            schedule = schedule_of(self.request.graph, executed)
            simulation = simulate(self.request.graph, schedule)
            if simulation.peak_bytes <= self.request.budget_bytes and (self.best is None or simulation.time_s < self.best[0]):
                self.best = (simulation.time_s, schedule)
                self.request.tell("rounding", self.best[0], self.bound_s)
            if self.request.is_stopped():
                return

    def generate_roundings(self, relaxed: Handed) -> Iterator[set[tuple[int, int]]]:
        """Yield the roundings of phase one: S > threshold for each threshold, then S with a probability of its value."""
        for threshold in self.params.thresholds:
            yield {key for key, value in relaxed.items() if value > threshold}
        for _ in range(self.params.samples):
            yield {key for key, value in relaxed.items() if self.draw.random() < value}

    def reach_verdict(self) -> Verdict:
        """Return the fastest schedule with the bound, or why there is none."""
        request = self.request
        if self.best is not None and self.bound_s is not None:
            time_s, schedule = self.best
            return Verdict(decide_status(time_s, self.bound_s, request.tolerance.first), schedule, self.bound_s)
        budget, spent = format_bytes(request.budget_bytes), format_seconds(request.clock.seconds)
        way_out = "Raise the budget, or use the solver windows"
        if self.end is not None and self.end.outcome is Outcome.FAILED:
            return Verdict(Status.ERROR, None, self.bound_s, f"the solver gave up after {spent}: {self.end.detail}")
        if self.end is not None and self.end.values is None and self.end.outcome is Outcome.STOPPED:
            limit = request.clock.format_amount(request.clock.limit)
            why = f"no relaxation for {budget} was solved in {spent} (limit {limit}): {self.end.detail}. {way_out}"
            return Verdict(Status.LIMIT, None, self.bound_s, why, Reason.TIME)
        why = f"no rounding of the relaxation fits {budget}; tried in {spent}. {way_out}"
        return Verdict(Status.LIMIT, None, self.bound_s, why, Reason.MEMORY)


def find_cheapest_executions(model: CheckmateProgram, handed: set[tuple[int, int]]) -> list[int]:
    """Return op ids in order of execution, the fewest that hand over `handed`, (stage, tensor) pairs: phase two.

    R[t,i] = 1 if i = t, or an output x of i has S[t+1,x] = 1 and S[t,x] = 0, or an op j with R[t,j] = 1 reads an x with S[t,x] =
    0. Tensors that cannot be recomputed in stage t count as handed over to it.
    """
    graph, is_present = model.graph, partial(_is_present, model, handed)
    order: list[int] = []
    for t in range(model.ops):
        wanted = {x for x in model.iterate_passing(t) if t + 1 < model.ops and is_present(t + 1, x) and not is_present(t, x)}
        stage = []
        for i in range(t, -1, -1):
            if i == t or any(x in wanted for x in graph.ops[i].outputs):
                stage.append(i)
                wanted.update(x for x in graph.ops[i].inputs if not is_present(t, x))
        order += reversed(stage)
    return order


def _is_present(model: CheckmateProgram, handed: set[tuple[int, int]], t: int, x: int) -> bool:
    made = model.made_at[x]
    return made < t and (model.s(0, t, x) == ONE or (t, x) in handed or model.r(0, t, made) is None)
