"""One least budget: the same number wherever it is asked for, with a schedule for it; fits to another measure."""

import re
from collections.abc import Callable
from dataclasses import replace

import pytest

import planner
from planner.capture.options import apply_options
from planner.graphs.errors import InfeasibleError, LimitError
from planner.graphs.ir import Graph
from planner.graphs.options.offload import OFFLOAD
from planner.graphs.options.surroundings import Link, Surroundings
from planner.graphs.reordering import keep_program_order
from planner.graphs.schedule import Schedule
from planner.graphs.simulate import simulate
from planner.graphs.synthetic.random_graphs import draw_graph, draw_training_step
from planner.graphs.synthetic.transformer import TransformerSize, transformer
from planner.graphs.units import format_enough
from planner.memory import least_budget as remembered
from planner.memory.fit import Bracket, find_largest, fit
from planner.memory.least_budget import LeastBudget, find_least_budget
from planner.memory.reserved import predict_counted_bytes
from planner.progress import Progress
from planner.settings.budget import Bytes
from planner.settings.counted_memory import CountedMemory
from planner.show.facts.graph import collect_graph_facts
from planner.solvers.clock import WallClock, WorkClock
from planner.solvers.eviction.least_peak import find_least_evicting_schedule
from planner.solvers.least import find_least_known
from planner.solvers.order.reorder import find_order
from planner.solvers.registry import get_solver
from planner.solvers.request import Request
from planner.solvers.result import SOLVED, Reason, Result, Status
from planner.studies.budget_analysis import advise_graph
from planner.studies.frontier import Frontier
from planner.studies.settings import StudySettings
from planner.studies.solve_curve import solve_curve
from planner.studies.solves import solve_in_order
from tests.support.marks import slow


def on_a_gpu(seed: int) -> Graph:
    return replace(draw_training_step(seed, 8), provenance={"device": "h200"})


@pytest.fixture(autouse=True)
def _nothing_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remembered, "_remembered", {})


def finds_nothing(request: Request) -> Result:
    """Solve as a search does that finds no schedule before its limit."""
    request.tell("searching", None, request.graph.time_s)
    return Result(request.graph, request.budget_bytes, Status.LIMIT, None, None, "windows", 0.0, message="nothing was found.")


@pytest.mark.parametrize("seed", [1, 5])
def test_info_curve_and_advice_name_the_same_budget(seed: int) -> None:
    graph = draw_graph(seed, 12)
    least = find_least_budget(graph)
    facts = collect_graph_facts(graph)
    found = solve_curve(graph, 3, StudySettings(total_time_limit_s=1.0, jobs=1))
    advice = advise_graph(graph, time_limit_s=1.0, options=("offload",))
    assert (facts.least_budget_bytes, facts.least_budget_found_bytes) == (least.proved_bytes, least.found_bytes)
    assert found.least is least
    assert (advice.least_proved_bytes, advice.least.budget_bytes) == (least.proved_bytes, least.found_bytes)
    assert advice.options[0].least_found_bytes == facts.least_budget_offload_found_bytes
    assert found.points[0].schedule is not None


@pytest.mark.parametrize("memory", [CountedMemory.ALLOCATED, CountedMemory.RESERVED])
def test_the_least_budget_is_a_function_of_the_graph(memory: CountedMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = on_a_gpu(1)
    first = find_least_budget(graph, memory)
    assert find_least_budget(replace(graph), memory) is first  # remembered
    monkeypatch.setattr(remembered, "_remembered", {})
    assert find_least_budget(graph, memory) == first


def test_the_rate_of_a_link_does_not_change_the_least_budget() -> None:
    graph = draw_training_step(7, 8)
    slowly, fast = (OFFLOAD.add_to(graph, Surroundings(Link.even(rate))) for rate in (1.0, 50e9))
    found = [find_least_budget(one) for one in (slowly, fast)]
    assert found[0] == found[1]
    assert simulate(fast, found[1].schedule).peak_bytes == found[1].found_bytes <= find_least_budget(graph).found_bytes


@pytest.mark.parametrize("seed", [0, 1, 2, 5])
def test_the_least_budget_is_the_better_of_two_orders(seed: int) -> None:
    graph = draw_graph(seed, 12)
    least = find_least_budget(graph)
    for order in (keep_program_order(graph), find_order(graph)):
        schedule = order.map_back(find_least_known(order.graph, WorkClock(1.0)))
        assert least.proved_bytes <= least.found_bytes <= simulate(graph, schedule).peak_bytes
    assert simulate(graph, least.schedule).peak_bytes == least.found_bytes


@pytest.mark.parametrize("memory", [CountedMemory.RESERVED, *slow(CountedMemory.DEVICE_EXPANDABLE)])
def test_least_budget_bracket_is_in_counted_memory(memory: CountedMemory) -> None:
    graph = on_a_gpu(1)
    found = find_least_budget(graph, memory)
    assert found.proved_bytes <= predict_counted_bytes(graph, found.schedule, memory) == found.found_bytes
    assert found.proved_bytes >= find_least_budget(graph).proved_bytes
    known = Frontier(keep_program_order(graph), 0.01, memory)
    known.learn_least(found)
    assert known.get_point(found.found_bytes, None).schedule == found.schedule
    assert known.get_point(found.proved_bytes - 1, None).status is Status.INFEASIBLE


def test_another_schedule_than_that_of_least_peak_reserves_less() -> None:
    graph = on_a_gpu(25)
    reserved, allocated = find_least_budget(graph, CountedMemory.RESERVED, arena=False), find_least_budget(graph)
    assert reserved.found_bytes < 0.9 * predict_counted_bytes(graph, allocated.schedule, CountedMemory.RESERVED, arena=False)
    assert simulate(graph, reserved.schedule).peak_bytes > allocated.found_bytes


def test_of_schedules_that_reserve_about_the_same_the_fastest_counts() -> None:
    graph = replace(transformer(TransformerSize(layers=2)), provenance={"device": "h200"})
    orders = (keep_program_order(graph), find_order(graph, WorkClock(2.0)))
    unsolved = [order.map_back(find_least_known(order.graph, WorkClock(1.0))) for order in orders]
    memory = CountedMemory.RESERVED
    needs = [
        (predict_counted_bytes(graph, schedule, memory, arena=False), simulate(graph, schedule).time_s) for schedule in unsolved
    ]
    known_bytes, time_s = min(needs)
    least = find_least_budget(graph, memory, arena=False)
    assert least.found_bytes <= 1.005 * known_bytes
    assert simulate(graph, least.schedule).time_s < 0.97 * time_s
    known = Frontier(orders[1], 0.01, memory)
    known.learn_least(least)
    above = known.get_point(int(1.3 * least.found_bytes), None)  # by a schedule that was met on the way
    assert graph.time_s < above.time_s < simulate(graph, least.schedule).time_s


def test_the_program_of_a_graph_is_searched_once_for_all_options_that_it_was_traced_with() -> None:
    graph = draw_training_step(1, 8)
    least = find_least_budget(graph)
    assert find_least_budget(replace(graph, provenance={**graph.provenance, "options": ["chunks"]})) is least
    assert find_least_budget(replace(graph, provenance={**graph.provenance, "device": "h200"})) is not least


def test_rules_of_eviction_are_tried_once_for_all_options_and_kinds_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[Graph] = []

    def find(graph: Graph, clock: WorkClock, **settings: object) -> Schedule | None:
        tried.append(graph)
        return find_least_evicting_schedule(graph, clock, **settings)

    monkeypatch.setattr("planner.solvers.least.find_least_evicting_schedule", find)
    facts = collect_graph_facts(on_a_gpu(1))
    assert facts.least_budget_offload_found_bytes <= facts.least_budget_found_bytes
    assert len(tried) == len({graph.ops for graph in tried}) <= 2  # one for each order


def test_stopped_search_returns_a_valid_bracket_and_is_not_remembered() -> None:
    graph = on_a_gpu(25)
    found = find_least_budget(graph, CountedMemory.RESERVED, should_stop=lambda: True)
    assert predict_counted_bytes(graph, found.schedule, CountedMemory.RESERVED) == found.found_bytes >= found.proved_bytes
    whole = find_least_budget(graph, CountedMemory.RESERVED)
    assert whole.found_bytes <= found.found_bytes
    assert (found.stopped, whole.stopped) == (True, False)
    assert find_least_budget(graph, CountedMemory.RESERVED, should_stop=lambda: True) is whole


def test_budgets_that_only_another_order_has_a_schedule_for_are_solved_in_that_order() -> None:
    graph = replace(transformer(TransformerSize(layers=2)), provenance={})
    least, other = find_least_budget(graph), find_order(graph, WorkClock(2.0))
    assert other.changed
    known = Frontier(keep_program_order(graph), 0.01)
    known.learn_least(replace(least, order=other.original))
    known.infeasible_bytes = least.found_bytes  # in this order
    point = known.get_point(least.found_bytes, None)
    assert (point.schedule, point.status, point.bound_s) == (least.schedule, Status.FEASIBLE, graph.time_s)
    assert known.get_point(least.found_bytes - 1, None).status is Status.INFEASIBLE
    place = known.choose_order(least.found_bytes)
    assert known.orders[place].original == other.original and known.choose_order(2 * least.found_bytes) == 0
    found = solve_in_order(known.orders[place], least.found_bytes, known.memory, WallClock(3.0))
    assert found.bound_s > 1.01 * graph.time_s
    known.learn(found, place)
    assert known.get_point(least.found_bytes, None).bound_s == found.bound_s


@pytest.mark.parametrize("seed", [1, 7, 25])
def test_a_named_budget_does_where_the_solve_finds_nothing(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = draw_training_step(seed, 8)
    monkeypatch.setattr("planner.memory.allocated_budget.get_solver", lambda _: finds_nothing)
    least = find_least_budget(graph)
    with pytest.raises((LimitError, InfeasibleError)) as refused:
        planner.solve(graph, least.found_bytes - 1)
    named = re.search(r"A schedule is known for ([\d.]+ .?B)\.", str(refused.value))
    plan = planner.solve(graph, named[1])
    assert plan.peak_bytes == least.found_bytes <= plan.budget_bytes
    assert (plan.status, plan.bound_s) == ("feasible", graph.time_s)


def test_a_solve_at_the_least_budget_improves_on_its_schedule() -> None:
    graph = draw_graph(3, 30)  # in another order of lower peak there is no schedule within this budget
    least = find_least_budget(graph)
    plan = planner.solve(graph, least.found_bytes, work_limit=10.0)
    assert plan.time_s < simulate(graph, least.schedule).time_s
    assert (plan.status, plan.ended, plan.settings["reordered"]) == (Status.OPTIMAL, None, False)


@pytest.mark.parametrize("memory", [CountedMemory.ALLOCATED, CountedMemory.RESERVED])
def test_the_schedule_of_the_least_budget_is_the_start(memory: CountedMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = on_a_gpu(25)
    least = find_least_budget(graph, memory, arena=False)
    given: list[Request] = []

    def solve(request: Request) -> Result:
        given.append(request)
        return get_solver("windows")(request)

    monkeypatch.setattr("planner.memory.known_budgets._TIGHT", 10.0)  # the bound on reserved memory is far below the least budget
    monkeypatch.setattr("planner.memory.allocated_budget.get_solver", lambda _: solve)
    plan = planner.solve(graph, least.found_bytes, memory=memory, work_limit=2.0, arena=False)
    assert given[0].start.schedule == least.schedule
    assert plan.time_s <= simulate(graph, least.schedule).time_s


@pytest.mark.parametrize("memory", [CountedMemory.RESERVED, CountedMemory.DEVICE])
def test_less_is_reserved_in_an_arena_and_each_command_says_how_much(memory: CountedMemory) -> None:
    graph = on_a_gpu(25)
    least, without = (find_least_budget(graph, memory, arena=arena) for arena in (None, False))
    assert least.proved_bytes <= least.found_bytes < 0.9 * without.found_bytes
    plan = planner.solve(graph, least.found_bytes, memory=memory, work_limit=2.0)
    assert plan.arena_bytes is not None and plan.reserved.device_bytes <= least.found_bytes
    found = solve_curve(graph, 2, StudySettings(memory=memory, time_limit_s=1.0, total_time_limit_s=600.0))
    assert found.points[0].budget_bytes == least.found_bytes >= (found.points[0].reserved_bytes or 0)
    assert found.points[0].status in (*SOLVED, Status.FEASIBLE)
    with pytest.raises((LimitError, InfeasibleError), match=format_enough(least.found_bytes)):
        planner.solve(graph, least.proved_bytes - 1, memory=memory, work_limit=2.0)
    if memory is CountedMemory.RESERVED:
        assert collect_graph_facts(graph).least_reserved_found_bytes == least.found_bytes


def test_steps_that_may_have_no_arena_are_counted_without() -> None:
    graph = apply_options(on_a_gpu(7), ("offload",), Surroundings(Link.even(1e9)))
    schedule = find_least_budget(graph).schedule
    for memory in (CountedMemory.RESERVED, CountedMemory.DEVICE):
        assert predict_counted_bytes(graph, schedule, memory) == predict_counted_bytes(graph, schedule, memory, arena=False)
    program = on_a_gpu(7)
    schedule, memory = find_least_budget(program).schedule, CountedMemory.RESERVED_EXPANDABLE
    assert predict_counted_bytes(program, schedule, memory) == predict_counted_bytes(program, schedule, memory, arena=False)


def test_a_named_budget_of_reserved_memory_does(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = on_a_gpu(25)
    least = find_least_budget(graph, CountedMemory.RESERVED)
    monkeypatch.setattr("planner.memory.allocated_budget.get_solver", lambda _: finds_nothing)
    plan = planner.solve(graph, least.found_bytes)
    assert plan.reserved_bytes == least.found_bytes


def test_a_plan_in_program_order_is_in_program_order(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = draw_graph(1, 12)
    monkeypatch.setattr("planner.memory.allocated_budget.get_solver", lambda _: finds_nothing)
    least = find_least_budget(graph)
    assert planner.solve(graph, least.found_bytes).settings["reordered"] is True
    with pytest.raises(LimitError):
        planner.solve(graph, least.found_bytes, reorder=False)


@pytest.mark.parametrize(("device", "known"), [("cpu", ""), ("h200", r"A schedule is known for .*\. ")])
def test_limit_errors_of_arenas_have_hints_and_the_time(device: str, known: str, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = replace(draw_training_step(25, 8), provenance={"device": device})
    too_little = lambda request: finds_nothing(request).map_to(reason=Reason.TIME)  # noqa: E731
    monkeypatch.setattr("planner.memory.allocated_budget.get_solver", lambda _: too_little)
    with pytest.raises(LimitError, match=rf"nothing was found\..*{known}It took .* \(limit 2 units of work\)\.$"):
        planner.solve(graph, find_least_budget(graph).found_bytes, arena=True, work_limit=2.0)


def test_limit_error_names_budgets_with_and_without_options(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = draw_graph(1, 12)
    facts = collect_graph_facts(graph)
    assert facts.least_budget_offload_found_bytes < facts.least_budget_found_bytes
    monkeypatch.setattr("planner.memory.known_budgets._TIGHT", 2.0)
    monkeypatch.setattr("planner.memory.allocated_budget.get_solver", lambda _: finds_nothing)
    heard: list[Progress] = []
    with pytest.raises(LimitError) as refused:
        planner.solve(graph, facts.least_budget_found_bytes - 1, on_progress=heard.append)
    known = f" A schedule is known for {facts.least_budget_found_bytes} B."
    offload = f" With the option offload a schedule is known for {facts.least_budget_offload_found_bytes} B, with "
    assert known in str(refused.value) and offload in str(refused.value)
    assert known in heard[-1].activity and offload in heard[-1].activity  # while it solves
    with pytest.raises(LimitError) as refused:
        planner.solve(graph, facts.least_budget_offload_found_bytes - 1, options=["offload"])
    assert "With the option" not in str(refused.value)


def test_an_error_says_that_its_search_for_the_least_budget_was_cut_short(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = draw_training_step(7, 8)
    budget = find_least_budget(graph).found_bytes - 1
    monkeypatch.setattr("planner.memory.allocated_budget.get_solver", lambda _: finds_nothing)
    with pytest.raises(LimitError) as refused:
        planner.solve(graph, budget)
    assert "cut short" not in str(refused.value)

    def stop(graph: Graph, *where: CountedMemory, **settings: object) -> LeastBudget:
        return replace(find_least_budget(graph, *where, **settings), stopped=True)

    monkeypatch.setattr("planner.memory.known_budgets.find_least_budget", stop)
    said = r" A schedule is known for .*The search for less was cut short: with more time it may find less\."
    with pytest.raises(LimitError, match=said):
        planner.solve(graph, budget)


def test_the_least_budget_is_looked_for_in_the_first_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = draw_training_step(7, 8)
    monkeypatch.setattr("planner.memory.known_budgets._TIGHT", 1.0)  # so that it is not looked for before the solve
    looked: list[float] = []

    def solve(request: Request) -> Result:
        for _ in range(8):
            request.clock.spend(1.0)
            request.tell("searching", None, None)
            looked.append(request.clock.now if remembered._remembered else 0.0)
        return finds_nothing(request)

    monkeypatch.setattr("planner.memory.allocated_budget.get_solver", lambda _: solve)
    budget = find_least_budget(graph).found_bytes + 1
    monkeypatch.setattr(remembered, "_remembered", {})
    heard: list[Progress] = []
    plans: list[planner.Plan] = []
    plan = planner.solve(graph, budget, work_limit=100.0, reorder=False, on_progress=heard.append, on_plan=plans.append)
    assert looked[:3] == [0.0, 0.0, 3.0]
    assert plan.peak_bytes <= budget and [p.schedule for p in plans] == [plan.schedule]
    assert heard[0].best_s is None and heard[-1].best_s == plan.time_s


def test_a_baseline_gives_no_schedule_that_is_not_its_own() -> None:
    graph = draw_training_step(7, 8)
    with pytest.raises(LimitError) as refused:
        planner.solve(graph, find_least_budget(graph).found_bytes, solver="keep-everything")
    assert "A schedule is known" not in str(refused.value)


PEAK, LEAST = 10_000, 2_000  # allocated bytes that plans may take


def in_segments(size: int) -> Callable[[int], int]:
    return lambda allocated: -(-allocated // size) * size


def fitted(measure: Callable[[int], int], budget: int, tries: int = 12) -> tuple[int, int, list[int]]:
    """A plan is its allocated bytes; also those that were asked for."""
    asked: list[int] = []

    def solve(wanted: Bytes) -> int:
        asked.append(wanted.size_bytes)
        if wanted.size_bytes < LEAST:
            raise InfeasibleError("below the least")
        return wanted.size_bytes - wanted.size_bytes % 7  # schedules take a little less than their budget

    return *fit(PEAK, solve, measure, Bracket(budget), allocated=lambda plan: plan, tries=tries), asked


@pytest.mark.parametrize("measure", [lambda taken: taken + 900, in_segments(1000), in_segments(3000), lambda taken: 2 * taken])
@pytest.mark.parametrize("budget", [10_000, 9_500, 6_500, 4_500])
def test_a_plan_is_found_whose_measure_is_within_the_budget(measure: Callable[[int], int], budget: int) -> None:
    plan, taken, asked = fitted(measure, budget)
    assert taken == measure(plan) <= budget
    assert all(0 < one < PEAK for one in asked)
    assert bool(asked) == (measure(PEAK) > budget)


def test_the_plan_that_takes_least_is_returned_where_none_fits() -> None:
    plan, taken, asked = fitted(lambda allocated: 5_000 + allocated // 2, 5_500)
    assert taken == 5_000 + plan // 2 > 5_500
    assert plan <= LEAST + 7 and len(asked) == 12
    assert any(one < LEAST for one in asked)


def test_no_more_plans_are_made_than_allowed() -> None:
    assert fitted(in_segments(1000), 4_500, tries=0) == (PEAK, PEAK, [])
    assert len(fitted(lambda _: PEAK, 4_500, tries=3)[2]) == 3


def test_budgets_of_a_bracket_are_between_its_ends() -> None:
    bracket = Bracket(5_000, floor_bytes=1_000)
    assert bracket.choose_next_bytes(1) is None  # nothing was too much
    bracket.learn(PEAK, 9_000, 7_000)
    assert bracket.choose_next_bytes(1) == 9_000 - 2_000
    assert bracket.choose_next_bytes(1, excess_bytes=3_000) == 9_000 - 3_000
    bracket.learn(7_000, 7_000, 4_000)
    assert bracket.choose_next_bytes(1) == 7_000 + (9_000 - 7_000) // 3  # where the measure would be the budget
    assert bracket.choose_next_bytes(2_000) is None


def test_the_largest_number_at_which_something_is_found() -> None:
    found = find_largest(lambda number: number if number <= 0.3 else None, 0.0, 1.0, halvings=10)
    assert 0.3 - 2**-10 <= found <= 0.3
    assert find_largest(lambda _: None, 0.0, 1.0, halvings=4) is None
