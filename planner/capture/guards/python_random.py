"""Refusal of random numbers that Python draws while a step is captured (``random``, ``numpy.random``).

The capture would keep one number for good, or take it from PyTorch's generator. PyTorch's own random ops are part of the plan
and draw new numbers at each step.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn
from unittest.mock import patch

import numpy as np

from planner.capture.source_lines import GRAPH_BREAK_ADVICE, find_current_line, find_library_advice, format_location
from planner.graphs.errors import TraceError
from planner.torch_private.capture import InstructionTranslatorBase, dynamo_misc, dynamo_user_defined
from planner.torch_private.patches import wrap

_GENERATORS = (random.Random, np.random.RandomState, np.random.Generator)
_MODULES = ("secrets", "uuid")
_DRAWS = ("random", "urandom", "randbelow", "randbits", "token_bytes", "token_hex", "uuid1", "uuid4")


@contextmanager
def forbid_python_random() -> Iterator[None]:
    """Raise an error if the captured code draws a random number that is not PyTorch's."""
    with ExitStack() as stack:
        stack.enter_context(wrap(InstructionTranslatorBase, "call_function", _check_and_call))
        for module in (dynamo_misc, dynamo_user_defined):
            stack.enter_context(patch.object(module, "call_random_fn", _refuse_function))
        yield


def _check_and_call(call: Callable[..., Any], translator: InstructionTranslatorBase, fn: Any, args: Any, kwargs: Any) -> None:
    for name in ("value", "fn"):
        _check(getattr(fn, name, None))
    call(translator, fn, args, kwargs)


def _check(function: object) -> None:
    name = getattr(function, "__name__", "")
    if isinstance(getattr(function, "__self__", None), _GENERATORS):
        _refuse(name)
    if name in _DRAWS and getattr(function, "__module__", "") in (*_MODULES, "os", "posix", "nt"):
        _refuse(name)


def _refuse_function(_: object, function: Callable[..., object], *__: object) -> NoReturn:
    _refuse(getattr(function, "__name__", "random"))


def _refuse(name: str) -> NoReturn:
    where = find_current_line()
    raise TraceError(
        f"{format_location(where)} draws a random number outside PyTorch ({name}), and a plan would use the same number in "
        "every step: draw it before the step and pass it with the batch, as a tensor, or use PyTorch's random functions"
        f"{find_library_advice(where)}; or {GRAPH_BREAK_ADVICE}"
    )
