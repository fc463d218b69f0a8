"""Random ops of a pass: each repeated execution draws the same numbers, even if others draw in between.

The functions that draw are called in place of an op, with the op and its arguments last. All draws of planned steps share one
lock. ``planner.capture.rewrites.reproducible_random`` gives an op its own generator.
"""

import threading
from collections.abc import Callable
from typing import Any

import torch

LOCK = threading.RLock()

Draw = Callable[..., Any]


def get_default_generator(device: torch.device) -> torch.Generator:
    """Return the generator from which ops on `device` draw by default; without an index, it is that of the current device.

    Where ops do not run, on meta tensors and without a GPU, it is that of the CPU.
    """
    if device.type in ("cpu", "meta") or not (module := torch.get_device_module(device)).is_available():
        return torch.default_generator
    generator: torch.Generator = module.default_generators[module.current_device() if device.index is None else device.index]
    return generator


def draw_once(draw: Draw, /, *args: Any, **kwargs: Any) -> Any:
    """Draw for an op that is executed once."""
    with LOCK:
        return draw(*args, **kwargs)


def draw_first(
    state: torch.Tensor, generator: torch.Generator, own: torch.Generator | None, draw: Draw, /, *args: Any, **kwargs: Any
) -> Any:
    """Draw for the first time and save the `state` of `generator`, which advances also if `draw` draws from `own`."""
    with LOCK:
        # The state saved before is outdated: others may have drawn since.
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
    """Draw again from `state`, by `own`; without it by `generator`, which is restored afterwards."""
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
