"""Errors in planned steps: out of memory, with the plan's memory and a budget that would work; others at the user's line."""

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from planner.capture.program.program import OpCalls
from planner.capture.source_lines import find_traced_line
from planner.graphs.errors import OutOfMemoryError, PlannerError
from planner.graphs.ir import Graph, Kind, Op
from planner.graphs.pools import DEVICE, HOST
from planner.graphs.schedule import Compute
from planner.graphs.short_tracebacks import raise_at_caller
from planner.graphs.simulate import simulate
from planner.graphs.units import format_bytes, format_enough
from planner.memory.free_memory import free_bytes
from planner.runtime.allocator_failure import AllocatorFailure, find_allocator_failure
from planner.runtime.step_lines import StepLines
from planner.solvers.bounds import bound_least_budget, describe_need

_MARGIN = 0.01  # of an advised budget: for memory outside the plan


@dataclass(frozen=True, slots=True)
class PlannedMemory:
    """The predicted memory of a planned step.

    Attributes:
        lines: lines of the code that runs.
        place: returns the device of a pool, by name.
        missing_bytes: returns the static bytes that are not allocated yet, such as the optimizer's state before its first step.
        afterwards: sentence of the error on the state of the model.
    """

    graph: Graph
    lines: StepLines
    calls: Sequence[OpCalls]
    place: Callable[[str], torch.device]
    missing_bytes: Callable[[], int] = lambda: 0
    afterwards: str = "The model, its gradients and the random state are as before the step."

    def raise_at_caller(self, error: Exception, which_pass: str) -> None:
        """Raise `error` at the line of the user's code that called the failed op; do nothing if that is not known."""
        op = None if isinstance(error, PlannerError) else self._find_failed_op(error)
        line = None if op is None else find_traced_line(self.calls[op.id].trace)
        if line is not None and line.lineno is not None:
            error.add_note(f"raised in the {which_pass} pass of a planned step, by {_name_op(op)}")
            raise_at_caller(line.filename, line.lineno, line.name, error)

    def _find_failed_op(self, error: BaseException) -> Op | None:
        step = self.lines.find_failed_step(error)
        failed = None if step is None else self.lines.schedule.steps[step]
        return self.graph.ops[failed.op] if isinstance(failed, Compute) else None

    def describe(self, failure: AllocatorFailure, error: BaseException, which_pass: str) -> OutOfMemoryError:
        """Return the error to raise for a `failure` of the allocator in `which_pass`, which ended with `error`."""
        step, op = self.lines.find_failed_step(error), self._find_failed_op(error)
        pool = DEVICE if op is None else _get_pool(self.graph, op)
        index = [p.name for p in self.graph.pools].index(pool)
        place = self.place(pool)
        free = free_bytes(place)
        static = self.graph.static_bytes_by_pool[pool]
        memory = simulate(self.graph, self.lines.schedule).pool_memory_bytes[index]
        held = static if step is None else memory[step]
        before = held if op is None else max(static, held - _count_made_bytes(self.graph, op, pool))
        room = before + free - (self.missing_bytes() if pool == DEVICE else 0)
        budget, advice = self._build_advice(failure, pool, max(memory), room)
        where = f"at this op {format_bytes(held)}" if op is not None else f"there {format_bytes(held)}"
        return OutOfMemoryError(
            f"out of memory in the {which_pass} pass: {_name_op(op)} {failure.describe()}, and without what it takes "
            f"{format_bytes(free)} are free on {place}; the plan holds {where}, {format_bytes(static)} of it static (parameters, "
            f"inputs and what else stays). {self.afterwards} {advice} ({failure.message})",
            asked_bytes=failure.asked_bytes,
            op=None if op is None else op.name,
            budget_bytes=budget,
        )

    def _build_advice(self, failure: AllocatorFailure, pool: str, peak_bytes: int, room_bytes: int) -> tuple[int | None, str]:
        """Return a budget that should work, if there is one, and advice.

        Args:
            peak_bytes: peak of the plan in the `pool`.
            room_bytes: memory that the step holds there before the op, and free memory.
        """
        if room_bytes >= peak_bytes:  # the memory is free, but fragmented
            room_bytes = peak_bytes - max(failure.asked_bytes or 0, peak_bytes // 20)
        wanted = _round_down(int(room_bytes * (1 - _MARGIN)))
        if pool == HOST:
            return None, f"Lower host_budget= to '{_format_exact(wanted)}', or free memory of the host."
        if pool != DEVICE:
            return None, f"Free memory there, or leave out the device {pool!r}."
        least = bound_least_budget(self.graph)
        if wanted < least.budget_bytes:
            return None, (
                f"No schedule of this step fits into what is free: at least {format_enough(least.budget_bytes)} are needed, "
                f"where {describe_need(self.graph, least.need)}. Lower the batch size, or free memory."
            )
        return wanted, (
            f"Plan with budget='{_format_exact(wanted)}' in place of the present peak of {format_bytes(peak_bytes)}, or lower "
            "the batch size."
        )


@dataclass(frozen=True, slots=True)
class ErrorReport:
    """A context for a pass: memory errors become an OutOfMemoryError that describes the plan, once its tensors are released.

    Other errors of an op are raised at the line of the user's code that called it. A context made of a generator would restore
    their traceback.
    """

    memory: PlannedMemory
    which_pass: str

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Raise what is to be raised in place of `error`."""
        if not isinstance(error, Exception):
            return
        if (failure := find_allocator_failure(error)) is None:
            self.memory.raise_at_caller(error, self.which_pass)
            return
        report = self.memory.describe(failure, error, self.which_pass)
        let_go(error)
        raise report from error


class StateNotMade:
    """The static bytes of a graph allocated during the first steps: optimizer state, and gradients to accumulate in."""

    def __init__(self, graph: Graph, model: nn.Module) -> None:
        """Record the versions of `model`'s parameters: while no parameter is written, the optimizer has no state yet."""
        self._sizes, self._model = graph.static_bytes_by_kind, model
        self._versions = self._count_written()

    def __call__(self) -> int:
        """Return the number of bytes that are not allocated yet."""
        missing = self._sizes.get(Kind.OPTIMIZER_STATE, 0) if self._count_written() == self._versions else 0
        if all(parameter.grad is None for parameter in self._model.parameters()):
            missing += self._sizes.get(Kind.ACCUMULATED_GRADIENT, 0)
        return missing

    def _count_written(self) -> int:
        return sum(p._version for p in self._model.parameters() if not p.is_inference())


@contextmanager
def report_errors(stage: str) -> Iterator[None]:
    """Replace memory errors inside by an OutOfMemoryError that names `stage`, as in ``measuring op 'mm_3'``."""
    try:
        yield
    except Exception as error:
        failure = find_allocator_failure(error)
        if failure is None:
            raise
        if isinstance(error, OutOfMemoryError):
            raise OutOfMemoryError(
                f"while {stage}: {error}", asked_bytes=error.asked_bytes, op=error.op, budget_bytes=error.budget_bytes
            ) from error
        let_go(error)
        raise OutOfMemoryError(
            f"out of memory while {stage}: it {failure.describe()}. Free memory, or lower the batch size. ({failure.message})",
            asked_bytes=failure.asked_bytes,
        ) from error


def let_go(error: BaseException) -> None:
    """Clear the frames of `error`, its causes and contexts: they would keep tensors alive."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            traceback.clear_frames(one.__traceback__)
            waiting += [one.__cause__, one.__context__]


def _name_op(op: Op | None) -> str:
    if op is None:
        return "code before or after its ops"
    return f"op {op.name!r} ({op.target})" + (f" in {op.module}" if op.module else "")


def _get_pool(graph: Graph, op: Op) -> str:
    if op.outputs:
        return graph.tensors[op.outputs[0]].pool
    return next(pool.name for pool in graph.pools if pool.owner == op.stream)


def _count_made_bytes(graph: Graph, op: Op, pool: str) -> int:
    """Return the most bytes that `op` allocates in `pool`."""
    made = [graph.tensors[t].size_bytes for t in op.outputs if graph.tensors[t].pool == pool]
    return sum(made) + op.workspace_bytes


def _round_down(size_bytes: int) -> int:
    """Return `size_bytes` rounded down to three digits."""
    unit = int(10 ** max(0, len(str(max(size_bytes, 0))) - 3))
    return max(size_bytes, 0) // unit * unit


def _format_exact(size_bytes: int) -> str:
    """Return a size of three digits in the form of a budget: ``283MB``, ``1.25GB``."""
    scale, unit = next(((s, u) for s, u in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")) if size_bytes >= s), (1, "B"))
    return f"{size_bytes / scale:g}{unit}"
