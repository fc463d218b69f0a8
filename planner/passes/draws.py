"""Random ops of a pass that draw what they drew first whenever they are executed again, whoever else draws meanwhile.

Each of these functions is called in place of an op, with the op and its arguments last. All that planned steps draw, they draw
under one lock. How an op gets a generator of its own: ``planner.capture.rewrites.reproducible_random``.
"""

import threading
from collections.abc import Callable
from typing import Any

import torch

LOCK = threading.RLock()


def draw_once(draw: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Draw what is not drawn again."""
    with LOCK:
        return draw(*args, **kwargs)


def draw_first(state: torch.Tensor, generator: torch.Generator, draw: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Draw for the first time, from `generator`; its state is saved."""
    with LOCK:
        # The state that was saved before is that of a moment ago, and others may have drawn since.
        state.copy_(generator.get_state())
        return draw(*args, **kwargs)


def draw_again(state: torch.Tensor, generator: torch.Generator, draw: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Draw again from `generator`, which is left as it was found: no kernel draws from another one."""
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
    """Draw for the first time, from `own` in the state of `generator`, which is saved, and moves on as if it had drawn."""
    with LOCK:
        state.copy_(generator.get_state())
        own.set_state(state)
        drawn = draw(*args, **kwargs)
        generator.set_state(own.get_state())
        return drawn


def draw_again_from(own: torch.Generator, state: torch.Tensor, draw: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Draw again from `own`."""
    with LOCK:
        own.set_state(state)
        return draw(*args, **kwargs)
