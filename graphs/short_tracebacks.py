"""Errors and warnings at the line that called a public function, in place of the frames of this project."""

import sys
import traceback
import warnings
from collections.abc import Callable
from functools import wraps
from inspect import Signature, signature
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, ParamSpec, TypeVar

from planner.graphs.errors import PlannerError, UsageError, causes, refuse_unknown_options

P = ParamSpec("P")
T = TypeVar("T")

_OURS = f"{Path(__file__).parents[1]}/"
_LIBRARIES = ("torch", "transformers", "accelerate", "lightning", "pytorch_lightning")
_MACHINERY = ("/torch/_dynamo/", "/torch/_functorch/", "/torch/autograd/function.py")  # between a planned model and its ops
_CALL = "/torch/nn/modules/module.py"  # where arguments that no forward() takes are refused
_BY_OP = "raised_by_op"  # an attribute of errors
_GENERATED_INIT = ("<string>", "__init__")  # that of a dataclass, which calls its checks
_GENERATED = "<eval_with_key>"  # the file of code that torch.fx makes


def shorten_traceback(function: Callable[P, T]) -> Callable[P, T]:
    """Return the public function `function`, with errors of the planner raised at its call.

    Of the frames below only those of the user's code stay, such as a model's forward pass. ``error.full_traceback`` has the text
    of the whole traceback. Arguments that a function does not take, or lacks, are such an error too. Errors of the user's own
    code lose our frames (``show_as_eager``).
    """
    taken = None if function.__qualname__ != function.__name__ else signature(function)  # of methods, Python checks them

    @wraps(function)
    def run_public(*args: P.args, **kwargs: P.kwargs) -> T:
        handled = sys.exception()
        try:
            if taken is not None:
                _check_arguments(taken, f"planner.{function.__name__}", args, kwargs)
            return function(*args, **kwargs)
        except PlannerError as error:
            shorten(error, handled)
            raise
        except Exception as error:
            show_as_eager(error)
            raise

    return run_public


def shorten_in_properties(kind: type[T]) -> type[T]:
    """Return the public class `kind`, with errors of the planner in its properties raised where they are read."""
    for name, value in list(vars(kind).items()):
        if isinstance(value, property) and value.fget is not None and not name.startswith("_"):
            setattr(kind, name, property(shorten_traceback(value.fget)))
    return kind


def _check_arguments(taken: Signature, name: str, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
    """Raise a UsageError unless the function `name` can be called with these arguments."""
    parameters = taken.parameters.values()
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        refuse_unknown_options(kwargs, taken.parameters, name)
    try:
        taken.bind(*args, **kwargs)
    except TypeError as error:
        shown = [parameter.name for parameter in parameters if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
        needed = [parameter for parameter in parameters if parameter.default is parameter.empty and parameter.name not in shown]
        shown += [f"{parameter.name}=..." for parameter in needed if parameter.kind is parameter.KEYWORD_ONLY]
        raise UsageError(f"{name}({', '.join(shown)}): {error}; options are given by name") from None


def shorten(error: PlannerError, handled: BaseException | None = None) -> None:
    """Remove the frames and the causes of `error` that say nothing to users; `handled` was in work before the public call."""
    _keep_full_traceback(error)
    if error.__cause__ is None or isinstance(error.__cause__, PlannerError) or _is_internal(error.__cause__):
        error.__cause__, error.__context__, error.__suppress_context__ = None, handled, handled is None
    for one in causes(error):
        one.__traceback__ = _leave_out(one.__traceback__, _is_inside)


def hide_frames(error: BaseException) -> None:
    """Remove the frames of this project from the traceback of `error`, where it stands around code of others."""
    error.__traceback__ = _leave_out(error.__traceback__, _is_ours)


def show_as_eager(error: Exception) -> None:
    """Remove our frames from `error` if the user's code, a library that it calls, or an op has raised it; else do nothing.

    ``error.full_traceback`` is set as for errors of the planner.
    """
    frames = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    raising = next((path for path in reversed(frames) if "/site-packages/" not in path), _GENERATED)
    if _BY_OP in vars(error) or frames[-1].endswith(_CALL) or not (_is_ours(raising) or raising.startswith(_GENERATED)):
        _keep_full_traceback(error)
        error.__traceback__ = _leave_out(error.__traceback__, _is_machinery)


def mark_as_raised_by_op(error: Exception) -> None:
    """Let ``show_as_eager`` remove our frames from `error`, which an op of the user's code has raised."""
    vars(error)[_BY_OP] = True


def raise_at(file: str, line: int, name: str, failed: list[BaseException]) -> NoReturn:
    """Raise the error in `failed`, which is emptied, as if a line of a file did it, in the function `name`."""
    scope: dict[str, Any] = {}
    exec(compile("\n" * (line - 1) + "def raise_failed(failed): raise failed.pop()", file, "exec"), scope)
    raise_failed = scope.pop("raise_failed")
    raise_failed.__code__ = raise_failed.__code__.replace(co_name=name, co_qualname=name)
    raise_failed(failed)
    raise AssertionError("the function raises")


def raise_at_caller(file: str, line: int, name: str, error: Exception) -> NoReturn:
    """Raise `error`, which an op has raised, at the line of the user's code that called the op, in the function `name`."""
    _keep_full_traceback(error)
    mark_as_raised_by_op(error)
    failed: list[BaseException] = [error.with_traceback(None)]
    del error
    raise_at(file, line, name, failed)


def _keep_full_traceback(error: Any) -> None:
    if not getattr(error, "full_traceback", ""):
        error.full_traceback = "".join(traceback.format_exception(error))


def _is_internal(error: BaseException) -> bool:
    """Return True if `error` is how Dynamo reports what the message of an error of the planner says."""
    return type(error).__module__.startswith("torch._dynamo")


def _leave_out(frames: TracebackType | None, unwanted: Callable[[str], bool]) -> TracebackType | None:
    """Return a traceback without the frames whose files are `unwanted`."""
    if frames is None:
        return None
    rest = _leave_out(frames.tb_next, unwanted)
    code = frames.tb_frame.f_code
    if unwanted(code.co_filename) or (code.co_filename, code.co_name) == _GENERATED_INIT:
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


def _is_machinery(path: str) -> bool:
    return _is_ours(path) or any(part in path for part in _MACHINERY)


def _is_inside(path: str) -> bool:
    return _is_ours(path) or any(f"/site-packages/{name}/" in path for name in _LIBRARIES)
