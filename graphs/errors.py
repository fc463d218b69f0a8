"""Exceptions and warnings that users may catch. A message states the problem, the value, the limit and what to do next."""

import sys
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from types import FrameType


class PlannerError(Exception):
    """Base class of all errors of the planner: the message is one clear line.

    Attributes:
        full_traceback: text of the traceback with all frames, which errors of public functions leave out.

    Examples:
        >>> try:
        ...     planner.solve(graph, "a lot")
        ... except planner.PlannerError as error:
        ...     print(type(error).__name__)
        BudgetError
    """

    full_traceback = ""


class UsageError(PlannerError):
    """An invalid argument: an unknown name, a wrong type, or a value that is incompatible with another argument."""


class GraphError(PlannerError):
    """A graph that does not describe a training step (cycle, negative cost, unknown tensor, ...)."""


class ScheduleError(PlannerError):
    """A schedule that cannot run on its graph; the message names the step and the tensor."""


class FormatError(PlannerError):
    """An invalid file: not JSON, cut short, of an unknown version, or with a wrong field."""


class BudgetError(PlannerError):
    """A budget that cannot be read, or that no schedule meets.

    Examples:
        >>> planner.solve(graph, "8")
        Traceback (most recent call last):
        planner.graphs.errors.BudgetError: ...
    """


class InfeasibleError(BudgetError):
    """A budget that no schedule meets, in all orders of the ops or in those that were tried; the message has a feasible one."""


class LimitError(PlannerError):
    """A solve that ended at its time limit, or was stopped, without a schedule.

    Examples:
        >>> try:
        ...     plan = planner.solve(graph, "100%", time_limit_s=60)
        ... except planner.LimitError as error:
        ...     print("more time, or a larger budget:", error)
    """


class OutputError(PlannerError):
    """A file that cannot be written."""


class ModelError(PlannerError):
    """A model that cannot be built: no such file or function, wrong options, an error inside."""


class UnknownOptionError(UsageError):
    """An option that a model's function does not have."""

    def __init__(self, what: str, option: str, choices: str) -> None:
        """Name the function by `what`, and its options by `choices`."""
        super().__init__(f"{what} has no option {option!r}: {choices}")
        self.option = option


class TraceError(PlannerError):
    """A model that cannot be captured as one static training graph.

    Examples:
        >>> def print_loss(output, target):
        ...     print(loss := loss_fn(output, target))
        ...     return loss
        >>> planner.trace(model, print_loss, (x, y))
        Traceback (most recent call last):
        planner.graphs.errors.TraceError: ...
    """


class MismatchError(PlannerError):
    """A plan used with another graph, or a step called with other shapes than it was planned for.

    Attributes:
        what: the first part of the message, without the way out.
    """

    def __init__(self, what: str, ways_out: str = "") -> None:
        super().__init__(what + ways_out)
        self.what = what


class SmallerBatchError(MismatchError):
    """A step called with a batch that is smaller than planned for, in the first dimension of its tensors only."""


class NumberMismatchError(MismatchError):
    """A step called when a Python number that it read has another value than when it was planned."""


class CopyError(PlannerError):
    """A copy between the device and the host that failed: the step is lost, the model is as before it."""


class DeviceError(PlannerError):
    """An op that failed on a device other than the main one: the step is lost, the model is as before it."""


class OutOfMemoryError(PlannerError, MemoryError, RuntimeError):
    """An allocation that failed; the model is as before the step.

    It is a ``MemoryError``, and a ``RuntimeError`` like PyTorch's.

    Attributes:
        asked_bytes: size of the allocation; None if unknown.
        op: name of the op that was running; None outside of planned steps.
        budget_bytes: a budget that should fit into the free memory; None if unknown.

    Examples:
        >>> try:
        ...     loss = step(x, y)
        ... except planner.OutOfMemoryError as error:
        ...     print(f"{error.op} found no {error.asked_bytes} bytes: plan with budget={error.budget_bytes}")
    """

    def __init__(
        self, message: str, *, asked_bytes: int | None = None, op: str | None = None, budget_bytes: int | None = None
    ) -> None:
        super().__init__(message)
        self.asked_bytes, self.op, self.budget_bytes = asked_bytes, op, budget_bytes


class SolverWarning(UserWarning):
    """A solve that ended early because of an internal error; its plan is the best found so far."""


class EagerWarning(UserWarning):
    """A planned step whose results differ from eager PyTorch's, or whose captured graph is much slower."""


def is_handled_by_a_caller(error: BaseException) -> bool:
    """Return True if a caller of the planner is in an ``except`` block for `error`, which then is a context of later errors."""
    handled_in = None if error.__traceback__ is None else error.__traceback__.tb_frame
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame is not handled_in:
        frame = frame.f_back
    return frame is not None


def quote(value: object) -> str:
    """Return `value` as a message shows it: in one line of at most 80 characters, or by its type if it takes more lines."""
    text = repr(value)
    return f"a {type(value).__name__}" if "\n" in text else text[:80]


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type if the message is empty: PyTorch's messages may be pages long."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def typed_line(error: BaseException) -> str:
    """Return the type of an error and the first line of its message."""
    name, line = type(error).__name__, first_line(error)
    return name if line == name else f"{name}: {line}"


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield `error` and the errors that it was raised from."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__


def refuse_unknown_options(given: Iterable[str], known: Iterable[str], owner: str) -> None:
    """Raise a UsageError unless all `given` options are `known` to `owner`; it says which was probably meant."""
    names = sorted(known)
    for name in sorted(set(given).difference(names)):
        raise UsageError(f"unknown option {name!r} of {owner}{suggest(name, names)}: choose from {', '.join(names)}")


def suggest(name: str, known: Iterable[str]) -> str:
    """Return, e.g., `` (did you mean offload?)`` for the name in `known` that is closest to `name`; "" if none is close."""
    names = {one.lower(): one for one in known}
    close = get_close_matches(name.lower(), names, n=1)
    return f" (did you mean {names[close[0]]}?)" if close else ""
