"""torchtitan's fractions of layers: the linear program, the 0-1 program of a layer, and the rounds, worked out by hand.

The step is f1 to f7 and g7 to g1, of a second and a byte each; two of f1 to f6 are a layer, of which the first is read inside
it only. Keeping everything takes 8, at g7 and g6.
"""

import pytest

from graphs.options.offload import remove_offload
from graphs.synthetic.small import make_training_chain
from solvers.baselines import auto_perf_maxing
from solvers.baselines.auto_perf_maxing import FractionsProgram, LayerTensor, choose_positions
from solvers.baselines.common.blocks import find_blockings
from solvers.baselines.common.offloading import offer_of
from solvers.clock import WallClock
from solvers.result import Reason
from tests.support.graphs.options import check_by_both_judges, names, small_gpt, three_layers, with_trips
from tests.support.solvers.answers import ask


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
