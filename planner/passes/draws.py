"""Random ops of a pass that draw what they drew first whenever they are executed again, whoever else draws meanwhile.

Each of these functions is called in place of an op, with the op and its arguments last. All that planned steps draw, they draw
under one lock. How an op gets a generator of its own: ``planner.capture.rewrites.reproducible_random``.
"""

import threading
from collections.abc import Callable
from typing import Any

import torch

LOCK = threading.RLock()

Draw = Callable[..., Any]


def draw_once(draw: Draw, /, *args: Any, **kwargs: Any) -> Any:
    """Draw what is not drawn again."""
    with LOCK:
        return draw(*args, **kwargs)


def draw_first(
    state: torch.Tensor, generator: torch.Generator, own: torch.Generator | None, draw: Draw, /, *args: Any, **kwargs: Any
) -> Any:
    """Draw for the first time, and save the `state` of `generator`, which moves on also where `draw` draws from `own`."""
    with LOCK:
        # The state that was saved before is that of a moment ago, and others may have drawn since.
        state.copy_(generator.get_state())
        if own is None:
            return draw(*args, **kwargs)
        own.set_state(state)
        drawn = draw(*args, **kwargs)
        generator.set_state(own.get_state())
        return drawn


def draw_again(
    state: torch.Tensor, generator: torch.Generator, own: torch.Generator | None, draw: Draw, /, *args: Any, **kwargs: Any
) -> Any:
    """Draw again from `state`; where no kernel draws from `own`, `generator` is left as it was found."""
    with LOCK:
        if own is not None:
            own.set_state(state)
            return draw(*args, **kwargs)
        now = generator.clone_state()
        try:
            generator.set_state(state)
            return draw(*args, **kwargs)
        finally:
            generator.set_state(now.get_state())
