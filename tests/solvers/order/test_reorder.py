"""An order of the ops that needs less memory: it is never worse; which orders a graph is solved in, and which result counts."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

import planner
from planner.cli.main import main
from planner.graphs.errors import GraphError
from planner.graphs.io.formats import write_graph
from planner.graphs.ir import Graph, Phase
from planner.graphs.reordering import Reordering, permute
from planner.graphs.schedule import Schedule, keep_everything
from planner.graphs.simulate import simulate
from planner.graphs.synthetic.draft import Draft
from planner.graphs.synthetic.random_graphs import draw_graph, draw_training_step
from planner.graphs.synthetic.small import make_chain, make_training_chain
from planner.graphs.synthetic.transformer import TransformerSize, transformer
from planner.plans.summary import summarize
from planner.runtime.executor import Executor
from planner.solvers.bounds import bound_least_budget
from planner.solvers.clock import WorkClock
from planner.solvers.order.peak import bound_any_order_peak_bytes, find_peak, keep_everything_peak_bytes
from planner.solvers.order.reorder import find_order, list_constraints, lowers_peak, may_lower_peak, reorder_by
from planner.solvers.order.solve import OrderSearch, SolvedOrder, solve_in, solve_in_best_order
from planner.solvers.registry import Solver, get_solver
from planner.solvers.request import Request, Start
from planner.solvers.result import Ending, Result, SolveProgress, SolveSettings, Status
from planner.solvers.tolerance import Tolerance
from planner.studies.curve import solve_curve
from planner.studies.max_batch import Wanted, find_max_batch
from tests.support.budgets import peak_bytes
from tests.support.marks import slow
from tests.support.models.outcomes import assert_exact
from tests.support.models.steps import capture_of, make, random_schedule
from tests.support.solvers.answers import ask


def weight_gradients() -> Graph:
    """Two layers whose weight gradients come after the gradients of their inputs.

    The second's frees a large activation, so it is best early; the first's frees little and is large, so it is
    best last.
    """
    draft = Draft()
    (a,) = draft.add_op("a", [], [2_000])
    (b,) = draft.add_op("b", [a], [20_000])
    (c,) = draft.add_op("c", [b], [2_000])
    (loss,) = draft.add_op("loss", [c], [1_000])
    (dc,) = draft.add_op("dc", [loss], [2_000], phase=Phase.BACKWARD)
    (db,) = draft.add_op("db", [dc], [20_000], phase=Phase.BACKWARD)
    (w2,) = draft.add_op("w2", [dc, b], [1_000], phase=Phase.BACKWARD)
    (w1,) = draft.add_op("w1", [loss, a], [30_000], phase=Phase.BACKWARD)
    (da,) = draft.add_op("da", [db], [2_000], phase=Phase.BACKWARD)
    (dx,) = draft.add_op("dx", [da], [2_000], phase=Phase.BACKWARD)
    return draft.build_graph([w2, w1, dx])


def read_in_between(*, stand_in: bool) -> Graph:
    """`early` reads what `first` makes and would best come before `second`; what stands for both of these comes where that is."""
    draft = Draft()
    x, y = draft.add_op("first", [], [10, 10])
    (z,) = draft.add_op("second", [x], [5])
    (small,) = draft.add_op("early", [y], [1])
    (end,) = draft.add_op("end", [z, small], [1])
    graph = draft.build_graph([end])
    if not stand_in:
        return graph
    both = replace(graph.ops[1], id=4, name="both", inputs=(), outputs=(y, z), optional=True, replaces=(0, 1))
    tensors = tuple(replace(t, producers=(*t.producers, 4)) if t.id in both.outputs else t for t in graph.tensors)
    return Graph((*graph.ops, both), tensors, graph.kept)


# --- the order ------------------------------------------------------------------------------------


def test_weight_gradients_go_where_they_need_least() -> None:
    graph = weight_gradients()
    found = find_order(graph)
    assert [op.name for op in found.graph.ops] == ["a", "b", "c", "loss", "dc", "w2", "db", "da", "dx", "w1"]
    assert peak_bytes(graph) == 54_000
    assert peak_bytes(found.graph) == 36_000
    assert found.changed


def test_chain_is_not_reordered() -> None:
    graph = make_training_chain(6)
    found = find_order(graph)
    assert not found.changed
    assert found.graph is graph


def test_where_time_is_short_the_program_order_is_the_answer() -> None:
    graph = weight_gradients()
    whole = WorkClock(1000)
    assert find_order(graph, whole).changed
    assert whole.now > 0
    short = WorkClock(0.5 * whole.now)
    assert find_order(graph, short).graph is graph
    assert 0.5 * whole.now <= short.now < whole.now  # what is not in time is not begun


def test_an_order_that_is_none_is_refused() -> None:
    with pytest.raises(GraphError, match="topological order"):
        permute(make_chain(3), [1, 0, 2])


def any_graph(seed: int, size: int) -> Graph:
    """A random graph with effects, writes in place, several phases and random ops."""
    if seed % 2:
        graph = draw_training_step(seed, size)
    else:
        graph = draw_graph(seed, 2 * size)
        half = seed % (2 * size)
        graph = replace(
            graph, ops=tuple(replace(op, phase=Phase.FORWARD if op.id <= half else Phase.BACKWARD) for op in graph.ops)
        )
    return replace(graph, ops=tuple(replace(op, random=(op.id * 7 + seed) % 5 == 0) for op in graph.ops))


graphs = st.builds(any_graph, st.integers(0, 10**6), st.integers(3, 14))


@given(graph=graphs)
@settings(max_examples=150)
def test_reordering_never_raises_the_peak_and_is_idempotent(graph: Graph) -> None:
    found = find_order(graph)
    assert peak_bytes(found.graph) <= peak_bytes(graph)
    assert bound_least_budget(found.graph).budget_bytes <= bound_least_budget(graph).budget_bytes
    assert found.graph.time_s == graph.time_s
    assert find_order(graph) == found
    assert not find_order(found.graph).changed


@given(graph=graphs)
@settings(max_examples=150)
def test_effects_random_ops_and_phases_keep_their_order(graph: Graph) -> None:
    found = find_order(graph)
    assert sorted(found.original) == [op.id for op in graph.ops]
    assert [op.phase for op in found.graph.ops] == [op.phase for op in graph.ops]
    place = {op: position for position, op in enumerate(found.original)}
    written = {t for op in graph.ops for t in op.mutates}
    effects = [op.id for op in graph.ops if op.random or not (op.recomputable or op.mutates or written.intersection(op.inputs))]
    assert all(place[one] < place[other] for one, other in pairwise(effects))
    for writer in (op for op in graph.ops if op.mutates):
        for op in graph.ops:
            if op is not writer and set(writer.mutates).intersection((*op.inputs, *op.mutates)):
                assert (op.id < writer.id) == (place[op.id] < place[writer.id])


@given(graph=graphs, seed=st.integers(0, 10**6))
@settings(max_examples=100)
def test_a_schedule_means_the_same_on_the_original(graph: Graph, seed: int) -> None:
    found = find_order(graph)
    schedule = random_schedule(replace_writers(found.graph), seed)
    there, here = simulate(found.graph, schedule), simulate(graph, found.map_back(schedule))
    assert here == there


def replace_writers(graph: Graph) -> Graph:
    """`graph` where nothing that touches what is written in place is executed again: any order of the rest runs."""
    written = {t for op in graph.ops for t in op.mutates}
    return replace(
        graph, ops=tuple(replace(op, recomputable=op.recomputable and not written.intersection(op.inputs)) for op in graph.ops)
    )


def test_op_with_side_effects_keeps_its_place_among_readers() -> None:
    draft = Draft()
    (a,) = draft.add_op("a", [], [9])
    draft.add_op("before", [a], [50])
    draft.add_op("effect", [a], [1], recomputable=False)
    draft.add_op("after", [a], [1])
    (last,) = draft.add_op("last", [], [1])
    assert [op.name for op in find_order(draft.build_graph([1, 2, 3, last])).graph.ops][1:4] != ["effect", "after", "before"]
    place = {op.name: op.id for op in find_order(draft.build_graph([1, 2, 3, last])).graph.ops}
    assert place["before"] < place["effect"] < place["after"]


# --- plans ----------------------------------------------------------------------------------------


def test_plan_of_a_reordered_graph_refers_to_the_original() -> None:
    graph = weight_gradients()
    plan = planner.solve(graph, 36_000)
    assert plan.graph == summarize(graph)
    assert (plan.settings["reordered"], plan.overhead) == (True, 0)
    simulation = simulate(graph, plan.schedule)
    assert (simulation.peak_bytes, simulation.time_s) == (plan.peak_bytes, plan.time_s)
    kept = planner.solve(graph, 53_000, reorder=False)
    assert kept.settings["reordered"] is False
    assert kept.overhead > 0


def test_program_order_is_used_if_only_it_fits() -> None:
    graph, budget_bytes = draw_graph(350, 12), 27
    in_new_order = get_solver("windows")(ask(find_order(graph).graph, budget_bytes))
    assert in_new_order.status is Status.INFEASIBLE
    plan = planner.solve(graph, budget_bytes)
    assert (plan.status, plan.settings["reordered"]) == ("optimal", False)


def test_baselines_use_program_order_unless_reorder_is_given() -> None:
    graph = weight_gradients()
    assert planner.solve(graph, 54_000, solver="keep-everything").peak_bytes == 54_000
    assert planner.solve(graph, 54_000, solver="keep-everything", reorder=True).peak_bytes == 36_000


def test_a_curve_is_of_the_reordered_graph_and_its_schedules_of_the_original() -> None:
    graph = weight_gradients()
    better, program = solve_curve(graph, 4), solve_curve(graph, 4, reorder=False)
    assert (better.reordered, program.reordered) == (True, False)
    assert better.least.found_bytes < program.least.found_bytes
    assert simulate(graph, better.least.schedule).peak_bytes == better.least.found_bytes
    for point in better.points:
        assert simulate(graph, point.schedule).peak_bytes == point.peak_bytes


def test_the_largest_batch_is_that_of_the_reordered_graph() -> None:
    def graph_of(batch: int) -> Graph:
        graph = weight_gradients()
        return replace(graph, tensors=tuple(replace(t, size_bytes=t.size_bytes * batch) for t in graph.tensors))

    wanted = Wanted(budget_bytes=80_000, limit=20, max_overhead=0.0)
    answers = {answer.method: answer.size for answer in find_max_batch(graph_of, wanted)}
    assert (answers["keep everything"], answers["optimal"]) == (1, 2)
    answers = {answer.method: answer.size for answer in find_max_batch(graph_of, replace(wanted, reorder=False))}
    assert answers["optimal"] == 1


def test_the_command_reorders_says_so_and_can_be_told_not_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "model.json")
    write_graph(weight_gradients(), path)
    assert main(["solve", path, "--budget", "36kB"]) == 0
    assert "takes each op first in program order as reordered, is faster" in capsys.readouterr().out
    assert main(["solve", path, "--budget", "36kB", "--no-reorder"]) == 3
    assert main(["info", path]) == 0
    assert "54.00 kB without recomputation, 36.00 kB with the ops in a better order" in capsys.readouterr().out


# --- real steps -----------------------------------------------------------------------------------


def schedules(found: Reordering) -> list[Schedule]:
    """In the new order: keeping everything, and with many ops again."""
    return [found.map_back(schedule) for schedule in (keep_everything(found.graph), random_schedule(found.graph, 1))]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", ["mutated", *slow("gpt2_written", "resnet18")])
def test_a_step_in_another_order_is_the_same_to_the_last_bit(name: str) -> None:
    workload = make(name)
    captured = capture_of(name)
    found = find_order(captured.graph)
    assert found.changed
    for schedule in schedules(found):
        step = Executor(captured, schedule, workload.model, workload.loss_fn)
        assert_exact(step, workload.model, workload.batch, workload.loss_fn)


def test_stand_ins_stay_before_the_readers_of_their_outputs() -> None:
    assert find_order(read_in_between(stand_in=False)).graph.ops[1].name == "early"
    assert not find_order(read_in_between(stand_in=True)).changed


def solved(graph: Graph, budget_bytes: int, *, tolerance: float = 1e-3) -> tuple[SolvedOrder, list[Graph]]:
    """Solve, each order to its end; also return the graphs that the solver was given."""
    solve, given = answering(solve_to_end)
    found = solve_in_best_order(solve, Request(graph, budget_bytes, Tolerance.of(tolerance), WorkClock(100.0)))
    return found, [request.graph for request in given]


def solve_to_end(request: Request) -> Result:
    """Solve, whatever else comes up."""
    return get_solver("windows")(replace(request, should_stop=None))


def waiting(request: Request) -> Result:
    """Spend the time of a solve that finds nothing."""
    while not request.is_stopped():
        request.clock.spend(1.0)
    return find_nothing(request)


def find_nothing(request: Request) -> Result:
    return Result(request.graph, request.budget_bytes, Status.LIMIT, None, None, "windows", 1.0)


def answering(*answers: Solver) -> tuple[Solver, list[Request]]:
    """Return a solver whose answers are made in turn, the last one again and again, and the requests that it is given."""
    given: list[Request] = []

    def solve(request: Request) -> Result:
        given.append(request)
        return answers[min(len(given), len(answers)) - 1](request)

    return solve, given


def wide_and_slow() -> Graph:
    """Weight gradients that are better in another order, beside an op that takes a thousand times as long as all others."""
    graph = weight_gradients()
    return replace(graph, ops=(replace(graph.ops[0], time_s=1e5, recomputable=False), *graph.ops[1:]))


def test_no_other_order_is_tried_where_none_lowers_the_peak() -> None:
    graph = make_training_chain(6)
    found, given = solved(graph, int(0.8 * keep_everything_peak_bytes(graph)))
    assert (found.result.status, found.order.changed) == (Status.OPTIMAL, False)
    assert found.result.time_s > graph.time_s
    assert given == [graph]


def test_no_other_order_is_tried_where_the_first_proof_leaves_nothing_to_gain() -> None:
    graph = wide_and_slow()
    found, given = solved(graph, 53_000)
    assert graph.time_s < found.result.time_s <= 1.001 * graph.time_s
    assert given == [graph]
    exact, given = solved(graph, 53_000, tolerance=0.0)
    assert exact.result.time_s == graph.time_s and exact.order.changed
    assert len(given) == 2


def test_an_order_that_lowers_no_peak_is_tried_where_program_order_is_not_proved() -> None:
    graph = transformer(TransformerSize(layers=2))
    order = find_order(graph)
    assert order.changed and not may_lower_peak(graph)
    budget_bytes = (bound_least_budget(graph).budget_bytes + keep_everything_peak_bytes(graph)) // 2
    rough = get_solver("largest")(Request(graph, budget_bytes)).schedule

    def search(request: Request) -> Result:
        request.tell("searching", 1e9, 1.1 * graph.time_s)
        while not request.is_stopped():
            request.clock.spend(0.1)
        return Result(graph, budget_bytes, Status.FEASIBLE, rough, graph.time_s, "windows", 1.0)

    solve, calls = answering(search, solve_to_end)
    found = solve_in_best_order(solve, Request(graph, budget_bytes, Tolerance.of(1e-3), WorkClock(100.0)))
    assert [call.graph for call in calls] == [graph, order.graph]
    assert found.result.status is Status.OPTIMAL and found.order == order


def test_further_solves_of_a_graph_know_the_order_that_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[Graph] = []

    def find_counted(graph: Graph, *given: Any) -> Reordering:
        searched.append(graph)
        return find_order(graph, *given)

    monkeypatch.setattr("planner.solvers.order.solve.find_order", find_counted)
    search, graphs = OrderSearch(), (weight_gradients(), draw_graph(2, 40))
    for graph in (graphs[0], graphs[0], graphs[1]):
        budget_bytes = int(0.9 * keep_everything_peak_bytes(graph))
        solve_in_best_order(solve_to_end, Request(graph, budget_bytes, Tolerance.of(0.0), WorkClock(100.0)), search)
        assert search.found == find_order(graph) and search.lowers_peak
    assert searched == list(graphs)


def test_an_order_of_lower_peak_is_solved_in_and_its_bound_reported() -> None:
    graph = weight_gradients()
    found, given = solved(graph, 36_000)
    assert given[-1] == find_order(graph).graph
    assert (found.result.time_s, found.result.bound_s, found.result.settings["reordered"]) == (graph.time_s, graph.time_s, True)


def test_a_schedule_of_program_order_is_kept_where_the_other_order_finds_none() -> None:
    graph = weight_gradients()
    solve, calls = answering(solve_to_end, find_nothing)
    kept = solve_in_best_order(solve, Request(graph, 53_000, clock=WorkClock(100.0)))
    assert len(calls) == 2
    assert kept.result.status is Status.OPTIMAL and not kept.order.changed


def test_infeasible_program_order_is_followed_by_another_order() -> None:
    graph = draw_graph(2, 40)
    order = find_order(graph)
    assert order.changed

    def refuse(request: Request) -> Result:
        return Result(request.graph, request.budget_bytes, Status.INFEASIBLE, None, None, "windows", 1.0, message="too small")

    solve, calls = answering(refuse, get_solver("windows"))
    found = solve_in_best_order(solve, Request(graph, keep_everything_peak_bytes(graph), clock=WorkClock(100.0)))
    assert [call.graph for call in calls] == [graph, order.graph]
    assert found.result.schedule is not None and found.order.changed


def test_without_a_schedule_in_program_order_another_takes_over() -> None:
    graph, clock = draw_graph(2, 40), WorkClock(100.0)
    solve, calls = answering(waiting, get_solver("windows"))
    found = solve_in_best_order(solve, Request(graph, keep_everything_peak_bytes(graph), clock=clock))
    assert len(calls) == 2 and found.result.status is Status.OPTIMAL
    assert clock.now < 40


def test_a_schedule_found_as_patience_ends_does_not_end_the_solve() -> None:
    graph = make_training_chain(6)
    budget_bytes = int(0.8 * keep_everything_peak_bytes(graph))

    def find_late(request: Request) -> Result:
        waiting(request)
        rough = get_solver("chen-sqrt")(Request(graph, budget_bytes)).schedule
        return Result(graph, budget_bytes, Status.FEASIBLE, rough, None, "windows", 1.0)

    solve, calls = answering(find_late, solve_to_end)
    found = solve_in_best_order(solve, Request(graph, budget_bytes, Tolerance.of(1e-3), WorkClock(100.0)))
    assert len(calls) == 2 and found.result.status is Status.OPTIMAL


def test_an_order_without_a_schedule_leaves_time_for_program_order() -> None:
    graph, clock = weight_gradients(), WorkClock(100.0)
    solve, calls = answering(waiting, waiting, get_solver("windows"))
    found = solve_in_best_order(solve, Request(graph, 53_000, clock=clock))
    assert [call.graph for call in calls] == [graph, find_order(graph).graph, graph] and clock.now < 60
    assert found.result.status is Status.OPTIMAL and not found.order.changed


def test_the_order_of_the_start_is_tried_before_others() -> None:
    graph = draw_graph(2, 40)
    order = swap_two_ops(graph)
    assert order.changed and order.original != find_order(graph).original
    solve, calls = answering(waiting, get_solver("windows"))
    start = Start(order.map_back(keep_everything(order.graph)))
    peak_bytes = max(keep_everything_peak_bytes(graph), keep_everything_peak_bytes(order.graph))
    found = solve_in_best_order(solve, Request(graph, peak_bytes, clock=WorkClock(100.0), start=start))
    assert [call.graph for call in calls] == [graph, order.graph]
    assert calls[1].start.schedule == keep_everything(order.graph)
    assert found.result.status is Status.OPTIMAL and found.order == order


def swap_two_ops(graph: Graph) -> Reordering:
    """Return `graph` with the first two ops in turn exchanged that may be."""
    before, _ = list_constraints(graph)
    order = list(range(len(before)))
    op = next(op for op in order[1:] if op - 1 not in before[op])
    order[op - 1 : op + 1] = [op, op - 1]
    return permute(graph, order)


def test_a_solve_that_makes_way_for_another_order_says_why_all_ended() -> None:
    graph = weight_gradients()
    known = get_solver("windows")(Request(graph, 53_000)).schedule

    def solve(request: Request) -> Result:
        request.tell("searching", 1e9, None)
        if request.graph != graph:
            return waiting(request)
        while not request.is_stopped():  # until another order is found
            request.clock.spend(0.1)
        ended = request.choose_ending()
        assert ended is Ending.STOPPED
        return Result(graph, request.budget_bytes, Status.FEASIBLE, known, graph.time_s, "windows", 1.0, ended=ended)

    found = solve_in_best_order(solve, Request(graph, 53_000, Tolerance.of(0.0), WorkClock(100.0)))
    assert (found.result.schedule, found.result.ended) == (known, Ending.LIMIT)


@pytest.mark.slow
def test_solves_that_count_work_come_to_the_same_twice() -> None:
    graph = draw_training_step(11, 30)
    for share in (0.6, 0.8):
        budget_bytes = int(share * keep_everything_peak_bytes(graph))
        one, again = (
            solve_in_best_order(get_solver("windows"), Request(graph, budget_bytes, clock=WorkClock(5.0))) for _ in "ab"
        )
        assert (one.result.schedule, one.result.bound_s, one.order) == (again.result.schedule, again.result.bound_s, again.order)


def test_a_failure_of_the_search_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(graph: Graph) -> bool:
        raise RuntimeError("out of luck")

    monkeypatch.setattr("planner.solvers.order.solve.may_lower_peak", fail)
    with pytest.raises(RuntimeError, match="out of luck"):
        solved(weight_gradients(), 53_000)


# --- the peak in any order ------------------------------------------------------------------------


@given(seed=st.integers(0, 10**6), size=st.integers(3, 14))
@settings(max_examples=150)
def test_no_order_that_is_found_has_a_peak_below_the_bound_on_all(seed: int, size: int) -> None:
    graph = draw_training_step(seed, size) if seed % 2 else draw_graph(seed, 2 * size)
    order = find_order(graph)
    bound = bound_any_order_peak_bytes(graph, find_peak(graph)[1], *list_constraints(graph))
    assert bound <= keep_everything_peak_bytes(order.graph) <= keep_everything_peak_bytes(graph)
    assert may_lower_peak(graph) or not lowers_peak(order)


def test_the_bound_on_all_orders_is_that_of_all_orders_of_a_small_graph() -> None:
    draft = Draft()
    (a,) = draft.add_op("a", [], [10])
    (b,) = draft.add_op("b", [a], [20], phase=Phase.BACKWARD)
    (c,) = draft.add_op("c", [a], [30], phase=Phase.BACKWARD)
    graph = draft.build_graph([b, c])
    assert keep_everything_peak_bytes(graph) == 60
    least = bound_any_order_peak_bytes(graph, find_peak(graph)[1], *list_constraints(graph))
    assert least == 40  # c before b holds a and c, and b is made beside these
    assert keep_everything_peak_bytes(permute(graph, [0, 2, 1]).graph) == 60


def test_no_order_of_a_transformer_lowers_its_peak() -> None:
    assert not may_lower_peak(transformer(TransformerSize(layers=2)))


def test_program_order_goes_on_if_neither_order_proves_its_schedule() -> None:
    graph = weight_gradients()
    budget_bytes = (bound_least_budget(graph).budget_bytes + keep_everything_peak_bytes(graph)) // 2

    def search(request: Request) -> Result:
        while not request.is_stopped() and request.clock.now < 20.0:
            request.clock.spend(1.0)
        return find_nothing(request)

    def find_roughly(request: Request) -> Result:
        search(request)
        rough = get_solver("largest")(Request(request.graph, budget_bytes)).schedule
        return Result(request.graph, budget_bytes, Status.FEASIBLE, rough, None, "windows", 1.0)

    solve, asked = answering(find_roughly, search, get_solver("windows"))
    found = solve_in_best_order(solve, Request(graph, budget_bytes, clock=WorkClock(100.0)))
    program, other, again = asked
    assert program.graph == again.graph == graph != other.graph
    assert program.start is None and again.start.schedule.computed
    assert found.result.status is Status.OPTIMAL and not found.order.changed


def test_the_first_order_is_bounded_and_its_bound_stays_with_its_schedule() -> None:
    graph, told = weight_gradients(), list[SolveProgress]()
    known = get_solver("windows")(Request(graph, 53_000))
    stopped: list[float] = []

    def solve(request: Request) -> Result:
        bound_s = graph.time_s
        while not request.is_stopped() and request.clock.now < 20.0:
            request.clock.spend(0.1)
            if stopped:  # in another order, where little is found and much is proved
                request.tell("bounding", 2 * known.time_s, 0.99 * known.time_s)
            else:
                bound_s = graph.time_s if request.clock.now < 5.0 else 0.95 * known.time_s
                request.tell("bounding", known.time_s, bound_s)
        stopped.append(request.clock.now)
        if len(stopped) > 1:
            return Result(request.graph, 53_000, Status.LIMIT, None, None, "windows", 1.0)
        return known.map_to(status=Status.FEASIBLE, bound_s=bound_s)

    assert 0.95 * known.time_s > graph.time_s
    request = Request(graph, 53_000, Tolerance.of(1e-3), WorkClock(100.0), told.append)
    assert solve_in_best_order(solve, request).result.bound_s == 0.95 * known.time_s
    assert 5.0 < stopped[0] < 6.0
    assert {(each.best_s, each.bound_s) for each in told} == {(known.time_s, graph.time_s), (known.time_s, 0.95 * known.time_s)}


def test_a_solve_starts_from_a_schedule_in_its_own_order() -> None:
    graph = draw_graph(6, 12)
    order = swap_two_ops(graph)
    budget_bytes = (bound_least_budget(order.graph).budget_bytes + keep_everything_peak_bytes(order.graph)) // 2
    solved = get_solver("windows")(Request(order.graph, budget_bytes, clock=WorkClock(20.0)))
    assert order.changed and solved.schedule is not None and solved.time_s != graph.time_s
    start = Start(order.map_back(solved.schedule))
    told: list[float] = []

    def note(progress: SolveProgress) -> None:
        told.extend([] if progress.best_s is None else [progress.best_s])

    asked = Request(graph, budget_bytes, clock=WorkClock(20.0), on_progress=note, should_stop=lambda: bool(told), start=start)
    solve_in(reorder_by(graph, start.schedule), get_solver("windows"), asked)
    assert told[0] == solved.time_s
    assert reorder_by(graph, start.schedule).graph == order.graph


@pytest.mark.parametrize("more_s", [0.0, 1.0])
def test_a_solve_that_goes_on_with_little_time_loses_no_bound(more_s: float) -> None:
    graph, order = weight_gradients(), find_order(weight_gradients())
    slow = replace(graph, ops=(replace(graph.ops[0], time_s=graph.ops[0].time_s + more_s), *graph.ops[1:]))
    calls: list[Request] = []

    def solve(request: Request) -> Result:
        calls.append(request)
        shares = {1: 0.5, 2: 0.99}  # of its time is proved; the third and the fourth solve end before they prove anything
        while len(calls) == 1 and not request.is_stopped():  # until another order is found
            request.clock.spend(0.1)
        known = get_solver("windows")(Request(request.graph, 53_000)).schedule
        found = Result(slow if request.graph == graph else request.graph, 53_000, Status.FEASIBLE, known, 0.0, "windows", 1.0)
        return found.map_to(bound_s=shares.get(len(calls), 0.1) * found.time_s, settings=SolveSettings(windows=[len(calls)]))

    found = solve_in_best_order(solve, Request(graph, 53_000, Tolerance.of(1e-3), WorkClock(100.0)))
    assert [call.graph == graph for call in calls] == [True, False, True, False]
    assert found.order == order
    assert found.result.bound_s == 0.99 * found.result.time_s and found.result.status is Status.FEASIBLE
    assert calls[-1].start.windows == (2,)
