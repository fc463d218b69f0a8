"""Policies that offload, all alike: two judges accept what they do, none is below the proved bound, and who cannot says so."""

import itertools

import pytest
from torch._subclasses.fake_tensor import FakeTensorMode

from planner.capture.workload.models import build
from planner.graphs.ir import Graph
from planner.graphs.options.offload import remove_offload
from planner.graphs.schedule import keep_everything
from planner.graphs.simulate import simulate
from planner.graphs.synthetic.small import make_training_chain
from planner.measure.tracing import trace
from planner.solvers.baselines import deepspeed_offload, offload_activations
from planner.solvers.problem import build_problem
from planner.solvers.registry import get_solver
from planner.solvers.result import Reason, Status
from planner.solvers.windows import solve as solve_exactly
from tests.support.budgets import peak_bytes
from tests.support.graphs.options import check_by_both_judges, offered, random_step, small_gpt, with_trips
from tests.support.marks import slow, slow_among
from tests.support.solvers.answers import ask

UNLIMITED = 10**15
WITHOUT_BUDGET = ("save-on-cpu", "offload-activations")
# Those that take graphs of a hundred ops.
LARGE = (*WITHOUT_BUDGET, "deepspeed-offload", "sac-and-offload", "capuchin-swap", "delta", "auto-perf-maxing")
RIVALS = (*LARGE, "poet")


@pytest.fixture(autouse=True)
def tensors_of_a_few_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rules that suit them."""
    monkeypatch.setattr(offload_activations, "_STASH", 2)
    for rules in (offload_activations, deepspeed_offload):
        monkeypatch.setattr(rules, "_LEAST_BYTES", 1)


@pytest.mark.parametrize("name", slow_among(RIVALS, "auto-perf-maxing", "poet"))
def test_schedules_with_offload_pass_both_judges(name: str) -> None:
    found = copied = 0
    seeds = range(20)
    for seed in seeds:
        graph, program = offered(seed), random_step(seed)
        peak = simulate(program, keep_everything(program)).peak_bytes
        for budget in (UNLIMITED, peak, int(0.8 * peak)):
            result = get_solver(name)(ask(graph, budget))
            assert result.status in {Status.OPTIMAL, Status.FEASIBLE, Status.LIMIT}
            if result.schedule is not None:
                check_by_both_judges(graph, result)
                found += 1
                copied += any(graph.ops[op].optional for op in result.schedule.computed)
    assert found > len(seeds) and copied


@pytest.mark.parametrize("wanted", [3, *slow(40)])
@pytest.mark.parametrize("name", slow_among(RIVALS, "auto-perf-maxing", "sac-and-offload", "save-on-cpu"))
def test_no_baseline_is_faster_than_the_bound(name: str, wanted: int) -> None:
    compared = 0
    for seed in itertools.count(100):
        if compared == wanted:
            return
        graph, program = offered(seed, most_ops=8), random_step(seed, most_ops=8)
        peak = simulate(program, keep_everything(program)).peak_bytes
        budget = UNLIMITED if name in WITHOUT_BUDGET else int(0.85 * peak)
        result = get_solver(name)(ask(graph, budget))
        if result.peak_bytes is None or result.time_s is None:
            continue
        exact = solve_exactly(ask(graph, result.peak_bytes, time_limit_s=3))
        assert exact.status is not Status.INFEASIBLE, seed
        assert exact.bound_s is None or exact.bound_s <= result.time_s * (1 + 1e-6), seed
        compared += 1


@pytest.mark.parametrize("name", LARGE)
def test_a_transformer_takes_less_memory(name: str) -> None:
    graph = small_gpt()
    program = build_problem(graph, 1).graph
    kept = simulate(program, keep_everything(program)).peak_bytes
    budget = kept if name in WITHOUT_BUDGET else int(0.85 * kept)
    result = get_solver(name)(ask(graph, budget))
    assert result.peak_bytes < kept and result.time_s >= program.time_s
    simulation = simulate(graph, result.schedule)
    assert simulation.pool_peaks_bytes[1] > 0 or simulation.recomputed > 0


@pytest.fixture(scope="module")
def captured() -> Graph:
    """A small GPT-2 as it is trained, modelled for an H200, with transfers."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        graph = trace(*build("gpt2", layers=2, width=256, heads=4, vocab=512, batch=8, seq=256), roofline="h200")
    return with_trips(graph, 50e9)


@pytest.fixture(scope="module")
def bounds(captured: Graph) -> dict[float, float | None]:
    """By share of the peak of keeping everything, what is proved of the time within it."""
    peak = peak_bytes(remove_offload(captured)[0])
    return {share: solve_exactly(ask(captured, int(share * peak), time_limit_s=5)).bound_s for share in (1.0, 0.85, 0.7)}


@pytest.mark.parametrize("name", slow_among(LARGE, "auto-perf-maxing", "sac-and-offload"))
def test_baselines_on_a_captured_gpt_respect_the_bound(name: str, captured: Graph, bounds: dict[float, float | None]) -> None:
    peak = peak_bytes(remove_offload(captured)[0])
    found = 0
    for share, bound_s in bounds.items():
        result = get_solver(name)(ask(captured, int(share * peak)))
        if result.schedule is None or result.time_s is None:
            assert result.reason is Reason.MEMORY
            continue
        simulation = simulate(captured, result.schedule)
        assert simulation.peak_bytes == result.peak_bytes and simulation.peak_bytes <= share * peak
        assert result.time_s >= bound_s * (1 - 1e-6)
        found += 1
    assert found


@pytest.mark.parametrize("name", RIVALS)
def test_graph_without_transfers_is_inapplicable(name: str) -> None:
    result = get_solver(name)(ask(make_training_chain(5), UNLIMITED))
    assert (result.status, result.reason) == (Status.LIMIT, Reason.INAPPLICABLE)
    assert "offers no transfers to the host" in result.message


@pytest.mark.parametrize("name", RIVALS)
def test_too_small_budget_is_reported_as_memory_limit(name: str) -> None:
    graph = small_gpt() if name in LARGE else with_trips(make_training_chain(5))
    result = get_solver(name)(ask(graph, graph.static_bytes + 2))
    assert (result.status, result.reason) == (Status.LIMIT, Reason.MEMORY)
