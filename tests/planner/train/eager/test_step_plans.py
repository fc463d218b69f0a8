"""Steps as they ran, their hashes and graphs, and steps that repeat: plans in the third, what they offer before each op."""

from typing import Any

import pytest

from planner.graphs.errors import PlannerError
from planner.graphs.io.graph_document import build_from_dict, convert_to_dict
from planner.graphs.ir import Kind, Phase
from planner.graphs.schedule import Compute, Free, Schedule, keep_everything
from planner.graphs.simulate import simulate
from planner.train.eager import step_plans
from planner.train.eager.enough_budget import find_enough_bytes
from planner.train.eager.step_log import LoggedOp, build_recorded_step
from planner.train.eager.step_plans import Action, StepPlan, StepPlans, list_actions
from tests.support.eager.solves import SolvedWhenWaitedFor
from tests.support.eager.step_logs import LENGTH, SIZE, Event, add, log_of, new_log, new_plans, ops_of_chain


@pytest.fixture(autouse=True)
def _solved_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans are ready when they are waited for; test_planned_steps has some that are solved in another process."""
    monkeypatch.setattr(step_plans, "BackgroundSolve", SolvedWhenWaitedFor)


def take_offered(plans: StepPlans) -> list[Action | int]:
    """Evict all that is offered."""
    offered = plans.advance_offered()
    taken: list[Action | int] = [Action(storage, evict=True) for storage in offered]
    offered.clear()
    return taken


def run(plans: StepPlans, ops: list[Event], evictions: int = 1) -> list[Action | int]:
    """Run a step that evicts all that it is offered, and return what was done, with the numbers of the ops."""
    plans.begin(0)
    done: list[Action | int] = []
    for i, event in enumerate(ops):
        done += [*take_offered(plans), i]
        add(event, plans.log, plans)
    done += take_offered(plans)
    plans.log.evicted = [0] * evictions
    plans.end()
    return done


def evictions_of(plan: StepPlan) -> list[Action]:
    return [action for before in plan.actions for action in before if action.evict]


def test_actions_are_the_schedule_between_the_ops() -> None:
    step = build_recorded_step(log_of(ops_of_chain(3)))
    steps = [Compute(0), Compute(1), Free(0), Compute(2), Compute(3), Free(2), Compute(0), Compute(4), Free(1), Free(3)]
    steps += [Compute(5), Free(0), Free(4)]
    found = list_actions(step, Schedule(tuple(steps)))
    assert found == ((), (), (Action(0, evict=True),), (), (Action(0, evict=False),), (), ())


def test_recomputation_of_overwritten_storage_repeats_its_writes() -> None:
    log = new_log()
    a = log.add_storage(SIZE)
    log.add_op(LoggedOp("make", (), (a,), time_s=1.0))
    log.add_op(LoggedOp("write_", (a,), (), (a,), time_s=1.0))
    b = log.add_storage(SIZE)
    log.add_op(LoggedOp("other", (), (b,), time_s=1.0))
    log.note_released(b)
    log.add_op(LoggedOp("read", (a,), (), time_s=1.0))
    log.note_released(a)
    steps = (Compute(0), Compute(1), Free(0), Free(1), Compute(2), Free(2), Compute(0), Compute(1), Free(0), Compute(3), Free(1))
    assert list_actions(build_recorded_step(log), Schedule(steps)) == (
        *((), ()),
        (Action(a, evict=True),),
        (Action(a, evict=False),),
        (),
    )


def test_overwritten_storage_is_recomputed_before_its_inputs_are_evicted() -> None:
    """As a dropout's mask: made of the shape of its input, then written."""
    log = new_log()
    x, mask, other = (log.add_storage(SIZE) for _ in range(3))
    log.add_op(LoggedOp("make", (), (x,), time_s=1.0))
    log.add_op(LoggedOp("empty_like", (x,), (mask,), time_s=1.0))
    log.add_op(LoggedOp("bernoulli_", (mask,), (), (mask,), time_s=1.0))
    log.note_released(x)
    log.add_op(LoggedOp("other", (), (other,), time_s=1.0))
    log.note_released(other)
    log.add_op(LoggedOp("read", (mask,), (), time_s=1.0))
    log.note_released(mask)
    step = build_recorded_step(log)
    assert step.storages == (x, mask, mask, other)
    steps = [Compute(0), Compute(1), Compute(2), Free(0), Free(1), Free(2), Compute(3), Free(3)]
    steps += [Compute(0), Compute(1), Free(0), Compute(2), Free(1), Compute(4), Free(2)]
    again = (Action(x, evict=False), Action(mask, evict=False), Action(x, evict=True))
    assert list_actions(step, Schedule(tuple(steps))) == ((), (), (), (Action(mask, evict=True),), again, ())


def test_a_schedule_in_another_order_is_refused() -> None:
    step = build_recorded_step(log_of(ops_of_chain(2)))
    with pytest.raises(PlannerError, match="executes op 'f_1' before ops that precede it"):
        list_actions(step, Schedule((Compute(1),)))


def test_repeated_step_follows_a_plan_from_the_third_time_on() -> None:
    plans = new_plans(5 * SIZE)
    ops = ops_of_chain()
    first = run(plans, ops)
    assert first == list(range(2 * LENGTH))
    plans.wait()
    assert plans.plans == ()
    assert run(plans, ops) == first
    plans.wait()
    (plan,) = plans.plans
    done = run(plans, ops)
    assert plans.planned_steps == 1
    assert done != first
    assert [i for i in done if isinstance(i, int)] == list(range(2 * LENGTH))
    assert [a for a in done if isinstance(a, Action)] == evictions_of(plan)
    assert simulate(plan.step.graph, plan.plan.schedule).peak_bytes <= 5 * SIZE


def test_a_step_that_fits_is_not_planned() -> None:
    plans = new_plans(100 * SIZE)
    for _ in range(3):
        run(plans, ops_of_chain(), evictions=0)
    plans.wait()
    assert plans.plans == ()


def test_an_op_that_differs_ends_the_plan_within_the_step() -> None:
    plans = new_plans(5 * SIZE)
    ops = ops_of_chain()
    for _ in range(2):
        run(plans, ops)
    plans.wait()
    planned = run(plans, ops)
    changed = [*ops[:-3], (ops[-3][0]._replace(target="c"), *ops[-3][1:]), *ops[-2:]]
    done = run(plans, changed)
    differs = done.index(2 * LENGTH - 3)
    assert done[:differs] == planned[:differs]
    assert done[differs:] == [2 * LENGTH - 3, 2 * LENGTH - 2, 2 * LENGTH - 1]
    assert (plans.planned_steps, plans.left_steps) == (1, 1)


def test_each_recurring_step_has_a_plan() -> None:
    plans = new_plans(5 * SIZE)
    one, other = ops_of_chain(), ops_of_chain(LENGTH + 1, "g")
    for _ in range(2):
        run(plans, one)
        run(plans, other)
    plans.wait()
    assert len(plans.plans) == 2
    by_length = {len(plan.step.graph.ops): plan for plan in plans.plans}
    for ops in (one, other, other, one):
        done = run(plans, ops)
        assert [a for a in done if isinstance(a, Action)] == evictions_of(by_length[len(ops)])
    assert plans.planned_steps == 4


def test_a_step_that_no_plan_fits_goes_on_by_the_heuristic() -> None:
    plans = new_plans(SIZE)
    for _ in range(3):
        run(plans, ops_of_chain())
    plans.wait()
    assert plans.plans == ()
    (failure,) = plans.failures
    assert failure.startswith("budget 10 B is below")


# --- sizes that vary ------------------------------------------------------------------------------


def sized(*sizes: int) -> StepPlans:
    """Plans after steps of these sizes and their solves."""
    plans = new_plans(500)
    for size in sizes:
        run(plans, ops_of_chain(size=size))
    plans.wait()
    return plans


def planned_sizes(plans: StepPlans) -> list[int]:
    return sorted(plan.step.graph.tensors[0].size_bytes for plan in plans.plans)


def offers(plans: StepPlans, size: int) -> list[list[int]]:
    """Run a step, and return what was offered before each op."""
    found = []
    plans.begin(0)
    for event in ops_of_chain(size=size):
        found.append(list(plans.advance_offered()))
        add(event, plans.log, plans)
    plans.end()
    return found


def evicted_by(plan: StepPlan) -> list[list[int]]:
    """What a plan has evicted before each op and not recomputed since, in order."""
    found: list[list[int]] = []
    evicted: list[int] = []
    for before in plan.actions[:-1]:
        for action in before:
            evicted = [storage for storage in evicted if storage != action.storage] + [action.storage] * action.evict
        found.append(evicted)
    return found


def test_a_step_that_comes_again_in_another_size_is_solved_in_the_largest() -> None:
    assert planned_sizes(sized(98)) == []
    assert planned_sizes(sized(98, 100, 96)) == [100]


@pytest.mark.slow
def test_sizes_far_below_those_with_a_plan_are_solved_too() -> None:
    assert planned_sizes(sized(100, 95, 80, 75)) == [80, 100]


@pytest.mark.slow
def test_size_without_a_plan_uses_evictions_of_the_next_larger_plan() -> None:
    plans = sized(100, 99, 70, 70, 90, 90)
    assert planned_sizes(plans) == [70, 90, 100]
    by_size = {plan.step.graph.tensors[0].size_bytes: evicted_by(plan) for plan in plans.plans}
    for size, lender in ((95, 100), (85, 90), (65, 70), (110, 100)):
        assert offers(plans, size) == [[], *by_size[lender][1:]]
    assert any(by_size[100])
    assert offers(plans, 90) == [[], *by_size[90][1:]]  # it has a plan of its own


def test_the_earlier_step_like_a_step_is_the_largest_of_those_that_are_not_larger() -> None:
    plans = new_plans(10**9)
    for size in (8, 10, 12):
        run(plans, ops_of_chain(size=size), evictions=0)
    run(plans, ops_of_chain(2 * LENGTH, "g", size=10), evictions=0)
    for size, expected in ((7, None), (8, 8), (11, 10), (99, 12)):
        plans.begin(0)
        assert plans.earlier is None
        add((LoggedOp("f", (), (0,)), (size,), ()), plans.log)
        earlier = plans.earlier
        assert (None if earlier is None else earlier.sizes_bytes[0]) == expected


def test_other_ops_are_offered_nothing() -> None:
    plans = sized(100, 100)
    plans.begin(0)
    add((LoggedOp("g", (), (0,)), (90,), ()), plans.log)
    assert plans.advance_offered() == {}


@pytest.mark.slow
def test_steps_without_a_plan_are_dropped_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_plans, "_MOST_STEPS", 3)
    plans = sized(100, 100)
    for length in (3, 4, 5):
        run(plans, ops_of_chain(length, "g", size=100))
    assert planned_sizes(plans) == [100]
    assert run(plans, ops_of_chain(size=100)) != list(range(2 * LENGTH))
    assert plans.planned_steps == 1
    run(plans, ops_of_chain(5, "g", size=100))  # of the others the latest two are known
    run(plans, ops_of_chain(3, "g", size=100))
    plans.wait()
    assert len(plans.plans) == 2


def note_op(log: Any, target: str, inputs: tuple[int, ...], made: tuple[int, ...] = (), **facts: object) -> None:
    log.add_op(LoggedOp(target, inputs, made, **facts))


def small_step() -> Any:
    """x, w -> h = mm(x, w); h <- relu_(h); y = mm(h, w); g = mm_backward(y, h), the gradient of w; then w <- sub_(w, g)."""
    log = new_log(100)
    x, w = log.add_storage(20), log.add_storage(30)
    h = log.add_storage(8)
    note_op(log, "aten.mm.default", (x, w), (h,), time_s=3.0)
    note_op(log, "aten.relu_.default", (h,), written=(h,), time_s=1.0)
    y = log.add_storage(4)
    note_op(log, "aten.mm.default", (h, w), (y,), time_s=2.0)
    g = log.add_storage(30)
    note_op(log, "aten.mm.default", (y, h), (g,), time_s=2.0, backward=True)
    log.note_released(h)
    note_op(log, "aten.sub_.Tensor", (w, g), written=(w,), time_s=1.0, recomputable=False)
    log.note_released(y)
    return log


def test_a_step_becomes_a_graph() -> None:
    step = build_recorded_step(small_step())
    graph = step.graph
    assert [op.name for op in graph.ops] == ["mm", "relu_", "mm_1", "mm_2", "sub_"]
    assert [t.name for t in graph.tensors] == ["held_0", "held_1", "mm", "relu_", "mm_1", "mm_2", "not read in the step"]
    assert step.storages == (0, 1, 2, 2, 3, 4, -1)
    assert [op.inputs for op in graph.ops] == [(0, 1), (2,), (3, 1), (4, 3), (1, 5, 4)]  # y is held until w is updated
    assert [op.outputs for op in graph.ops] == [(2,), (3,), (4,), (5,), ()]
    assert graph.ops[1].overwrites == ((3, 2),)
    assert graph.ops[4].mutates == (1,)
    assert [op.phase for op in graph.ops] == [Phase.FORWARD] * 3 + [Phase.BACKWARD] * 2
    assert graph.kept == {5}
    assert graph.static_bytes == 100
    assert graph.tensors[6].kind is Kind.CONSTANT
    assert build_from_dict(convert_to_dict(graph)) == graph
    assert simulate(graph, keep_everything(graph)).peak_bytes == 100 + 8 + 4 + 30


def test_unpacked_tensors_are_inputs_of_all_ops_of_their_node() -> None:
    log = new_log()
    a, b, loss, g, h, k = (log.add_storage(1) for _ in range(6))
    note_op(log, "f", (), (a,))
    note_op(log, "f", (a,), (b,))
    note_op(log, "loss", (b,), (loss,))
    log.note_unpacked(b)
    note_op(log, "g", (loss,), (g,), backward=True, node=7)
    note_op(log, "g", (g, b), (h,), backward=True, node=7)
    note_op(log, "g", (h,), (k,), backward=True, node=6)
    graph = build_recorded_step(log).graph
    assert [op.inputs for op in graph.ops] == [(), (a,), (b,), (b, loss), (b, g), (h,)]
    assert [op.recomputable for op in graph.ops] == [True, True, False, False, False, False]


def test_keep_everything_schedule_frees_released_storages() -> None:
    graph = build_recorded_step(small_step()).graph
    assert keep_everything(graph).steps == (
        *(Compute(0), Compute(1), Free(2)),
        *(Compute(2), Compute(3), Free(3)),
        *(Compute(4), Free(4)),
    )


@pytest.mark.parametrize("only_saved", [False, True])
def test_only_storages_held_by_the_program_stay_until_released(only_saved: bool) -> None:
    log = new_log()
    a, b, c = (log.add_storage(size) for size in (7, 5, 3))
    note_op(log, "f", (), (a,))
    note_op(log, "g", (a,), (b,))
    note_op(log, "h", (b,), (c,))
    log.note_released(a, only_saved=only_saved)
    graph = build_recorded_step(log).graph
    assert graph.ops[2].inputs == ((1,) if only_saved else (1, 0))


@pytest.mark.parametrize("heuristic", ["dtr", "lru", "dtr-random"])
def test_a_chain_needs_two_gradients_and_an_activation(heuristic: str) -> None:
    step = build_recorded_step(log_of(ops_of_chain()))
    assert find_enough_bytes(step, heuristic, max_recomputation=100.0) == 3 * SIZE


def test_sufficient_budget_without_recomputation_is_the_peak() -> None:
    step = build_recorded_step(log_of(ops_of_chain()))
    assert find_enough_bytes(step, "dtr", max_recomputation=0.0) == (LENGTH + 1) * SIZE
