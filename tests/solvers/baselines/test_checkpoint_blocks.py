"""Checkpoint every block: which ops are a block, what stays in memory, and what is computed again."""

import re
from dataclasses import replace

import pytest
from torch._subclasses.fake_tensor import FakeTensorMode

from graphs.ir import Graph, Phase
from graphs.schedule import Compute, Free, keep_everything
from graphs.simulate import simulate
from graphs.synthetic.draft import Draft
from graphs.synthetic.small import make_training_chain
from graphs.synthetic.transformer import TransformerSize, transformer
from planner.capture.workload.models import build
from planner.measure.tracing import trace
from solvers.baselines import sac
from solvers.baselines.checkpoint_blocks import checkpoint_blocks, solve
from solvers.baselines.common.blocks import ModuleTree, block_of, count_levels, find_blockings
from solvers.baselines.common.recomputation import recompute_groups
from solvers.result import Reason, Status
from tests.support.solvers.answers import ask


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
