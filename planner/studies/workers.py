"""The interface of executors of jobs: in this process, in several processes, or on a cluster."""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

POLL_S = 0.2


Task = TypeVar("Task")
Done = TypeVar("Done")
# The work on a task, picklable; the second argument is polled, and once True the work ends with its results so far.
Job: TypeAlias = Callable[[Task, Callable[[], bool]], Done]


def ignore(_: str) -> None:
    """Do nothing with an activity: nobody is told."""


def return_false() -> bool:
    """Return False: nobody asks to stop."""
    return False


@dataclass(frozen=True, slots=True)
class Workers(Generic[Task, Done]):
    """An executor for the tasks of a job.

    Attributes:
        count: number of parallel tasks.
        stop: tells running tasks to end with their results so far.
        check: raises ``PlannerError`` if running tasks will not end.
    """

    submit: Callable[[Task], Future[Done]]
    count: int
    stop: Callable[[], object] = lambda: None
    check: Callable[[], object] = lambda: None
