"""Lines of the user's code, for messages, and advice about those that cannot be planned."""

import operator
import os
import re
import sysconfig
from collections.abc import Mapping
from pathlib import Path, PurePath
from traceback import FrameSummary, extract_tb

import torch
from torch import fx

from planner.torch_private.capture import TracingContext

_OURS = (torch.__path__[0], f"{Path(__file__).parents[1]}{os.sep}")
_LIBRARIES = tuple({sysconfig.get_path(kind) + os.sep for kind in ("stdlib", "purelib", "platlib")})
# For steps that are not one static graph.
GRAPH_BREAK_ADVICE = (
    "train with planner.checkpoint(model, budget=...), which plans the parts before and after such a line separately, or in a "
    "block of planner.rematerialize(budget=...), which needs no graph"
)
ITERATOR_REFUSAL = (
    "{where} advances an iterator ({name}) that exists before the step, which no plan follows: choose by a number that is an "
    "attribute (self.values[self.calls % 3]; self.calls += 1), which a plan follows, take the value before the step and pass it "
    "with the batch, or {on}"
)
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>.+)')


def find_current_line() -> FrameSummary | None:
    """Return the line that Dynamo captures, in the innermost function of the user's code; None outside of a capture."""
    frames = list(TracingContext.extract_stack()) if TracingContext.try_get() else []
    theirs = [frame for frame in frames if not is_our_code(frame.filename)]
    return _read_text((theirs or frames)[-1]) if frames else None


def find_traced_line(stack_trace: str | None) -> FrameSummary | None:
    """Return the innermost line of a stack trace that is the user's; if there is none, the innermost line."""
    found = list(_FRAME.finditer(stack_trace or ""))
    if not found:
        return None
    theirs = next((frame for frame in reversed(found) if not is_our_code(frame["file"])), found[-1])
    file, line, function = theirs.group("file", "line", "function")
    return FrameSummary(file, int(line), function.strip())


def find_raising_line(error: BaseException) -> FrameSummary | None:
    """Return the innermost line of the traceback of `error` that is the user's; None if there is none."""
    theirs = [frame for frame in extract_tb(error.__traceback__) if not is_our_code(frame.filename)]
    return theirs[-1] if theirs else None


def is_our_code(file: str) -> bool:
    """Return True if `file` belongs to PyTorch or the planner, so that a user cannot change it."""
    return file.startswith(_OURS)


def has_stopped_in_library(error: BaseException) -> bool:
    """Return True if the innermost line that `error`, of Dynamo, names is in an installed library, or in Python's own."""
    found = _FRAME.findall(str(error))
    return bool(found) and found[-1][0].startswith(_LIBRARIES)


def format_location(line: FrameSummary | None) -> str:
    """Return `line` as the beginning of a message: its file, its number and, if it is available, its code."""
    if line is None:
        return "a line of the step"
    return f"{line.filename}:{line.lineno}" + (f" ({line.line})" if line.line else "")


def format_node(node: fx.Node) -> str:
    """Return where the user's code calls the captured `node`: a line or, if it is not known, the operator and its module."""
    while node.target is operator.getitem and isinstance(node.args[0], fx.Node):  # one of several results
        node = node.args[0]
    if (line := find_traced_line(node.meta.get("stack_trace"))) is not None:
        return format_location(line)
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    return f"{node.target} in {format_module_path(stack)}" if stack else str(node.target)


def format_module_path(stack: Mapping[str, tuple[str, object]]) -> str:
    """Return the path of the innermost module of a captured node's ``nn_module_stack``."""
    path = list(stack.values())[-1][0]
    return re.sub(r"^L\['(\w+)'\]", r"\1", path).removeprefix("self.").replace("_modules['", "").replace("']", "")


def branch_refusal(line: FrameSummary | None, depends_on: str) -> str:
    """Return the message for a branch that cannot be part of a plan."""
    return (
        f"the step cannot be captured as one graph: what {format_location(line)} does depends on the data, on {depends_on} "
        f"that differ from step to step{find_library_advice(line)}; {GRAPH_BREAK_ADVICE}, or compute both sides and choose "
        "with torch.where"
    )


def find_library_advice(where: FrameSummary | None) -> str:
    """Return the setting that disables a random choice in a line of a known library, in brackets; "" for other lines."""
    if where is None or "transformers" not in PurePath(where.filename).parts:
        return ""
    if "mask_indices" in where.name:
        return " (of Transformers' speech models: mask_time_prob=0 and mask_feature_prob=0 in the config switch SpecAugment off)"
    if re.search(r"layer_?drop|dropout_probability|skip_the_layer", where.line or ""):
        return " (layerdrop=0 in the model's config switches the dropping of layers off)"
    return ""


def _read_text(frame: FrameSummary) -> FrameSummary:
    """Return the line of `frame` with its code as it is now: a frame of Dynamo reads its code when it is shown."""
    return FrameSummary(frame.filename, frame.lineno, frame.name)
