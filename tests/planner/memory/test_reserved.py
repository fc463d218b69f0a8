"""Budgets of reserved memory: plans of graphs on a CUDA device, by the model of its allocator."""

import re
from dataclasses import replace
from itertools import pairwise

import pytest

import planner
from planner.graphs.allocators.caching import EXPANDABLE
from planner.graphs.allocators.training import least_capacity_bytes, usage_of
from planner.graphs.errors import FormatError, InfeasibleError, LimitError, MismatchError, UsageError
from planner.graphs.ir import Graph, Kind
from planner.graphs.reordering import keep_program_order
from planner.graphs.schedule import keep_everything
from planner.graphs.synthetic.small import make_training_chain
from planner.graphs.synthetic.transformer import TransformerSize, transformer
from planner.graphs.units import format_bytes, format_enough
from planner.memory import reserved_budget
from planner.memory.least_budget import find_least_budget
from planner.memory.reserved import EagerMemory, build_training, predict_beside, predict_eager_reserved_bytes
from planner.memory.reserved_budget import solve_counted
from planner.plans.document import plan_to_dict
from planner.plans.plan import Plan, plan_from_dict
from planner.plans.plan_check import check_plan
from planner.plans.solve import solve, solve_graph
from planner.progress import Progress
from planner.settings.budget import Bytes
from planner.settings.counted_memory import CountedMemory
from planner.settings.plan import PlanSettings
from planner.show.facts.graph import collect_graph_facts
from planner.show.report.graph_text import describe_graph
from planner.solvers.clock import WorkClock
from planner.solvers.order.solve import SolvedOrder
from planner.solvers.registry import get_solver
from planner.solvers.request import Request
from planner.solvers.result import Ending, Reason, Result, Status
from planner.studies.budget_analysis import advise_graph
from tests.support.graphs.small_graphs import of_four_sizes

MIB = 2**20


def chain(device: str = "h200", *, size_bytes: int = 12 * MIB) -> Graph:
    plain = make_training_chain(8)
    return replace(
        plain,
        tensors=tuple(replace(t, size_bytes=size_bytes) for t in plain.tensors),
        provenance={"device": device},
    )


def reserved(graph: Graph, plan: Plan) -> int:
    return usage_of(build_training(graph, plan.schedule)).reserved_bytes


def test_budgets_count_reserved_memory_on_cuda_and_allocated_on_the_cpu() -> None:
    here, there = solve(chain(), "100%"), solve(chain("cpu"), "100%")
    assert (here.memory, there.memory) == (CountedMemory.RESERVED, CountedMemory.ALLOCATED)
    assert here.reserved_bytes == 9 * 12 * MIB and there.reserved is None
    by_name = solve(chain(), "100%", memory="allocated")
    assert by_name.memory is CountedMemory.ALLOCATED and by_name.reserved_bytes == here.reserved_bytes


@pytest.mark.parametrize("share", [100, 80, 60, 50, 45])
def test_plan_reserves_at_most_its_budget(share: int) -> None:
    graph = chain(size_bytes=11 * MIB + 512)  # of segments of 12 MiB
    plan = solve(graph, f"{share}%", work_limit=5.0)
    assert plan.reserved_bytes == reserved(graph, plan) <= plan.budget_bytes == 9 * 12 * MIB * share // 100
    assert plan.bound_s <= plan.time_s
    assert plan.reserved.eager_bytes == 9 * 12 * MIB


def test_a_tight_plan_is_solved_for_fewer_allocated_bytes() -> None:
    # Tensors of 1 to 10 MiB come from segments of 20 MiB, three of 6 MiB in each.
    graph = chain(size_bytes=6 * MIB)
    plan = solve(graph, 40 * MIB, work_limit=5.0, arena=False)
    allocated = solve(graph, 40 * MIB, work_limit=5.0, memory="allocated")
    assert allocated.peak_bytes == 36 * MIB and reserved(graph, allocated) == 40 * MIB == plan.reserved_bytes
    less = solve(graph, 39 * MIB, work_limit=5.0, arena=False)
    assert less.reserved_bytes == 20 * MIB and less.peak_bytes == 18 * MIB
    assert less.time_s > plan.time_s >= less.bound_s
    assert less.settings["allocated_budget_bytes"] < 39 * MIB


@pytest.mark.slow
def test_less_in_memory_at_single_ops_is_faster_than_less_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = of_four_sizes(12, 12)
    plan = solve(graph, "80%", work_limit=5.0, arena=False)
    monkeypatch.setattr(reserved_budget, "_LOCAL_SOLVES", 0)
    everywhere = solve(graph, "80%", work_limit=5.0, arena=False)
    assert plan.bound_s == everywhere.bound_s
    assert plan.bound_s <= plan.time_s < everywhere.time_s
    assert reserved(graph, plan) <= plan.budget_bytes
    assert plan.settings["allocated_budget_bytes"] == plan.budget_bytes
    assert plan.peak_bytes <= usage_of(build_training(graph, plan.schedule)).allocated_bytes


def test_less_in_memory_at_single_ops_finds_plans_where_less_everywhere_finds_none(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = of_four_sizes(35, 8)
    plan = solve(graph, "80%", work_limit=5.0, arena=False)
    assert reserved(graph, plan) <= plan.budget_bytes
    monkeypatch.setattr(reserved_budget, "_LOCAL_SOLVES", 0)
    monkeypatch.setattr(
        "planner.memory.known_budgets.REORDERED", frozenset()
    )  # so that the least budget's schedule does not count
    with pytest.raises(LimitError, match="no schedule was found that reserves"):
        solve(graph, "80%", work_limit=5.0, arena=False)


def test_expandable_segments_are_another_kind_of_memory() -> None:
    graph = chain(size_bytes=11 * MIB)
    plan = solve(graph, "100%", memory="reserved-expandable")
    assert plan.reserved.expandable
    assert plan.reserved_bytes == usage_of(build_training(graph, plan.schedule), EXPANDABLE).reserved_bytes == 100 * MIB


def test_a_budget_below_every_schedule_is_refused_with_a_proof() -> None:
    with pytest.raises(InfeasibleError, match="is below"):
        solve(chain(), 30 * MIB, work_limit=2.0)


def test_a_budget_that_no_plan_is_found_for_names_ways_out() -> None:
    # Three tensors of 1 KiB fit into 2 MiB, of which a segment is, and not into less.
    graph = chain(size_bytes=1024)
    with pytest.raises(LimitError, match=r"memory='allocated'.*A schedule is known for 2\.10 MB"):
        solve(graph, "1MB", work_limit=2.0)
    with pytest.raises(LimitError, match="Raise the budget, or let it count only allocated memory"):
        solve(graph, "1MB", work_limit=2.0, memory="reserved-expandable")
    assert solve(graph, "1MB", work_limit=2.0, memory="allocated").peak_bytes < 10**6


def test_hints_are_in_reserved_memory() -> None:
    for graph, budget in ((chain(size_bytes=1024), "1MB"), (chain(), 30 * MIB)):
        least = find_least_budget(graph, CountedMemory.RESERVED)
        proved = f"The least budget of reserved memory is at least {format_bytes(least.proved_bytes)}."
        known = f"A schedule is known for {format_enough(least.found_bytes)}."
        with pytest.raises((LimitError, InfeasibleError), match=rf"\. {re.escape(proved)} {re.escape(known)}"):
            solve(graph, budget, work_limit=2.0)


def test_workspaces_of_libraries_count() -> None:
    plain = chain()
    ops = tuple(replace(op, target="aten.mm.default") for op in plain.ops)
    graph = replace(plain, ops=ops)
    h100, a100 = (replace(graph, provenance={"device": name}) for name in ("NVIDIA H100 80GB HBM3", "a100"))
    assert (
        predict_beside(plain, CountedMemory.RESERVED).library_bytes == 0
        and predict_beside(graph, CountedMemory.RESERVED).library_bytes == 2 * 33 * MIB
    )
    assert predict_beside(h100, CountedMemory.RESERVED).library_bytes == 2 * 33 * MIB
    assert predict_beside(a100, CountedMemory.RESERVED).library_bytes == 2 * (2 * 4096 + 8 * 16 + 1024) * 1024
    plan = solve(graph, "100%", work_limit=2.0)
    assert plan.reserved.library_bytes == 66 * MIB
    assert plan.reserved_bytes == 9 * 12 * MIB + 66 * MIB
    with pytest.raises(InfeasibleError, match=r"69\.21 MB are workspaces that libraries keep"):
        solve(graph, 64 * MIB + 30 * MIB, work_limit=2.0)


def test_optimizer_memory_counts_as_reserved() -> None:
    graph = replace(chain(size_bytes=3 * MIB).holding(Kind.PARAMETER, "w", 60 * MIB), provenance={"device": "a100"})
    with_adam = replace(graph, provenance={"device": "a100", "optimizer": "adamw"})
    schedule = keep_everything(graph)
    without, counted = (usage_of(build_training(one, schedule)) for one in (graph, with_adam))
    assert counted.reserved_bytes == without.reserved_bytes + 60 * MIB
    plan = solve(with_adam, "100%", work_limit=2.0)
    assert plan.reserved.optimizer_bytes == 60 * MIB
    assert "62.91 MB while it runs" in str(plan)


def test_a_budget_without_room_for_the_optimizer_is_refused_with_a_proof() -> None:
    graph = replace(chain().holding(Kind.PARAMETER, "w", 60 * MIB), provenance={"device": "a100", "optimizer": "adamw"})
    assert predict_beside(graph, CountedMemory.RESERVED).optimizing_bytes == 60 * MIB + 60 * MIB
    with pytest.raises(InfeasibleError, match=r"below the 125\.83 MB in use while the optimizer runs.*fused=True"):
        solve(graph, 120 * MIB - 1)


def test_plans_on_the_way_fit_the_budget() -> None:
    graph = transformer(TransformerSize(layers=3, vocabulary=8192, batch=2, sequence=512))
    graph = replace(graph, provenance={"device": "h200"})
    seen: list[Plan] = []
    budget_bytes = int(0.85 * predict_eager_reserved_bytes(graph, CountedMemory.RESERVED))
    plan = solve(graph, budget_bytes, work_limit=5.0, arena=False, on_plan=seen.append)
    assert seen and all(reserved(graph, one) <= budget_bytes == one.budget_bytes for one in (*seen, plan))
    assert [one.time_s for one in seen] == sorted((one.time_s for one in seen), reverse=True)
    assert plan.time_s == seen[-1].time_s and {one.memory for one in seen} == {CountedMemory.RESERVED}
    least_device_bytes = least_capacity_bytes(build_training(graph, plan.schedule))
    assert plan.peak_bytes <= least_device_bytes <= plan.reserved_bytes


def test_a_solve_that_should_stop_returns_a_plan_that_fits() -> None:
    graph = chain(size_bytes=6 * MIB)
    plan = solve_graph(graph, Bytes(39 * MIB), PlanSettings(), should_stop=lambda: True)
    assert plan.reserved_bytes <= 39 * MIB


def test_a_solve_that_must_stop_does_so_without_a_plan() -> None:
    with pytest.raises(LimitError, match=r"no schedule within 40\.89 MB was found, .* It took .* \(limit 8 units of work\)\.$"):
        solve(chain(size_bytes=6 * MIB), 39 * MIB, work_limit=8.0, should_stop=lambda: True)


def test_each_solve_is_stopped_by_its_own_gap() -> None:
    seen: list[Progress] = []
    solve(chain(size_bytes=6 * MIB), 39 * MIB, work_limit=5.0, arena=False, on_progress=seen.append)
    assert seen[0].best_s is None
    assert any(before.best_s is not None and after.best_s is None for before, after in pairwise(seen))


def test_plan_files_keep_reserved_memory() -> None:
    plan = solve(chain(), "80%", work_limit=2.0)
    read = plan_from_dict(plan_to_dict(plan))
    assert (read.memory, read.reserved) == (CountedMemory.RESERVED, plan.reserved)
    assert "memory" not in plan_to_dict(solve(chain("cpu"), "80%"))


def test_a_file_that_says_less_is_refused() -> None:
    graph = chain()
    plan = solve(graph, "80%", work_limit=2.0)
    check_plan(graph, plan)
    assert plan.reserved is not None
    with pytest.raises(MismatchError, match="its file was edited"):
        check_plan(graph, replace(plan, reserved=replace(plan.reserved, total_bytes=plan.reserved.total_bytes - 1)))
    with pytest.raises(FormatError, match=r"reserved\.total_bytes"):
        plan_from_dict({**plan_to_dict(plan), "reserved": {"total_bytes": 10**9, "allocated_bytes": 1, "eager_bytes": 1}})
    without = {name: value for name, value in plan_to_dict(plan).items() if name != "reserved"}
    with pytest.raises(FormatError, match="what is reserved, as the budget counts reserved memory"):
        plan_from_dict(without)


@pytest.mark.parametrize("memory", ["device", "device-expandable"])
def test_budget_of_the_whole_device_counts_the_context(memory: str) -> None:
    graph = chain()
    context_bytes, budget_bytes = 800 * 10**6, 800 * 10**6 + 7 * 12 * MIB
    plan = solve(graph, budget_bytes, memory=memory, work_limit=3.0)
    same = solve(graph, 7 * 12 * MIB, memory=memory.replace("device", "reserved"), work_limit=3.0)
    assert (plan.reserved.context_bytes, same.reserved.context_bytes) == (context_bytes, 0)
    assert plan.reserved_bytes == plan.reserved.total_bytes + context_bytes <= budget_bytes == plan.budget_bytes
    assert (plan.schedule, plan.bound_s) == (same.schedule, same.bound_s)
    assert plan.eager_bytes == same.eager_bytes + context_bytes
    assert plan.compute_needed_bytes(plan.peak_bytes + 5) == plan.reserved_bytes + 5
    assert "CUDA's context 800.00 MB" in str(plan) and "not counted" in str(same)
    assert plan_from_dict(plan_to_dict(plan)).reserved == plan.reserved
    check_plan(graph, plan)


def test_cuda_context_is_that_measured_by_the_trace() -> None:
    graph = chain()
    measured = replace(graph, provenance={**graph.provenance, "context_bytes": 500 * 10**6})
    assert predict_beside(measured, CountedMemory.DEVICE).context_bytes == 500 * 10**6
    assert predict_beside(measured, CountedMemory.RESERVED).context_bytes == 0
    assert predict_beside(chain("NVIDIA Unheard-Of 5"), CountedMemory.DEVICE).context_bytes == 800 * 10**6
    check_plan(graph, solve(measured, "100%", memory="device", work_limit=3.0))
    with pytest.raises(InfeasibleError, match=r"Of the 510\.00 MB, 500\.00 MB are CUDA's context"):
        solve(measured, 510 * 10**6, memory="device")


def test_plans_with_transfers_fit_a_budget_of_reserved_memory() -> None:
    graph = chain(size_bytes=11 * MIB)
    plan = solve(graph, "60%", options=["offload"], link="100GB/s", host_budget="1GB", work_limit=3.0)
    assert plan.pool_peaks_bytes["host"] > 0
    assert plan.reserved_bytes <= plan.budget_bytes == 9 * 12 * MIB * 60 // 100
    assert plan.peak_bytes <= plan.reserved_bytes


def test_the_least_memory_counts_allocated_bytes() -> None:
    plan = solve(chain(), max_overhead="50%", work_limit=2.0)
    assert plan.memory is CountedMemory.ALLOCATED and plan.reserved_bytes is not None
    with pytest.raises(UsageError, match="max_overhead="):
        solve(chain(), max_overhead="50%", memory="reserved")


def test_reserved_memory_of_the_cpu_is_refused() -> None:
    with pytest.raises(UsageError, match="a model on the CPU: PyTorch's CPU allocator reserves no memory"):
        solve(chain("cpu"), "80%", memory="reserved")
    with pytest.raises(UsageError, match="choose from reserved, reserved-expandable, allocated"):
        planner.solve(chain(), "80%", memory="all")


@pytest.mark.parametrize("device", ["cpu", "h200"])
def test_facts_and_advice_report_memory_of_eager_pytorch(device: str) -> None:
    graph = chain(device, size_bytes=11 * MIB)
    facts, advice = collect_graph_facts(graph), advise_graph(graph, time_limit_s=1.0, options=())
    assert facts.eager_memory == advice.eager_memory
    texts = describe_graph(facts), str(advice)
    if device == "cpu":
        # Freed mappings raise the threshold: the second step takes all from the heap, which keeps what it had at most.
        assert 9 * 11 * MIB < facts.eager_memory.resident_bytes < 10 * 11 * MIB
        assert all("with glibc's allocator" in text for text in texts)
    else:
        assert facts.eager_memory == EagerMemory(9 * 12 * MIB, 100 * MIB, 9 * 12 * MIB, 800 * 10**6)
        assert all("113.25 MB by PyTorch's allocator, 104.86 MB with expandable segments" in text for text in texts)


def test_plan_text_names_the_counted_memory() -> None:
    text = str(solve(chain(), "80%", work_limit=2.0))
    assert "budget 90.60 MB reserved, peak" in text and "by PyTorch's default allocator" in text


@pytest.mark.parametrize("fits", [False, True])
def test_a_first_solve_that_is_not_over_leaves_the_rest_of_the_clock_to_the_same_budget(*, fits: bool) -> None:
    graph = chain()
    budget_bytes = round(0.8 * predict_eager_reserved_bytes(graph, CountedMemory.RESERVED))
    asked: list[Request] = []

    def run(request: Request) -> SolvedOrder:
        asked.append(request)
        if len(asked) > 1:
            return SolvedOrder(get_solver("windows")(request), keep_program_order(graph))
        while not request.is_stopped():  # its share of the clock is not enough for a schedule, or for its proof
            request.clock.spend(1.0)
        least = find_least_budget(graph, CountedMemory.RESERVED).schedule
        said = {"ended": Ending.LIMIT} if fits else {"reason": Reason.TIME}
        found = Status.FEASIBLE if fits else Status.LIMIT, least if fits else None, graph.time_s
        return SolvedOrder(Result(graph, request.budget_bytes, *found, "windows", 1.0, **said), keep_program_order(graph))

    result = solve_counted(run, Request(graph, budget_bytes, clock=WorkClock(40.0)), CountedMemory.RESERVED).result
    assert asked[0].budget_bytes == asked[1].budget_bytes
    assert (result.status, result.ended) == (Status.OPTIMAL, None) and result.bound_s > graph.time_s
