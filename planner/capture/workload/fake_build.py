"""Construction of models without memory: fake tensors on the CPU, also for code that names CUDA devices."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode

from planner.torch_private.core import FakeTensorMode, allow_fake_conversions

_CPU = torch.device("cpu")
_GIB = 2**30


@contextmanager
def build_on_fakes(*, as_on_cuda: bool) -> Iterator[None]:
    """Make all tensors that are created inside fake: they have shapes and no memory.

    Args:
        as_on_cuda: run code that names a CUDA device as on a machine that has one. ``.cuda()``, ``device="cuda"`` and the like
            leave tensors on the CPU, ``torch.cuda.is_available()`` is True, and queries of the device are answered as by one of
            compute capability 9.0 with 80 GiB. The machine itself may have a CUDA device or none.
    """
    with ExitStack() as stack:
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(allow_fake_conversions())
        if as_on_cuda:
            for module, name, replacement in _iterate_replacements():
                stack.enter_context(patch.object(module, name, replacement))
            stack.enter_context(_CpuInsteadOfCuda())
        yield


class _CpuInsteadOfCuda(TorchFunctionMode):
    """A mode that replaces CUDA devices among the arguments of torch functions by the CPU."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0].to(_CPU, **{name: value for name, value in given.items() if name == "memory_format"})
        if func is torch.Tensor.pin_memory:
            return args[0]
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda_name(args[1]):
            args = (args[0], _CPU, *args[2:])
        args = tuple(_CPU if isinstance(arg, torch.device) and arg.type == "cuda" else arg for arg in args)
        if _is_cuda_name(given.get("device")):
            given["device"] = _CPU
        if "pin_memory" in given and func is not torch.Tensor.pin_memory:
            given["pin_memory"] = False
        return func(*args, **given)


def _is_cuda_name(device: object) -> bool:
    """Return True if `device` is CUDA in any form that torch functions take: ``"cuda:1"``, an index, a ``torch.device``."""
    if isinstance(device, torch.device):
        return device.type == "cuda"
    if isinstance(device, str):
        return device.partition(":")[0] == "cuda"
    return isinstance(device, int) and not isinstance(device, bool)


def _move_to_cpu(device: Any) -> Any:
    return _CPU if _is_cuda_name(device) else device


def _iterate_replacements() -> Iterator[tuple[ModuleType, str, Callable[..., Any]]]:
    """Yield functions of torch, as module and name, and their replacements while a model is built as on CUDA."""
    properties = SimpleNamespace(
        name="CUDA", major=9, minor=0, total_memory=80 * _GIB, multi_processor_count=132, warp_size=32, is_integrated=False
    )
    answers: dict[str, Any] = {
        "is_available": True,
        "is_initialized": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_name": properties.name,
        "get_device_capability": (9, 0),
        "get_device_properties": properties,
        "is_bf16_supported": True,
        "mem_get_info": (80 * _GIB, 80 * _GIB),
        "memory_allocated": 0,
        "max_memory_allocated": 0,
        "memory_reserved": 0,
        "max_memory_reserved": 0,
    }
    ignored = ("init", "set_device", "synchronize", "empty_cache", "reset_peak_memory_stats", "manual_seed", "manual_seed_all")
    for name in (*answers, *ignored):
        yield torch.cuda, name, _make_constant(answers.get(name))
    default, load = torch.set_default_device, torch.load
    yield torch, "set_default_device", lambda device: default(_move_to_cpu(device))
    yield torch, "load", partial(_load_on_cpu, load)
    for name, answer in (("is_available", True), ("current_accelerator", torch.device("cuda")), ("device_count", 1)):
        yield torch.accelerator, name, _make_constant(answer)


def _make_constant(answer: object) -> Callable[..., Any]:
    return lambda *_, **__: answer


def _load_on_cpu(load: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    bound = inspect.signature(load).bind(*args, **kwargs)
    if "map_location" in bound.arguments:
        bound.arguments["map_location"] = _move_to_cpu(bound.arguments["map_location"])
    return load(*bound.args, **bound.kwargs)
