"""Capuchin's swaps and DELTA: small cases worked out by hand, and that they know what the judge does.

The chain is f1 to f4, g4 to g1, of a second and a byte each; g4 reads f3 and f4, g3 f2, g2 f1. Keeping everything takes 5.
"""

import pytest

from graphs.simulate import simulate
from graphs.synthetic.small import make_training_chain
from solvers.baselines import capuchin_swap, delta
from solvers.baselines.common.offloading import offer_of
from solvers.baselines.common.online import OnlineFailedError
from solvers.result import Reason
from tests.support.graphs.options import check_by_both_judges, names, offered, with_trips
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
