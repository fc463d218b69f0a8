"""Arenas of steps on CUDA, as they are planned: addresses in a pool of PyTorch's allocator, on the model of it."""

from dataclasses import replace

import pytest

from planner.graphs.addresses import Buffer
from planner.graphs.allocators.training import Training
from planner.graphs.errors import LimitError, MismatchError, UsageError
from planner.graphs.ir import Graph
from planner.graphs.synthetic.small import make_training_chain
from planner.memory.arena_rules import plan_device_arena
from planner.memory.reserved import DeviceTraining
from planner.plans.document import plan_to_dict
from planner.plans.plan import Plan, plan_from_dict
from planner.plans.plan_check import check_plan
from planner.plans.solve import solve
from planner.settings.counted_memory import CountedMemory
from planner.solvers.registry import get_solver
from planner.solvers.request import Request
from planner.solvers.result import Ending, Result, Status
from tests.support.graphs.small_graphs import of_four_sizes
from tests.support.marks import slow
from tests.support.solvers.brute_force import fastest

MIB = 2**20


def step(*buffers: tuple[int, int, int]) -> Training:
    """A step with buffers that begin and end at steps of its schedule, of so many MiB."""
    return Training((), tuple(Buffer(str(i), lower, upper, size * MIB) for i, (lower, upper, size) in enumerate(buffers)))


def test_requests_of_one_op_are_told_apart() -> None:
    # The shorter one of two equal requests comes second, and must lie where the third begins.
    steering = plan_device_arena(step((0, 3, 12), (0, 1, 12), (1, 3, 24), (0, 1, 12)))
    assert not steering.missed
    assert steering.pool_bytes <= (12 + 24 + 12 + 6 * 2) * MIB


def test_a_step_without_large_requests_has_the_smallest_slab() -> None:
    steering = plan_device_arena(Training((), (Buffer("0", 0, 1, 100),)))
    assert (steering.slab_bytes, steering.outside_bytes, steering.missed) == (10 * MIB, 2 * MIB, frozenset())


def test_holes_are_as_large_as_requests_that_are_multiples_of_each_other() -> None:
    step = Training((), tuple(Buffer(str(i), i, i + 4, int(size * MIB)) for i, size in enumerate((6.125, 12.25, 24.5, 49))))
    steering = plan_device_arena(step)
    assert not steering.missed and steering.outside_bytes == 0
    assert steering.slab_bytes == 92 * MIB  # of segments of 2 MiB, for 91.875


def mixed(device: str = "h200") -> Graph:
    """A chain of 24 ops whose tensors have many sizes."""
    plain, sizes = make_training_chain(12), (12, 30, 7, 44, 18)
    tensors = tuple(replace(t, size_bytes=sizes[t.id % 5] * MIB) for t in plain.tensors)
    return replace(plain, tensors=tensors, provenance={"device": device})


@pytest.mark.parametrize("share", [60, 50, *slow(80)])
def test_plans_in_an_arena_are_within_their_budget_and_no_slower(share: int) -> None:
    graph = mixed()
    plain, plan = (solve(graph, f"{share}%", work_limit=6.0, arena=arena) for arena in (False, True))
    assert plan.reserved_bytes <= plan.budget_bytes == plain.budget_bytes
    assert plan.time_s <= plain.time_s
    steering = DeviceTraining.of(graph, plan.schedule).arena
    assert (plan.arena_bytes, plan.outside_arena_bytes) == (steering.slab_bytes, steering.outside_bytes)
    assert plan.reserved_bytes == plan.predicted_bytes == graph.static_bytes + steering.pool_bytes
    assert plan.memory is CountedMemory.RESERVED
    check_plan(graph, plan)
    assert plan_from_dict(plan_to_dict(plan)) == replace(plan, source=None)


@pytest.mark.parametrize("share", [60, 50])
def test_a_plan_that_would_reserve_too_much_has_an_arena_by_itself(share: int) -> None:
    graph, seen = mixed(), list[Plan]()
    plan = solve(graph, f"{share}%", work_limit=6.0, on_plan=seen.append)
    without = solve(graph, f"{share}%", work_limit=6.0, arena=False)
    assert all(one.reserved_bytes is not None and one.reserved_bytes <= plan.budget_bytes for one in seen)
    steering = DeviceTraining.of(graph, plan.schedule).arena
    in_segments = DeviceTraining.of(graph, plan.schedule).predict(0, in_arena=False).total_bytes
    assert graph.static_bytes + steering.pool_bytes == plan.reserved_bytes <= plan.budget_bytes < in_segments
    assert (plan.arena_bytes, without.arena_bytes) == (steering.slab_bytes, None)
    assert plan.time_s < without.time_s
    assert plan.bound_s is not None and plan.bound_s == without.bound_s <= plan.time_s
    check_plan(graph, plan)
    assert plan_from_dict(plan_to_dict(plan)) == replace(plan, source=None)


@pytest.mark.parametrize("budget", [110, 130, 170])
def test_reserved_memory_costs_what_allocated_memory_does_but_for_rounding(budget: int) -> None:
    plain, sizes = make_training_chain(6), (12, 30, 7, 44, 18)
    tensors = tuple(replace(t, size_bytes=sizes[t.id % 5] * MIB) for t in plain.tensors)
    graph = replace(plain, tensors=tensors, provenance={"device": "h200"})
    plan = solve(graph, budget * MIB, work_limit=6.0)
    assert plan.arena_bytes is not None
    with_rounding_s, fastest_s = (fastest(graph, (budget - less) * MIB) for less in (4, 0))
    assert plan.bound_s <= fastest_s <= plan.time_s <= with_rounding_s
    assert plan.peak_bytes <= plan.reserved_bytes <= budget * MIB


def test_what_had_too_little_time_is_solved_again_from_what_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Request] = []

    def run(request: Request) -> Result:
        asked.append(request)
        found = get_solver("windows")(request)
        is_first = sum(other.budget_bytes == request.budget_bytes for other in asked) == 1
        cut = is_first and len(asked) > 1 and found.schedule is not None
        return replace(found, graph=request.graph, status=Status.FEASIBLE, ended=Ending.LIMIT) if cut else found

    monkeypatch.setattr("planner.memory.allocated_budget.get_solver", lambda _: run)
    plan = solve(of_four_sizes(7, 8), "75%", work_limit=20.0, reorder=False)
    *budgets, last = (request.budget_bytes for request in asked)
    assert last in budgets and len(budgets) == len(set(budgets))
    assert all(request.start is not None for request in asked[1:])
    assert plan.ended is Ending.EXHAUSTED


def test_a_plan_within_the_tolerance_ends_for_no_other_reason() -> None:
    plan = solve(mixed(), "100%", work_limit=3.0)
    assert (plan.status, plan.ended) == (Status.OPTIMAL, None)


def test_plans_that_need_no_arena_or_can_have_none_run_in_none() -> None:
    graph = mixed()
    assert solve(graph, "100%", work_limit=6.0).arena_bytes is None
    for settings in (
        {"memory": "reserved-expandable"},
        {"memory": "allocated"},
        {"options": ["offload"], "link": "100GB/s", "host_budget": "1GB"},
    ):
        assert solve(graph, "70%", work_limit=6.0, **settings).arena_bytes is None
    assert solve(mixed("cpu"), "60%", work_limit=6.0).arena_bytes is None


def test_a_plan_in_an_arena_reserves_less_than_in_segments() -> None:
    graph = mixed()
    plan = solve(graph, "60%", work_limit=6.0, arena=True)
    usual = DeviceTraining.of(graph, plan.schedule).predict(0, in_arena=False)
    assert plan.peak_bytes <= plan.reserved.total_bytes < usual.total_bytes


def test_false_sizes_of_an_arena_are_noticed() -> None:
    graph = mixed()
    plan = solve(graph, "80%", work_limit=3.0, arena=True)
    assert plan.reserved is not None
    with pytest.raises(MismatchError, match="reserved"):
        check_plan(graph, replace(plan, reserved=replace(plan.reserved, total_bytes=plan.reserved.total_bytes - MIB)))


@pytest.mark.parametrize("memory", ["allocated", "reserved-expandable", "device-expandable"])
def test_an_arena_on_cuda_is_reserved_memory_without_expandable_segments(memory: str) -> None:
    with pytest.raises(UsageError, match=f"memory is '{memory}', and on CUDA an arena"):
        solve(mixed(), "80%", memory=memory, arena=True)


def test_the_context_counts_in_an_arena_too() -> None:
    graph = mixed()
    plan = solve(graph, graph.static_bytes + 1_200 * 10**6, memory="device", work_limit=3.0, arena=True)
    assert plan.reserved.context_bytes
    assert plan.reserved_bytes <= plan.budget_bytes


def test_a_budget_that_no_plan_in_an_arena_meets_names_ways_out() -> None:
    with pytest.raises(LimitError, match=r"Raise the budget or the time limit\. A schedule is known for 12\.59 MB\."):
        solve(
            replace(mixed(), tensors=tuple(replace(t, size_bytes=1024) for t in mixed().tensors)),
            "9MB",
            work_limit=1.0,
            arena=True,
        )
