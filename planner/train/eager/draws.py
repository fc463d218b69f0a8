"""Random numbers of ops: the state from which an op draws is kept, so that it draws the same numbers when it is recomputed."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from planner.capture.program.draws import LOCK, get_default_generator
from planner.runtime.random_state import RandomState
from planner.train.eager.operators import Operator
from planner.train.eager.tensor_arguments import iterate_tensors


def lock_of_draws(operator: Operator) -> AbstractContextManager[object]:
    """Return the lock to hold while an op saves its random state and draws.

    Ops that draw nothing get a null context, and so do custom operators, which may wait for another thread.
    """
    return LOCK if operator.random else nullcontext()


def get_random_state(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[torch.Generator, RandomState]:
    """Return the generator that an op with these arguments draws from, and its present state."""
    generator = _get_generator(args, kwargs)
    return generator, RandomState.of(generator)


def _get_generator(args: Sequence[Any], kwargs: dict[str, Any]) -> torch.Generator:
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Generator):
            return value
    device = kwargs.get("device")
    if device is None:
        device = next((tensor.device for tensor in iterate_tensors((args, kwargs))), "cpu")
    return get_default_generator(torch.device(device))
