"""Random ops of a pass: each repeated execution draws the same numbers, even if others draw in between.

Each of these functions is called in place of an op, with the op and its arguments last. All draws of planned steps share one
lock. ``planner.capture.rewrites.reproducible_random`` gives an op its own generator.
"""

import threading
from collections.abc import Callable
from typing import Any

import torch

LOCK = threading.RLock()


def draw_once(draw: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Draw for an op that is executed once."""
    with LOCK:
        return draw(*args, **kwargs)


def draw_first(state: torch.Tensor, generator: torch.Generator, draw: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Draw for the first time, from `generator`, and save its state."""
    with LOCK:
        # The state saved before is outdated: others may have drawn since.
        state.copy_(generator.get_state())
        return draw(*args, **kwargs)


def draw_again(state: torch.Tensor, generator: torch.Generator, draw: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Draw again from `generator`, and restore it afterwards; for kernels that take no other generator."""
    with LOCK:
        now = generator.clone_state()
        try:
            generator.set_state(state)
            return draw(*args, **kwargs)
        finally:
            generator.set_state(now.get_state())


def draw_first_from(
    own: torch.Generator,
    state: torch.Tensor,
    generator: torch.Generator,
    draw: Callable[..., Any],
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Draw for the first time from `own` in the state of `generator`; save that state, and advance `generator` by the draw."""
    with LOCK:
        state.copy_(generator.get_state())
        own.set_state(state)
        drawn = draw(*args, **kwargs)
        generator.set_state(own.get_state())
        return drawn


def draw_again_from(own: torch.Generator, state: torch.Tensor, draw: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Draw again from `own` in the saved state."""
    with LOCK:
        own.set_state(state)
        return draw(*args, **kwargs)
