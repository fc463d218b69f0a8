"""Steps as they ran: hashes that tell steps apart, the graphs that solvers take, and the budget that would do."""

import pytest

from graphs.io.graph_document import build_from_dict, convert_to_dict
from graphs.ir import Kind, Phase
from graphs.schedule import Compute, Free, keep_everything
from graphs.simulate import simulate
from planner.train.eager.enough_budget import find_enough_bytes
from planner.train.eager.step_log import LoggedOp, StepLog, build_recorded_step
from tests.support.eager.step_logs import LENGTH, SIZE, add_op, log_of, ops_of_chain, release


def add(log: StepLog, target: str, inputs: tuple[int, ...], made: tuple[int, ...] = (), **facts: object) -> None:
    add_op(log, LoggedOp(target, inputs, made, **facts))


def small_step() -> StepLog:
    """x, w -> h = mm(x, w); h <- relu_(h); y = mm(h, w); g = mm_backward(y, h), the gradient of w; then w <- sub_(w, g)."""
    log = StepLog(held_bytes=100)
    x, w = log.add_storage(20), log.add_storage(30)
    h = log.add_storage(8)
    add(log, "aten.mm.default", (x, w), (h,), time_s=3.0)
    add(log, "aten.relu_.default", (h,), written=(h,), time_s=1.0)
    y = log.add_storage(4)
    add(log, "aten.mm.default", (h, w), (y,), time_s=2.0)
    g = log.add_storage(30)
    add(log, "aten.mm.default", (y, h), (g,), time_s=2.0, backward=True)
    release(log, h)
    add(log, "aten.sub_.Tensor", (w, g), written=(w,), time_s=1.0, recomputable=False)
    release(log, y)
    return log


def test_a_step_becomes_a_graph() -> None:
    step = build_recorded_step(small_step(), {"model": "small"})
    graph = step.graph
    assert [op.name for op in graph.ops] == ["mm", "relu_", "mm_1", "mm_2", "sub_"]
    assert [t.name for t in graph.tensors] == ["held_0", "held_1", "mm", "relu_", "mm_1", "mm_2", "not read in the step"]
    assert step.storages == (0, 1, 2, 2, 3, 4, -1)
    assert [op.inputs for op in graph.ops] == [(0, 1), (2,), (3, 1), (4, 3), (1, 5, 4)]  # y is held until w is updated
    assert [op.outputs for op in graph.ops] == [(2,), (3,), (4,), (5,), ()]
    assert graph.ops[1].overwrites == ((3, 2),)
    assert graph.ops[4].mutates == (1,)
    assert [op.phase for op in graph.ops] == [Phase.FORWARD] * 3 + [Phase.BACKWARD] * 2
    assert graph.kept == {5}
    assert graph.static_bytes == 100
    assert graph.tensors[6].kind is Kind.CONSTANT
    assert build_from_dict(convert_to_dict(graph)) == graph
    assert simulate(graph, keep_everything(graph)).peak_bytes == 100 + 8 + 4 + 30


def test_unpacked_tensors_are_inputs_of_all_ops_of_their_node() -> None:
    log = StepLog(held_bytes=0)
    a, b, loss, g, h, k = (log.add_storage(1) for _ in range(6))
    add(log, "f", (), (a,))
    add(log, "f", (a,), (b,))
    add(log, "loss", (b,), (loss,))
    log.unpack(b)
    add(log, "g", (loss,), (g,), backward=True, node=7)
    add(log, "g", (g, b), (h,), backward=True, node=7)
    add(log, "g", (h,), (k,), backward=True, node=6)
    graph = build_recorded_step(log).graph
    assert [op.inputs for op in graph.ops] == [(), (a,), (b,), (b, loss), (b, g), (h,)]
    assert [op.recomputable for op in graph.ops] == [True, True, False, False, False, False]


def test_keep_everything_schedule_frees_released_storages() -> None:
    graph = build_recorded_step(small_step()).graph
    assert keep_everything(graph).steps == (
        *(Compute(0), Compute(1), Free(2)),
        *(Compute(2), Compute(3), Free(3)),
        *(Compute(4), Free(4)),
    )


@pytest.mark.parametrize("only_saved", [False, True])
def test_only_storages_held_by_the_program_stay_until_released(only_saved: bool) -> None:
    log = StepLog(held_bytes=0)
    a, b, c = (log.add_storage(size) for size in (7, 5, 3))
    add(log, "f", (), (a,))
    add(log, "g", (a,), (b,))
    add(log, "h", (b,), (c,))
    release(log, a)
    log.only_saved.update([a] if only_saved else [])
    graph = build_recorded_step(log).graph
    assert graph.ops[2].inputs == ((1,) if only_saved else (1, 0))


@pytest.mark.parametrize("heuristic", ["dtr", "lru", "dtr-random"])
def test_a_chain_needs_two_gradients_and_an_activation(heuristic: str) -> None:
    step = build_recorded_step(log_of(ops_of_chain()))
    assert find_enough_bytes(step, heuristic, max_recomputation=100.0) == 3 * SIZE


def test_sufficient_budget_without_recomputation_is_the_peak() -> None:
    step = build_recorded_step(log_of(ops_of_chain()))
    assert find_enough_bytes(step, "dtr", max_recomputation=0.0) == (LENGTH + 1) * SIZE
