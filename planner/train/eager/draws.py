"""Random numbers of ops: the state from which an op draws is kept, so that it draws the same numbers when it is recomputed."""

import torch

from planner.capture.program.draws import get_default_generator
from planner.runtime.random_state import RandomState
from planner.train.eager.tensor_arguments import iterate_tensors


def get_random_state(*args: object, **kwargs: object) -> tuple[torch.Generator, RandomState]:
    """Return the generator that an op with these arguments draws from, and its present state."""
    generator = _get_generator(args, kwargs)
    return generator, RandomState.of(generator)


def _get_generator(args: tuple[object, ...], kwargs: dict[str, object]) -> torch.Generator:
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Generator):
            return value
    device = kwargs.get("device") or next((tensor.device for tensor in iterate_tensors((args, kwargs))), "cpu")
    assert isinstance(device, torch.device | str)
    return get_default_generator(torch.device(device))
