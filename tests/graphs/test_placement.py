"""Placement and units of sharded parameters: their ops, their inverse, and the judge's checks of memories and clocks."""

from dataclasses import replace

import pytest

from planner.capture.options import apply_options
from planner.graphs.errors import GraphError, ScheduleError
from planner.graphs.io.graph_document import build_from_dict, convert_to_dict
from planner.graphs.ir import Graph, Kind, Op, Phase, Tensor
from planner.graphs.options.gather import ADD, GATHER, OVERLAP, REDUCE, InsertedUnits, Shard, Sum, Unit, insert_units
from planner.graphs.options.placement import PLACEMENT, get_placement
from planner.graphs.options.surroundings import Link, OtherDevice, Surroundings
from planner.graphs.options.transfers import find_transfers
from planner.graphs.schedule import Compute, Free, Schedule, keep_everything
from planner.graphs.simulate import simulate
from planner.graphs.synthetic.draft import Draft
from planner.graphs.synthetic.random_graphs import draw_graph
from tests.support.graphs.collective_costs import build_cost
from tests.support.graphs.event_judge import judged, runs
from tests.support.graphs.options import on_devices, with_trips
from tests.support.graphs.small_graphs import diamond
from tests.support.solvers.answers import check
from tests.support.solvers.brute_force import fastest


def layer() -> Graph:
    """A layer of 3 s with a parameter of 4 bytes, and its kept gradient."""
    draft = Draft()
    weight = draft.add_static("weight", 4)
    (a,) = draft.add_op("a", [weight], [2], time_s=3.0, workspace_bytes=1)
    (b,) = draft.add_op("b", [a, weight], [4], time_s=3.0)
    return draft.build_graph([b])


def by_name(graph: Graph, *steps: str) -> Schedule:
    """Steps by the names of ops, and of tensors after a minus."""
    ops = {op.name: op.id for op in graph.ops}
    tensors = {t.name: t.id for t in graph.tensors}
    return Schedule(tuple(Free(tensors[s[1:]]) if s.startswith("-") else Compute(ops[s]) for s in steps))


def test_placement_adds_copies_and_variants() -> None:
    graph = on_devices(layer(), OtherDevice("cpu", (1.0, None), 2.0, 100, differs="rounding"))
    assert graph.program == layer().ops
    assert [(pool.name, pool.owner, pool.capacity_bytes) for pool in graph.pools[1:]] == [("cpu", "compute@cpu", 100)]
    # b cannot run there, so that its output never is; a parameter is only ever copied there.
    assert [(op.name, op.stream, op.time_s, op.differs) for op in graph.ops[2:]] == [
        ("copy_weight_device_to_cpu", "device_to_cpu", 2.0, ""),
        ("copy_a_device_to_cpu", "device_to_cpu", 1.0, ""),
        ("a@cpu", "compute@cpu", 1.0, "rounding"),
        ("copy_a_cpu_to_device", "cpu_to_device", 1.0, ""),
    ]
    assert graph.ops[4].replaces == (0,) and graph.ops[4].workspace_bytes == 1
    assert [(t.name, t.pool, t.producers) for t in graph.tensors[3:]] == [("weight@cpu", "cpu", (2,)), ("a@cpu", "cpu", (3, 4))]
    assert graph.tensors[1].producers == (0, 5)


def test_three_devices_have_all_pairs_of_copies() -> None:
    graph = on_devices(layer(), OtherDevice("second", (1.0, 1.0), 4.0), OtherDevice("third", (1.0, 1.0), 2.0))
    found = get_placement(graph)
    assert sorted((d, e) for d, e, x in found.copies if x == 1) == [(d, e) for d in range(3) for e in range(3) if d != e]
    assert all(e > 0 for _, e, x in found.copies if x == 0)
    # The link of the later of two devices is between them.
    assert [graph.ops[found.copies[d, e, 1]].time_s for d, e in ((0, 1), (1, 2), (2, 0))] == [0.5, 1.0, 1.0]


def test_removing_placement_restores_the_program() -> None:
    compared = 0
    for seed in range(30):
        graph = draw_graph(seed, 9)
        times = tuple(None if op.id % 4 == 3 else op.time_s for op in graph.ops)
        offered = on_devices(graph, OtherDevice("second", times, 1.0), OtherDevice("third", times[::-1], 1.0, 50))
        read = get_placement(build_from_dict(convert_to_dict(offered)))
        assert (read.program.ops, read.program.tensors, read.program.kept) == (graph.ops, graph.tensors, graph.kept)
        for d in (1, 2):
            for i, run in enumerate(read.runs[d]):
                assert run is None or (offered.ops[run].replaces == (i,) and offered.ops[run].stream == read.pools[d].owner)
                compared += run is not None
            for x, place in enumerate(read.places[d]):
                assert place is None or offered.tensors[place].size_bytes == graph.tensors[x].size_bytes
    assert compared > 100
    alone = get_placement(diamond())
    assert alone.program == diamond() and alone.runs == (tuple(range(5)),) and not alone.copies


def test_random_and_in_place_ops_stay_on_the_device() -> None:
    draft = Draft()
    state, weight = draft.add_static("state", 1), draft.add_static("weight", 1)
    (a,) = draft.add_op("reads", [state, weight], [1])
    (b,) = draft.add_op("writes", [a, state], [1], mutates=(state,))
    (c,) = draft.add_op("draws", [b], [1])
    draft.add_op("moves", [c], [1])
    plain = draft.build_graph()
    graph = replace(plain, ops=tuple(replace(op, random=op.name == "draws") for op in plain.ops))
    offered = on_devices(graph, OtherDevice("second", (1.0,) * 4, 1.0))
    assert [op.name for op in offered.ops if op.replaces] == ["moves@second"]
    with pytest.raises(GraphError, match="no op can run on device 'second'"):
        on_devices(graph, OtherDevice("second", (1.0, 1.0, 1.0, None), 1.0))


def test_held_tensors_stay_on_the_device() -> None:
    tensors = (Tensor(0, "t", 1, (0,)), Tensor(1, "again", 1, (1,), held_for=0), Tensor(2, "u", 1, (2,)), Tensor(3, "v", 1, (3,)))
    ops = tuple(Op(i, f"op{i}", "f", inputs, (i,), 1.0) for i, inputs in enumerate(((), (), (1,), (2,))))
    offered = on_devices(Graph(ops, tensors, frozenset()), OtherDevice("second", (1.0,) * 4, 1.0))
    assert [op.replaces for op in offered.ops if op.replaces] == [(0,), (3,)]


def test_judge_checks_each_memory_and_each_clock() -> None:
    graph = on_devices(layer(), OtherDevice("cpu", (1.0, 1.0), 4.0, 11))
    there = by_name(
        graph, "copy_weight_device_to_cpu", "a@cpu", "b@cpu", "-a@cpu", "-weight@cpu", "copy_b_cpu_to_device", "-b@cpu"
    )
    assert runs(graph, there.steps)
    simulation, verdict = simulate(graph, there), judged(graph, there)
    # 4 on the device throughout; there the weight, a and b; a and its workspace are less.
    assert simulation.pool_peaks_bytes == (8, 10) == tuple(verdict.peaks_bytes.values())
    assert simulation.time_s == 4.0 == max(verdict.done_s.values())
    with pytest.raises(ScheduleError, match="ends without 'b', which must be kept"):
        simulate(graph, by_name(graph, "copy_weight_device_to_cpu", "a@cpu", "b@cpu"))
    with pytest.raises(ScheduleError, match="takes pool 'cpu' to 10 bytes: its capacity is 9"):
        simulate(on_devices(layer(), OtherDevice("cpu", (1.0, 1.0), 4.0, 9)), there)
    # While the device makes a, the weight goes: then b is made there from the copy of a.
    both = by_name(graph, "copy_weight_device_to_cpu", "a", "copy_a_device_to_cpu", "b@cpu", "copy_b_cpu_to_device")
    assert simulate(graph, both).time_s == 3.0 + 0.5 + 1.0 + 1.0 == max(judged(graph, both).done_s.values())


def test_invalid_graphs_and_devices_raise() -> None:
    cpu = OtherDevice("cpu", (1.0, 1.0), 1.0)
    with pytest.raises(GraphError, match="needs another device"):
        apply_options(layer(), ("placement",), Surroundings(Link.even(1.0)))
    with pytest.raises(GraphError, match="has 2 times for a program of 5 ops"):
        on_devices(diamond(), cpu)
    with pytest.raises(GraphError, match="already has other pools or streams: add it once"):
        PLACEMENT.add_to(on_devices(layer(), cpu), Surroundings(Link.even(1.0), others=(cpu,)))
    with pytest.raises(GraphError, match="would have a pool or stream 'cpu', which the graph has already"):
        on_devices(layer(), cpu, cpu)
    for speed in (0.0, -1.0, float("inf")):
        with pytest.raises(GraphError, match="must be above 0"):
            OtherDevice("cpu", (1.0,), speed)
    with pytest.raises(GraphError, match="only graphs with placement and no other option"):
        get_placement(with_trips(diamond()))
    offered = on_devices(layer(), cpu)
    lonely = Tensor(len(offered.tensors), "lonely", 1, (), pool="cpu")
    with pytest.raises(GraphError, match="are not copies"):
        get_placement(replace(offered, tensors=(*offered.tensors, lonely)))


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
