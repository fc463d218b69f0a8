"""Training by a schedule is training: three AdamW steps, equal to the last bit."""

import pytest

from planner.graphs.schedule import keep_everything
from planner.graphs.simulate import simulate
from planner.measure.tracing import profile_capture
from planner.settings.plan import PlanSettings
from tests.support.budgets import on_the_way
from tests.support.marks import slow_among
from tests.support.models.outcomes import assert_same, train
from tests.support.models.steps import STEPS, capture_of, make, random_schedule, solve_for

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.mark.parametrize("name", slow_among(STEPS, "llama", "unet", "vit", "gpt2_written"))
def test_every_schedule_trains_as_eager_does(name: str) -> None:
    workload = make(name)
    captured = profile_capture(capture_of(name), workload, PlanSettings(passes=1))
    graph = captured.graph
    eager = train(workload, None)
    assert_same(eager, train(workload, (captured, keep_everything(graph))))
    recomputed = 0
    for budget in on_the_way(graph, 0.6, 0.1):
        plan = solve_for(0.0, graph, budget)
        recomputed += simulate(graph, plan.schedule).recomputed
        assert_same(eager, train(workload, (captured, plan.schedule)))
    for seed in range(3):
        schedule = random_schedule(graph, seed)
        recomputed += simulate(graph, schedule).recomputed
        assert_same(eager, train(workload, (captured, schedule)))
    assert recomputed > 0


def test_recomputed_dropout_draws_the_same_mask() -> None:
    workload = make("gpt2_written")
    captured = capture_of("gpt2_written")
    dropouts = [op.id for op in captured.graph.ops if op.random and op.recomputable]
    schedule = random_schedule(captured.graph, 1)
    again = [op for op in dropouts if schedule.computed.count(op) > 1]
    assert again
    assert_same(train(workload, None), train(workload, (captured, schedule)))
