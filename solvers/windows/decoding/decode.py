"""From a solution of the model to a real order of executions, and what of it is over the budget."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from graphs.schedule import Compute, Schedule, schedule_of
from graphs.simulate import simulate
from solvers.highs.program import Floats
from solvers.places import Places
from solvers.problem import Problem, problem_of
from solvers.windows.decoding.device_transfers import side_by_side
from solvers.windows.decoding.expand import Choice, expand
from solvers.windows.decoding.host_transfers import timed
from solvers.windows.decoding.plain_graph import PlainGraph, plain_graph
from solvers.windows.relaxation.discretization import Discretization, Model

NOWHERE_BYTES = 2**62  # of what does not fit in another memory, whatever the budget


@dataclass(frozen=True, slots=True)
class Order:
    """Ops in order of execution; for each the window it belongs to, and whether it is the first time.

    Attributes:
        first: whether it is executed in its place.
        away: (tensor, position) where a tensor comes back from the host before that execution reads it.
        instead: as in ``Choice``.
    """

    computed: tuple[int, ...]
    windows: tuple[int, ...]
    first: tuple[bool, ...]
    away: frozenset[tuple[int, int]] = frozenset()
    instead: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Trial:
    """An order, its schedule, and what that takes.

    Attributes:
        peak_bytes: of the main device; ``NOWHERE_BYTES`` where another memory does not hold what is made there.
        memory_bytes: for each execution the memory during it, static bytes included; copies are no executions.
        waits_s: for each execution what the computation waits before it; empty where it never does.
        ends: for each execution the number of steps until what goes after it at once is gone; empty likewise.
    """

    order: Order
    schedule: Schedule
    time_s: float
    peak_bytes: int
    memory_bytes: tuple[int, ...]
    waits_s: tuple[float, ...] = ()
    ends: tuple[int, ...] = ()


def read_choice(model: Model, values: Floats) -> Choice:
    """Binaries of a solution, read at one half (HiGHS has checked that they are whole)."""
    again: list[set[int]] = [set() for _ in model.detail.ends]
    handed: list[set[int]] = [set() for _ in range(len(model.detail.ends) + 1)]
    for (k, i), column in model.again.items():
        if values[column] > 0.5:
            again[k].add(i)
    for (k, t), column in model.handed.items():
        if values[column] > 0.5:
            handed[k].add(t)
    instead = frozenset(b for b, column in model.instead.items() if values[column] > 0.5)
    if model.problem.copies is None:
        return Choice(tuple(map(frozenset, again)), tuple(map(frozenset, handed)), instead=instead)
    taken: list[set[int]] = [set() for _ in model.detail.ends]
    for (k, t), column in model.taken.items():
        if values[column] > 0.5:
            taken[k].add(t)
    freeze = tuple(map(frozenset, taken))
    return Choice(tuple(map(frozenset, again)), tuple(map(frozenset, handed)), taken=freeze, instead=instead)


def try_out(problem: Problem, order: Order) -> Trial:
    """The schedule with the shortest lives that executes in this order, judged.

    With round trips, tensors live longer than that while they go to the host, and are there before they are read.
    """
    if problem.copies is not None and not problem.places.plain:
        return _try_out_plain(problem, order)
    if problem.devices is not None:
        return _try_out_side_by_side(problem, order)
    if problem.copies is not None:
        found = timed(problem, order.computed, order.away)
        order, schedule = replace(order, away=found.away), Schedule(tuple(found.steps))
        simulation = simulate(problem.whole, schedule)
        memory = tuple(taken + problem.graph.static_bytes for taken in found.memory_bytes)
        return Trial(order, schedule, simulation.time_s, simulation.peak_bytes, memory, tuple(found.waits_s), tuple(found.ends))
    ids = problem.places.ids
    schedule = schedule_of(problem.graph, [ids[i] for i in order.computed])
    simulation = simulate(problem.graph, schedule)
    memory = tuple(
        taken for step, taken in zip(schedule.steps, simulation.memory_bytes, strict=True) if isinstance(step, Compute)
    )
    return Trial(order, schedule, simulation.time_s, simulation.peak_bytes, memory)


def _try_out_side_by_side(problem: Problem, order: Order) -> Trial:
    """With copies between devices issued when they should be; `order` as it is then."""
    ids = problem.places.ids
    found = side_by_side(problem.graph, [ids[i] for i in order.computed], problem.budget_bytes)
    moved = replace(
        order,
        computed=tuple(order.computed[place] for place in found.moved),
        windows=tuple(order.windows[place] for place in found.moved),
        first=tuple(order.first[place] for place in found.moved),
    )
    if not found.fits_elsewhere:
        return Trial(moved, found.schedule, math.inf, NOWHERE_BYTES, found.memory_bytes)
    simulation = simulate(problem.graph, found.schedule)
    return Trial(moved, found.schedule, simulation.time_s, simulation.peak_bytes, found.memory_bytes)


def _try_out_plain(problem: Problem, order: Order) -> Trial:
    """What the plain graph makes of an order with both optional ops and round trips."""
    plain = plain_graph(problem, order.computed)
    away = frozenset((here, place) for t, place in order.away if (here := plain.only(t)) is not None)
    detail = Discretization((len(plain.ops) - 1,))
    trial = try_out(problem_of(plain.graph, problem.budget_bytes), order_of(detail, plain.order, away))
    return trial_of_whole(problem, plain, order, trial)


def trial_of_whole(problem: Problem, plain: PlainGraph, order: Order, trial: Trial) -> Trial:
    """The trial of an order that is `order` in the problem, given that of its plain graph."""
    schedule = plain.schedule_of_whole(problem, trial.schedule)
    if problem.devices is not None:
        found = side_by_side(problem.whole, schedule.computed, problem.budget_bytes)
        schedule = found.schedule
        if not found.fits_elsewhere:
            return replace(trial, order=order, schedule=schedule, time_s=math.inf, peak_bytes=NOWHERE_BYTES, ends=())
    simulation = simulate(problem.whole, schedule)
    return replace(trial, order=order, schedule=schedule, time_s=simulation.time_s, peak_bytes=simulation.peak_bytes, ends=())


def late_writers(problem: Problem, order: Order) -> set[int]:
    """Ops that write in place what another op, executed again after them, reads.

    And ops before which one is executed that reads what nothing has made: where ops depend on each other, by what they make
    a second time, the solution of a model may be none.
    """
    late: set[int] = set()
    done = 0
    if not problem.places.plain:
        late = _reads_of_nothing(problem, order)
    for op, first in zip(order.computed, order.first, strict=True):
        if not first and problem.last_again[op] < done:
            late.add(problem.last_again[op])
        done = op + 1 if first else done
    return late


def _reads_of_nothing(problem: Problem, order: Order) -> set[int]:
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
    detail: Discretization,
    computed: Sequence[int],
    away: frozenset[tuple[int, int]] = frozenset(),
    instead: frozenset[int] = frozenset(),
    places: Places | None = None,
) -> Order:
    """`computed` with the windows of `detail` marked; first executions come in program order.

    Args:
        instead: what is executed in place of others, among the `places`; None: all ops are executed in theirs.
    """
    windows: list[int] = []
    first: list[bool] = []
    expected = None if places is None else [*places.executed(instead), len(places.ids)]
    done = 0
    for op in computed:
        following = done if expected is None else expected[done]
        first.append(op == following)
        windows.append(detail.window_of(following))
        done += op == following
    return Order(tuple(computed), tuple(windows), tuple(first), away, instead)


def decoded(problem: Problem, detail: Discretization, choice: Choice) -> Order:
    """The order that a solution of a model says, with what is away meanwhile."""
    places = None if problem.places.plain else problem.places
    order = order_of(detail, expand(problem, detail, choice), instead=choice.instead, places=places)
    if problem.copies is None or not choice.taken:
        return order
    return replace(order, away=_away(problem, choice, order))


def _away(problem: Problem, choice: Choice, order: Order) -> frozenset[tuple[int, int]]:
    """What comes back from the host: where it is read, but was not handed over all the time since it was read before.

    What comes back though it was handed over is away for the longest time that it is not read.
    """
    assert problem.copies is not None
    away: set[tuple[int, int]] = set()
    seconds = list(accumulate((problem.time_s[op] for op in order.computed), initial=0.0))
    gaps: dict[tuple[int, int], list[tuple[float, int]]] = {}
    last: dict[int, int] = {}
    for place, op in enumerate(order.computed):
        window = order.windows[place]
        for t in problem.inputs[op]:
            if t in problem.copies.trips and t in last:
                since = order.windows[last[t]]
                if not all(t in choice.handed[k] for k in range(since + 1, window + 1)):
                    away.add((t, place))
                for k in range(since, window + 1):
                    gaps.setdefault((k, t), []).append((seconds[place] - seconds[last[t]], place))
            last[t] = place
        last.update((t, place) for t in problem.outputs[op])
    for k, taken in enumerate(choice.taken):
        for t in taken:
            found = gaps.get((k, t), [])
            if found and not any((t, place) in away for _, place in found):
                away.add((t, max(found)[1]))
    return frozenset(away)
