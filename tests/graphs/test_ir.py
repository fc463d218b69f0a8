"""The IR with pools, streams and optional ops: validation, and unchanged behaviour without them."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from types import FrameType
from typing import Any

import pytest

from planner.graphs.checks import check_graph, check_plain
from planner.graphs.errors import GraphError
from planner.graphs.ir import Graph, Op, Phase, Tensor
from planner.graphs.options import remove_options
from planner.graphs.pools import COMPUTE, DEVICE, DEVICE_TO_HOST, HOST_TO_DEVICE, Pool
from planner.graphs.schedule import keep_everything
from planner.graphs.synthetic.draft import Draft
from planner.graphs.synthetic.random_graphs import draw_graph, draw_training_step
from planner.graphs.synthetic.small import make_chain
from planner.plans.solve import solve
from planner.show.facts.graph import collect_graph_facts
from planner.solvers.registry import get_solver
from tests.support.graphs.small_graphs import diamond
from tests.support.solvers.answers import ask

HOST = Pool("host", DEVICE_TO_HOST, 8)
DEVICE_POOL = Pool(DEVICE, COMPUTE)


def parts() -> dict[str, Any]:
    """f makes a from the static w, g makes b from a; a can go to the host and come back; fast stands for both."""
    tensors = (
        Tensor(0, "w", 1, ()),
        Tensor(1, "a", 4, (0, 3)),
        Tensor(2, "b", 2, (1, 4)),
        Tensor(3, "a@host", 4, (2,), pool="host"),
    )
    ops = (
        Op(0, "f", "f", (0,), (1,), 1.0),
        Op(1, "g", "g", (1,), (2,), 1.0, phase=Phase.BACKWARD),
        Op(2, "out", "copy", (1,), (3,), 2.0, stream=DEVICE_TO_HOST, optional=True),
        Op(3, "in", "copy", (3,), (1,), 2.0, stream=HOST_TO_DEVICE, optional=True),
        Op(4, "fast", "fast", (0,), (2,), 1.5, optional=True, replaces=(0, 1), differs="rounding"),
    )
    return {"ops": ops, "tensors": tensors, "kept": frozenset({2}), "pools": (DEVICE_POOL, HOST)}


def with_changed(kind: str, index: int, **changes: Any) -> Graph:
    made = parts()
    made[kind] = tuple(replace(part, **changes) if i == index else part for i, part in enumerate(made[kind]))
    return Graph(**made)


def test_graph_with_pools_streams_and_optional_ops() -> None:
    graph = Graph(**parts())
    assert graph.streams == (COMPUTE, DEVICE_TO_HOST, HOST_TO_DEVICE)
    assert [op.name for op in graph.program] == ["f", "g"]
    assert graph.time_s == 2.0
    assert graph.static_bytes_by_pool == {DEVICE: 1, "host": 0}
    assert [op.exact for op in graph.ops] == [True, True, True, True, False]
    assert [t.static for t in graph.tensors] == [True, False, False, False]
    assert not graph.plain and make_chain(3).plain


def test_static_bytes_are_counted_by_pool() -> None:
    made = parts()
    tensors = (*made["tensors"], Tensor(4, "state", 5, (), pool="host"))
    graph = Graph(**{**made, "tensors": tensors})
    assert graph.static_bytes == 1 and sum(graph.static_bytes_by_kind.values()) == 1
    assert graph.static_bytes_by_pool == {DEVICE: 1, "host": 5}


@pytest.mark.parametrize(
    ("pools", "said"),
    [
        ((), "the first pool of a graph is 'device', which the stream 'compute' owns"),
        ((HOST, DEVICE_POOL), "the first pool of a graph is 'device'"),
        ((Pool(DEVICE, HOST_TO_DEVICE), HOST), "the first pool of a graph is 'device', which the stream 'compute' owns"),
        ((Pool(DEVICE, COMPUTE, 5), HOST), "pool 'device' has capacity 5: its capacity is the budget of a solve"),
        ((DEVICE_POOL, HOST, HOST), "pool 'host' appears twice"),
        ((DEVICE_POOL, Pool("host", "")), "pool 'host' is owned by the stream '': both need a name"),
        ((DEVICE_POOL, Pool("host", COMPUTE, -1)), "pool 'host' has capacity -1"),
        ((DEVICE_POOL,), "tensor 'a@host' is in the pool 'host': the graph has 'device'"),
    ],
)
def test_invalid_pools_raise(pools: tuple[Pool, ...], said: str) -> None:
    with pytest.raises(GraphError, match=said):
        Graph(**{**parts(), "pools": pools})


@pytest.mark.parametrize(
    ("index", "changes", "said"),
    [
        (0, {"optional": True}, "op 'f' is optional and comes first"),
        (4, {"optional": False, "phase": Phase.BACKWARD}, "op 'fast' comes after the optional op 'in'"),
        (0, {"stream": ""}, "op 'f' runs on a stream without a name"),
        (3, {"workspace_bytes": 3}, "op 'in' has a workspace of 3 bytes, but its stream 'host_to_device' owns no pool"),
        (0, {"replaces": (1,)}, "op 'f' replaces other ops, but is not optional"),
        (0, {"differs": "rounding"}, r"op 'f' differs from the program \(rounding\), but is not optional"),
        (4, {"replaces": (2,)}, "op 'fast' replaces op 2, which is not one of the 2 of the program"),
        (4, {"replaces": (1, 0)}, r"op 'fast' replaces \(1, 0\): each op once, in ascending order"),
        (4, {"random": True}, "op 'fast' is optional, and must be random if one of the ops that it replaces is"),
        (4, {"mutates": (0,)}, "op 'fast' is optional, and must write in place exactly what"),
        (2, {"inputs": (1, 3)}, "op 'out' reads 'a@host', which op 'out' makes at or after it"),
        (3, {"inputs": (1, 3)}, "op 'in' both reads and makes 'a'"),
        (1, {"outputs": (1, 2)}, "tensor 'a' is an output of both 'f' and 'g', and neither is optional"),
    ],
)
def test_invalid_ops_raise(index: int, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(GraphError, match=said):
        with_changed("ops", index, **changes)


@pytest.mark.parametrize(
    ("index", "changes", "said"),
    [
        (1, {"producers": (0,)}, r"tensor 'a' has producers \(0,\), but it is an output of the ops \(0, 3\)"),
        (2, {"producers": (4, 1)}, r"tensor 'b' has producers \(4, 1\), but it is an output of the ops \(1, 4\), in this order"),
        (1, {"producers": (0, 5)}, "tensor 'a' has producer 5, which is not one of the 5 ops"),
    ],
)
def test_invalid_tensors_raise(index: int, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(GraphError, match=said):
        with_changed("tensors", index, **changes)


def test_kept_tensor_without_program_op_raises() -> None:
    with pytest.raises(GraphError, match="kept tensor 'a@host' is produced by optional ops only"):
        Graph(**{**parts(), "kept": frozenset({3})})


def test_static_bytes_above_the_capacity_raise() -> None:
    made = parts()
    with pytest.raises(GraphError, match="pool 'host' has a capacity of 8 bytes, but its static tensors take 9"):
        Graph(**{**made, "tensors": (*made["tensors"], Tensor(4, "state", 9, (), pool="host"))})


def test_optional_reader_of_a_written_tensor_needs_a_place() -> None:
    made = parts()
    write = replace(made["ops"][1], mutates=(0,))
    ops = (made["ops"][0], write, *made["ops"][2:4], replace(made["ops"][4], mutates=(0,)))
    assert not Graph(**{**made, "ops": ops}).plain
    with pytest.raises(
        GraphError, match="op 'fast' is optional and reads 'w', which 'g' writes in place: name the op that it replaces"
    ):
        Graph(**{**made, "ops": (*ops[:4], replace(ops[4], replaces=(), mutates=()))})


def test_solvers_of_plain_graphs_raise() -> None:
    graph = Graph(**parts())
    refused = "the graph has 2 pools, 3 streams and 3 optional ops"
    for name in ("windows", "checkmate", "sac", "dtr", "keep-everything"):
        with pytest.raises(GraphError, match=refused):
            get_solver(name)(ask(graph, 100))
    with pytest.raises(GraphError, match=refused):
        solve(graph, "100%")
    with pytest.raises(GraphError, match=refused):
        keep_everything(graph)
    check_plain(make_chain(3))


def test_graph_properties_refer_to_the_program() -> None:
    graph = Graph(**parts())
    facts = collect_graph_facts(graph)
    assert facts.summary.ops == len(graph.program) == len(remove_options(graph).ops)
    assert facts.summary.optional_ops == len(graph.ops) - len(graph.program) == 3


def test_graph_with_a_second_stream_is_not_plain() -> None:
    ops = (make_chain(2).ops[0], replace(make_chain(2).ops[1], stream="side"))
    with pytest.raises(GraphError, match="1 pools, 2 streams and 0 optional ops"):
        check_plain(Graph(ops, make_chain(2).tensors, frozenset()))


@pytest.mark.parametrize(
    ("graph", "fingerprint"),
    [
        (make_chain(4), "b6e683a4ddd126c73c5a3a19b70da314"),
        (diamond(), "871da442b2abe20f5e07edf0d2956da9"),
        (draw_graph(1, 20), "a063f8606e8c00bcb56763831b7eb252"),
        (draw_training_step(3, 500), "2a84497e08e4dfc8ada771288a566522"),
    ],
    ids=["chain", "diamond", "random", "step"],
)
def test_fingerprint_of_plain_graphs_is_unchanged(graph: Graph, fingerprint: str) -> None:
    assert graph.fingerprint == fingerprint


def test_options_are_part_of_the_fingerprint() -> None:
    graphs = [
        Graph(**parts()),
        with_changed("ops", 2, stream=HOST_TO_DEVICE),
        with_changed("ops", 4, replaces=(1,)),
        with_changed("tensors", 1, pool="host"),
        Graph(**{**parts(), "pools": (DEVICE_POOL, replace(HOST, owner=HOST_TO_DEVICE))}),
    ]
    assert len({graph.fingerprint for graph in graphs}) == len(graphs)
    assert with_changed("ops", 4, differs="").fingerprint == graphs[0].fingerprint  # found out by running it


def written_over(
    *, kept: Sequence[int] = (), sizes: tuple[int, int] = (8, 8), pairs: tuple[tuple[int, int], ...] = ((2, 1),)
) -> Graph:
    """static w; a: w -> x; b: x, w -> y, which may be written over x."""
    draft = Draft()
    w = draft.add_static("w", 8)
    (x,) = draft.add_op("a", [w], sizes[:1])
    draft.add_op("b", [x, w], sizes[1:], overwrites=pairs)
    return draft.build_graph(kept)


def test_overwrites_are_part_of_the_fingerprint() -> None:
    graph = written_over()
    assert graph.out_of_place() == written_over(pairs=())
    assert len({graph.fingerprint, graph.out_of_place().fingerprint}) == 2


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kept": [1]}, "op 'b' writes 'b' over 'a', which must stay in memory"),
        ({"pairs": ((2, 0),)}, "op 'b' writes 'b' over 'w', which must stay in memory"),
        ({"sizes": (8, 9)}, "they have 9 and 8 bytes: sizes must be equal"),
        ({"pairs": ((1, 2),)}, "op 'b' writes tensor 1 over 2: the first must be an output of it, the second an input"),
        ({"pairs": ((2, 1), (2, 1))}, "op 'b' lists a tensor twice among those that it overwrites"),
    ],
)
def test_invalid_overwrites_raise(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(GraphError, match=said):
        written_over(**changes)


def test_checks_are_linear_in_the_ops() -> None:
    def lines_run(length: int) -> int:
        graph, count = make_chain(length), 0

        def traced(frame: FrameType, event: str, _: Any) -> Any:
            nonlocal count
            count += event == "line"
            return traced

        before = sys.gettrace()
        sys.settrace(traced)
        try:
            check_graph(graph)
        finally:
            sys.settrace(before)
        return count

    assert lines_run(400) < 4.5 * lines_run(100)
