"""Decoding of a model's solution to an order of executions and its schedule.

Known weakness: with optional ops and transfers to the host at once an order is decoded by way of its plain graph only, in which a
tensor of several producers is not offloaded.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from planner.graphs.pools import DEVICE_TO_HOST, HOST_TO_DEVICE
from planner.graphs.schedule import Compute, Schedule, schedule_of
from planner.graphs.simulate import simulate
from planner.solvers.highs.program import Floats
from planner.solvers.problem import Problem, build_problem
from planner.solvers.windows.decoding.expand import Solution, expand
from planner.solvers.windows.decoding.plain_graph import PlainGraph, build_plain_graph
from planner.solvers.windows.decoding.transfer_plan import Reloads
from planner.solvers.windows.decoding.transfers import add_transfers
from planner.solvers.windows.relaxation.discretization import Discretization, Model

NOWHERE_BYTES = 2**62  # peak of a schedule that does not fit another pool, at any budget


@dataclass(frozen=True, slots=True)
class Order:
    """Ops in order of execution, with the window of each.

    Attributes:
        first: for each execution, True if it is the one in the op's place.
        reloads: (tensor, position), where a tensor is reloaded before that execution reads it.
    """

    computed: tuple[int, ...]
    windows: tuple[int, ...]
    first: tuple[bool, ...]
    reloads: Reloads = frozenset()
    instead: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Trial:
    """An order and its simulated schedule.

    Attributes:
        peak_bytes: of the main device; ``NOWHERE_BYTES`` if another pool is too small.
        memory_bytes: for each op of the order the memory during it, including static memory.
        waits_s: for each op of the order the time that its stream waits before it; empty without transfers to the host.
        ends: for each op of the order the number of steps up to the frees after it; empty without transfers to the host.
    """

    order: Order
    schedule: Schedule
    time_s: float
    peak_bytes: int
    memory_bytes: tuple[int, ...]
    waits_s: tuple[float, ...] = ()
    ends: tuple[int, ...] = ()


def read_solution(model: Model, values: Floats) -> Solution:
    """Return the binaries of a solution, rounded at one half (HiGHS has checked that they are integer)."""
    windows = len(model.discretization.ends)
    instead = frozenset(b for b, column in model.instead.items() if values[column] > 0.5)
    handed, taken = _list_chosen(model.handed, windows + 1, values), _list_chosen(model.taken, windows, values)
    return Solution(_list_chosen(model.recomputed, windows, values), handed, taken=taken, instead=instead)


def _list_chosen(columns: dict[tuple[int, int], int], count: int, values: Floats) -> tuple[frozenset[int], ...]:
    found: list[set[int]] = [set() for _ in range(count)]
    for (k, x), column in columns.items():
        if values[column] > 0.5:
            found[k].add(x)
    return tuple(map(frozenset, found))


def try_out(problem: Problem, order: Order) -> Trial:
    """Return the simulated schedule with the shortest lifetimes that executes in this order.

    With offloading, tensors live longer while they are transferred to the host, and are reloaded before they are read.
    """
    if problem.round_trips and not problem.places.plain:
        return _try_out_plain(problem, order)
    if problem.has_streams:
        return _try_out_transfers(problem, order)
    ids = problem.places.ids
    schedule = schedule_of(problem.graph, [ids[i] for i in order.computed])
    simulation = simulate(problem.graph, schedule)
    memory = tuple(
        taken for step, taken in zip(schedule.steps, simulation.memory_bytes, strict=True) if isinstance(step, Compute)
    )
    return Trial(order, schedule, simulation.time_s, simulation.peak_bytes, memory)


def _try_out_transfers(problem: Problem, order: Order) -> Trial:
    """Return the trial of an order with transfers, each issued at the right time."""
    ids = problem.places.ids
    found = add_transfers(problem, [ids[i] for i in order.computed], order.reloads)
    moved, issued = found.moved, list(range(len(found.moved)))
    if problem.places.plain:  # transfers of the program stay before their readers in the order, wherever they are issued
        issued = sorted(issued, key=moved.__getitem__)
        moved = sorted(moved)
    order = replace(
        order,
        computed=tuple(order.computed[index] for index in moved),
        windows=tuple(order.windows[index] for index in moved),
        first=tuple(order.first[index] for index in moved),
        reloads=found.reloads,
    )
    schedule, memory = found.schedule, tuple(found.memory_bytes[at] for at in issued)
    if not found.fits_elsewhere:
        return Trial(order, schedule, math.inf, NOWHERE_BYTES, memory)
    simulation = simulate(problem.whole, schedule)
    trial = Trial(order, schedule, simulation.time_s, simulation.peak_bytes, memory)
    if not problem.round_trips:
        return trial
    return replace(trial, waits_s=tuple(found.waits_s[at] for at in issued), ends=tuple(found.ends[at] for at in issued))


def _try_out_plain(problem: Problem, order: Order) -> Trial:
    """Return the trial of an order with both optional ops and offloading, by way of its plain graph."""
    plain = build_plain_graph(problem, order.computed)
    reloads = frozenset((here, place) for t, place in order.reloads if (here := plain.find_only(t)) is not None)
    own = build_problem(plain.graph, problem.budget_bytes)
    trial = try_out(own, order_of(own, plain.order, reloads))
    return map_trial_back(problem, plain, order, trial)


def map_trial_back(problem: Problem, plain: PlainGraph, order: Order, trial: Trial) -> Trial:
    """Return the trial of `order` in the problem, given the trial of its plain graph."""
    schedule = plain.schedule_of_whole(problem, trial.schedule)
    if problem.placed:
        found = add_transfers(problem, schedule.computed)
        schedule = found.schedule
        if not found.fits_elsewhere:
            return replace(trial, order=order, schedule=schedule, time_s=math.inf, peak_bytes=NOWHERE_BYTES, ends=())
    simulation = simulate(problem.whole, schedule)
    return replace(trial, order=order, schedule=schedule, time_s=simulation.time_s, peak_bytes=simulation.peak_bytes, ends=())


def is_possible(problem: Problem, order: Order) -> bool:
    """Return True if each op finds its inputs unchanged, and the order respects the graph's limits on resources."""
    return not find_late_writers(problem, order) and problem.allows(order.computed)


def find_late_writers(problem: Problem, order: Order) -> set[int]:
    """Return the ops that write in place a tensor that another op, recomputed after them, reads.

    Return also ops before which an input of an execution is missing: where ops depend on each other's recomputed outputs, a
    solution of a model may have no valid order.
    """
    late: set[int] = set()
    done = 0
    if not problem.places.plain:
        late = _find_reads_of_nothing(problem, order)
    for op, first in zip(order.computed, order.first, strict=True):
        if not first and problem.recompute_before[op] < done:
            late.add(problem.recompute_before[op])
        done = op + 1 if first else done
    return late


def _find_reads_of_nothing(problem: Problem, order: Order) -> set[int]:
    made: set[int] = set()
    lacking = False
    late: set[int] = set()
    for op, first in zip(order.computed, order.first, strict=True):
        lacking |= not made.issuperset(problem.inputs[op])
        made.update(problem.outputs[op])
        if first and lacking:
            late.add(op)
            lacking = False
    return late


def order_of(
    problem: Problem,
    computed: Sequence[int],
    reloads: Reloads = frozenset(),
    instead: frozenset[int] = frozenset(),
    *,
    discretization: Discretization | None = None,
) -> Order:
    """Return `computed` with the windows of `discretization` (None: one window); first executions are in program order."""
    windows: list[int] = []
    first: list[bool] = []
    discretization = discretization or Discretization.whole(problem)
    expected = None if problem.places.plain else [*problem.places.list_executed(instead), problem.ops]
    done = 0
    for op in computed:
        following = done if expected is None else expected[done]
        first.append(op == following)
        windows.append(discretization.find_window(following))
        done += op == following
    return Order(tuple(computed), tuple(windows), tuple(first), reloads, instead)


def order_of_schedule(problem: Problem, schedule: Schedule) -> Order | None:
    """Return the order of a schedule of the problem's whole graph, with its reloads and the ops that replace others.

    Return None if it executes ops that the problem leaves out, or its first executions are not in the order of the problem.
    """
    place = {op: i for i, op in enumerate(problem.places.ids)}
    computed: list[int] = []
    reloads: set[tuple[int, int]] = set()
    instead: set[int] = set()
    passed: set[int] = set()  # ops that were executed, and those replaced
    waiting: set[int] = set()  # tensors that were reloaded and not read since
    for op in schedule.computed:
        if (executed := problem.whole.ops[op]).stream == HOST_TO_DEVICE:
            waiting.update(executed.outputs)
        if executed.stream in {HOST_TO_DEVICE, DEVICE_TO_HOST}:
            continue
        if (i := place.get(op)) is None:
            return None
        group = problem.places.replaces[i]
        if group and group[-1] not in passed:  # the place of the group is still to come
            instead.add(i)
            passed.update(group)
        passed.add(i)
        reloads.update((t, len(computed)) for t in waiting.intersection(problem.inputs[i]))
        waiting.difference_update(problem.inputs[i])
        computed.append(i)
    order = order_of(problem, computed, frozenset(reloads), frozenset(instead))
    return order if sum(order.first) == len(problem.places.list_executed(order.instead)) else None


def decode(problem: Problem, discretization: Discretization, solution: Solution) -> Order:
    """Return the order of a model's solution, with the reloads of offloaded tensors."""
    order = order_of(problem, expand(problem, discretization, solution), instead=solution.instead, discretization=discretization)
    return replace(order, reloads=_find_reloads(problem, solution, order)) if problem.round_trips and solution.taken else order


def _find_reloads(problem: Problem, solution: Solution, order: Order) -> Reloads:
    """Return the reloads: before reads of tensors that were not handed over continuously since the last read.

    A tensor that is reloaded although it was handed over is offloaded in its longest interval without reads.
    """
    reloads: set[tuple[int, int]] = set()
    seconds = list(accumulate((problem.time_s[op] for op in order.computed), initial=0.0))
    gaps: dict[tuple[int, int], list[tuple[float, int]]] = {}
    last: dict[int, int] = {}
    for place, op in enumerate(order.computed):
        window = order.windows[place]
        for t in problem.inputs[op]:
            if t in problem.round_trips and t in last:
                since = order.windows[last[t]]
                if not all(t in solution.handed[k] for k in range(since + 1, window + 1)):
                    reloads.add((t, place))
                for k in range(since, window + 1):
                    gaps.setdefault((k, t), []).append((seconds[place] - seconds[last[t]], place))
            last[t] = place
        last.update((t, place) for t in problem.outputs[op])
    for k, taken in enumerate(solution.taken):
        for t in taken:
            found = gaps.get((k, t), [])
            if found and not any((t, place) in reloads for _, place in found):
                reloads.add((t, max(found)[1]))
    return frozenset(reloads)
