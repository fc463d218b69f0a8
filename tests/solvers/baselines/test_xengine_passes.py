"""What a caller gets of the forward pass is on the main device as that ends, in what the program finds."""

from dataclasses import replace

import pytest

from graphs.errors import ScheduleError
from graphs.ir import Graph, Phase
from graphs.options.passes import order_by_passes, split_into_passes
from graphs.options.surroundings import OtherDevice
from graphs.schedule import Compute, schedule_of
from graphs.simulate import simulate
from graphs.synthetic.draft import Draft
from solvers.clock import WorkClock
from solvers.registry import get_solver
from solvers.request import Request
from tests.support.graphs.options import on_devices


def step() -> Graph:
    """A loss of 4 bytes, which another device computes sooner, and two kept gradients behind it."""
    draft = Draft()
    (a,) = draft.add_op("a", [], [4], time_s=9.0)
    (loss,) = draft.add_op("loss", [a], [4], time_s=9.0)
    (b,) = draft.add_op("b", [a], [2], time_s=9.0)
    (c,) = draft.add_op("c", [b], [2], time_s=9.0)
    graph = draft.build_graph([loss, b, c])
    return replace(graph, ops=tuple(replace(op, phase=Phase.FORWARD if op.id < 2 else Phase.BACKWARD) for op in graph.ops))


@pytest.mark.parametrize("solver", ["xengine", "xengine-overlapped", "windows"])
@pytest.mark.parametrize("budget", [8, 12, 100])
def test_a_loss_that_is_made_elsewhere_comes_with_the_forward_pass(solver: str, budget: int) -> None:
    graph = on_devices(step(), OtherDevice("second", (1.0,) * 4, 4.0, 20))
    result = get_solver(solver)(Request(graph, budget, clock=WorkClock(0.5)))
    assert any(graph.ops[op].replaces for op in result.schedule.computed)
    forward, _ = split_into_passes(graph, result.schedule)
    loss = next(t.id for t in graph.tensors if t.producers and graph.ops[t.producers[0]].name == "loss")
    assert any(isinstance(s, Compute) and loss in graph.ops[s.op].outputs for s in forward)
    # It is there in what the program counts: nothing is held longer where the schedule is run.
    again = simulate(graph, order_by_passes(graph, result.schedule))
    assert again.peak_bytes == result.peak_bytes <= budget


def test_a_loss_that_is_computed_here_again_comes_with_the_forward_pass() -> None:
    graph = on_devices(step(), OtherDevice("second", (1.0,) * 4, 4.0))
    ids = {op.name: op.id for op in graph.ops}
    names = ["a", "copy_a_device_to_second", "loss@second", "loss", "b", "c"]
    schedule = schedule_of(graph, [ids[name] for name in names])
    forward, backward = split_into_passes(graph, schedule)
    computed = [[graph.ops[s.op].name for s in steps if isinstance(s, Compute)] for steps in (forward, backward)]
    assert computed == [names[:4], names[4:]]
    assert order_by_passes(graph, schedule) == schedule
    late = schedule_of(graph, [ids[name] for name in ("a", "copy_a_device_to_second", "loss@second", "b", "loss", "c")])
    with pytest.raises(ScheduleError, match="'loss', which the step returns, is not in memory"):
        split_into_passes(graph, late)
