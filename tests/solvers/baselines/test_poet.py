"""POET's program: what it decides, what that takes in time, and that its memory is the judge's."""

import pytest

from graphs.schedule import keep_everything
from graphs.simulate import simulate
from graphs.synthetic.small import make_training_chain
from graphs.synthetic.transformer import TransformerSize, transformer
from solvers import highs
from solvers.baselines import poet
from solvers.baselines.common.offloading import offer_of
from solvers.baselines.poet import PoetProgram
from solvers.clock import WallClock
from solvers.registry import estimate_program_time_s
from solvers.result import Reason
from tests.support.graphs.options import check_by_both_judges, offered, with_trips
from tests.support.marks import slow
from tests.support.solvers.answers import ask


def test_paging_takes_no_time_there_and_its_time_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(poet, "_POWERS", (0.1,))
    graph = with_trips(make_training_chain(4))
    paged = poet.solve(ask(graph, 3))
    check_by_both_judges(graph, paged)
    # f1 and f2 go and come, for 4 tenths, where making f1, then f2 and f1 again costs 2 or 3. There is no room to ask for
    # them before their stages, so each is waited for.
    assert sorted(graph.ops[op].name for op in paged.schedule.computed if graph.ops[op].optional) == [
        "copy_f1_device_to_host",
        "copy_f1_host_to_device",
        "copy_f2_device_to_host",
        "copy_f2_host_to_device",
    ]
    assert paged.time_s == 10.0


def test_cost_of_copies_decides_between_recomputing_and_offload(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = with_trips(make_training_chain(4))
    both = poet.solve(ask(graph, 4))
    assert both.time_s <= 9.0
    monkeypatch.setattr(poet, "_POWERS", (1.0,))
    computed = poet.solve(ask(graph, 4))
    # Two seconds of copies cost more than f1 again.
    assert not any(graph.ops[op].optional for op in computed.schedule.computed)
    assert computed.time_s == 9.0


@pytest.mark.parametrize("power", [0.01, *slow(1.0)])
def test_program_cost_bounds_the_cost_of_the_schedule(power: float) -> None:
    compared = 0
    for seed in range(40):
        graph = offered(seed, most_ops=8)
        offer = offer_of(graph)
        peak = simulate(offer.program, keep_everything(offer.program)).peak_bytes
        model = PoetProgram(offer, int(0.85 * peak), power)
        program = model.build()
        assert program is not None
        found = highs.solve_program(program, clock=WallClock(10))
        if found.values is None or found.objective is None:
            continue
        schedule = poet.carry_out(model, found.values, int(0.85 * peak))
        simulation = simulate(graph, schedule)
        assert simulation.peak_bytes <= int(0.85 * peak), seed
        times = [graph.ops[op].time_s * (power if graph.ops[op].optional else 1.0) for op in schedule.computed]
        # A copy that is carried out twice in the program may be there still, and some serve nothing.
        assert sum(times) - graph.time_s <= found.objective * model.unit_s + 1e-6, seed
        compared += 1
    assert compared > 10


def test_large_graphs_are_not_tried() -> None:
    graph = with_trips(transformer(TransformerSize(layers=12)), 50e9)
    result = poet.solve(ask(graph, 10**12))
    assert result.reason is Reason.SIZE and "more than 36,000, the most that this solver supports" in result.message


def test_a_limit_in_which_there_is_no_solution_is_refused_at_once() -> None:
    graph = with_trips(plain := make_training_chain(20), 50e9)
    budget_bytes = simulate(plain, keep_everything(plain)).peak_bytes
    least_s = estimate_program_time_s("poet", graph, budget_bytes)
    refused = poet.solve(ask(graph, budget_bytes, time_limit_s=0.9 * least_s))
    assert refused.reason is Reason.TIME and "to write it and solve its relaxation once takes about" in refused.message
    assert estimate_program_time_s("poet", plain, budget_bytes) == 0.0  # without transfers
