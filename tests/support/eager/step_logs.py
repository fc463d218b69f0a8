"""Logs of steps, made op by op, as ``native/op_records.cpp`` makes them."""

from typing import Any

from planner.native.library import wait_for_library
from planner.train.eager.step_log import LoggedOp, StepLog
from planner.train.eager.step_plans import StepPlans

SIZE, LENGTH = 10, 6


Event = tuple[LoggedOp, tuple[int, ...], tuple[int, ...]]  # an op, the sizes of what it makes, and what is released after it


def ops_of_chain(length: int = LENGTH, target: str = "f", size: int = SIZE) -> list[Event]:
    """A chain f0, f1, ... and its gradients."""
    found = []
    for i in range(length):
        op = LoggedOp(target, (i - 1,) if i else (), (i,), time_s=1.0)
        found.append((op, (size,), ()))
    for i in reversed(range(length)):
        before = length + (length - 1 - i) - 1
        reads = (i,) if i == length - 1 else (i, before)
        op = LoggedOp("b", reads, (before + 1,), time_s=1.0, backward=True)
        found.append((op, (size,), reads))
    return found


def new_log(held_bytes: int = 0) -> Any:
    return wait_for_library().step_log(held_bytes)


def new_plans(budget_bytes: int) -> StepPlans:
    return StepPlans(budget_bytes, new_log)


def add(event: Event, log: Any, plans: StepPlans | None = None) -> None:
    """Add an op to the log of a step, or of the current step of `plans`."""
    op, sizes, released = event
    if op.backward:
        log.note_unpacked(op.inputs[0])
    for size in sizes:
        log.add_storage(size)
    log.add_op(op)
    if plans is not None:
        plans.follow_matching_plan()
    for storage in released:
        log.note_released(storage)


def log_of(ops: list[Event]) -> StepLog:
    log = new_log()
    for event in ops:
        add(event, log)
    return log
