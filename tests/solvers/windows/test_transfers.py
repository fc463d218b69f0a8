"""Orders with transfers as schedules: the judge agrees on times, waits, memory, rows 10 to 13 hold; moves and least budgets."""

import random
from typing import Any

import pytest

from planner.capture.options import apply_options
from planner.graphs.ir import Graph, Op, Phase, Tensor
from planner.graphs.options.gather import OVERLAP, Shard, Unit, insert_units
from planner.graphs.options.offload import OFFLOAD, remove_offload
from planner.graphs.options.surroundings import Link, OtherDevice, Surroundings
from planner.graphs.schedule import Compute, keep_everything, schedule_of
from planner.graphs.simulate import simulate
from planner.graphs.synthetic.draft import Draft
from planner.graphs.synthetic.random_graphs import draw_graph, draw_training_step
from planner.solvers.bounds import bound_least_budget, need_at
from planner.solvers.clock import WorkClock
from planner.solvers.eviction.engine import find_evicting_order
from planner.solvers.eviction.rules import RULES, EvictionSettings
from planner.solvers.highs.program import Outcome
from planner.solvers.least import bracket_least_budget, find_least_known
from planner.solvers.problem import Problem, build_problem
from planner.solvers.registry import get_solver
from planner.solvers.result import Status
from planner.solvers.windows.decoding.decode import Trial, order_of, try_out
from planner.solvers.windows.decoding.encode import encode_trial
from planner.solvers.windows.decoding.pruning import prune_with_transfers
from planner.solvers.windows.decoding.transfer_plan import TransferPlan
from planner.solvers.windows.decoding.transfers import add_transfers
from planner.solvers.windows.relaxation.models import build_relaxation
from planner.solvers.windows.strategies.offloaded_orders import find_least_offloaded
from planner.solvers.windows.strategies.offloading import generate_simpler, recompute_where_it_waits
from planner.solvers.windows.strategies.placement import DeviceOps, Placing
from tests.support.graphs.collective_costs import build_cost
from tests.support.graphs.options import on_devices, random_placement, with_trips
from tests.support.marks import slow
from tests.support.solvers.answers import ask
from tests.support.solvers.brute_force_transfers import fastest_with_transfers
from tests.support.solvers.random_orders import everything, random_order, short_form, solve_with_choices


def offering(draw: random.Random, most_ops: int) -> Graph:
    graph = draw_graph(draw.randint(0, 10**6), draw.randint(3, most_ops))
    host_bytes = draw.choice((None, None, draw.randint(3, 30)))
    rates = (0.5, 1.0, 2.0, 4.0)
    link = Link(draw.choice(rates), draw.choice(rates), draw.choice((0.0, 0.0, 0.5)))
    return apply_options(graph, ("offload",), Surroundings(link, host_bytes))


def some_reloads(draw: random.Random, problem: Problem, computed: list[int]) -> frozenset[tuple[int, int]]:
    reads = [(t, place) for place, op in enumerate(computed) for t in problem.inputs[op] if t in problem.round_trips]
    return frozenset(pair for pair in reads if draw.random() < 0.5)


@pytest.mark.parametrize("seeds", [range(first, first + 100) for first in range(0, 600, 100)], ids=str)
def test_the_judge_says_the_same(seeds: range) -> None:
    waited = copied = 0
    for seed in seeds:
        draw = random.Random(seed)
        graph = offering(draw, 9)
        problem = build_problem(graph, graph.static_bytes + draw.choice((10**9, draw.randint(5, 60))))
        computed = random_order(draw, problem)
        found = add_transfers(problem, computed, some_reloads(draw, problem, computed))
        simulation = simulate(graph, found.schedule)
        assert simulation.clocks_s[0] == pytest.approx(found.time_s), seed
        assert simulation.peak_bytes == max(found.memory_bytes), seed
        executed = [step.op for step in found.schedule.steps if isinstance(step, Compute) and step.op < problem.ops]
        assert executed == computed
        assert len(found.waits_s) == len(found.ends) == len(computed)
        spent = sum(problem.time_s[op] for op in computed)
        assert spent + sum(found.waits_s) == pytest.approx(found.time_s), seed
        waited += any(found.waits_s)
        copied += bool(found.reloads)
    assert waited > 10 and copied > 10


@pytest.mark.parametrize(
    "seeds",
    [
        range(first, first + 20) if first < 60 else pytest.param(range(first, first + 20), marks=pytest.mark.slow)
        for first in range(0, 200, 20)
    ],
    ids=str,
)
def test_every_schedule_with_copies_solves_the_relaxation_at_its_budget(seeds: range) -> None:
    copied = 0
    for seed in seeds:
        draw = random.Random(seed)
        graph = offering(draw, 8)
        loose = build_problem(graph, 10**9)
        n = loose.ops
        computed = short_form(loose.graph, random_order(draw, loose))
        reloads = some_reloads(draw, loose, computed)
        trial = try_out(loose, order_of(loose, computed, reloads))
        problem = build_problem(graph, trial.peak_bytes)
        copied += bool(trial.order.reloads)
        some = tuple(sorted({*draw.sample(range(n), n // 2), n - 1}))
        for discretization in (everything((n - 1,)), everything(some), everything(some).split(range(n))):
            model = build_relaxation(problem, discretization)
            solution = encode_trial(problem, discretization, trial)
            assert {(k, t) for k, taken in enumerate(solution.taken) for t in taken} <= model.taken.keys(), seed
            answer = solve_with_choices(model, solution)
            assert answer.outcome is Outcome.OPTIMAL, (seed, discretization.ends)
            assert answer.objective <= problem.convert_to_units(trial.time_s - problem.base_s) + 1e-4, (seed, discretization.ends)
    assert copied > len(seeds) / 3


def test_queued_offloads_are_ordered_by_last_read() -> None:
    """The channel is busy with z when a and b are made; b is read for the last time before a, and goes before it."""
    z, a, b = range(3)
    reads = ((), (), (), (b,), (z, a), (), (b,), (a,), (z,))
    tensors = tuple(Tensor(i, f"t{i}", 4, (i,)) for i in range(len(reads)))
    ops = tuple(Op(i, f"op{i}", "f", inputs, (i,), 1.0) for i, inputs in enumerate(reads))
    graph = apply_options(Graph(ops, tensors, frozenset({8})), ("offload",), Surroundings(Link.even(1.0)))
    problem = build_problem(graph, 100)
    found = add_transfers(problem, range(9), {(b, 6), (a, 7), (z, 8)})
    out = {transfers.out.op: t for t, transfers in problem.round_trips.items()}
    assert [out[step.op] for step in found.schedule.steps if isinstance(step, Compute) and step.op in out] == [z, b, a]


def test_hundreds_of_tensors_without_space_on_the_host_take_few_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    """400 tensors are produced, then read in reverse; the host has space for 7 of them."""
    count, attempts = 400, []
    tensors = tuple(Tensor(t, f"t{t}", 4, (t,)) for t in range(2 * count))
    reads = (*((),) * count, *((t,) for t in reversed(range(count))))
    ops = tuple(Op(i, f"op{i}", "f", inputs, (i,), 1.0) for i, inputs in enumerate(reads))
    graph = apply_options(Graph(ops, tensors, frozenset({2 * count - 1})), ("offload",), Surroundings(Link.even(4.0), 28))
    problem = build_problem(graph, 10**6)

    def plan(*args: Any, careful: bool) -> TransferPlan:
        attempts.append(args)
        return TransferPlan(*args, careful=careful)

    monkeypatch.setattr("planner.solvers.windows.decoding.transfers.TransferPlan", plan)
    found = add_transfers(problem, range(2 * count), {(t, 2 * count - 1 - t) for t in range(count - 1)})
    assert found.fits_elsewhere and len(found.reloads) == 7
    assert len(attempts) < 30
    assert simulate(graph, found.schedule).time_s == pytest.approx(found.time_s)


def draw_sharded_step(seed: int, layers: int) -> Graph:
    """A step whose layers read one parameter each, gathered alone and reduced after its gradient, on one stream."""
    draw, draft = random.Random(seed), Draft()
    sizes = [draw.randint(10, 100) for _ in range(layers)]
    weights = [draft.add_static(f"w{i}", draw.randint(5, 80)) for i in range(layers)]
    made: list[int] = []
    for i, size in enumerate(sizes):
        made += draft.add_op(f"layer{i}", [*made[-1:], weights[i]], [size], time_s=float(draw.randint(1, 5)))
    gradient, units = made[-1], list[Unit]()
    for i in reversed(range(layers)):
        inputs, whole = [*made[max(0, i - 1) : i + 1], weights[i]], draft.tensors[weights[i]].size_bytes
        inputs += [gradient] if gradient not in inputs else []
        own, gradient = draft.add_op(f"back{i}", inputs, [whole, sizes[i]], time_s=8.0, phase=Phase.BACKWARD)
        cost = build_cost(whole / draw.choice((10, 40)), draw.choice((0, whole)))
        units.append(Unit(f"u{i}", (Shard(weights[i], 1 + whole // 4, whole),), cost, (own,), 1 + whole // 4, cost))
    return insert_units(draft.build_graph([]), units[::-1], [gradient]).graph


def test_orders_that_fit_on_one_stream_fit_with_collectives_in_parallel() -> None:
    """Gathers are issued early only beside what reductions need in their places."""
    judged = faster = 0
    for seed in range(60):
        program = draw_sharded_step(seed, 4 + seed % 9)
        graph = OVERLAP.add_to(program, Surroundings())
        least, most = bound_least_budget(graph).budget_bytes, simulate(program, keep_everything(program)).peak_bytes
        budget = round(least + random.Random(seed).random() * (most - least))
        order = find_evicting_order(build_problem(program, budget), RULES[0], EvictionSettings(max_factor=4.0))
        if order is None or simulate(graph, schedule_of(program, order.computed)).peak_bytes > budget:
            continue
        found = add_transfers(build_problem(graph, budget), order.computed)
        simulation = simulate(graph, found.schedule)
        assert (simulation.peak_bytes, simulation.time_s) == (max(found.memory_bytes), pytest.approx(found.time_s)), seed
        assert simulation.peak_bytes <= budget, seed
        judged += 1
        faster += found.time_s < sum(program.ops[op].time_s for op in order.computed)
    assert judged > 40 and faster > 40


def test_reloads_are_made_where_they_are_wanted_beside_collectives() -> None:
    """Positions count the collectives of an order."""
    for seed in range(5):
        draw, program = random.Random(seed), draw_sharded_step(seed, 6)
        graph = OFFLOAD.add_to(OVERLAP.add_to(program, Surroundings()), Surroundings(Link.even(40.0)))
        problem = build_problem(graph, 10**6)
        computed = list(range(problem.ops))
        wanted = some_reloads(draw, problem, computed)
        found = add_transfers(problem, computed, wanted)
        reloaded = {trip.back.op: t for t, trip in problem.round_trips.items()}
        made = [reloaded[op] for op in found.schedule.computed if op in reloaded]
        assert wanted and sorted(made) == sorted(t for t, _ in wanted)


def transfer(graph: Graph, budget_bytes: int, *wanted: str) -> TransferPlan:
    """The plan of what is executed by name in this order; the judge agrees on its time."""
    ids = {op.name: op.id for op in graph.ops}
    found = add_transfers(build_problem(graph, budget_bytes), [ids[name] for name in wanted])
    judged = simulate(graph, found.schedule)
    assert (judged.time_s, judged.peak_bytes) == (found.time_s, max(found.memory_bytes))
    return found


@pytest.mark.parametrize("order", [0, 1])
def test_copies_are_issued_as_soon_as_there_is_something_to_copy(order: int) -> None:
    draft = Draft()
    (a,) = draft.add_op("a", [], [4], time_s=2.0)
    (b,) = draft.add_op("b", [], [4], time_s=2.0)
    draft.add_op("c", [a, b], [1], time_s=1.0)
    graph = on_devices(draft.build_graph([]), OtherDevice("second", (1.0, 1.0, None), 4.0))
    copies = ["copy_a_second_to_device", "copy_b_second_to_device"][:: 1 if order else -1]
    found = transfer(graph, 100, "a@second", "b@second", *copies, "c")
    # a is there after 1 s, its copy after 2, that of b after 3.
    assert found.time_s == 4.0


def test_a_copy_is_waited_for_only_where_its_memory_is_called_for() -> None:
    draft = Draft()
    (a,) = draft.add_op("a", [], [4], time_s=1.0)
    (b,) = draft.add_op("b", [], [4], time_s=1.0)
    draft.add_op("c", [a, b], [1], time_s=1.0)
    graph = on_devices(draft.build_graph([]), OtherDevice("second", (None, 1.0, 1.0), 1.0))
    order = ("a", "copy_a_device_to_second", "b", "copy_b_device_to_second", "c@second")
    roomy, tight = (transfer(graph, budget, *order) for budget in (8, 7))
    assert (max(roomy.memory_bytes), roomy.time_s) == (8, 10.0)
    # b begins when a has been copied, after 5 s.
    assert (max(tight.memory_bytes), tight.time_s) == (4, 11.0)


@pytest.mark.parametrize("seeds", [range(first, first + 40) for first in range(0, 120, 40)], ids=str)
def test_the_judge_says_the_same_of_devices(seeds: range) -> None:
    """Random placements, in which tensors are sent to another device and back, and computed again."""
    judged = sent = 0
    for seed in seeds:
        draw = random.Random(seed)
        graph, budget = random_placement(seed, 6)
        problem = build_problem(graph, budget)
        where = DeviceOps(problem)
        device = {v: draw.choice([d for w, d in where.runs if w == v]) for v, d in where.runs if d == 0}
        away = [(t, d, (d + 1) % where.count) for v in device for t in where.outputs[v] for d in range(where.count)]
        recomputed = frozenset((v, draw.randrange(where.count)) for v in device if draw.random() < 0.1)
        computed = where.list_computed(Placing(device, recomputed, frozenset(x for x in away if draw.random() < 0.2)))
        if computed is None:
            continue
        found = add_transfers(problem, [problem.places.ids[i] for i in computed])
        assert sorted(found.moved) == list(range(len(computed)))
        if not found.fits_elsewhere:
            continue
        simulation = simulate(graph, found.schedule)
        assert simulation.time_s == pytest.approx(found.time_s), seed
        assert simulation.peak_bytes == max(found.memory_bytes), seed
        judged += 1
        sent += len(computed) > len(device)
    assert judged > 20 and sent > 10


def test_a_copy_that_nothing_reads_comes_before_the_next_one() -> None:
    draft = Draft()
    (a,) = draft.add_op("a", [], [4], time_s=1.0)
    (b,) = draft.add_op("b", [], [4], time_s=1.0)
    draft.add_op("c", [a, b], [1], time_s=1.0)
    graph = on_devices(draft.build_graph([]), OtherDevice("second", (1.0, 1.0, None), 4.0))
    found = transfer(graph, 20, "a@second", "b", "copy_a_second_to_device", "copy_a_second_to_device", "c")
    assert found.time_s == 4.0


def test_a_kept_tensor_may_come_last() -> None:
    draft = Draft()
    (a,) = draft.add_op("a", [], [4], time_s=3.0)
    draft.add_op("b", [], [4], time_s=1.0)
    graph = on_devices(draft.build_graph([a]), OtherDevice("second", (1.0, 1.0), 4.0))
    found = transfer(graph, 8, "a@second", "b", "copy_a_second_to_device")
    assert found.time_s == 2.0


def test_the_copy_that_is_due_first_goes_first() -> None:
    draft = Draft()
    a, b = draft.add_op("p", [], [4, 4])
    draft.add_op("u", [b], [1])
    draft.add_op("v", [a], [1])
    graph = on_devices(draft.build_graph([]), OtherDevice("second", (1.0, None, None), 4.0))
    found = transfer(graph, 20, "p@second", "copy_p_second_to_device", "copy_p.1_second_to_device", "u", "v")
    assert found.time_s == 4.0


def test_a_copy_that_is_not_due_waits_for_the_space_of_one_that_leaves() -> None:
    """Beside a, which leaves until 4, there is space for b or for m; b is read last."""
    draft = Draft()
    (a,) = draft.add_op("a", [], [6])
    (b,) = draft.add_op("b", [], [4])
    draft.add_op("m", [], [3], time_s=4.0)
    draft.add_op("r", [b], [1])
    draft.add_op("s", [a], [1])
    graph = on_devices(draft.build_graph([]), OtherDevice("second", (None, 1.0, None, None, 1.0), 2.0))
    found = transfer(graph, 12, "a", "b@second", "m", "copy_b_second_to_device", "r", "copy_a_device_to_second", "s@second")
    assert max(found.memory_bytes) <= 12
    assert found.time_s == 8.0


def test_a_copy_leaves_before_its_memory_is_needed() -> None:
    """The other memory holds a or the output of y. It is needed from the start, r reads a only at 7."""
    draft = Draft()
    (a,) = draft.add_op("a", [], [4])
    draft.add_op("m", [], [1], time_s=3.0)
    draft.add_op("n", [], [1], time_s=3.0)
    draft.add_op("y", [], [4], time_s=6.0)
    draft.add_op("r", [a], [1])
    graph = on_devices(draft.build_graph([]), OtherDevice("second", (1.0, None, None, 6.0, 1.0), 4.0, capacity_bytes=6))
    found = transfer(graph, 20, "a", "copy_a_device_to_second", "m", "n", "y@second", "copy_a_second_to_device", "r")
    assert found.fits_elsewhere
    assert found.time_s == 9.0


GB = 10**9


def offering_transfers(seed: int, link_bytes_per_s: float) -> Graph:
    return apply_options(draw_training_step(seed, 12), ("offload",), Surroundings(Link.even(link_bytes_per_s)))


def random_trial(draw: random.Random, problem: Problem) -> Trial:
    computed = short_form(problem.graph, random_order(draw, problem))
    reloads = frozenset(
        (t, place)
        for place, op in enumerate(computed)
        for t in problem.inputs[op]
        if t in problem.round_trips and draw.random() < 0.4
    )
    return try_out(problem, order_of(problem, computed, reloads))


@pytest.mark.parametrize("seed", [*range(5), *slow(*range(5, 8))])
def test_recomputing_in_place_of_a_reload_shortens_waits(seed: int) -> None:
    draw = random.Random(seed)
    problem = build_problem(offering_transfers(seed, 2e9), 100 * GB)
    waiting = random_trial(draw, problem)
    assert any(waiting.waits_s)
    budget = waiting.peak_bytes
    found = recompute_where_it_waits(problem, waiting, budget, lambda: False)
    assert found.peak_bytes <= budget and found.time_s <= waiting.time_s
    assert sum(found.waits_s) < sum(waiting.waits_s)
    assert len(found.order.reloads) < len(waiting.order.reloads)
    assert recompute_where_it_waits(problem, waiting, budget, lambda: True) is waiting


@pytest.mark.parametrize("seed", [*range(5), *slow(*range(5, 8))])
def test_simpler_orders_have_one_execution_or_copy_less(seed: int) -> None:
    draw = random.Random(seed)
    problem = build_problem(offering_transfers(seed, 20e9), 100 * GB)
    trial = random_trial(draw, problem)
    kinds = {0: 0, 1: 0}
    for place, computed, reloads in generate_simpler(problem, trial, trial.peak_bytes):
        found = try_out(problem, order_of(problem, computed, reloads))  # raises if what is read is not there
        fewer = len(trial.order.computed) - len(computed)
        kinds[fewer] += 1
        assert fewer or len(reloads) == len(trial.order.reloads) - 1
        assert (place is not None) == bool(fewer)
        if fewer and reloads <= trial.order.reloads:
            assert found.peak_bytes
    assert kinds[1] > 3


def test_executions_there_is_room_for_are_left_out_together() -> None:
    left_out, none_recomputed = [], 0
    for seed in range(8):
        draw = random.Random(seed)
        problem = build_problem(offering_transfers(seed, 20e9), 100 * GB)
        trial = random_trial(draw, problem)
        found = prune_with_transfers(problem, trial, trial.peak_bytes, lambda: False)
        assert found.peak_bytes <= trial.peak_bytes and found.time_s <= trial.time_s
        left_out.append(len(trial.order.computed) - len(found.order.computed))
        # Where memory is no limit, nothing is executed again, unless copies take as long anyway.
        roomy = prune_with_transfers(problem, trial, 100 * GB, lambda: False)
        none_recomputed += roomy.order.computed == tuple(range(problem.ops))
        assert prune_with_transfers(problem, trial, 100 * GB, lambda: True) is trial
    assert all(number >= 0 for number in left_out) and max(left_out) > 2
    assert none_recomputed > 4


def once_each(made: int = 4, size: int = 10) -> Graph:
    """Tensors that cannot be made again, all of them read at the end, the last first; an op of 25 bytes between."""
    draft = Draft()
    tensors = [draft.add_op(f"make{i}", [], [size], recomputable=False)[0] for i in range(made)]
    draft.add_op("between", [], [], workspace_bytes=25)
    for i, t in reversed(list(enumerate(tensors))):
        draft.add_op(f"read{i}", [t], [1])
    return draft.build_graph()


@pytest.mark.parametrize(("host_bytes", "least"), [(None, 25), (40, 25), (39, 26), (30, 35), (12, 53), (0, 65)])
def test_least_budget_depends_on_host_capacity(host_bytes: int | None, least: int) -> None:
    whole = with_trips(once_each(), host_bytes=host_bytes)
    program, offloads = remove_offload(whole)
    assert bound_least_budget(whole).budget_bytes == least
    assert need_at(program, None, offloads).held_bytes == least - 25
    assert bound_least_budget(program).budget_bytes == 65


@pytest.mark.parametrize(("host_bytes", "found"), [(None, 25), (40, 25), (39, 35), (30, 35), (12, 55), (0, 65)])
def test_a_schedule_takes_as_little_where_whole_tensors_can(host_bytes: int | None, found: int) -> None:
    graph = with_trips(once_each(), host_bytes=host_bytes)
    trial = find_least_offloaded(graph, WorkClock(1.0))
    simulation = simulate(graph, trial.schedule)
    assert simulation.peak_bytes == trial.peak_bytes == found
    assert simulation.pool_peaks_bytes[1] == 65 - found


def test_the_host_makes_less_possible_than_recomputing_alone() -> None:
    less = 0
    for seed in range(8):
        program = draw_training_step(seed, 24)
        without = simulate(program, find_least_known(program, WorkClock(0.5))).peak_bytes
        graph = with_trips(program, 1e9)
        simulation = simulate(graph, find_least_known(graph, WorkClock(0.5)))
        assert bound_least_budget(graph).budget_bytes <= simulation.peak_bytes <= without
        less += simulation.peak_bytes < without
    assert less > 0


@pytest.mark.slow
def test_least_offloaded_budget_is_bracketed() -> None:
    exact = 0
    for seed in range(30):
        draw = random.Random(seed)
        program = draw_graph(draw.randint(0, 10**6), draw.randint(3, 4))
        graph = with_trips(program, host_bytes=draw.choice((None, None, draw.randint(3, 20))))
        proved = bound_least_budget(graph).budget_bytes
        found = simulate(graph, find_least_known(graph, WorkClock(0.5))).peak_bytes
        assert proved <= found
        try:
            if proved > 1:
                assert fastest_with_transfers(graph, proved - 1, most=20_000) is None, seed
        except TimeoutError:
            continue
        exact += proved == found
    assert exact > 15


@pytest.mark.slow
def test_the_exact_solver_has_a_schedule_at_the_least_budget() -> None:
    graph = with_trips(draw_training_step(5, 40), 1e9)
    bracket = bracket_least_budget(graph, clock=WorkClock(4.0))
    assert bracket.proved_bytes <= bracket.found_bytes
    result = get_solver("windows")(ask(graph, bracket.found_bytes, time_limit_s=5))
    assert result.schedule is not None and result.peak_bytes <= bracket.found_bytes
    refused = get_solver("windows")(ask(graph, bound_least_budget(graph).budget_bytes - 1))
    assert refused.status is Status.INFEASIBLE
