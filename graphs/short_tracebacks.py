"""Errors and warnings at the line that called a public function, in place of the frames of this project."""

import sys
import traceback
import warnings
from collections.abc import Callable
from functools import wraps
from inspect import signature
from pathlib import Path
from types import TracebackType
from typing import ParamSpec, TypeVar

from graphs.errors import PlannerError, causes, refuse_unknown_options

P = ParamSpec("P")
T = TypeVar("T")

_ROOT = Path(__file__).resolve().parent.parent
_OURS = tuple(f"{_ROOT / name}/" for name in ("planner", "solvers", "graphs"))
_LIBRARIES = ("torch", "transformers", "accelerate", "lightning", "pytorch_lightning")


def shorten_traceback(function: Callable[P, T]) -> Callable[P, T]:
    """Return the public function `function`, with errors of the planner raised at its call.

    Of the frames below only those of the user's code stay, such as a model's forward pass. ``error.full_traceback`` has the text
    of the whole traceback. An option that a function does not have is such an error too.
    """
    parameters = signature(function).parameters
    takes_all = function.__qualname__ != function.__name__ or any(p.kind is p.VAR_KEYWORD for p in parameters.values())

    @wraps(function)
    def run_public(*args: P.args, **kwargs: P.kwargs) -> T:
        handled = sys.exception()
        try:
            if not takes_all:
                refuse_unknown_options(kwargs, parameters, f"planner.{function.__name__}")
            return function(*args, **kwargs)
        except PlannerError as error:
            shorten(error, handled)
            raise

    return run_public


def shorten(error: PlannerError, handled: BaseException | None = None) -> None:
    """Remove the frames and the causes of `error` that say nothing to users; `handled` was in work before the public call."""
    if not error.full_traceback:
        error.full_traceback = "".join(traceback.format_exception(error))
    if error.__cause__ is None or isinstance(error.__cause__, PlannerError) or _is_internal(error.__cause__):
        error.__cause__, error.__context__, error.__suppress_context__ = None, handled, handled is None
    for one in causes(error):
        one.__traceback__ = _leave_out(one.__traceback__, _is_inside)


def hide_frames(error: BaseException) -> None:
    """Remove the frames of this project from the traceback of `error`, where it stands around code of others."""
    error.__traceback__ = _leave_out(error.__traceback__, _is_ours)


def _is_internal(error: BaseException) -> bool:
    """Return True if `error` is how Dynamo reports what the message of an error of the planner says."""
    return type(error).__module__.startswith("torch._dynamo")


def _leave_out(frames: TracebackType | None, unwanted: Callable[[str], bool]) -> TracebackType | None:
    """Return a traceback without the frames whose files are `unwanted`."""
    if frames is None:
        return None
    rest = _leave_out(frames.tb_next, unwanted)
    if unwanted(frames.tb_frame.f_code.co_filename):
        return rest
    return TracebackType(rest, frames.tb_frame, frames.tb_lasti, frames.tb_lineno)


def warn_caller(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the innermost line that is neither of this project nor of a library that calls it."""
    level = 1
    frame = sys._getframe()
    while frame.f_back is not None and _is_inside(frame.f_code.co_filename):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


def _is_ours(path: str) -> bool:
    return path.startswith(_OURS)


def _is_inside(path: str) -> bool:
    return _is_ours(path) or any(f"/site-packages/{name}/" in path for name in _LIBRARIES)
