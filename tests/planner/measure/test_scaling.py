"""Prediction of graphs at sizes that were not captured."""

from dataclasses import replace

import pytest

from graphs.errors import GraphError
from graphs.ir import Graph
from graphs.synthetic.draft import Draft
from graphs.synthetic.small import make_training_chain
from planner.measure.scaling import GraphFit, list_sample_sizes


def test_fit_reproduces_polynomials() -> None:
    graph = make_training_chain(4)

    def at(batch: int, length: int) -> object:
        size = 7 * batch * length**2 + 10**9 * batch + 5
        ops = tuple(replace(op, time_s=1e-6 * size, workspace_bytes=size) for op in graph.ops)
        return replace(graph, ops=ops, tensors=tuple(replace(t, size_bytes=size * (t.id + 1)) for t in graph.tensors))

    fit = GraphFit({(b, n): at(b, n) for b in list_sample_sizes(16) for n in list_sample_sizes(100)})
    for sizes in ((16, 100), (3, 7), (40, 333)):
        found, wanted = fit.build_graph(sizes), at(*sizes)
        assert [t.size_bytes for t in found.tensors] == [t.size_bytes for t in wanted.tensors]
        assert found.time_s == pytest.approx(wanted.time_s, rel=1e-6)
        assert [op.workspace_bytes for op in found.ops] == pytest.approx([op.workspace_bytes for op in wanted.ops], rel=1e-6)


def test_graphs_without_a_fit_raise() -> None:
    with pytest.raises(GraphError, match="a size that varies is 3"):
        list_sample_sizes(3)
    with pytest.raises(GraphError, match="make no grid"):
        GraphFit({(4,): make_training_chain(4)})
    with pytest.raises(GraphError, match=r"different ops at sizes \(2,\)"):
        GraphFit({(4,): make_training_chain(4), (3,): make_training_chain(4), (2,): make_training_chain(5)})


def test_op_overwrites_an_input_only_if_allowed_at_all_sizes() -> None:
    def at(*pairs: tuple[int, int]) -> Graph:
        draft = Draft()
        (x,) = draft.add_op("a", [], [10])
        (y,) = draft.add_op("b", [x], [10], overwrites=pairs)
        return draft.build_graph([y])

    pair = (1, 0)
    for graphs, wanted in (({(2,): at(pair), (4,): at(pair)}, (pair,)), ({(2,): at(pair), (4,): at()}, ())):
        assert [op.overwrites for op in GraphFit(graphs).build_graph((3,)).ops] == [(), wanted]
