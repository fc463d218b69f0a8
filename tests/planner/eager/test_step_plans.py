"""Steps that repeat: plans in the third, what they do before each op, and other steps."""

import pytest

from graphs.errors import PlannerError
from graphs.schedule import Compute, Free, Schedule
from graphs.simulate import simulate
from planner.eager.step_log import LoggedOp, StepLog, recorded_step
from planner.eager.step_plans import Action, StepPlans, actions

SIZE, LENGTH = 10, 6


def ops_of_chain(length: int = LENGTH, target: str = "f") -> list[tuple[LoggedOp, tuple[int, ...], tuple[int, ...]]]:
    """A chain f0, f1, ... and its gradients: each op with the sizes of what it makes, and what is released after it."""
    found = []
    for i in range(length):
        op = LoggedOp(target, (i - 1,) if i else (), (i,), time_s=1.0)
        found.append((op, (SIZE,), ()))
    for i in reversed(range(length)):
        before = length + (length - 1 - i) - 1
        reads = (i,) if i == length - 1 else (i, before)
        op = LoggedOp("b", reads, (before + 1,), time_s=1.0, backward=True)
        found.append((op, (SIZE,), reads))
    return found


def log_of(ops: list[tuple[LoggedOp, tuple[int, ...], tuple[int, ...]]]) -> StepLog:
    log = StepLog(0)
    for op, sizes, released in ops:
        if op.backward:
            log.unpack(op.inputs[0])
        for size in sizes:
            log.add_storage(size)
        log.add_op(op, op.target)
        for storage in released:
            log.release(storage)
    return log


def run(plans: StepPlans, ops: list[tuple[LoggedOp, tuple[int, ...], tuple[int, ...]]], evictions: int = 1) -> list[Action | int]:
    """Run a step, and return what was done, with the numbers of the ops."""
    plans.begin(0)
    done: list[Action | int] = []
    for i, (op, sizes, released) in enumerate(ops):
        done += plans.due()
        assert plans.due() == ()  # each once
        if op.backward:
            plans.log.unpack(op.inputs[0])
        for size in sizes:
            plans.log.add_storage(size)
        done.append(i)
        plans.add_op(op, op.target)
        for storage in released:
            plans.log.release(storage)
    done += plans.due()
    plans.log.evictions = evictions
    plans.end()
    return done


def test_actions_are_the_schedule_between_the_ops() -> None:
    step = recorded_step(log_of(ops_of_chain(3)))
    steps = [Compute(0), Compute(1), Free(0), Compute(2), Compute(3), Free(2), Compute(0), Compute(4), Free(1), Free(3)]
    steps += [Compute(5), Free(0), Free(4)]
    found = actions(step, Schedule(tuple(steps)))
    assert found == ((), (), (Action(0, evict=True),), (), (Action(0, evict=False),), (), ())


def test_what_is_written_over_is_recomputed_with_the_present_contents() -> None:
    log = StepLog(0)
    a = log.add_storage(SIZE)
    log.add_op(LoggedOp("make", (), (a,), time_s=1.0), 0)
    log.add_op(LoggedOp("write_", (a,), (), (a,), time_s=1.0), 1)
    b = log.add_storage(SIZE)
    log.add_op(LoggedOp("other", (), (b,), time_s=1.0), 2)
    log.release(b)
    log.add_op(LoggedOp("read", (a,), (), time_s=1.0), 3)
    log.release(a)
    steps = (Compute(0), Compute(1), Free(0), Free(1), Compute(2), Free(2), Compute(0), Compute(1), Free(0), Compute(3), Free(1))
    assert actions(recorded_step(log), Schedule(steps)) == (
        *((), ()),
        (Action(a, evict=True),),
        (Action(a, evict=False),),
        (),
    )


def test_a_schedule_in_another_order_is_refused() -> None:
    step = recorded_step(log_of(ops_of_chain(2)))
    with pytest.raises(PlannerError, match="executes op 'f_1' before those ahead of it"):
        actions(step, Schedule((Compute(1),)))


def test_a_step_is_planned_when_it_comes_for_the_third_time() -> None:
    plans = StepPlans(5 * SIZE)
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
    # The plan's schedule is what was done, without what the program frees itself.
    executed = [step.op for step in plan.plan.schedule.steps if isinstance(step, Compute)]
    assert [i for i in done if isinstance(i, int)] == list(range(2 * LENGTH))
    assert sum(isinstance(i, Action) and not i.evict for i in done) == len(executed) - 2 * LENGTH
    assert simulate(plan.step.graph, plan.plan.schedule).peak_bytes <= 5 * SIZE


def test_a_step_that_fits_is_not_planned() -> None:
    plans = StepPlans(100 * SIZE)
    for _ in range(3):
        run(plans, ops_of_chain(), evictions=0)
    plans.wait()
    assert plans.plans == ()


def test_an_op_that_differs_ends_the_plan_within_the_step() -> None:
    plans = StepPlans(5 * SIZE)
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
    plans = StepPlans(5 * SIZE)
    one, other = ops_of_chain(), ops_of_chain(LENGTH + 1, "g")
    for _ in range(2):
        run(plans, one)
        run(plans, other)
    plans.wait()
    assert len(plans.plans) == 2
    by_length = {len(plan.step.graph.ops): plan for plan in plans.plans}
    for ops in (one, other, other, one):
        done = run(plans, ops)
        expected = by_length[len(ops)].actions
        assert [a for a in done if isinstance(a, Action)] == [a for before in expected for a in before]
    assert plans.planned_steps == 4


def test_a_step_that_no_plan_fits_goes_on_by_the_heuristic() -> None:
    plans = StepPlans(SIZE)
    for _ in range(3):
        run(plans, ops_of_chain())
    plans.wait()
    assert plans.plans == ()
    (failure,) = plans.failures
    assert failure.startswith("budget 10 B is below")
