"""Capuchin, DELTA and torchtitan's fractions of layers: small cases worked out by hand."""

import pytest

from planner.graphs.options.offload import remove_offload
from planner.graphs.simulate import simulate
from planner.graphs.synthetic.small import make_training_chain
from planner.solvers.baselines import auto_perf_maxing, capuchin_swap, delta
from planner.solvers.baselines.auto_perf_maxing import FractionsProgram, LayerTensor, choose_positions
from planner.solvers.baselines.common.blocks import find_blockings
from planner.solvers.baselines.common.offloading import offer_of
from planner.solvers.baselines.common.online import OnlineFailedError
from planner.solvers.clock import WallClock
from planner.solvers.result import Reason
from tests.support.graphs.options import check_by_both_judges, names, offered, small_gpt, three_layers, with_trips
from tests.support.solvers.answers import ask


def test_capuchin_swaps_by_free_time() -> None:
    graph = with_trips(make_training_chain(4))
    offer = offer_of(graph)
    assert offer is not None
    # f1 is idle from 2 to 6, f2 from 3 to 5; two seconds of that are copies. f3 and f4 never are.
    assert [(s.tensor, s.after, s.before, s.free_s) for s in capuchin_swap.list_swaps(offer)] == [(0, 1, 6, 2.0), (1, 2, 5, 0.0)]


@pytest.mark.parametrize(
    ("budget", "swaps", "time_s"),
    [
        (5, 0, 8.0),
        # f1 goes after f2 and comes back while g3 is executed.
        (4, 1, 8.0),
        # Before g3 there is no room for f2 and beside it none for f1: both are waited for.
        (3, 2, 10.0),
    ],
)
def test_capuchin_swaps_just_enough_tensors(budget: int, swaps: int, time_s: float) -> None:
    graph = with_trips(make_training_chain(4))
    result = capuchin_swap.solve(ask(graph, budget))
    check_by_both_judges(graph, result)
    assert (result.settings["swaps"], result.time_s, result.peak_bytes) == (swaps, time_s, budget)
    assert capuchin_swap.solve(ask(graph, 2)).reason is Reason.MEMORY


def test_delta_drops_tensors_cheaper_to_recompute_than_to_copy() -> None:
    graph = with_trips(make_training_chain(4))
    result = delta.solve(ask(graph, 4))
    check_by_both_judges(graph, result)
    # Before g4 f1 was read 2 s ago, f2 1 s: f1 goes. A second to make it again is less than two to copy it.
    assert names(graph, result) == ["f1", "f2", "f3", "f4", "g4", "g3", "f1", "g2", "g1"]
    assert (result.time_s, result.peak_bytes) == (9.0, 4)


def test_delta_swaps_tensors_cheaper_to_copy_and_prefetches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta, "_AHEAD", (1,))
    graph = with_trips(make_training_chain(4), bytes_per_s=4.0)
    result = delta.solve(ask(graph, 4))
    check_by_both_judges(graph, result)
    assert names(graph, result) == [
        "f1",
        "f2",
        "f3",
        "f4",
        "copy_f1_device_to_host",
        "g4",
        "copy_f1_host_to_device",
        "g3",
        "g2",
        "g1",
    ]
    assert (result.time_s, result.peak_bytes) == (8.0, 4)
    # Without looking ahead f1 is waited for.
    monkeypatch.setattr(delta, "_AHEAD", (0,))
    assert delta.solve(ask(graph, 4)).time_s == 8.25


def test_delta_failures_have_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = with_trips(make_training_chain(8))
    assert delta.solve(ask(graph, 2)).reason is Reason.MEMORY
    assert delta.solve(ask(graph, 3, time_limit_s=1e-9)).reason is Reason.TIME
    monkeypatch.setattr(delta, "_THRASH_FACTOR", 1.01)
    thrashes = delta.solve(ask(graph, 3))
    assert (thrashes.reason, thrashes.schedule) == (Reason.THRASHING, None)


def test_clocks_and_memory_are_those_of_the_judge() -> None:
    ended = 0
    for seed in range(150):
        graph = offered(seed)
        offer = offer_of(graph)
        assert offer is not None
        for budget in (graph.static_bytes + 25, graph.static_bytes + 40):
            run = delta.DeltaRun(offer, budget, 2, lambda: "")
            try:
                simulation = simulate(graph, run.run())
            except OnlineFailedError:
                continue
            assert (run.device.now_s, run.device.out_s, run.device.in_s) == pytest.approx(simulation.clocks_s)
            assert simulation.memory_bytes[-1] == run.device.memory_bytes
            assert simulation.peak_bytes <= budget
            ended += any(graph.ops[op].optional for op in run.device.schedule.computed)
    assert ended > 20


def outer() -> FractionsProgram:
    offer = offer_of(three_layers())
    return FractionsProgram(offer, find_blockings(offer.program)[0].blocks)


def test_layers_are_measured() -> None:
    found = outer()
    assert (found.bytes, found.forward_s, found.working_bytes) == ([2, 2, 2], [2.0, 2.0, 2.0], [0, 0, 0])
    assert max(found.live) == found.live[7] == found.live[8] == 8
    assert [[(s.again, s.away) for s in saved] for saved in found.saved] == [
        [(True, True), (False, True)],
        [(True, True), (False, True)],
        [(True, False), (False, False)],
    ]
    # g6 begins with what is inside the last layer, g4 and g2 with that of the others.
    assert found.backward == [range(12, 14), range(10, 12), range(8, 10)]


def test_fractions_of_layers_match_hand_computed_values() -> None:
    found = outer()
    r, o = found.find_fractions(8, WallClock()) or ([], [])
    assert r == pytest.approx([0, 0, 0])
    # At g6 a byte too much: only what is offloaded of layer 0 is away then, at no cost.
    r, o = found.find_fractions(7, WallClock()) or ([], [])
    assert r == pytest.approx([0, 0, 0]) and o[0] >= 0.5 - 1e-9 and o[2] == 0
    # A byte too much at g4 too, when layer 0 is back already: half of it is computed again. Of the three at g6 that leaves
    # one, as much as may be away of layer 0, and one of layer 1.
    r, o = found.find_fractions(5, WallClock()) or ([], [])
    assert r == pytest.approx([0.5, 0.5, 0]) and o[0] == pytest.approx(0.5)


def test_a_slow_link_is_a_limit() -> None:
    offer = offer_of(with_trips(remove_offload(three_layers())[0], bytes_per_s=0.25))
    r, o = FractionsProgram(offer, find_blockings(offer.program)[0].blocks).find_fractions(7, WallClock()) or ([], [])
    # Half a byte in the 2 seconds of a layer: the other half of a byte is computed again, in layer 0 or 1.
    assert max(o) == pytest.approx(0.25) and sum(r) == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("large_away", "again", "away"),
    [
        (True, [1, 2], [0]),
        # Without the largest, 3 + 1 are away; of 4 and 6 bytes, a byte off both, the one that takes less time.
        (False, [0], [1, 3]),
    ],
)
def test_layer_program_chooses_tensors_to_recompute_and_offload(large_away: bool, again: list[int], away: list[int]) -> None:
    saved = [LayerTensor(t, size, 1.0, again=True, away=t > 0 or large_away) for t, size in enumerate((4, 3, 2, 1))]
    assert choose_positions(saved, 5.0, 4.0, WallClock()) == (again, away)
    assert choose_positions(saved, 0.0, 0.0, WallClock()) == ([], [])


def test_rounds_end_with_a_schedule_that_fits() -> None:
    graph = three_layers()
    kept = auto_perf_maxing.solve(ask(graph, 8))
    assert (kept.time_s, kept.peak_bytes) == (14.0, 8)
    tight = auto_perf_maxing.solve(ask(graph, 6))
    check_by_both_judges(graph, tight)
    # f1 and f2 go to the host, and nothing is waited for.
    assert tight.time_s == 14.0 and {"copy_f1_device_to_host", "copy_f2_device_to_host"} <= set(names(graph, tight))


@pytest.mark.slow
def test_a_transformer_near_its_budget() -> None:
    graph = small_gpt(6)
    offer = offer_of(graph)
    peak = max(FractionsProgram(offer, find_blockings(offer.program)[0].blocks).live)
    shares = (0.8, 0.7)
    found = [auto_perf_maxing.solve(ask(graph, int(share * peak))) for share in shares]
    assert all(one.peak_bytes is not None and one.peak_bytes <= share * peak for one, share in zip(found, shares, strict=True))


def test_graph_without_blocks_is_inapplicable() -> None:
    result = auto_perf_maxing.solve(ask(with_trips(make_training_chain(4)), 10))
    assert result.reason is Reason.INAPPLICABLE and "no blocks" in result.message
