"""Which step of a schedule each line of generated code belongs to: an op that fails is found by its traceback."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType

from graphs.schedule import Schedule

Line = tuple[str, int]  # file name, line number


@dataclass(frozen=True, slots=True)
class StepLines:
    """The lines of a compiled schedule.

    Attributes:
        schedule: the steps, in the order of the code.
        steps: for each line of a step, the position of that step in `schedule`.
    """

    schedule: Schedule
    steps: Mapping[Line, int]

    def failed_step(self, error: BaseException) -> int | None:
        """Return the position of the step that raised `error`; None if the traceback leads through no step."""
        for cause in causes(error):
            for line in _lines(cause.__traceback__):
                if line in self.steps:
                    return self.steps[line]
        return None


def number_lines(
    filename: str, first_line: int, lines: Sequence[str], origins: Sequence[int | None], first_step: int
) -> dict[Line, int]:
    """Return the step of each line of source.

    Args:
        filename: of the source.
        first_line: number of the first of `lines` in it.
        lines: as a ``PassWriter`` wrote them; one may have line breaks inside.
        origins: ``PassWriter.origins`` of `lines`.
        first_step: position of the first step of the pass.
    """
    found: dict[Line, int] = {}
    number = first_line
    for text, origin in zip(lines, origins, strict=True):
        following = number + 1 + text.count("\n")
        if origin is not None:
            found.update(dict.fromkeys(((filename, n) for n in range(number, following)), first_step + origin))
        number = following
    return found


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield `error` and the errors that it was raised from."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__


def _lines(traceback: TracebackType | None) -> Iterator[Line]:
    while traceback is not None:
        yield traceback.tb_frame.f_code.co_filename, traceback.tb_lineno
        traceback = traceback.tb_next
