"""Lines of the code that is captured, and what to do about one that no plan can hold: for messages."""

import linecache
import os
import re
from dataclasses import dataclass
from pathlib import Path, PurePath
from traceback import FrameSummary, extract_tb

import torch

from planner.torch_private.capture import TracingContext

_FLOORS = Path(__file__).parents[3]
_OURS = (torch.__path__[0], *(f"{_FLOORS / floor}{os.sep}" for floor in ("graphs", "solvers", "planner")))
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>.+)')


@dataclass(frozen=True, slots=True)
class Line:
    """A line of source code.

    Attributes:
        file, line, function: where it is.
        text: of it; "" where the source is not known.
    """

    file: str
    line: int
    function: str = ""
    text: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" + (f" ({self.text})" if self.text else "")


def where_now() -> Line | None:
    """The line that Dynamo is at, in the innermost function of the user's code; None where nothing is captured."""
    frames = list(TracingContext.extract_stack()) if TracingContext.try_get() else []
    theirs = [frame for frame in frames if not is_our_code(frame.filename)]
    return _line((theirs or frames)[-1]) if frames else None


def where_made(stack_trace: str | None) -> Line | None:
    """The innermost line of a stack trace that is not of PyTorch or the planner, or the innermost where all are."""
    found = list(_FRAME.finditer(stack_trace or ""))
    if not found:
        return None
    theirs = next((frame for frame in reversed(found) if not is_our_code(frame["file"])), found[-1])
    file, line, function = theirs.group("file", "line", "function")
    return Line(file, int(line), function.strip(), linecache.getline(file, int(line)).strip())


def where_raised(error: BaseException) -> Line | None:
    """The innermost line of the traceback of `error` that is not of PyTorch or the planner; None where all are."""
    theirs = [frame for frame in extract_tb(error.__traceback__) if not is_our_code(frame.filename)]
    return _line(theirs[-1]) if theirs else None


def is_our_code(file: str) -> bool:
    """Return whether `file` is part of PyTorch or of the planner: not what a user can change."""
    return file.startswith(_OURS)


def ways_on() -> str:
    """What takes a step that one static graph cannot hold."""
    return (
        'train with torch.compile(model, backend="planner", options={"budget": ...}), which plans what is before and after '
        "such a line apart"
    )


def at(line: Line | None) -> str:
    """Where something is, at the beginning of a message."""
    return "a line of the step" if line is None else str(line)


def refused(line: Line | None, depends_on: str) -> str:
    """Why a branch cannot be part of a plan."""
    return (
        f"the step cannot be captured as one graph: what {at(line)} does depends on the data, on {depends_on} that differ from "
        f"step to step{advice(line)}; {ways_on()}, or compute both sides and choose with torch.where"
    )


def advice(where: Line | None) -> str:
    """What to set for a line of a library that is known to choose at random."""
    if where is None or "transformers" not in PurePath(where.file).parts:
        return ""
    if "mask_indices" in where.function:
        return " (of Transformers' speech models: mask_time_prob=0 and mask_feature_prob=0 in the config switch SpecAugment off)"
    if re.search(r"layer_?drop|dropout_probability|skip_the_layer", where.text):
        return " (layerdrop=0 in the model's config switches the dropping of layers off)"
    return ""


def _line(frame: FrameSummary) -> Line:
    return Line(frame.filename, frame.lineno or 0, frame.name, (frame.line or "").strip())
