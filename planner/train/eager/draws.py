"""Random numbers of ops: the state from which an op draws is kept, so that it draws the same numbers when it is recomputed."""

import torch

from planner.capture.program.draws import get_default_generator
from planner.runtime.random_state import RandomState


def get_random_state(generator: torch.Generator | None, device: torch.device) -> tuple[torch.Generator, RandomState]:
    """Return the generator that an op on a device draws from, and its present state; `generator` if one was passed to it."""
    if generator is None:
        generator = get_default_generator(device)
    return generator, RandomState.of(generator)
