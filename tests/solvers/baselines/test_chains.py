"""Methods made for chains, and blocks that are checkpointed: which ops they are, and what is kept and computed again."""

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from planner.capture.workload.models import build
from planner.graphs.ir import Graph, Phase
from planner.graphs.schedule import Compute, Free, keep_everything
from planner.graphs.simulate import simulate
from planner.graphs.synthetic.draft import Draft
from planner.graphs.synthetic.random_graphs import draw_graph, draw_training_step
from planner.graphs.synthetic.small import make_training_chain
from planner.graphs.synthetic.transformer import TransformerSize, transformer
from planner.measure.tracing import trace
from planner.solvers.baselines import chen, griewank, rotor, sac
from planner.solvers.baselines.checkpoint_blocks import checkpoint_blocks, solve
from planner.solvers.baselines.common.blocks import ModuleTree, block_of, count_levels, find_blockings
from planner.solvers.baselines.common.recomputation import recompute_groups
from planner.solvers.baselines.common.stages import Cuts, ForwardStages, StageRun, cut_places, find_crossings, select_evenly
from planner.solvers.baselines.griewank import count_extra_runs, plan
from planner.solvers.registry import get_solver
from planner.solvers.result import Reason, SolveProgress, Status
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


def named_transformer(layers: int) -> Graph:
    """A transformer whose ops have module paths like those of a traced one."""
    graph = transformer(TransformerSize(layers=layers, batch=2))
    return replace(graph, ops=tuple(replace(op, module=re.sub(r"^block(\d+)", r"model.h.\1", op.name)) for op in graph.ops))


def two_blocks() -> Graph:
    """Forward a1, a2 (module h.0), b1, b2 (h.1), loss; backward in reverse; unit sizes and times.

    Backward of each op reads its input, its output and the gradient.
    """
    draft = Draft()
    f: list[int] = []
    for name in ("a1", "a2", "b1", "b2", "loss"):
        f += draft.add_op(name, f[-1:], [1])
    gradient: tuple[int, ...] = ()
    for i in range(4, -1, -1):
        gradient = draft.add_op(
            f"{draft.ops[i].name}_backward", [*f[max(0, i - 1) : i + 1], *gradient], [1], phase=Phase.BACKWARD
        )
    graph = draft.build_graph(gradient)
    modules = {"a": "h.0.x", "b": "h.1.x", "l": ""}
    return replace(graph, ops=tuple(replace(op, module=modules[op.name[0]]) for op in graph.ops))


def test_blocks_are_numbered_modules() -> None:
    assert block_of("model.h.0.attn.c_proj", 1) == "model.h.0"
    assert block_of("model.1.2.branch.0", 1) == "model.1"
    assert block_of("model.1.2.branch.0", 2) == "model.1.2"
    assert block_of("model.1.2.branch.0", 9) == "model.1.2.branch.0"
    assert block_of("model.layer1.conv", 1) == block_of("", 1) == ""


def test_a_block_runs_again_just_before_its_backward() -> None:
    graph = two_blocks()
    schedule = checkpoint_blocks(graph, 1)
    names = [graph.ops[op].name for op in schedule.computed]
    forward = ["a1", "a2", "b1", "b2", "loss"]
    # Nothing but a2 and b2 crosses a boundary.
    backward = ["loss_backward", "b1", "b2_backward", "b1_backward", "a1", "a2_backward", "a1_backward"]
    assert names == forward + backward
    # Before the backward, a1 and b1 are free and a2 and b2 are not.
    before = schedule.steps[: schedule.steps.index(Compute(5))]
    assert {graph.tensors[s.tensor].name for s in before if isinstance(s, Free)} == {"a1", "b1"}
    assert simulate(graph, schedule).time_s == 12


@pytest.mark.parametrize("layers", [2, 5])
def test_of_a_transformer_only_boundaries_stay(layers: int) -> None:
    graph = named_transformer(layers)
    assert count_levels(graph) == 1
    schedule = checkpoint_blocks(graph, 1)
    simulation, kept = simulate(graph, schedule), simulate(graph, keep_everything(graph))
    assert simulation.peak_bytes < kept.peak_bytes
    again = [op for op in set(schedule.computed) if schedule.computed.count(op) > 1]
    assert simulation.recomputed == len(again)
    assert {block_of(graph.ops[op].module, 1) for op in again} == {f"model.h.{i}" for i in range(layers)}
    assert all(graph.ops[op].phase is Phase.FORWARD for op in again)
    # At the end of the forward pass there are of each block its output and the random states.
    end = schedule.steps.index(Compute(next(op.id for op in graph.ops if op.phase is Phase.BACKWARD)))
    made = {t for s in schedule.steps[:end] if isinstance(s, Compute) for t in graph.ops[s.op].outputs}
    live = made - {s.tensor for s in schedule.steps[:end] if isinstance(s, Free)}
    inside = [graph.ops[graph.tensors[t].producers[0]] for t in live]
    left = {op.name.split(".", 1)[1] for op in inside if block_of(op.module, 1)}
    assert left == {"add2", "dropout1.state", "dropout2.state", "dropout3.state"}


def test_memory_of_more_layers_grows_by_boundaries_only() -> None:
    peaks = [simulate(g := named_transformer(n), checkpoint_blocks(g, 1)).peak_bytes - g.static_bytes for n in (4, 5, 6)]
    keeping = [simulate(g := named_transformer(n), keep_everything(g)).peak_bytes - g.static_bytes for n in (4, 5, 6)]
    assert peaks[2] - peaks[1] == peaks[1] - peaks[0] < (keeping[1] - keeping[0]) / 10


def test_the_level_is_chosen_by_the_budget() -> None:
    draft = Draft()
    f: list[int] = []
    for i in range(8):
        f += draft.add_op(f"f{i}", f[-1:], [100])
    gradient: tuple[int, ...] = ()
    for i in range(7, -1, -1):
        gradient = draft.add_op(f"g{i}", [*f[max(0, i - 1) : i], *gradient], [10], phase=Phase.BACKWARD)
    graph = draft.build_graph(gradient)
    # Stages of four layers, in pairs.
    graph = replace(
        graph, ops=tuple(replace(op, module=f"s.{int(op.name[1:]) // 4}.{int(op.name[1:]) // 2}") for op in graph.ops)
    )
    stages, pairs = (simulate(graph, checkpoint_blocks(graph, level)) for level in (1, 2))
    assert stages.time_s > pairs.time_s
    large = solve(ask(graph, max(stages.peak_bytes, pairs.peak_bytes)))
    assert (large.status, large.settings, large.time_s) == (Status.FEASIBLE, {"level": 2}, pairs.time_s)
    small = solve(ask(graph, min(stages.peak_bytes, pairs.peak_bytes)))
    assert small.schedule is not None
    too_small = solve(ask(graph, min(stages.peak_bytes, pairs.peak_bytes) - 1))
    assert too_small.status is Status.LIMIT
    assert "checkpointing every block needs" in too_small.message


def test_a_graph_without_blocks_says_so() -> None:
    result = solve(ask(make_training_chain(5), 10**9))
    assert result.status is Status.LIMIT
    assert result.reason is Reason.INAPPLICABLE
    assert "no blocks" in result.message


# --- modules by depth -----------------------------------------------------------------------------


def in_modules(*paths: str) -> Graph:
    """A forward pass of one op for each path, and a backward op that reads the last."""
    draft = Draft()
    f: list[int] = []
    for i, _ in enumerate(paths):
        f += draft.add_op(f"f{i}", f[-1:], [1])
    draft.add_op("backward", f[-1:], [1], phase=Phase.BACKWARD)
    graph = draft.build_graph([len(paths)])
    return replace(graph, ops=tuple(replace(op, module=path) for op, path in zip(graph.ops, (*paths, paths[-1]), strict=True)))


def modules(graph: Graph, depth: int, *, layers: bool = False) -> list[str | None]:
    return list(ModuleTree(graph).list_modules_at(depth, layers=layers))[:-1]


def test_modules_some_steps_below_the_model() -> None:
    graph = in_modules("m.stem.a", "m.stem.b", "m.pool", "m.body.x.a", "m.body", "m.body.y", "", "m.head")
    assert modules(graph, 1) == ["m.stem", "m.stem", None, "m.body", "m.body", "m.body", None, None]
    assert modules(graph, 1, layers=True) == ["m.stem", "m.stem", "m.pool", "m.body", "m.body", "m.body", None, "m.head"]
    # What a module computes itself beside those inside it is in none of them.
    assert modules(graph, 2) == [None, None, None, "m.body.x", None, None, None, None]


def test_modules_of_a_list_are_separate_blocks() -> None:
    graph = in_modules("m.down.0.a", "m.down.0.b", "m.pool", "m.down.1.a", "m.down.1.b", "m.pool", "m.seq.0", "m.seq.1")
    assert ModuleTree(graph).lists == {("m", "down")}
    assert modules(graph, 1) == ["m.down.0", "m.down.0", None, "m.down.1", "m.down.1", None, "m.seq", "m.seq"]
    assert modules(graph, 1, layers=True)[2::3] == ["m.pool", "m.pool call 2"]


def test_a_module_that_is_called_twice_is_no_list() -> None:
    graph = in_modules("m.enc.a", "m.enc.b", "m.mix", "m.enc.a", "m.enc.b")
    assert ModuleTree(graph).lists == frozenset()
    assert modules(graph, 1) == ["m.enc", "m.enc", None, "m.enc call 2", "m.enc call 2"]


def test_ways_that_divide_alike_are_tried_once() -> None:
    graph = in_modules("m.h.0.a", "m.h.0.b", "m.h.1.a", "m.h.1.b", "m.head")
    divided = [way.blocks[:-1] for way in find_blockings(graph)]
    assert len(set(divided)) == len(divided)
    assert (("m.h.0",) * 2 + ("m.h.1",) * 2 + (None,)) in divided
    assert (("m.h",) * 4 + (None,)) in divided
    assert find_blockings(in_modules("m", "m", "m")) == []


@pytest.fixture(scope="module")
def unet() -> Graph:
    """As it is trained, modelled for an H200."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        return trace(*build("unet", batch=4), roofline="h200")


def test_the_blocks_of_a_unet_are_stem_down_and_up(unet: Graph) -> None:
    way = next(way for way in find_blockings(unet) if way.settings == {"depth": 1})
    names = {"model.stem", *(f"model.{part}.{k}" for part in ("down", "up") for k in range(4))}
    assert set(way.blocks) == {None, *names}
    found, kept = simulate(unet, recompute_groups(unet, way.blocks)), simulate(unet, keep_everything(unet))
    assert found.peak_bytes / kept.peak_bytes == pytest.approx(0.589, abs=0.002)
    assert found.time_s / kept.time_s - 1 == pytest.approx(0.297, abs=0.002)


def test_a_unet_is_checkpointed_at_70_percent_of_its_peak(unet: Graph) -> None:
    peak = simulate(unet, keep_everything(unet)).peak_bytes
    blocks, selective = solve(ask(unet, int(0.7 * peak))), sac.solve(ask(unet, int(0.7 * peak)))
    assert selective.time_s < blocks.time_s < 1.3 * unet.time_s
    # By single layers, as numbered modules alone would have it, it needs more.
    numbered = [simulate(unet, checkpoint_blocks(unet, level)).peak_bytes for level in range(1, count_levels(unet) + 1)]
    assert min(numbered) > 0.7 * peak
