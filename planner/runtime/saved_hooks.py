"""Hooks on saved tensors that a program has put around a planned step.

A plan decides what is saved, and its own functions save little else than parameters and inputs: hooks that change values, such as
a compression, do not get the tensors that they would get in eager mode, so that gradients differ.
"""

from functools import lru_cache

from planner.capture.frontend.python_state import is_own
from planner.graphs.short_tracebacks import warn_caller
from planner.torch_private.checkpoints import get_saved_hooks


def warn_of_saved_hooks() -> None:
    """Warn, once for each function, if the innermost hooks on saved tensors are the user's own."""
    if (hooks := get_saved_hooks()) is not None and is_own(getattr(hooks[0], "__module__", None)):
        _warn(getattr(hooks[0], "__qualname__", repr(hooks[0])))


@lru_cache(maxsize=64)
def _warn(name: str) -> None:
    warn_caller(
        f"hooks on saved tensors ({name}) are around a planned step, which saves other tensors than eager PyTorch: if they "
        "change values, gradients differ. Leave them out: the plan decides what is kept"
    )
