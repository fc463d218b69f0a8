"""The least budget of a graph: one search, and one answer, for every command, study and message. Never imports torch.

The answer is a function of the graph and of the memory that budgets count: the search has a clock of work, not of seconds, and
the rates of links to the host do not matter. So ``planner info``, ``solve``, ``curve`` and ``advise`` name the same number, and a
solve at that budget has the schedule that proves it feasible.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar, cast

from planner.graphs.errors import ScheduleError
from planner.graphs.ir import Graph
from planner.graphs.options import extract_eager_program
from planner.graphs.reordering import Reordering, keep_program_order, permute
from planner.graphs.schedule import Schedule
from planner.graphs.simulate import simulate
from planner.memory.allocated_budget import build_solver_in_order
from planner.memory.reserved import choose_arena, predict_beside, predict_counted_bytes
from planner.memory.reserved_budget import solve_counted
from planner.settings.counted_memory import CountedMemory
from planner.solvers.bounds import bound_least_budget
from planner.solvers.clock import WorkClock, measure_rest
from planner.solvers.least import find_least_known, narrow_bracket
from planner.solvers.order.reorder import find_order
from planner.solvers.pass_ends import add_pass_ends
from planner.solvers.request import Request
from planner.solvers.result import Status
from planner.solvers.tolerance import Tolerance

# Units of work: for the order of the ops; in each order, for schedules without a program; for the solves after that.
_ORDER, _KNOWN, _SOLVES = 2.0, 1.0, 1.0
_LINK = 25e9  # bytes per second of all transfers
_PRECISION = 0.005  # of the budget found: where the search ends for reserved memory, which comes in segments,
_CLOSE = 0.001  # and for allocated bytes, whose bound is often met
_NEXT = 0.6  # position of the next budget in the bracket, nearer to the feasible end
_SLICE, _SLICE_LEAST = 0.3, 0.5  # of the work that is left, and in its unit: for each budget of reserved memory
_FAILURES = 2  # budgets of reserved memory in turn that nothing is found for
_REMEMBERED = 32  # searches


@dataclass(frozen=True, slots=True)
class LeastBudget:
    """The least feasible budget of a graph, bracketed by a proof and a schedule.

    Attributes:
        proved_bytes: no schedule needs less that first executes the ops in an order that was tried: the program's and another.
        found_bytes: bytes that `schedule` needs of the memory that the budget counts.
        schedule: of the graph; it runs within `found_bytes`.
        order: the ops in the order of its first executions.
        larger: schedules that were met in solves, with their orders; some need more and take less time.
        stopped: True if the search was stopped, so that the whole search may find less.
    """

    proved_bytes: int
    found_bytes: int
    schedule: Schedule
    order: tuple[int, ...]
    larger: tuple["LeastBudget", ...] = ()
    stopped: bool = False

    @property
    def exact(self) -> bool:
        """True if the least feasible budget is known to the byte."""
        return self.proved_bytes == self.found_bytes


_Found = TypeVar("_Found")
_remembered: dict[Hashable, object] = {}


def find_least_budget(
    graph: Graph,
    memory: CountedMemory = CountedMemory.ALLOCATED,
    *,
    arena: bool | None = None,
    reorders: bool = True,
    should_stop: Callable[[], bool] | None = None,
) -> LeastBudget:
    """Return the least budget of `graph` that is known, with its schedule. It is remembered.

    Args:
        graph: with the options that schedules may use.
        memory: kind of memory that the budget counts.
        arena: as in ``planner.memory.reserved.choose_arena``.
        reorders: False for schedules in program order only.
        should_stop: polled; once True, the best so far is returned, and not remembered.
    """
    arena = choose_arena(graph, memory, asked=arena)
    stop = should_stop or (lambda: False)

    def search() -> LeastBudget:
        if memory is CountedMemory.ALLOCATED or arena is False:
            return _search(_set_even_links(graph), memory, stop, reorders=reorders)
        return _find_in_arena(graph, memory, find_least_budget(graph, reorders=reorders, should_stop=stop), arena=arena)

    key = (_identify(graph), memory, arena, reorders)
    found = _remember(key, search, stop)
    return found if key in _remembered else replace(found, stopped=True)


def _identify(graph: Graph) -> Hashable:
    """Return a key of all that a least budget depends on."""
    origin = dict(graph.provenance.remove("options"))  # the ops say which options there are
    return graph.ops, graph.tensors, graph.kept, graph.pools, graph.limits, repr(origin)


def _remember(key: Hashable, search: Callable[[], _Found], stop: Callable[[], bool]) -> _Found:
    """Return what `search` found for the key before; search now if it did not, and remember that unless it was stopped."""
    if (known := _remembered.get(key)) is not None:
        return cast(_Found, known)
    found = search()
    if not stop():
        _remembered[key] = found
        if len(_remembered) > _REMEMBERED:
            del _remembered[next(iter(_remembered))]
    return found


def _find_in_arena(graph: Graph, memory: CountedMemory, least: LeastBudget, *, arena: bool | None) -> LeastBudget:
    """Return the least budget of reserved memory, given that of allocated bytes: little more is reserved in an arena."""
    brackets = []
    for found in (least, *least.larger):
        found_bytes = predict_counted_bytes(graph, found.schedule, memory, arena=arena)
        proved_bytes = min(found_bytes, predict_beside(graph, memory).bound(found.proved_bytes))
        brackets.append(replace(found, proved_bytes=proved_bytes, found_bytes=found_bytes, larger=()))
    return replace(brackets[0], larger=tuple(brackets[1:]))


def _set_even_links(graph: Graph) -> Graph:
    """Return `graph` with transfers of one usual rate: what schedules hold does not depend on the rates of links.

    Which tensors are sent does, and with that what an allocator reserves: at no usual rate are all transfers dear, or free.
    """
    times_s = {op.id: graph.tensors[op.inputs[0]].size_bytes / _LINK for op in graph.ops if graph.crosses_pools(op)}
    if not times_s:
        return graph
    return replace(graph, ops=tuple(replace(op, time_s=times_s.get(op.id, op.time_s)) for op in graph.ops))


def _search(graph: Graph, memory: CountedMemory, stop: Callable[[], bool], *, reorders: bool) -> LeastBudget:
    """Search in program order and in the order of lower peak without solving programs, then narrow the bracket by solves.

    What is reserved is that without an arena. Graphs with optional ops are not narrowed: their programs are large.
    """
    alone = [] if graph.plain else _find_without_options(graph, memory, stop, reorders=reorders)
    unsolved = _remember(
        (_identify(graph), bool(alone), reorders),
        lambda: _find_without_programs(graph, stop, only_options=bool(alone), reorders=reorders),
        stop,
    )
    found = [_judge(order, schedule, memory, proved_bytes) for order, schedule, proved_bytes in unsolved]
    if graph.plain:
        best = (_narrow if memory is CountedMemory.ALLOCATED else _narrow_reserved)(graph, found, memory, stop)
        proved_bytes = best.proved_bytes
    else:
        proved_bytes = min(least.proved_bytes for least in found)
        best = min((*found, *alone), key=lambda least: least.found_bytes)
    return replace(best, proved_bytes=min(proved_bytes, best.found_bytes))


def _find_without_programs(
    graph: Graph, stop: Callable[[], bool], *, only_options: bool, reorders: bool
) -> list[tuple[Reordering, Schedule, int]]:
    """Return each order, the schedule of least peak in it that is found without solving a program, and the bound in it.

    The memory that a budget counts does not matter, so that the search is shared by all kinds.
    """
    orders = [keep_program_order(graph)]
    if reorders and (other := find_order(graph, WorkClock(_ORDER), stop)).changed:
        orders.append(other)
    found = []
    for order in orders:
        bound = bound_least_budget(add_pass_ends(order.graph).graph).budget_bytes
        clock = WorkClock(_KNOWN)
        known = find_least_known(order.graph, clock, should_stop=stop, proved_bytes=bound, only_options=only_options)
        found.append((order, known, bound))
    return found


def _find_without_options(graph: Graph, memory: CountedMemory, stop: Callable[[], bool], *, reorders: bool) -> list[LeastBudget]:
    """Return the least budget of the program alone, whose schedules are also schedules with options.

    Empty if the step with options does not allow the schedule, which reads a tensor that is overwritten there.
    """
    program = extract_eager_program(graph)
    alone = find_least_budget(program, memory, arena=False, reorders=reorders, should_stop=stop)
    order = (*alone.order, *range(len(program.ops), len(graph.ops)))
    try:
        return [replace(alone, found_bytes=predict_counted_bytes(graph, alone.schedule, memory, arena=False), order=order)]
    except ScheduleError:
        return []


def _judge(order: Reordering, schedule: Schedule, memory: CountedMemory, proved_bytes: int) -> LeastBudget:
    """Return the bracket of a schedule of the graph of `order` and of a bound, which is of allocated bytes."""
    graph, schedule = order.source, order.map_back(schedule)
    if memory is not CountedMemory.ALLOCATED:
        proved_bytes = predict_beside(graph, memory).bound(proved_bytes)
    return LeastBudget(proved_bytes, predict_counted_bytes(graph, schedule, memory, arena=False), schedule, order.original)


def _narrow(graph: Graph, found: Sequence[LeastBudget], memory: CountedMemory, stop: Callable[[], bool]) -> LeastBudget:
    """Return the bracket of allocated bytes after solves for less, in the order of the least of `found`."""
    known = min(found, key=lambda least: least.found_bytes)
    others = [least.proved_bytes for least in found if least is not known]
    order = permute(graph, known.order)
    schedule = order.schedule_of_graph(known.schedule)
    solved = narrow_bracket(order.graph, schedule, WorkClock(_SOLVES), precision=_CLOSE, should_stop=stop)
    best = _judge(order, solved.schedule, memory, solved.proved_bytes)
    return replace(best, proved_bytes=min([best.proved_bytes, *others]))


def _narrow_reserved(graph: Graph, found: Sequence[LeastBudget], memory: CountedMemory, stop: Callable[[], bool]) -> LeastBudget:
    """Return the bracket of reserved bytes after solves for less, in the last order of `found`.

    The schedule that needs the fewest allocated bytes may reserve much more than another. So budgets of reserved memory below
    what it reserves are solved, each until a schedule fits; those that nothing was found for stay open, unless they are refuted.
    The first budget is hardly above: whole segments are reserved, so that schedules that reserve about the same may take very
    different times. The fastest within the precision counts.
    """
    *others, known = found
    order, clock, failures, seen = permute(graph, known.order), WorkClock(_SOLVES), 0, list(found)
    run, allocated_bytes = build_solver_in_order(order), bound_least_budget(order.graph).budget_bytes

    def learn(schedule: Schedule) -> None:
        found_bytes = predict_counted_bytes(graph, schedule, memory, arena=False)
        seen.append(replace(known, found_bytes=found_bytes, schedule=schedule))

    def get_least_bytes() -> int:
        return min(least.found_bytes for least in seen)

    budget_bytes = most_bytes = int((1 + _PRECISION) * get_least_bytes())
    refused_bytes = known.proved_bytes  # nothing was found at this budget, though nothing was proved
    while failures < _FAILURES and not stop():
        limited = clock.start_part(max(_SLICE_LEAST, _SLICE * measure_rest(clock)))
        first = Request(graph, budget_bytes, Tolerance.of(1.0), limited, should_stop=lambda: True)
        solved = solve_counted(run, first, memory, arena=False, must_stop=stop, on_least=learn, proved_bytes=allocated_bytes)
        result = solved.result
        if result.schedule is not None:
            learn(result.schedule)
            failures = 0
        elif budget_bytes < most_bytes:
            refused_bytes, failures = budget_bytes + 1, failures + 1
        if result.status is Status.INFEASIBLE:
            known = replace(known, proved_bytes=budget_bytes + 1)
        if get_least_bytes() - refused_bytes <= _PRECISION * get_least_bytes():
            break
        budget_bytes = int(refused_bytes + _NEXT * (get_least_bytes() - refused_bytes))
    near = [least for least in seen if least.found_bytes <= (1 + _PRECISION) * get_least_bytes()]
    fastest = min(near, key=lambda least: (simulate(graph, least.schedule).time_s, least.found_bytes))
    proved_bytes = min(least.proved_bytes for least in (known, *others))
    return replace(fastest, proved_bytes=proved_bytes, larger=tuple(least for least in seen if least is not fastest))
