"""The map from lines of passes to steps of a schedule: a failed op is found by its traceback."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType

from planner.capture.program.builder import Line
from planner.graphs.errors import causes
from planner.graphs.schedule import Schedule


@dataclass(frozen=True, slots=True)
class StepLines:
    """The lines of a compiled schedule.

    Attributes:
        schedule: the steps, in the order of the code.
        steps: for each line of a step, the position of that step in `schedule`.
    """

    schedule: Schedule
    steps: Mapping[Line, int]

    def find_failed_step(self, error: BaseException) -> int | None:
        """Return the position of the step that raised `error`; None if the traceback leads through no step."""
        for cause in causes(error):
            for line in _iterate_lines(cause.__traceback__):
                if line in self.steps:
                    return self.steps[line]
        return None


def _iterate_lines(traceback: TracebackType | None) -> Iterator[Line]:
    while traceback is not None:
        yield traceback.tb_frame.f_code.co_filename, traceback.tb_lineno
        traceback = traceback.tb_next
