"""Which orders of the ops a graph is solved in, and which result counts."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from graphs.ir import Graph, Phase
from graphs.schedule import keep_everything
from graphs.synthetic.draft import Draft
from graphs.synthetic.random_graphs import draw_graph, draw_training_step
from graphs.synthetic.small import make_training_chain
from graphs.synthetic.transformer import TransformerSize, transformer
from solvers.bounds import bound_least_budget
from solvers.clock import WorkClock
from solvers.order.background import OrderSearch
from solvers.order.peak import bound_any_order_peak_bytes, find_peak, keep_everything_peak_bytes
from solvers.order.reorder import Reordering, find_order, list_constraints, lowers_peak, may_lower_peak, permute, reorder_by
from solvers.order.solve import SolvedOrder, solve_in, solve_in_best_order
from solvers.registry import Solver, get_solver
from solvers.request import Request, Start
from solvers.result import Ending, Result, SolveProgress, Status
from solvers.tolerance import Tolerance
from tests.solvers.order.test_reorder import weight_gradients


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

    monkeypatch.setattr("solvers.order.background.find_order", find_counted)
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

    monkeypatch.setattr("solvers.order.background.may_lower_peak", fail)
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
        return found.map_to(bound_s=shares.get(len(calls), 0.1) * found.time_s, settings={"windows": [len(calls)]})

    found = solve_in_best_order(solve, Request(graph, 53_000, Tolerance.of(1e-3), WorkClock(100.0)))
    assert [call.graph == graph for call in calls] == [True, False, True, False]
    assert found.order == order
    assert found.result.bound_s == 0.99 * found.result.time_s and found.result.status is Status.FEASIBLE
    assert calls[-1].start.windows == (2,)
