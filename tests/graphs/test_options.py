"""Options of a graph: added by name, removed again, and independent of the order of their names."""

from dataclasses import replace
from itertools import permutations

import pytest

from planner.capture.options import OPTIONS, apply_options
from planner.graphs.errors import GraphError, UsageError
from planner.graphs.io.graph_document import build_from_dict, convert_to_dict
from planner.graphs.ir import Graph, Op, Tensor
from planner.graphs.options import remove_options
from planner.graphs.options.compress import VARIANCE
from planner.graphs.options.offload import LEAST_BYTES, NO_OFFLOADS, OFFLOAD, remove_offload
from planner.graphs.options.placement import PLACEMENT, get_placement, get_placement_with_options, is_placed, remove_placement
from planner.graphs.options.selection import remove_computed
from planner.graphs.options.surroundings import Link, Surroundings
from planner.graphs.pools import COMPUTE, DEVICE, DEVICE_TO_HOST, HOST, HOST_TO_DEVICE, name_channel
from planner.graphs.simulate import simulate
from planner.graphs.synthetic.random_graphs import draw_graph
from planner.graphs.synthetic.small import make_training_chain
from tests.support.graphs.event_judge import judged, runs
from tests.support.graphs.random_choices import BESIDE, any_schedule, around, found_in_a_step

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


def test_order_of_option_names_does_not_matter() -> None:
    for seed in range(10):
        graph = found_in_a_step(seed)
        known = around(graph, "second", "third")
        first, *rest = (apply_options(graph, names, known) for names in permutations(BESIDE))
        assert all((first.ops, first.tensors, first.pools) == (other.ops, other.tensors, other.pools) for other in rest)
        assert (first.program, first.kept, dict(first.limits)[VARIANCE]) == (graph.program, graph.kept, 0.5)
        # The program, what is computed otherwise, what other devices do, and last the transfers to the host.
        assert first.ops[: len(graph.ops)] == graph.ops
        kinds = [0 if op.stream == COMPUTE else 2 if op.stream in (DEVICE_TO_HOST, HOST_TO_DEVICE) else 1 for op in first.ops]
        assert kinds == sorted(kinds) and set(kinds) == {0, 1, 2}
        places = [(0 if t.pool == DEVICE else 2 if t.pool == HOST else 1) for t in first.tensors]
        assert places == sorted(places) and set(places) == {0, 1, 2}
        assert [pool.name for pool in first.pools] == [DEVICE, "second", "third", HOST]
        assert build_from_dict(convert_to_dict(first)) == first


def test_transfers_are_of_one_kind() -> None:
    for seed in range(10):
        graph = found_in_a_step(seed)
        whole = apply_options(graph, BESIDE, around(graph, "second", "third"))
        transfers = [op for op in whole.ops if op.is_transfer]
        assert {HOST, "second", "third"} <= {pool for op in transfers for pool in whole.ends(op)}
        for op in transfers:
            source, target = whole.ends(op)
            assert op.stream == name_channel(source, target) and op.name.endswith(f"_{op.stream}") and whole.crosses_pools(op)
            assert (op.time_s > 0 or not whole.tensors[op.inputs[0]].size_bytes) and op.exact and not op.workspace_bytes
        computing = {pool.owner for pool in whole.pools if pool.computes}
        assert all(op.is_transfer or op.stream in computing for op in whole.ops)


def test_optional_ops_and_copies_refer_to_the_program_alone() -> None:
    offered = 0
    for seed in range(20):
        graph = found_in_a_step(seed)
        whole = apply_options(graph, BESIDE, around(graph))
        made = {t for op in graph.program for t in (*op.inputs, *op.outputs)}
        for op in whole.ops[len(graph.ops) :]:
            assert made.issuperset(t for t in (*op.inputs, *op.outputs) if whole.tensors[t].pool == DEVICE)
            assert len(op.replaces) <= 1 and not op.overwrites
        offered += sum(op.optional for op in graph.ops)
        # Whatever other devices read, what comes back from the host is what the step itself reads.
        _, offloads = remove_offload(whole)
        _, alone = remove_offload(OFFLOAD.add_to(graph, around(graph)))
        assert offloads and list(offloads.by_tensor) == list(alone.by_tensor)
    assert offered > 20


def test_each_option_can_be_removed() -> None:
    for seed in range(20):
        graph = found_in_a_step(seed)
        known = around(graph, "second", "third")
        whole, both = apply_options(graph, BESIDE, known), PLACEMENT.add_to(graph, known)
        rest, offloads = remove_offload(whole)
        assert rest == both and offloads
        assert offloads.host_bytes is None or offloads.host_bytes == 1000
        assert all(whole.ops[transfers.out.op].inputs == (t,) for t, transfers in offloads.by_tensor.items())
        assert remove_offload(both) == (both, NO_OFFLOADS)
        assert remove_placement(whole) == OFFLOAD.add_to(graph, known)
        assert remove_placement(both) == graph
        assert remove_placement(graph) is graph and not is_placed(graph)
        program = remove_options(whole)
        assert program.ops == graph.program and remove_options(graph).tensors == program.tensors
        found = get_placement_with_options(both)
        assert found.program == graph and len(found.runs[0]) == len(graph.program)
        alone = get_placement(remove_computed(both))
        assert [sum(run is not None for run in runs) for runs in alone.runs] == [
            sum(run is not None for run in runs) for runs in found.runs
        ]


def test_incompatible_options_raise() -> None:
    graph = found_in_a_step(3)
    whole, both = apply_options(graph, BESIDE, around(graph)), PLACEMENT.add_to(graph, around(graph))
    for twice in (
        lambda: PLACEMENT.add_to(both, around(graph)),
        lambda: PLACEMENT.add_to(OFFLOAD.add_to(graph, around(graph)), around(graph)),
    ):
        with pytest.raises(GraphError, match="already has other pools or streams: add it once, and first"):
            twice()
    with pytest.raises(GraphError, match="already has other pools or streams: add it once, and after placement"):
        OFFLOAD.add_to(whole, around(graph))
    with pytest.raises(UsageError, match="named twice"):
        apply_options(graph, ("placement", "offload", "placement"), around(graph))
    names = ("second", "second"), ("host",), ("device",), ("a_to_b", "c", "a", "b_to_c")
    for wrong, taken in zip(names, ("second", "host", "device", "a_to_b_to_c"), strict=True):
        with pytest.raises(
            GraphError, match=rf"device '{wrong[-1]}' would have a pool or stream '{taken}', which the graph has already"
        ):
            PLACEMENT.add_to(graph, around(graph, *wrong))
    with pytest.raises(GraphError, match="only graphs with placement and no other option are supported"):
        get_placement(both)
    with pytest.raises(GraphError, match="only graphs with placement and no other option are supported"):
        get_placement_with_options(whole)
    stand_in = next(op for op in both.ops if op.replaces and op.stream != COMPUTE)
    for changed, said in (
        (replace(stand_in, replaces=()), "neither transfers a tensor from one device to another nor replaces one op"),
        (
            replace(stand_in, stream="elsewhere", workspace_bytes=0),
            "neither transfers of single tensors to or from host memory nor ops",
        ),
    ):
        ops = (*both.ops[: stand_in.id], changed, *both.ops[stand_in.id + 1 :])
        with pytest.raises(GraphError, match=said):
            remove_offload(replace(both, ops=ops))


def test_both_judges_agree_with_all_options() -> None:
    streams, written_over = set[str](), 0
    for seed in range(25):
        graph = found_in_a_step(seed)
        whole = apply_options(graph, BESIDE, around(graph, "second", "third"))
        schedule = any_schedule(whole, seed)
        assert runs(whole, schedule.steps)
        found, verdict = simulate(whole, schedule), judged(whole, schedule)
        assert found.pool_peaks_bytes == tuple(verdict.peaks_bytes[pool.name] for pool in whole.pools)
        assert found.clocks_s == tuple(verdict.done_s[stream] for stream in whole.streams)
        streams.update(whole.ops[op].stream for op in schedule.computed)
        written_over += simulate(whole.out_of_place(), schedule).peak_bytes > found.peak_bytes
    assert streams == set(whole.streams) and written_over > 3
