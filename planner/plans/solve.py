"""From a graph and a budget to a plan. Never imports torch.

The memory that a budget counts, the arena, the least budget and an overhead in place of a budget meet here; each is searched for
in ``planner.memory``. What these return is judged once more on the graph of the plan, since it was mapped back from other
problems: other orders, smaller sets of options, plain graphs. Known weakness: with an allowed overhead, only allocated memory is
counted.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Self

from planner.graphs.checks import check_sums
from planner.graphs.errors import InfeasibleError, LimitError, PlannerError, SolverWarning, UsageError
from planner.graphs.ir import Graph, check_is_graph
from planner.graphs.options.compress import predict_gradient_error
from planner.graphs.options.option import Feature
from planner.graphs.options.selection import describe_differences
from planner.graphs.reordering import Reordering, keep_program_order
from planner.graphs.schedule import Schedule
from planner.graphs.short_tracebacks import shorten_traceback, warn_caller
from planner.graphs.simulate import simulate
from planner.memory.allocated_budget import REORDERED, build_solver, map_result_to_step
from planner.memory.known_budgets import KnownBudgets
from planner.memory.least_memory import solve_least_memory
from planner.memory.reserved import (
    DeviceTraining,
    choose_arena,
    choose_memory,
    is_on_cuda,
    predict_eager_bytes,
    predict_eager_reserved_bytes,
)
from planner.memory.reserved_budget import combine_stops, solve_counted
from planner.plans.plan import Plan
from planner.plans.record import GraphSummary
from planner.plans.select_attributes import select_attributes
from planner.plans.summary import get_other_peaks, get_step_time, summarize
from planner.progress import OnProgress, Stage, Stages, list_views
from planner.settings.budget import Budget, Overhead, read_budget_or_overhead
from planner.settings.compatibility import check_compatible
from planner.settings.counted_memory import CountedMemory
from planner.settings.plan import PlanSettings, select_settings
from planner.solvers.clock import Clock
from planner.solvers.order.reorder import find_order, map_result_back
from planner.solvers.registry import get_solver
from planner.solvers.request import Request, Start
from planner.solvers.result import Result, SolveProgress, Status
from planner.solvers.tolerance import WIDENING, Tolerance

Tell = Callable[[SolveProgress], None]  # called as a solve advances
Stop = Callable[[], bool]  # polled: returns True to end a solve

_REORDER_SHARE = 0.25  # of the limit: time to search for an order of the ops before many budgets are solved


@shorten_traceback
def solve(
    graph: Graph,
    budget: str | float | None = None,
    *,
    max_overhead: str | float | None = None,
    solver: str = "windows",
    tolerance: float | Tolerance = WIDENING,
    time_limit_s: float = 3600.0,
    work_limit: float | None = None,
    reorder: bool | None = None,
    options: Sequence[str] = (),
    link: str | float | None = None,
    host_budget: str | int | None = None,
    exact: bool = False,
    params: object = None,
    memory: str | None = None,
    arena: bool | None = None,
    on_progress: OnProgress = None,
    should_stop: Stop | None = None,
    on_plan: Callable[[Plan], None] | None = None,
) -> Plan:
    """Find the fastest schedule of `graph` that fits a budget, with a lower bound on the step time.

    Args:
        graph: of a training step, from ``planner.trace``.
        budget: memory of the whole step: bytes, ``8GB``, ``7.5GiB``; or ``60%`` or 0.6 of the predicted peak of plain eager
            PyTorch.
        max_overhead: in place of a budget: find the least memory at which the step takes at most this much longer than keeping
            everything, as 0.1 or ``10%``. It becomes the ``budget_bytes`` of the plan.
        solver: ``windows``, which proves its gap, or a baseline (``planner solvers`` lists them).
        tolerance: gap at which the solve ends, relative to the step time. By default 0.1%; 0.5% after 20 s, 2% after 2 minutes. A
            number holds throughout. ``plan.settings`` names the one that ended the solve.
        time_limit_s: seconds after which the best schedule so far is returned.
        work_limit: a limit in units of work, about a second each, in place of seconds: the plan is the same on every run and
            machine. One thread works at a time.
        reorder: True: search for an order of the ops that needs less memory first. False: keep program order. None: with
            ``windows``, solve in program order first, then in another order if that can gain; baselines keep program order.
        options: names of options that the schedule may use besides recomputation (``docs/options``). ``chunks``, ``pack``,
            ``kernels``, ``in-place`` and ``compress`` must have been named when the graph was traced.
        link, host_budget: for ``offload``: bytes a second (``50GB/s``) and host memory (``64GB``). Without `link`, the measured
            or else the published rate of the device is used.
        exact: of the options, use only what was verified to give the same bits.
        params: of the solver: for ``windows`` a ``planner.WindowsParams``. None: its defaults.
        memory: kind of memory that the budget counts: ``reserved`` for all that PyTorch's allocator reserves on CUDA with default
            settings, ``reserved-expandable`` with expandable segments, ``device`` or ``device-expandable`` for CUDA's context as
            well, so that the budget is one of the whole device, or ``allocated`` for the bytes of tensors in use. None:
            ``reserved`` for a graph of a CUDA device, ``allocated`` on the CPU and with `max_overhead`.
        arena: the budget is for a step that runs in an arena (``docs/addresses.md``): static memory, the arena, and what is
            outside of it. The bound holds for all schedules whose buffers have addresses there. None: on CUDA, for budgets of
            reserved memory without expandable segments, if the plan would otherwise reserve more than its budget.
        on_progress: called with each ``planner.progress.Progress``. None: show progress on a terminal and in a notebook, and log
            to the logger ``planner``; False: only log.
        should_stop: polled; when it returns True, the best schedule so far is returned.
        on_plan: called with each better plan on the way.

    Raises:
        BudgetError: the budget cannot be read or is not above zero, or both or neither of `budget` and `max_overhead` are given.
        InfeasibleError: proved: no schedule fits the budget.
        LimitError: no schedule was found before the solve was stopped.
        UsageError, PlannerError: no such solver, an option with a wrong value, or the solver failed.

    Examples:
        >>> plan = planner.solve(graph, "100%")
        >>> plan.overhead, plan.gap
        (0.0, 0.0)
        >>> planner.solve(graph, "1kB")
        Traceback (most recent call last):
        planner.graphs.errors.InfeasibleError: budget 1.00 kB is below ...
    """
    check_is_graph(graph)
    settings = PlanSettings.of(**select_settings(locals()))
    for name, function in {"should_stop": should_stop, "on_plan": on_plan}.items():
        if not (function is None or callable(function)):
            raise UsageError(f"{name} is {function!r}: must be a function, or None")
    wanted = read_budget_or_overhead(budget, max_overhead)
    with Stages(*list_views(on_progress), stages=(Stage.SOLVE,)) as stages:
        with stages.run_stage(Stage.SOLVE) as stage:
            check_sums(graph)
            tell = stage.report_solve(base_s=graph.time_s)
            plan = solve_graph(graph, wanted, settings, on_progress=tell, must_stop=should_stop, on_plan=on_plan)
        stages.finish()
    return plan


def solve_graph(
    graph: Graph,
    budget: Budget,
    settings: PlanSettings,
    *,
    on_progress: Tell | None = None,
    should_stop: Stop | None = None,
    must_stop: Stop | None = None,
    on_plan: Callable[[Plan], None] | None = None,
    start: Start | None = None,
) -> Plan:
    """Return the plan of ``solve`` for `settings`.

    Args:
        graph, budget, settings: what is solved, and how.
        on_progress: called as the solve advances.
        should_stop: polled; once it returns True, the solve ends as soon as it has a schedule within the budget.
        must_stop: polled; once it returns True, the solve ends with what it has, if anything.
        start: what is known from a solve at other costs.
    """
    clock, traced = settings.start_clock(), graph
    graph = settings.options.apply(graph)
    if isinstance(budget, Overhead):
        check_compatible(settings.features | {Feature.MAX_OVERHEAD})
        plans = _Plans.of(graph, settings, CountedMemory.ALLOCATED)
        stop = combine_stops(should_stop, must_stop)
        request = Request(graph, 0, settings.tolerance, clock, on_progress, stop, settings.params)
        return plans.plan_of(_solve_least_memory(request, budget.share, settings), clock)
    memory = choose_memory(graph, settings.memory)
    plans = _Plans.of(graph, settings, memory)
    budget_bytes = budget.resolve(plans.eager_bytes)
    request = Request(
        graph,
        budget_bytes,
        settings.tolerance,
        clock,
        on_progress,
        should_stop,
        settings.params,
        on_schedule=None if on_plan is None else partial(plans.report_interim, on_plan, budget_bytes, clock),
        start=start,
    )
    known = KnownBudgets(traced, request, memory, replace(settings, arena=plans.arena), must_stop or (lambda: False))
    solved = solve_counted(
        build_solver(settings, graph),
        known.begin(),
        memory,
        arena=plans.arena,
        must_stop=known.must_stop_solve,
        on_least=known.learn if known.names_least else None,
    )
    result = known.complete(solved)
    if result.status is Status.INFEASIBLE:
        raise InfeasibleError(result.message)
    return plans.plan_of(result, clock)


def _get_arena_setting(graph: Graph, settings: PlanSettings, memory: CountedMemory) -> bool | None:
    """Return True or False if steps of `graph` run in an arena or in none, None if that is to be decided for each schedule.

    Raises:
        UsageError: an arena is asked for, and steps cannot run in one, or a budget of `memory` cannot count it.
    """
    if not settings.arena:
        return choose_arena(graph, memory, asked=settings.arena)
    check_compatible(settings.features)
    if is_on_cuda(graph) and choose_arena(graph, memory) is False:
        raise UsageError(
            f"memory is {memory.value!r}, and on CUDA an arena is reserved memory of PyTorch's default allocator, without "
            f"expandable segments: take memory={CountedMemory.RESERVED.value!r} or {CountedMemory.DEVICE.value!r}, or leave out "
            "arena=True"
        )
    return True


@dataclass(frozen=True, slots=True)
class _Plans:
    """The plans of one graph.

    Attributes:
        graph: with the options that were asked for.
        memory: kind of memory that the user's budget counts.
        arena: as in ``solve_counted``.
        eager_reserved_bytes: bytes that plain eager PyTorch reserves; None on the CPU.
    """

    graph: Graph
    settings: PlanSettings
    summary: GraphSummary
    memory: CountedMemory
    arena: bool | None
    eager_reserved_bytes: int | None

    @classmethod
    def of(cls, graph: Graph, settings: PlanSettings, memory: CountedMemory) -> Self:
        """Return the plans of `graph`, whose arena and reserved memory depend on the `memory` that is counted."""
        arena = _get_arena_setting(graph, settings, memory)
        eager_reserved_bytes = predict_eager_reserved_bytes(graph, memory) if is_on_cuda(graph) else None
        return cls(graph, settings, summarize(graph), memory, arena, eager_reserved_bytes)

    @property
    def eager_bytes(self) -> int:
        """Bytes that plain eager PyTorch needs of the memory that the budget counts."""
        if self.memory is CountedMemory.ALLOCATED or self.eager_reserved_bytes is None:
            return self.summary.keep_everything_peak_bytes
        return self.eager_reserved_bytes

    def report_interim(
        self, on_plan: Callable[[Plan], None], budget_bytes: int, clock: Clock, schedule: Schedule, bound_s: float
    ) -> None:
        """Report the plan of a schedule on the way."""
        settings, request = self.settings, Request(self.graph, budget_bytes, self.settings.tolerance, clock)
        found = Status.FEASIBLE, schedule, bound_s, settings.solver, clock.seconds, request.settings
        on_plan(self.plan_of(Result(self.graph, budget_bytes, *found), clock))

    def plan_of(self, result: Result, clock: Clock) -> Plan:
        """Return the plan of `result`, with the memory reserved for it on CUDA.

        Args:
            clock: of all solves for the plan, of which the result may be only the last.

        Raises:
            LimitError, PlannerError: it has no schedule.
            BudgetError: the schedule's peak on the graph of the plan is over the budget.
        """
        if result.status is Status.LIMIT:
            raise LimitError(result.message)
        if result.schedule is None:
            raise PlannerError(f"the solver {result.solver} failed: {result.message}")
        if result.message:
            warn_caller(
                f"the solver {result.solver} ended early, for {result.message}. The best schedule until then is the plan; please "
                "report this with the graph",
                SolverWarning,
            )
        graph, schedule = self.graph, result.schedule
        judged = simulate(graph, schedule)  # it was mapped back from other problems
        result = result.map_to(**select_attributes(judged, "peak_bytes", "time_s"))
        settings = replace(
            result.settings,
            limit=dict.fromkeys(result.settings.limit, clock.limit),
            no_arena=self.settings.no_arena or None,
            options=self.settings.options.record(graph),
        )
        plan = Plan(
            graph=self.summary,
            schedule=schedule,
            budget_bytes=result.budget_bytes,
            memory=self.memory,
            **select_attributes(result, "peak_bytes", "time_s", "bound_s", "solver", "versions", "ended"),
            seconds=clock.seconds,
            settings=settings,
            pool_peaks_bytes=get_other_peaks(graph, judged),
            step_s=get_step_time(graph, judged),
            differs=describe_differences(graph, schedule.computed),
            gradient_error=predict_gradient_error(graph, schedule.computed),
            source=graph,
            arena_bytes=settings.arena_bytes,
            outside_arena_bytes=settings.outside_arena_bytes,
        )
        if self.eager_reserved_bytes is None:
            return plan
        training = DeviceTraining.of(graph, schedule, self.memory)
        in_arena = training.is_in_arena(result.budget_bytes, arena=self.arena)
        if in_arena:
            plan = replace(plan, arena_bytes=training.arena.slab_bytes, outside_arena_bytes=training.arena.outside_bytes)
        reserved = training.predict(self.eager_reserved_bytes, in_arena=in_arena)
        return replace(plan, reserved=reserved, seconds=clock.seconds)  # addresses in an arena take seconds too


def _solve_least_memory(request: Request, overhead: float, settings: PlanSettings) -> Result:
    """Return the schedule of least memory whose overhead over keeping everything is at most `overhead`."""
    graph, clock = request.graph, request.clock
    order = order_for(graph, settings.solver, reorder=settings.reorder, clock=clock.start_part(_REORDER_SHARE * clock.limit))
    found = solve_least_memory(get_solver(settings.solver), replace(request, graph=order.graph), overhead)
    return map_result_to_step(graph, map_result_back(order, found))


def order_for(graph: Graph, solver: str, *, reorder: bool | None, clock: Clock | None = None) -> Reordering:
    """Return `graph` in the order of ops in which `solver` solves it at several budgets.

    Args:
        reorder: True: the best order found; False: program order; None: the former for the solver ``windows``, the latter for
            others.
        clock: limit of the search for an order.
    """
    reorder = solver in REORDERED if reorder is None else reorder
    return find_order(graph, clock) if reorder else keep_program_order(graph)


def compute_eager_peak_bytes(eager: Graph, planned: Graph, asked: CountedMemory | None) -> int:
    """Return the bytes that plain eager PyTorch needs for a step that is planned with other kernels; shares refer to them.

    Args:
        eager: the step as eager PyTorch runs it.
        planned: the same step as it is planned, with all static memory that its process holds.
        asked: the kind of memory that the budget counts; None for the default.
    """
    memory = choose_memory(planned, asked)
    return predict_eager_bytes(eager, memory) - eager.static_bytes + planned.static_bytes


def judge_on(graph: Graph, plan: Plan) -> Plan:
    """Return `plan` with the time and the peak of its schedule on `graph`: the same step with other costs.

    The only bound known there is that all ops of the program are executed once.
    """
    found = simulate(graph, plan.schedule)
    bound_s = graph.time_s if graph.plain else None
    reserved = plan.reserved
    if reserved is not None:
        training = DeviceTraining.of(graph, plan.schedule, plan.memory)
        reserved = training.predict(reserved.eager_bytes, in_arena=plan.arena_bytes is not None)
    return replace(
        plan,
        graph=summarize(graph),
        peak_bytes=found.peak_bytes,
        time_s=found.time_s,
        bound_s=bound_s,
        reserved=reserved,
        pool_peaks_bytes=get_other_peaks(graph, found),
        step_s=get_step_time(graph, found),
        corrected_s=None,
        source=graph,
    )
