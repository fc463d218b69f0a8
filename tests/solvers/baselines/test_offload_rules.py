"""Rules by which PyTorch, torchtune, DeepSpeed and torchtitan offload: small cases worked out by hand.

The chain is f1, f2, f3, g3, g2, g1 of a second and a byte each; g3 reads f2 and f3, g2 reads f1 and g3. A copy takes a second.
"""

import pytest

from planner.graphs.ir import Graph
from planner.graphs.schedule import Compute, Free, Schedule
from planner.graphs.simulate import simulate
from planner.graphs.synthetic.small import make_training_chain
from planner.solvers.baselines import deepspeed_offload, offload_activations, sac_and_offload, save_on_cpu
from planner.solvers.baselines.common.offloading import offer_of
from planner.solvers.result import Reason, Result
from tests.support.graphs.options import check_by_both_judges, names, three_layers, with_trips
from tests.support.solvers.answers import ask

CHAIN = with_trips(make_training_chain(3))


@pytest.fixture(autouse=True)
def tensors_of_a_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    """Are not too small."""
    for rules in (offload_activations, deepspeed_offload):
        monkeypatch.setattr(rules, "_LEAST_BYTES", 1)


def figures(result: Result) -> tuple[float | None, int | None]:
    check_by_both_judges(CHAIN, result)
    return result.time_s, result.peak_bytes


def test_save_on_cpu_waits_for_every_copy() -> None:
    result = save_on_cpu.solve(ask(CHAIN, 10))
    # f1 and f2 are on the host when f2 and f3 are done with them; f3 at 4, f2 and f3 back at 6, f1 from 7 to 8.
    assert figures(result) == (10.0, 3)
    issued = (
        "f1 copy_f1_device_to_host f2 copy_f2_device_to_host f3 copy_f3_device_to_host "
        "copy_f2_host_to_device copy_f3_host_to_device g3 copy_f1_host_to_device g2 g1"
    )
    assert names(CHAIN, result) == issued.split()
    assert save_on_cpu.solve(ask(CHAIN, 2)).reason is Reason.MEMORY


def test_tensors_beyond_host_capacity_stay_on_the_device() -> None:
    graph = with_trips(make_training_chain(3), host_bytes=1)
    result = save_on_cpu.solve(ask(graph, 10))
    assert [name for name in names(graph, result) if name.startswith("copy")] == [
        "copy_f1_device_to_host",
        "copy_f1_host_to_device",
    ]


def test_offload_activations_has_a_stash_and_asks_an_op_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload_activations, "_STASH", 1)
    result = offload_activations.solve(ask(CHAIN, 10))
    # f3 is in the stash when g3 reads it. f2 comes from 3 to 4, then f1 while g3 is executed, and g2 has it at 5.
    assert figures(result) == (7.0, 4)
    issued = (
        "f1 copy_f1_device_to_host f2 copy_f2_device_to_host f3 "
        "copy_f3_device_to_host copy_f2_host_to_device copy_f1_host_to_device g3 g2 g1"
    )
    assert names(CHAIN, result) == issued.split()


def test_a_larger_stash_keeps_more(monkeypatch: pytest.MonkeyPatch) -> None:
    # f1, f2 and f3 are stashed; only f1 is read after g3, at which the stash goes: at 4 its copies are long done.
    result = offload_activations.solve(ask(CHAIN, 10))
    assert figures(result) == (7.0, 4)
    assert [name for name in names(CHAIN, result) if name.endswith("host_to_device")] == ["copy_f1_host_to_device"]
    monkeypatch.setattr(offload_activations, "_LEAST_BYTES", 2)
    small = offload_activations.solve(ask(CHAIN, 10))
    assert figures(small) == (6.0, 4) and len(names(CHAIN, small)) == 6


@pytest.mark.parametrize(
    ("budget", "time_s", "peak", "floor"),
    [
        # All goes, which is waited for after f3, for it was made last; then 3 s of copies in, which nothing hides.
        (3, 10.0, 3, "step"),
        # Above the 2 bytes of the forward pass there is room for f1 and f2: only f3 goes and comes.
        (4, 8.0, 4, "forward pass"),
        # f3 as well: nothing goes.
        (5, 6.0, 4, "forward pass"),
    ],
)
def test_deepspeed_keeps_the_largest_that_there_is_room_for(budget: int, time_s: float, peak: int, floor: str) -> None:
    result = deepspeed_offload.solve(ask(CHAIN, budget))
    assert figures(result) == (time_s, peak)
    assert result.settings["floor"] == floor


def test_deepspeed_brings_back_early_where_memory_allows() -> None:
    graph = with_trips(make_training_chain(4))
    offer = offer_of(graph)
    plan = deepspeed_offload._OffloadPlan(offer, [0])
    # f1 is read by g2, two ops into the backward pass: asked for before g3, a second earlier, where 3 bytes are in use.
    tight, roomy = (plan.reload_early(budget_bytes=budget).computed for budget in (3, 4))
    copy_in = offer.by_tensor[0].back.op
    assert tight.index(copy_in) == tight.index(6) - 1
    assert roomy.index(copy_in) == roomy.index(5) - 1


def tried_with(saves: str, share: float) -> tuple[Graph, Schedule]:
    graph = three_layers()
    offer = offer_of(graph)
    assert offer is not None
    wanted = {"saves": saves, "level": 1, "share": share}
    (found,) = (c.schedule for c in sac_and_offload._generate_trials(offer) if c.settings == wanted)
    return graph, found


def test_sac_and_offload_asks_a_layer_ahead() -> None:
    graph, schedule = tried_with("matmul", 1.0)
    issued = """f1 copy_f1_device_to_host f2 copy_f2_device_to_host f3 copy_f3_device_to_host f4 copy_f4_device_to_host f5 f6 f7
        g7 copy_f4_host_to_device copy_f3_host_to_device g6 g5 copy_f2_host_to_device copy_f1_host_to_device g4 g3 g2 g1"""
    assert [graph.ops[op].name for op in schedule.computed] == issued.split()
    # What layer 0 alone reads goes after layer 1, and what layer 1 reads after layer 2.
    frees = {name: schedule.steps[schedule.steps.index(Free(t)) - 1] for t, name in enumerate(("f1", "f2", "f3", "f4"))}
    assert frees["f1"] == Compute(3)
    assert {step.op if isinstance(step, Compute) else 5 for name, step in frees.items() if name != "f1"} == {5}
    # Nothing is waited for: f4 is there at 9, f3 at 10, f2 at 11 and f1 at 12, when they are read.
    simulation = simulate(graph, schedule)
    assert (simulation.time_s, simulation.peak_bytes) == (14.0, 6)


def test_sac_and_offload_sends_ends_of_layers_and_makes_the_rest_again() -> None:
    graph, schedule = tried_with("nothing", 1.0)
    issued = """f1 f2 copy_f2_device_to_host f3 f4 copy_f4_device_to_host f5 f6 f7
        g7 copy_f4_host_to_device f5 g6 g5 copy_f2_host_to_device f3 g4 g3 f1 g2 g1"""
    assert [graph.ops[op].name for op in schedule.computed] == issued.split()
    # 14 ops, 3 again, and both copies in are waited for: their layers begin with their readers.
    assert simulate(graph, schedule).time_s == 19.0


def test_sac_and_offload_sends_the_largest_within_its_share() -> None:
    graph, schedule = tried_with("nothing", 0.5)
    assert [graph.ops[op].name for op in schedule.computed if graph.ops[op].optional] == [
        "copy_f2_device_to_host",
        "copy_f2_host_to_device",
    ]
    graph, schedule = tried_with("matmul", 0.25)
    assert [graph.ops[op].name for op in schedule.computed if graph.ops[op].optional] == [
        "copy_f1_device_to_host",
        "copy_f1_host_to_device",
    ]


def test_sac_and_offload_wants_blocks() -> None:
    result = sac_and_offload.solve(ask(CHAIN, 10))
    assert result.reason is Reason.INAPPLICABLE and "no blocks" in result.message


def test_parts_of_layers_may_stand_among_those_of_others() -> None:
    graph = three_layers("010 22")
    # f3, of layer 0, is made after layer 1 has ended, at whose end it would go.
    result = sac_and_offload.solve(ask(graph, 10))
    check_by_both_judges(graph, result)
    for candidate in sac_and_offload._generate_trials(offer_of(graph)):
        simulate(graph, candidate.schedule)
