"""What PyTorch offers: save lists, and the memory budget with its minimum cuts and knapsack."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from planner.graphs.ir import Graph, Phase
from planner.graphs.schedule import keep_everything
from planner.graphs.simulate import simulate
from planner.graphs.synthetic.draft import Draft
from planner.graphs.synthetic.random_graphs import draw_graph, draw_training_step
from planner.graphs.synthetic.small import make_training_chain
from planner.solvers.baselines import memory_budget, sac
from planner.solvers.baselines.common.torch_ops import COMPUTE_INTENSIVE, extract_base_name
from planner.solvers.baselines.memory_budget import Partition, generate_trials, solve_knapsack
from planner.solvers.baselines.sac import SacParams, SacRule, list_saved_ops, save_lists, select_listed_ops
from planner.solvers.registry import get_solver
from planner.solvers.result import Reason, Status
from tests.support.solvers.answers import ask


def network(blocks: int) -> Graph:
    """Blocks of mm (4 bytes, 4 s), relu (4, 1), mm (4, 4), attention (4, 6), norm (4, 1); each backward reads its op's input.

    All ops belong to the numbered module of their block.
    """
    targets = ("mm", "relu", "mm", "_scaled_dot_product_flash_attention", "native_layer_norm")
    draft = Draft()
    f: list[int] = []
    for block in range(blocks):
        for place, time_s in enumerate((4.0, 1.0, 4.0, 6.0, 1.0)):
            f += draft.add_op(f"{block}.{place}", f[-1:], [4], time_s=time_s)
    (g,) = draft.add_op("loss", f[-1:], [1], time_s=0.5)
    for i in range(len(f) - 1, -1, -1):
        (g,) = draft.add_op(f"backward {i}", [*f[max(0, i - 1) : i], g], [4], phase=Phase.BACKWARD)
    graph = draft.build_graph([g])
    ops = [
        replace(op, target=f"aten.{targets[op.id % 5]}.default", module=f"h.{op.id // 5}") if op.id < 5 * blocks else op
        for op in graph.ops
    ]
    return replace(graph, ops=tuple(ops))


def recomputed(graph: Graph, computed: Sequence[int]) -> list[str]:
    again = [op for place, op in enumerate(computed) if op in computed[:place]]
    return [graph.ops[op].name for op in again]


# --- save lists -----------------------------------------------------------------------------------


def test_base_name_strips_namespace_and_overload() -> None:
    assert extract_base_name("aten.mm.default") == extract_base_name("mm") == "mm"
    assert extract_base_name("aten.relu_.default") == extract_base_name("relu_") == "relu"
    assert extract_base_name("generator.get_state") == "generator"


def test_sac_rules_save_the_listed_ops() -> None:
    graph = network(2)
    assert [op.name for op in list_saved_ops(graph, SacRule.LISTED)] == ["0.0", "0.2", "0.3", "1.0", "1.2", "1.3"]
    assert [op.name for op in list_saved_ops(graph, SacRule.EVERY_SECOND)] == ["0.0", "0.3", "1.0", "1.3"]
    assert [op.name for op in list_saved_ops(graph, SacRule.ATTENTION)] == ["0.3", "1.3"]
    assert [op.name for op in list_saved_ops(graph, SacRule.LISTED, frozenset({"relu", "aten.mm.default"}))][:3] == [
        "0.0",
        "0.1",
        "0.2",
    ]


def test_the_rest_of_a_block_runs_again() -> None:
    # Of each block the norm crosses into the next, or, of the last, is read by the loss; the relu alone is dropped.
    graph = network(2)
    result = sac.solve(ask(graph, 10**6))
    assert recomputed(graph, result.schedule.computed) == ["1.1", "0.1"]
    listed = sac.solve(ask(graph, 10**6, params=SacParams(save=("_scaled_dot_product_flash_attention",))))
    assert recomputed(graph, listed.schedule.computed) == ["1.0", "1.1", "1.2", "0.0", "0.1", "0.2"]
    assert (listed.time_s, listed.settings["save"]) == (graph.time_s + 18, ["_scaled_dot_product_flash_attention"])


def test_the_fastest_save_list_that_fits_or_none() -> None:
    graph = network(4)
    kept = simulate(graph, keep_everything(graph)).peak_bytes
    peaks = {rule: sac.solve(ask(graph, kept), rule=rule).peak_bytes for rule in SacRule}
    assert all(peak is not None and peak < kept for peak in peaks.values())
    too_small = sac.solve(ask(graph, 20))
    assert (too_small.status, too_small.bound_s) == (Status.LIMIT, None)
    assert "selective checkpointing needs" in too_small.message


def test_a_list_of_your_own_that_names_nothing() -> None:
    result = sac.solve(ask(network(2), 10**6, params=SacParams(save=("matmul",))))
    assert result.status is Status.LIMIT
    assert "no op of the forward pass is one of those that sac saves" in result.message


def test_a_list_that_names_nothing_does_not_apply() -> None:
    result = sac.solve(ask(make_training_chain(5), 10**9))
    assert (result.status, result.reason) == (Status.LIMIT, Reason.INAPPLICABLE)
    assert "does not apply" in result.message
    small = sac.solve(ask(network(4), 20))
    assert small.reason is Reason.MEMORY


def test_lists_of_the_kinds_there_are() -> None:
    names = [known.name for known in save_lists(["aten.mm.default", "aten.addmm.default", "aten.convolution.default"])]
    assert names == [
        "matmul + convolution",
        "every second matmul + convolution",
        "convolution",
        "matmul",
        "every second matmul",
        "nothing",
    ]
    assert [known.name for known in save_lists(["aten.relu.default"])] == ["nothing"]


def test_save_lists_select_their_ops() -> None:
    graph = network(3)
    lists = {
        known.name: [op.name for op in select_listed_ops(known, graph)] for known in save_lists([op.target for op in graph.ops])
    }
    assert lists["attention"] == ["0.3", "1.3", "2.3"]
    assert lists["every second matmul"] == ["0.0", "1.0", "2.0"]
    assert lists["attention + every second matmul"] == ["0.0", "0.3", "1.0", "1.3", "2.0", "2.3"]
    assert lists["nothing"] == []


def test_sac_is_tuned_over_its_lists() -> None:
    """For each budget no list alone does better, and with more memory it is never slower."""
    graph = network(6)
    peak = simulate(graph, keep_everything(graph)).peak_bytes
    chosen, times = set(), []
    for budget in range(10, peak + 1, 4):
        tuned = sac.solve(ask(graph, budget))
        alone = [sac.solve(ask(graph, budget), rule=rule).time_s for rule in (SacRule.EVERY_SECOND, SacRule.ATTENTION)]
        alone += [
            sac.solve(ask(graph, budget, params=SacParams(save=tuple(save)))).time_s for save in (["mm"], list(COMPUTE_INTENSIVE))
        ]
        found = [time_s for time_s in alone if time_s is not None]
        if tuned.time_s is None:
            assert not found
            continue
        assert tuned.peak_bytes <= budget
        assert tuned.time_s <= min(found, default=tuned.time_s)
        chosen.add(tuned.settings["saves"])
        times.append(tuned.time_s)
    assert times == sorted(times, reverse=True)
    assert {"attention + matmul", "nothing"} <= chosen and len(chosen) >= 4


# --- the memory budget ----------------------------------------------------------------------------


@given(items=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 9)), min_size=1, max_size=8), room=st.integers(0, 100))
def test_the_knapsack_is_optimal(items: list[tuple[int, int]], room: int) -> None:
    sizes, values = [size / 100 for size, _ in items], [float(value) for _, value in items]
    chosen = solve_knapsack(np.array(sizes), values, room / 100)
    assert sum(items[k][0] for k in chosen) <= room
    sets = (s for n in range(len(items) + 1) for s in combinations(range(len(items)), n))
    best = max(sum(values[k] for k in s) for s in sets if sum(items[k][0] for k in s) <= room)
    assert sum(values[k] for k in chosen) == best


def least_cut(partition: Partition, banned: set[int]) -> float:
    """Least weight of saved tensors from which the backward's can be made without an op of `banned`, by trying all."""
    graph = partition.graph
    tensors = sorted(partition.distance)

    def weight(t: int) -> float:
        return graph.tensors[t].size_bytes * 1.1 ** min(partition.distance[t], 100)

    def suffices(saved: set[int]) -> bool:
        needed = set(partition.read) - saved
        for op in reversed(graph.ops):
            if needed.intersection(op.outputs):
                if op.id in banned:
                    return False
                needed |= {t for t in op.inputs if t in partition.absent} - saved
        return True

    sets = (set(s) for n in range(len(tensors) + 1) for s in combinations(tensors, n))
    return min(sum(map(weight, s)) for s in sets if suffices(s))


@pytest.mark.parametrize("seed", range(12))
def test_the_cut_is_the_least(seed: int) -> None:
    graph = draw_training_step(seed, 8)
    partition = Partition(graph)
    banned = {op.id for op in graph.ops if op.id % 3 == seed % 3}
    found = sum(graph.tensors[t].size_bytes * 1.1 ** min(partition.distance[t], 100) for t in partition.cut(banned))
    assert found == pytest.approx(least_cut(partition, banned), rel=1e-6)


def test_memory_budget_1_saves_non_elementwise_tensors_and_0_none() -> None:
    graph = network(2)
    partition = Partition(graph)
    names = {graph.tensors[t].name for t in partition.choose_saved(1.0)}
    assert names == {"0.0", "0.2", "0.3", "0.4", "1.0", "1.2", "1.3", "loss"}
    assert partition.choose_saved(0.0) == frozenset()


def test_a_smaller_fraction_saves_less_and_takes_longer() -> None:
    graph = network(6)
    partition = Partition(graph)
    saved = [partition.count_bytes(partition.choose_saved(fraction)) for fraction in memory_budget.FRACTIONS]
    assert all(size <= max(fraction * saved[0], 0) for fraction, size in zip(memory_budget.FRACTIONS, saved, strict=True))
    times = [simulate(graph, trial.schedule).time_s for trial in generate_trials(graph, (1.0, 0.6, 0.3, 0.0))]
    assert times == sorted(times)
    assert len(set(times)) == 4


def test_without_names_the_knapsack_is_over_all_ops() -> None:
    graph = make_training_chain(20)
    partition = Partition(graph)
    assert [len(partition.choose_saved(fraction)) for fraction in (1.0, 0.5, 0.0)] == [20, 10, 0]


def test_a_budget_in_bytes_finds_its_fraction() -> None:
    graph = network(6)
    result = memory_budget.solve(ask(graph, int(0.7 * simulate(graph, keep_everything(graph)).peak_bytes)))
    assert result.status is Status.FEASIBLE
    assert 0 < result.settings["fraction"] < 1
    too_small = memory_budget.solve(ask(graph, 10))
    assert (too_small.status, too_small.bound_s) == (Status.LIMIT, None)


# --- any graph ------------------------------------------------------------------------------------


@given(seed=st.integers(0, 10**6), ops=st.integers(2, 30), share=st.floats(0.3, 1.0))
def test_schedules_run_and_fit_on_random_graphs(seed: int, ops: int, share: float) -> None:
    graph = draw_graph(seed, ops)
    graph = replace(graph, ops=tuple(replace(op, phase=Phase.BACKWARD) if 2 * op.id > ops else op for op in graph.ops))
    budget = int(share * simulate(graph, keep_everything(graph)).peak_bytes)
    for result in (
        get_solver("memory-budget")(ask(graph, budget)),
        sac.solve(ask(graph, budget, params=SacParams(save=("synthetic",)))),
        *(get_solver(name)(ask(graph, budget)) for name in ("chen-sqrt", "chen-greedy", "griewank", "rotor")),
    ):
        assert result.status in (Status.OPTIMAL, Status.FEASIBLE, Status.LIMIT)
