"""Units of sharded parameters as ops of a graph."""

from dataclasses import replace

import pytest

from graphs.errors import ScheduleError
from graphs.ir import Graph, Kind, Phase
from graphs.options.gather import ADD, GATHER, OVERLAP, REDUCE, InsertedUnits, Shard, Sum, Unit, insert_units
from graphs.options.surroundings import Surroundings
from graphs.options.transfers import find_transfers
from graphs.schedule import Compute, Free, Schedule, keep_everything
from graphs.simulate import simulate
from graphs.synthetic.draft import Draft
from tests.support.graphs.collective_costs import build_cost
from tests.support.solvers.answers import check
from tests.support.solvers.brute_force import fastest

WHOLE, SHARD, BUFFER = 8, 4, 8


def step() -> Graph:
    """Two layers with a parameter each, a loss that takes much memory, and both gradients."""
    draft = Draft()
    first, second, x = (draft.add_static(name, WHOLE) for name in ("first", "second", "x"))
    (a,) = draft.add_op("a", [first, x], [10])
    (b,) = draft.add_op("b", [second, a], [2])
    (loss,) = draft.add_op("loss", [b], [1], workspace_bytes=24)
    gradient, inner = draft.add_op("b_backward", [loss, a, second], [WHOLE, 10], phase=Phase.BACKWARD)
    (other,) = draft.add_op("a_backward", [inner, x], [WHOLE], phase=Phase.BACKWARD)
    return draft.build_graph([gradient, other])


def insert(graph: Graph, *, adds: bool = False, reduces: bool = True) -> InsertedUnits:
    names = {tensor.name: tensor.id for tensor in graph.tensors}
    cost = build_cost(2.0, BUFFER)

    def build(name: str, gradient: int) -> Unit:
        sums = (Sum(f"{name}.sum", (gradient,), WHOLE, build_cost(1.0, 0)),) if adds else ()
        shards, gradients = (Shard(names[name], SHARD, WHOLE),), (gradient,)
        return Unit(name, shards, cost, gradients, SHARD, cost if reduces else None, sums)

    gradients = (("first", "a_backward"), ("second", "b_backward"))
    return insert_units(graph, [build(name, names[gradient]) for name, gradient in gradients], frozenset())


def test_units_are_gathered_before_their_readers_and_reduced_behind_their_gradients() -> None:
    inserted = insert(step())
    graph = inserted.graph
    order = ["first.gather", "a", "second.gather", "b", "loss", "b_backward", "second.reduce", "a_backward", "first.reduce"]
    assert [op.name for op in graph.ops] == order
    assert [None if source is None else step().ops[source].name for source in inserted.sources] == [
        None if "." in name else name for name in order
    ]
    assert [op.target for op in graph.ops if op.target in (GATHER, REDUCE)] == [GATHER, GATHER, REDUCE, REDUCE]
    assert all(op.recomputable is (op.target != REDUCE) for op in graph.ops)
    assert {graph.tensors[t].name for t in graph.kept} == {"first.gradients", "second.gradients"}
    assert graph.static_bytes_by_kind == {Kind.PARAMETER: WHOLE + 2 * SHARD}  # the input, and both shards


def test_optional_ops_replace_the_same_ops() -> None:
    graph = step()
    alternative = replace(graph.ops[1], id=5, name="b.other", optional=True, replaces=(1,))
    tensors = [replace(t, producers=(*t.producers, 5)) if t.id in alternative.outputs else t for t in graph.tensors]
    inserted = insert(replace(graph, ops=(*graph.ops, alternative), tensors=tuple(tensors))).graph
    assert inserted.ops[-1].name == "b.other"
    assert [inserted.ops[op].name for op in inserted.ops[-1].replaces] == ["b"]


def test_a_unit_may_be_gathered_again_and_is_reduced_once() -> None:
    graph = insert(step()).graph
    number = {op.name: op.id for op in graph.ops}
    kept = keep_everything(graph)
    (second,) = graph.ops[number["second.gather"]].outputs
    at = next(i for i, done in enumerate(kept.steps) if done == Compute(number["b_backward"]))
    again = Schedule((*kept.steps[:at], Free(second), Compute(number["second.gather"]), *kept.steps[at:]))
    assert simulate(graph, again).time_s == simulate(graph, kept).time_s + 2.0
    with pytest.raises(ScheduleError):
        simulate(graph, Schedule((*kept.steps, Compute(number["second.reduce"]))))


@pytest.mark.parametrize("reduces", [False, True])
def test_gradients_are_added_to_sums_as_soon_as_they_are_there(reduces: bool) -> None:
    graph = insert(step(), adds=True, reduces=reduces).graph
    backward = [op for op in graph.ops if op.phase is Phase.BACKWARD]
    kept = ["second.reduce", "first.reduce"] if reduces else []
    order = ["b_backward", "second.sum.add", *kept[:1], "a_backward", "first.sum.add", *kept[1:]]
    assert [op.name for op in backward] == order
    assert all(not op.recomputable for op in backward if op.target in (ADD, REDUCE))
    read = [name for unit in ("second", "first") for name in (f"{unit}.sum", f"{unit}.sum.added")]
    assert [graph.tensors[t].name for op in backward if op.target == REDUCE for t in op.inputs] == read[: 2 * len(kept)]
    transfers = find_transfers(OVERLAP.apply(graph, Surroundings()))
    assert all(transfers[op.id].may_be_early is (op.target == GATHER) for op in graph.ops if op.id in transfers)
    assert graph.static_bytes_by_kind[Kind.BUFFER] == 2 * WHOLE
    assert len(graph.kept) == len(kept)


@pytest.mark.parametrize(("adds", "reduces"), [(False, True), (True, False), (True, True)])
def test_the_solver_gathers_again_as_brute_force_does(adds: bool, reduces: bool) -> None:
    graph = insert(step(), adds=adds, reduces=reduces).graph
    peak = simulate(graph, keep_everything(graph)).peak_bytes
    gathered = set[int]()
    for budget_bytes in range(graph.static_bytes, peak + 1):
        result = check(graph, budget_bytes, fastest(graph, budget_bytes))
        if result.schedule is not None:
            gathered.add(sum(graph.ops[op].target == GATHER for op in result.schedule.computed))
    assert gathered == {2, 3}
