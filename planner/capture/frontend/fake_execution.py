"""Execution of a step on fake tensors, outside of a capture: its Python code runs, nothing is computed."""

import builtins
import functools
import gc
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from planner.capture.signature import Batch, split_arguments
from planner.torch_private.core import FakeTensor, FakeTensorMode, pytree
from planner.torch_private.patches import wrap


@contextmanager
def run_on_fakes(step: nn.Module, batch: Batch) -> Iterator[Callable[[], Any]]:
    """Yield a function that calls `step` on fake copies of its tensors and of `batch`: no real tensor is written.

    Afterwards no ``functools.lru_cache`` returns a fake tensor, which eager PyTorch would compute with later. Values that the
    step stores elsewhere are restored by planner.capture.frontend.effects.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    run = partial(_run_on_fakes, mode, step, batch)
    references = sys.getrefcount(mode)  # each fake tensor adds one
    try:
        yield run
    finally:
        if sys.getrefcount(mode) > references:
            gc.collect(1)  # cycles of the execution hold some
        if sys.getrefcount(mode) > references:  # the search takes longer than the execution of a small step
            for found in _list_objects():
                if type(found) is functools._lru_cache_wrapper and _is_holding(gc.get_referents(found), mode):
                    found.cache_clear()


@contextmanager
def mute_output() -> Iterator[None]:
    """Drop what a step prints, and what it logs below warnings: it does so again when it trains."""
    with patch.object(builtins, "print", lambda *_, **__: None), wrap(logging.Logger, "_log", _log_warnings):
        yield


def _log_warnings(log: Callable[..., None], logger: logging.Logger, level: int, *args: Any, **kwargs: Any) -> None:
    if level >= logging.WARNING or logger.name.partition(".")[0] == "planner":
        log(logger, level, *args, **kwargs)


def _run_on_fakes(mode: FakeTensorMode, step: nn.Module, batch: Batch) -> Any:
    make_fake = partial(_make_fake, mode)
    with mode, mute_output(), torch.random.fork_rng(devices=[]):
        tensors = {name: make_fake(tensor) for name, tensor in (*step.named_parameters(), *step.named_buffers())}
        args, kwargs = pytree.tree_map(make_fake, split_arguments(batch))
        return torch.func.functional_call(step, tensors, args, kwargs)


def _make_fake(mode: FakeTensorMode, value: Any) -> Any:
    return mode.from_tensor(value) if isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor) else value


def _is_holding(cached: list[Any], mode: FakeTensorMode) -> bool:
    return any(isinstance(leaf, FakeTensor) and leaf.fake_mode is mode for leaf in pytree.tree_leaves(cached))


def _list_objects() -> list[Any]:
    """Return all objects that the garbage collector tracks; frozen ones, as in some training loops, stay frozen."""
    if not gc.get_freeze_count():
        return gc.get_objects()
    gc.collect()  # garbage would be frozen for good; going through what is frozen takes longer than the capture of a small step
    gc.unfreeze()
    try:
        return gc.get_objects()
    finally:
        gc.freeze()
