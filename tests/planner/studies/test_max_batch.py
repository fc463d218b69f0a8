"""The largest batch: equal to trying them all, honest about what is not known, and refused in one line."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, strategies as st

from planner.capture.workload.workload import parse_spec
from planner.graphs.errors import GraphError, InfeasibleError, LimitError
from planner.graphs.ir import Graph, Phase
from planner.graphs.schedule import keep_everything
from planner.graphs.simulate import simulate
from planner.graphs.synthetic.draft import Draft
from planner.measure.scaling import GraphFit, has_same_ops
from planner.memory.least_memory import StopWhenDecided
from planner.memory.reserved import predict_counted_bytes, predict_reserved_at
from planner.settings.counted_memory import CountedMemory
from planner.settings.option_settings import RECOMPUTATION, build_option_settings
from planner.settings.plan import PlanSettings
from planner.solvers.registry import get_solver
from planner.solvers.request import Request
from planner.solvers.result import Result, SolveProgress, Status
from planner.studies.max_batch import find_largest, find_max_batch
from planner.studies.sizes import METHODS, LargestSize, Wanted, list_samples
from planner.studies.solves import solve_in_order
from planner.studies.workload_sizes import SizedModel
from planner.studies.workload_tracing import Tracing
from tests.support.marks import slow
from tests.support.solvers.answers import ask, script_solver


def chain(batch: int) -> Graph:
    """Six layers in two blocks and their backward: 1000 bytes of weights, sizes and times affine in the batch."""
    draft = Draft()
    draft.add_static("weights", 1000)
    f: list[int] = []
    for i in range(6):
        f += draft.add_op(f"f{i}", f[-1:], [100 * batch], time_s=1 + 0.5 * batch)
    gradient: tuple[int, ...] = ()
    for i in range(5, -1, -1):
        inputs = [*f[max(0, i - 1) : i + 1], *gradient]
        gradient = draft.add_op(f"g{i}", inputs, [100 * batch], time_s=2 + batch, phase=Phase.BACKWARD)
    graph = draft.build_graph(gradient, batch=batch)
    return replace(graph, ops=tuple(replace(op, module=f"h.{int(op.name[1:]) // 3}") for op in graph.ops))


def note_sizes() -> tuple[Callable[[int], Graph], list[int]]:
    """Return ``chain``, and the sizes that it is asked for."""
    traced: list[int] = []

    def graph_of(batch: int) -> Graph:
        traced.append(batch)
        return chain(batch)

    return graph_of, traced


def by_method(answers: tuple[LargestSize, ...]) -> dict[str, LargestSize]:
    assert [answer.method for answer in answers] == [method for method, _ in METHODS]
    return {answer.method: answer for answer in answers}


def brute_force(graph_of: Callable[[int], Graph], solver: str, wanted: Wanted, upto: int) -> int:
    """The largest batch up to `upto` that `solver` fits, each tried to the end."""
    best = 0
    for batch in range(1, upto + 1):
        graph = graph_of(batch)
        result = get_solver(solver)(ask(graph, wanted.budget_bytes, tolerance=1e-4))
        cap = float("inf") if wanted.max_overhead is None else (1 + wanted.max_overhead) * graph.time_s
        if result.time_s is not None and result.time_s <= cap:
            best = batch
    return best


@pytest.mark.parametrize("limit", [9, *slow(30)])
@pytest.mark.parametrize("max_overhead", [None, 0.05, 0.5])
@pytest.mark.parametrize("budget", [3_000, 9_000])
def test_max_batch_equals_brute_force(budget: int, max_overhead: float | None, limit: int) -> None:
    wanted = Wanted(budget, max_overhead, limit)
    answers = by_method(find_max_batch(chain, wanted))
    for method, solver in METHODS:
        answer = answers[method]
        expected = brute_force(chain, solver, wanted, min(limit, 25))
        assert (answer.size or 0) == expected, method
        assert answer.at_limit == (expected == limit)
        assert (answer.complete, answer.undecided, answer.extrapolated) == (True, None, False)
        if answer.size is not None:
            simulation = simulate(chain(answer.size), answer.result.schedule)
            assert simulation.peak_bytes == answer.result.peak_bytes <= budget
            assert answer.overhead <= (max_overhead if max_overhead is not None else 10)
    assert answers["keep everything"].overhead == 0
    assert (answers["optimal"].size or 0) >= (answers["checkpoint every block"].size or 0)


@pytest.mark.slow
def test_max_batch_of_a_traced_model_equals_brute_force() -> None:
    batches = SizedModel(
        parse_spec("zoo:mlp,layers=3,width=32,classes=8"), "batch", Tracing(PlanSettings(roofline="h200")), way_out=""
    )
    kept = cached(batches.trace_graph)
    graph = kept(8)
    peak_bytes = simulate(graph, keep_everything(graph)).peak_bytes
    wanted = Wanted(peak_bytes, 0.3, limit=14, memory=CountedMemory.ALLOCATED)
    answers = by_method(find_max_batch(kept, wanted))
    for method, solver in METHODS:
        assert (answers[method].size or 0) == brute_force(kept, solver, wanted, 14), method
    assert answers["keep everything"].size in range(8, 14)


def large(batch: int) -> Graph:
    """The chain with tensors of megabytes, on a GPU: 12 MiB of weights."""
    graph = chain(batch)
    sized = (replace(t, size_bytes=t.size_bytes * 2**13 + (4 * 2**20 if t.static else 0)) for t in graph.tensors)
    return replace(graph, tensors=tuple(sized), provenance={"device": "h200"})


def test_max_batch_on_cuda_fits_reserved_memory() -> None:
    budget = 200 * 2**20
    wanted = Wanted(budget, limit=40)
    reserved = by_method(find_max_batch(large, wanted))
    allocated = by_method(find_max_batch(large, replace(wanted, memory=CountedMemory.ALLOCATED)))
    for method, _ in METHODS:
        answer = reserved[method]
        needed = predict_reserved_at(large(answer.size), answer.result.schedule, CountedMemory.RESERVED, budget)
        assert answer.reserved_bytes == needed and needed <= budget
        assert answer.size <= (allocated[method].size or 0)
    kept = reserved["keep everything"].size
    larger = large(kept + 1)
    assert predict_counted_bytes(larger, keep_everything(larger), CountedMemory.RESERVED) > budget
    assert (allocated["keep everything"].reserved_bytes or 0) > budget


def test_workspaces_of_libraries_alone_may_exceed_a_budget() -> None:
    def with_products(batch: int) -> Graph:
        graph = large(batch)
        return replace(graph, ops=tuple(replace(op, target="aten.mm.default") for op in graph.ops))

    with pytest.raises(InfeasibleError, match="workspaces of libraries"):
        find_max_batch(with_products, Wanted(60 * 2**20, limit=10))


def cached(graph_of: Callable[[int], Graph]) -> Callable[[int], Graph]:
    graphs: dict[int, Graph] = {}

    def get(batch: int) -> Graph:
        if batch not in graphs:
            graphs[batch] = graph_of(batch)
        return graphs[batch]

    return get


@given(st.integers(1, 70), st.integers(1, 60), st.integers(0, 60), st.integers(0, 60))
def test_the_largest_number_is_found_from_anywhere(first: int, limit: int, low: int, answer: int) -> None:
    low = min(low, limit)
    asked: list[int] = []

    def fits(n: int) -> bool:
        assert low < n <= limit and n not in asked
        asked.append(n)
        return n <= answer

    assert find_largest(fits, first=first, limit=limit, low=low) == max(low, min(answer, limit))


def test_few_graphs_are_traced() -> None:
    graph_of, traced = note_sizes()
    answers = by_method(find_max_batch(graph_of, Wanted(1_000_000, limit=10_000)))
    assert answers["keep everything"].size > 500
    assert len(traced) == len(set(traced)) <= 8


def test_with_guesses_only_the_sizes_next_to_them_are_traced() -> None:
    expected = by_method(find_max_batch(chain, Wanted(9_000, limit=30)))
    graph_of, traced = note_sizes()
    guesses = {method: answer.size or 1 for method, answer in expected.items()}
    answers = by_method(find_max_batch(graph_of, Wanted(9_000, limit=30, guesses=guesses)))
    assert {method: answer.size for method, answer in answers.items()} == guesses
    assert set(traced) <= {size + more for size in guesses.values() for more in (0, 1)}


def test_a_budget_too_small_for_one_is_refused() -> None:
    with pytest.raises(InfeasibleError, match=r"not even a batch of 1: budget 1\.10 kB is below"):
        find_max_batch(chain, Wanted(1100))
    with pytest.raises(InfeasibleError, match=r"overhead of at most 1.00%: raise the budget or the allowed overhead"):
        find_max_batch(chain, Wanted(1500, 0.01))


def test_undecided_batch_sizes_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def solve(request: Request) -> Result:
        graph = request.graph
        return Result(graph, request.budget_bytes, Status.LIMIT, None, graph.time_s, "windows", 1.0, message="out of time")

    script_solver(monkeypatch, "windows", solve)
    answer = by_method(find_max_batch(chain, Wanted(4_000, 0.01, limit=10)))["optimal"]
    # What keeping everything fits, the optimal schedule does.
    assert (answer.size, answer.undecided) == (4, 5)
    with pytest.raises(LimitError, match="not even a batch of 1: out of time"):
        find_max_batch(chain, Wanted(1350))


def test_a_solve_ends_once_the_question_is_answered() -> None:
    def after(progress: SolveProgress, *, limit_s: float = 10.0) -> bool:
        decision = StopWhenDecided(limit_s)
        decision(progress)
        return decision.is_reached()

    assert after(SolveProgress(1, "", 10.0, 9.0))
    assert not after(SolveProgress(1, "", 10.5, 9.0))
    assert not after(SolveProgress(1, "", None, 10.0))
    assert after(SolveProgress(1, "", None, 10.5))
    assert after(SolveProgress(1, "", 99.0, 50.0), limit_s=math.inf)
    assert not after(SolveProgress(1, "", None, 50.0), limit_s=math.inf)


def test_the_proof_of_the_last_solve_is_that_of_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def prove_little_first(*given: Any, tolerance: float, **settings: Any) -> Result:
        result = solve_in_order(*given, tolerance=tolerance, **settings)
        return result if tolerance < 1.0 else result.map_to(bound_s=1.0)

    monkeypatch.setattr("planner.studies.max_batch.solve_in_order", prove_little_first)
    optimal = by_method(find_max_batch(chain, Wanted(3_000, limit=9)))["optimal"]
    assert (optimal.size, optimal.gap) == (5, pytest.approx(0.0, abs=1e-3))


def test_stopped_search_returns_its_best_answers() -> None:
    asked: list[str] = []
    answers = find_max_batch(chain, Wanted(4_000, limit=10), on_activity=asked.append, should_stop=lambda: len(asked) > 6)
    assert answers[0].size is not None
    assert not answers[-1].complete
    with pytest.raises(LimitError, match="stopped before any batch"):
        find_max_batch(chain, Wanted(4_000), should_stop=lambda: True)


def test_beyond_the_memory_of_the_device_lines_do() -> None:
    def graph_of(batch: int) -> Graph:
        if batch > 16:
            raise MemoryError
        return chain(batch)

    budget = Wanted(30_000, limit=100)
    exact, lines = by_method(find_max_batch(chain, budget)), by_method(find_max_batch(graph_of, budget))
    for method, _ in METHODS:
        assert lines[method].size == exact[method].size
        assert lines[method].extrapolated == ((exact[method].size or 0) > 16)

    def nothing(batch: int) -> Graph:
        raise MemoryError

    with pytest.raises(LimitError, match="ran out of memory: use --roofline"):
        find_max_batch(nothing, budget)


def test_a_line_through_two_graphs_gives_the_third() -> None:
    line = GraphFit({(2,): chain(2), (4,): chain(4)})
    for batch in (1, 2, 3, 4, 50):
        graph = line.build_graph((batch,))
        assert graph.tensors == chain(batch).tensors
        assert [op.time_s for op in graph.ops] == pytest.approx([op.time_s for op in chain(batch).ops])
        assert has_same_ops(graph, chain(batch))
    other = replace(chain(4), kept=frozenset())
    with pytest.raises(GraphError, match=r"different ops at sizes \(4,\)"):
        GraphFit({(2,): chain(2), (4,): other})


def test_offload_fits_more_and_both_judges_agree() -> None:
    """Blocks' outputs may run again, yet what is read last is made first: the host takes it."""
    options = build_option_settings(["offload"], link=1e6, host_budget=10**6)
    for budget, overhead in ((3_000, None), (9_000, None), (9_000, 0.3)):
        wanted = Wanted(budget, overhead, limit=40, options=options)
        *without, offloading = find_max_batch(chain, wanted)
        assert (
            by_method(tuple(without))["optimal"].size
            == by_method(find_max_batch(chain, replace(wanted, options=RECOMPUTATION)))["optimal"].size
        )
        assert (offloading.method, offloading.undecided) == ("with offload", None)
        assert offloading.size >= (without[-1].size or 0)
        simulation = simulate(options.apply(chain(offloading.size)), offloading.result.schedule)
        assert simulation.peak_bytes == offloading.result.peak_bytes <= budget
        assert offloading.overhead <= (10 if overhead is None else overhead)
    assert offloading.size > (without[-1].size or 0)


def test_sizes_are_multiples_of_the_unit() -> None:
    wanted = Wanted(9_000, limit=10, varies="seq", unit=4)
    units = by_method(find_max_batch(chain, replace(wanted, unit=1, varies="batch")))
    for method, answer in by_method(find_max_batch(chain, wanted)).items():
        assert answer.size == 4 * (units[method].size or 0)
    with pytest.raises(InfeasibleError, match=r"not even seq=4: budget 1\.10 kB"):
        find_max_batch(chain, replace(wanted, budget_bytes=1100))
    assert list_samples("batch", 1) == list_samples("batch", 100) == (8, 16)
    assert list_samples("seq", 1) == (16, 8, 4) and list_samples("seq", 64) == (64, 32, 16)
