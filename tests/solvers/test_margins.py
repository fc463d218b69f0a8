"""Local margins: schedules of a graph with them leave as much free, and half way between two of them is found."""

from graphs.schedule import Compute, keep_everything
from graphs.simulate import simulate
from graphs.synthetic.small import training_chain
from solvers.margins import between, most_above, with_margins


def test_a_schedule_has_room_for_the_margin_while_its_op_runs() -> None:
    graph = training_chain(3)
    schedule = keep_everything(graph)
    before, after = (simulate(one, schedule) for one in (graph, with_margins(graph, {1: 5})))
    grown = [more - less for less, more in zip(before.memory_bytes, after.memory_bytes, strict=True)]
    assert schedule.steps[1] == Compute(1)
    assert grown == [0, 5, *[0] * (len(grown) - 2)]
    assert with_margins(graph, {}) is graph


def test_half_way() -> None:
    assert between({0: 4, 1: 7}, {0: 10, 2: 1, 3: 6}) == {0: 7, 3: 3}
    assert most_above({0: 10, 2: 1}, {0: 4, 1: 90}) == 6
    assert most_above({}, {1: 90}) == 0
