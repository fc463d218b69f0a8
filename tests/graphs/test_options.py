"""Options of a graph: optional ops that are added by name."""

from dataclasses import replace

import pytest

from graphs.errors import GraphError, UsageError
from graphs.io.graph_document import build_from_dict, convert_to_dict
from graphs.ir import Graph, Op, Tensor
from graphs.options.offload import LEAST_BYTES, NO_OFFLOADS, OFFLOAD, remove_offload
from graphs.options.surroundings import Link, Surroundings
from graphs.pools import COMPUTE, DEVICE_TO_HOST, HOST, HOST_TO_DEVICE
from graphs.synthetic.random_graphs import draw_graph
from graphs.synthetic.small import make_training_chain
from planner.capture.options import OPTIONS, apply_options

AROUND = Surroundings(Link.even(25e9), host_bytes=10**12)


def mixed() -> Graph:
    """A static tensor, two large ones of which one is kept, a small one, and one that nobody reads."""
    sizes = (9 * LEAST_BYTES, 4 * LEAST_BYTES, LEAST_BYTES - 1, 3 * LEAST_BYTES, 2 * LEAST_BYTES)
    names = ("state", "large", "small", "kept", "unread")
    tensors = tuple(Tensor(i, name, size, (i - 1,) if i else ()) for i, (name, size) in enumerate(zip(names, sizes, strict=True)))
    reads = ((0,), (1,), (1, 2), (3,))
    ops = tuple(Op(i, f"op{i}", "f", inputs, (i + 1,), 1.0) for i, inputs in enumerate(reads))
    return Graph(ops, tensors, frozenset({3}))


def test_large_tensors_get_offload_and_reload_ops() -> None:
    graph = apply_options(mixed(), ("offload",), AROUND)
    assert graph.program == mixed().ops
    out, back = graph.ops[4:]
    assert (out.stream, back.stream) == (DEVICE_TO_HOST, HOST_TO_DEVICE)
    assert graph.streams == (COMPUTE, DEVICE_TO_HOST, HOST_TO_DEVICE)
    assert out.inputs == back.outputs == (1,) and out.outputs == back.inputs == (5,)
    assert out.time_s == back.time_s == 4 * LEAST_BYTES / 25e9
    assert graph.tensors[1].producers == (0, back.id)
    assert (graph.tensors[5].name, graph.tensors[5].pool) == ("large@host", HOST)
    assert graph.pools[1].capacity_bytes == 10**12
    assert graph.time_s == mixed().time_s


def test_each_copy_takes_the_latency_and_its_bytes_at_the_rate_of_its_direction() -> None:
    graph = OFFLOAD.add_to(
        mixed(), Surroundings(Link(out_bytes_per_s=LEAST_BYTES, in_bytes_per_s=2 * LEAST_BYTES, latency_s=0.25))
    )
    assert [op.time_s for op in graph.ops[4:]] == [4.25, 2.25]


def test_all_tensors_of_small_graphs_get_transfers() -> None:
    graph = draw_graph(3, 12)
    read = [t for t in graph.tensors if t.producers and t.id not in graph.kept and graph.consumers[t.id] and t.size_bytes]
    _, offloads = remove_offload(OFFLOAD.add_to(graph, AROUND))
    assert offloads and list(offloads.by_tensor) == [t.id for t in read]


@pytest.mark.parametrize("graph", [mixed(), make_training_chain(5), draw_graph(7, 15)], ids=["mixed", "chain", "random"])
def test_removing_transfers_restores_the_program(graph: Graph) -> None:
    found, offloads = remove_offload(build_from_dict(convert_to_dict(OFFLOAD.add_to(graph, AROUND))))
    assert (found.ops, found.tensors, found.kept) == (graph.ops, graph.tensors, graph.kept)
    assert offloads and offloads.host_bytes is None  # there is room for all of them
    assert remove_offload(graph) == (graph, NO_OFFLOADS)


def test_host_capacity_is_a_limit() -> None:
    graph = make_training_chain(5)
    sizes = [graph.tensors[t].size_bytes for t in remove_offload(OFFLOAD.add_to(graph, AROUND))[1].by_tensor]
    for capacity, limit in ((sum(sizes), None), (sum(sizes) - 1, sum(sizes) - 1), (0, 0)):
        _, offloads = remove_offload(OFFLOAD.add_to(graph, replace(AROUND, host_bytes=capacity)))
        assert offloads and offloads.host_bytes == limit


def test_graph_without_candidates_is_unchanged() -> None:
    ops = (Op(0, "op0", "f", (), (0,), 1.0),)
    program = Graph(ops, (Tensor(0, "t0", 8, (0,)),), frozenset({0}))
    found, offloads = remove_offload(OFFLOAD.add_to(program, AROUND))
    assert found == program and not offloads


def test_other_optional_ops_and_pools_raise() -> None:
    graph = OFFLOAD.add_to(mixed(), AROUND)
    out, back = graph.ops[4:]
    for changed in (replace(out, stream=COMPUTE), replace(out, recomputable=False), replace(out, differs="rounding")):
        with pytest.raises(GraphError, match=r"2 optional ops\. Some are neither transfers of single tensors"):
            remove_offload(replace(graph, ops=(*graph.ops[:4], changed, back)))
    for pools in (
        (*graph.pools[:1], replace(graph.pools[1], owner=HOST_TO_DEVICE)),
        (*graph.pools, replace(graph.pools[1], name="disk")),
    ):
        with pytest.raises(GraphError, match="neither transfers of single tensors"):
            remove_offload(replace(graph, pools=pools))


def test_invalid_options_raise() -> None:
    with pytest.raises(UsageError, match="there is no option 'squeeze' of a graph: choose from offload"):
        apply_options(mixed(), ("squeeze",), AROUND)
    with pytest.raises(UsageError, match="named twice"):
        apply_options(mixed(), ("offload", "offload"), AROUND)
    with pytest.raises(GraphError, match="already"):
        apply_options(apply_options(mixed(), ("offload",), AROUND), ("offload",), AROUND)
    with pytest.raises(UsageError, match="the option 'offload' needs to know the link to the host"):
        apply_options(mixed(), ("offload",))
    for speed in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(GraphError, match="must be above 0"):
            Link.even(speed)
        with pytest.raises(GraphError, match="must be above 0"):
            Link(1.0, speed)
    for latency_s in (-1e-6, float("inf"), float("nan")):
        with pytest.raises(GraphError, match="must be 0 or more, such as 1e-5"):
            Link.even(1.0, latency_s)
    with pytest.raises(GraphError, match="must be 0 or more"):
        Surroundings(Link.even(1.0), -1)


def test_each_option_has_a_description() -> None:
    assert all(option.description for option in OPTIONS.values())
