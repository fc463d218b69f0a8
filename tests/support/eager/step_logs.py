"""Logs of steps, made op by op, as ``native/op_records.cpp`` makes them."""

from collections.abc import Hashable

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


def add_op(log: StepLog, op: LoggedOp, shapes: Hashable = 0) -> None:
    """Add an op to a log; `shapes` distinguishes executions on tensors of different shapes."""
    structure = hash((*log.structures[-1:], op.target, op.inputs, op.made, op.written))
    log.made_bytes.append(sum(log.made_bytes[-1:]) + sum(log.sizes_bytes[storage] for storage in op.made))
    log.ops.append(op)
    log.structures.append(structure)
    log.chains.append(hash((log.chain, structure, shapes)))


def add_storage(log: StepLog, size_bytes: int) -> int:
    """Add a storage that is new in the step, and return its number."""
    log.sizes_bytes.append(size_bytes)
    return len(log.sizes_bytes) - 1


def unpack(log: StepLog, storage: int) -> None:
    """Record that autograd has unpacked a storage."""
    log.unpacked.setdefault(len(log.ops), []).append(storage)


def release(log: StepLog, storage: int) -> None:
    """Record that the program has released a storage."""
    log.released[storage] = len(log.ops)


def add(event: Event, log: StepLog, plans: StepPlans | None = None) -> None:
    """Add an op to the log of a step, or of the current step of `plans`."""
    op, sizes, released = event
    if op.backward:
        unpack(log, op.inputs[0])
    for size in sizes:
        add_storage(log, size)
    add_op(log, op, sizes)
    if plans is not None:
        plans.check_plan()
    for storage in released:
        release(log, storage)


def log_of(ops: list[Event]) -> StepLog:
    log = StepLog(0)
    for event in ops:
        add(event, log)
    return log
