"""Combinations of options: independent of the order of their names, and each can be removed again."""

from dataclasses import replace
from itertools import permutations

import pytest

from graphs.errors import GraphError, UsageError
from graphs.io.graph_document import build_from_dict, convert_to_dict
from graphs.options import remove_options
from graphs.options.compress import VARIANCE
from graphs.options.offload import NO_OFFLOADS, OFFLOAD, remove_offload
from graphs.options.placement import PLACEMENT, get_placement, get_placement_with_options, is_placed, remove_placement
from graphs.options.selection import remove_computed
from graphs.pools import COMPUTE, DEVICE, DEVICE_TO_HOST, HOST, HOST_TO_DEVICE, name_channel
from graphs.simulate import simulate
from planner.capture.options import apply_options
from tests.support.graphs.event_judge import judged, runs
from tests.support.graphs.random_choices import BESIDE, any_schedule, around, found_in_a_step


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
