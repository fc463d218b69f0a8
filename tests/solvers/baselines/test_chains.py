"""Methods made for chains: segments, binomial checkpointing, the dynamic programme; and what they do elsewhere."""

import math
from collections.abc import Iterator
from functools import cache

import pytest
from hypothesis import given, strategies as st

from graphs.ir import Graph, Phase
from graphs.synthetic.draft import Draft
from graphs.synthetic.random_graphs import draw_graph, draw_training_step
from graphs.synthetic.small import make_training_chain
from graphs.synthetic.transformer import TransformerSize, transformer
from solvers.baselines import chen, griewank, rotor
from solvers.baselines.common.stages import Cuts, ForwardStages, StageRun, cut_places, find_crossings, select_evenly
from solvers.baselines.griewank import count_extra_runs, plan
from solvers.registry import get_solver
from solvers.result import SolveProgress, Status
from tests.support.budgets import peak_bytes
from tests.support.graphs.small_graphs import diamond
from tests.support.solvers.answers import ask

CHAIN_SOLVERS = ("chen-sqrt", "chen-greedy", "griewank", "rotor")


def training_chain_with_internals(layers: int) -> Graph:
    """Layers of two ops, of which the backward reads the first and the layer's input; unit sizes and times."""
    draft = Draft()
    inner: list[int] = []
    outer: list[int] = []
    for i in range(layers):
        inner += draft.add_op(f"inner{i}", outer[-1:], [1])
        outer += draft.add_op(f"outer{i}", inner[-1:], [1])
    (g,) = draft.add_op("loss", outer[-1:], [1])
    for i in range(layers - 1, -1, -1):
        (g,) = draft.add_op(f"g{i}", [g, inner[i], *outer[max(0, i - 1) : i]], [1], phase=Phase.BACKWARD)
    return draft.build_graph([g])


# --- stages ---------------------------------------------------------------------------------------


def test_where_a_graph_may_be_cut() -> None:
    # a -> b -> d, a -> c -> d: what is after b or c is not all made by the op before the cut.
    graph = diamond()
    assert find_crossings(graph) == [{0}, {0, 1}, {0, 1, 2}, {0, 3}, frozenset()]
    assert cut_places(graph, Cuts.ARTICULATION) == [0, 4]
    assert cut_places(graph, Cuts.LINEARISED) == [0, 1, 2, 3, 4]


def test_blocks_of_a_transformer_end_at_articulation_points() -> None:
    graph = transformer(TransformerSize(layers=3, batch=1))
    names = [graph.ops[i].name for i in cut_places(graph, Cuts.ARTICULATION)]
    assert {f"block{i}.{end}" for i in range(3) for end in ("add1", "add2")} <= set(names)
    assert not {f"block{i}.gelu" for i in range(3)} & set(names)


def test_places_are_spaced_evenly() -> None:
    assert select_evenly(range(10), 3) == [3, 6, 9]
    assert select_evenly([4, 7], 5) == [4, 7]
    assert select_evenly([], 3) == []


def test_a_plan_becomes_a_schedule() -> None:
    graph = training_chain_with_internals(2)
    stages = ForwardStages(graph, [1, 4])
    schedule = stages.schedule([StageRun(0, saving=False), StageRun(1, saving=True), StageRun(0, saving=True)])
    names = [graph.ops[op].name for op in schedule.computed]
    assert names == ["inner0", "outer0", "inner1", "outer1", "loss", "g1", "inner0", "g0"]


# --- Chen -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [16, 64, 256, 1024])
def test_memory_of_square_root_segments(length: int) -> None:
    graph = make_training_chain(length)
    result = chen.solve(ask(graph, 10 * length))
    assert result.peak_bytes <= 2 * math.sqrt(length) + 3
    assert graph.time_s < result.time_s <= 1.5 * graph.time_s


def test_greedy_segments_are_of_even_bytes() -> None:
    # With stages of unequal bytes, as many segments of as many stages take more than segments of as many bytes.
    draft = Draft()
    f: list[int] = []
    sizes = [16] * 4 + [1] * 32
    for i, size in enumerate(sizes):
        f += draft.add_op(f"f{i}", f[-1:], [size])
    gradient: tuple[int, ...] = ()
    for i in range(len(sizes) - 1, -1, -1):
        gradient = draft.add_op(f"g{i}", [*f[max(0, i - 1) : i], *gradient], [1], phase=Phase.BACKWARD)
    graph = draft.build_graph()
    even = chen.solve(ask(graph, 10**6))
    greedy = chen.solve(ask(graph, even.peak_bytes - 1), rule="chen-greedy")
    assert greedy.status is Status.FEASIBLE
    assert greedy.time_s <= 1.5 * graph.time_s


def test_segments_that_do_not_fit() -> None:
    result = chen.solve(ask(make_training_chain(64), 10))
    assert (result.status, result.bound_s, result.solver) == (Status.LIMIT, None, "chen-sqrt")
    assert "recomputing segments needs 16 B" in result.message


# --- revolve --------------------------------------------------------------------------------------


@cache
def least_runs(length: int, snapshots: int) -> int:
    """Runs of a stage besides one each for its backward, by trying all places of the next snapshot."""
    if length <= 1:
        return 0
    if snapshots == 1:
        return length * (length - 1) // 2
    return min(m + least_runs(length - m, snapshots - 1) + least_runs(m, snapshots) for m in range(1, length))


@pytest.mark.parametrize("snapshots", range(1, 9))
def test_binomial_checkpointing_runs_the_least_number_of_stages(snapshots: int) -> None:
    for length in range(1, 41):
        steps = list(plan(length, snapshots))
        assert [step.stage for step in steps if step.saving] == list(range(length))[::-1]
        assert len(steps) - length == count_extra_runs(length, snapshots) == least_runs(length, snapshots)


def stored(length: int, snapshots: int) -> Iterator[int]:
    """Snapshots at once while the plan runs: after each save what later runs begin with and was not made since."""
    steps = list(plan(length, snapshots))
    for place, step in enumerate(steps):
        if step.saving:
            # A run begins with the output of the stage before it; where it does not follow on, that is a snapshot.
            made = {s.stage for s in steps[:place]}
            ahead: set[int] = set()
            begun: set[int] = set()
            for s in steps[place + 1 :]:
                if s.stage - 1 not in begun and s.stage - 1 in made:
                    ahead.add(s.stage - 1)
                begun.add(s.stage)
            yield len(ahead) + 1


@pytest.mark.parametrize("snapshots", range(1, 6))
def test_as_many_snapshots_as_said(snapshots: int) -> None:
    assert max(stored(30, snapshots)) == snapshots


@pytest.mark.parametrize("layers", [5, 8, 12])
def test_revolve_with_the_least_memory(layers: int) -> None:
    graph = make_training_chain(layers)
    assert griewank.solve(ask(graph, 3)).time_s == 2 * layers + (layers - 1) * (layers - 2) / 2
    assert griewank.solve(ask(graph, 2)).status is Status.LIMIT


# --- rotor ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", range(2, 10))
def test_the_optimum_of_a_uniform_chain_at_each_budget(budget: int) -> None:
    graph = make_training_chain(8)
    optimum = get_solver("windows")(ask(graph, budget, tolerance=1e-6))
    assert rotor.solve(ask(graph, budget)).time_s == optimum.time_s


@pytest.mark.parametrize("budget", range(4, 12))
def test_about_the_optimum_of_a_chain_with_internals(budget: int) -> None:
    # Not quite: a snapshot that is stored stays until all after it is reversed.
    graph = training_chain_with_internals(5)
    optimum_s, time_s = (get_solver(name)(ask(graph, budget)).time_s for name in ("windows", "rotor"))
    assert optimum_s <= time_s <= optimum_s + 1


@pytest.mark.parametrize("seed", range(5))
def test_no_method_beats_the_bound(seed: int) -> None:
    graph = draw_training_step(seed, 12)
    budget = int(0.7 * peak_bytes(graph))
    bound = get_solver("windows")(ask(graph, budget, tolerance=0.01, time_limit_s=20.0)).bound_s
    assert bound is not None
    times = {name: get_solver(name)(ask(graph, budget)).time_s or math.inf for name in CHAIN_SOLVERS}
    assert all(time_s >= bound * (1 - 1e-9) for time_s in times.values())
    assert times["rotor"] < math.inf


def test_a_transformer_takes_less_time_than_by_segments() -> None:
    graph = transformer(TransformerSize(layers=6, batch=2))
    budget = int(0.5 * peak_bytes(graph))
    times = {name: get_solver(name)(ask(graph, budget)).time_s or math.inf for name in CHAIN_SOLVERS}
    assert times["rotor"] < times["chen-greedy"] < 1.4 * graph.time_s


def test_time_limit_returns_the_best_schedule_so_far() -> None:
    graph = make_training_chain(40)
    said: list[SolveProgress] = []
    late = griewank.solve(ask(graph, 1000, time_limit_s=0.0, on_progress=said.append))
    assert (late.status, len(said), said[0].best_s) == (Status.FEASIBLE, 1, late.time_s)
    stopped = griewank.solve(ask(graph, 2, should_stop=lambda: True))
    assert "(of what was tried before it was stopped), over the budget of 2 B" in stopped.message


# --- any graph ------------------------------------------------------------------------------------


@given(seed=st.integers(0, 10**6), ops=st.integers(2, 30), share=st.floats(0.3, 1.0), name=st.sampled_from(CHAIN_SOLVERS))
def test_schedules_run_and_fit_on_random_graphs(seed: int, ops: int, share: float, name: str) -> None:
    graph = draw_graph(seed, ops)
    result = get_solver(name)(ask(graph, int(share * peak_bytes(graph))))
    assert result.status in (Status.OPTIMAL, Status.FEASIBLE, Status.LIMIT)


@given(seed=st.integers(0, 10**6), layers=st.integers(2, 25), name=st.sampled_from(CHAIN_SOLVERS))
def test_training_steps_are_cut_to_size(seed: int, layers: int, name: str) -> None:
    graph = draw_training_step(seed, layers)
    result = get_solver(name)(ask(graph, peak_bytes(graph)))
    assert result.time_s <= 2 * graph.time_s
