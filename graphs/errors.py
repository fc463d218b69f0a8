"""Exceptions and warnings that users may catch. Their messages say what, the value, the limit and the way out."""

import sys
from types import FrameType


class PlannerError(Exception):
    """Anything the planner refuses: the message is one clear line."""


class UsageError(PlannerError):
    """A value that an argument cannot have: an unknown name, a wrong type, or one that does not go with another argument."""


class GraphError(PlannerError):
    """A graph that does not describe a training step (cycle, negative cost, unknown tensor, ...)."""


class ScheduleError(PlannerError):
    """A schedule that cannot run on its graph; names the step and the tensor."""


class FormatError(PlannerError):
    """A file that is not what it should be: not JSON, cut short, unknown version, wrong field."""


class BudgetError(PlannerError):
    """A budget that cannot be read, or that no schedule meets."""


class InfeasibleError(BudgetError):
    """Proved, of all schedules or of those in the orders of the ops that were tried: none meets the budget; says what does."""


class LimitError(PlannerError):
    """A solve that ended at its time limit, or was stopped, before it found a schedule."""


class OutputError(PlannerError):
    """A file that cannot be written."""


class ModelError(PlannerError):
    """A model that was named but cannot be built: no such file or function, wrong options, an error inside."""


class UnknownOptionError(UsageError):
    """An option that the function which builds a model does not have.

    Attributes:
        option: its name.
    """

    def __init__(self, what: str, option: str, there: str) -> None:
        """Of the function that `what` names; `there` says which options it has."""
        super().__init__(f"{what} has no option {option!r}: {there}")
        self.option = option


class TraceError(PlannerError):
    """A model that cannot be captured as one static training graph."""


class MismatchError(PlannerError):
    """A plan used with another graph, or a step called with other shapes than it was planned for.

    Attributes:
        what: the first part of the message, without the ways out.
    """

    def __init__(self, what: str, ways_out: str = "") -> None:
        super().__init__(what + ways_out)
        self.what = what


class CopyError(PlannerError):
    """A copy between the device and the host that failed: the step is lost, the model is as before it."""


class DeviceError(PlannerError):
    """An op that failed on another device than the main one: the step is lost, the model is as before it."""


class OutOfMemoryError(PlannerError, MemoryError, RuntimeError):
    """An allocation that failed; a step that fails with it leaves the model as it was before the step.

    It is a ``MemoryError``, and a ``RuntimeError`` as those of PyTorch are.

    Attributes:
        asked_bytes: size of the allocation; None if the allocator does not say.
        op: name of the op that was running; None outside of planned steps.
        budget_bytes: a budget that should fit into the memory that is free; None if there is none, or none is known.
    """

    def __init__(
        self, message: str, *, asked_bytes: int | None = None, op: str | None = None, budget_bytes: int | None = None
    ) -> None:
        super().__init__(message)
        self.asked_bytes, self.op, self.budget_bytes = asked_bytes, op, budget_bytes


class SolverWarning(UserWarning):
    """A solve ended early because of what must not happen; its plan is the best that was found until then."""


class EagerWarning(UserWarning):
    """A planned step computes other numbers than eager PyTorch, or what it was captured as is much dearer."""


def is_handled_by_a_caller(error: BaseException) -> bool:
    """True if the user plans while handling `error`, in ``except ...:``, so that it is a context of all that is raised here."""
    handled_in = None if error.__traceback__ is None else error.__traceback__.tb_frame
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame is not handled_in:
        frame = frame.f_back
    return frame is not None


def first_line(error: BaseException) -> str:
    """Return the first line that an error says, or its type if it says nothing: messages of PyTorch go on for pages."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def typed_line(error: BaseException) -> str:
    """Return the type of an error and the first line that it says."""
    name, line = type(error).__name__, first_line(error)
    return name if line == name else f"{name}: {line}"
