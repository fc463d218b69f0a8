"""Patches for statements that Dynamo refuses, though a capture can leave them out or run them beforehand."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import nn
from torch.distributions import Distribution

from graphs.errors import TraceError
from planner.capture.frontend.source_lines import current_line, location
from planner.capture.rewrites.outputs import same_layout, storage
from planner.torch_private.capture import (
    FOLLOWS_REQUIRES_GRAD,
    SETATTR,
    DynamoBytecodeFlatten,
    InstructionTranslatorBase,
    OptimizerVariable,
    OutputGraph,
    TorchDynamoException,
    UserDefinedObjectVariable,
    VariableBuilder,
    read_names_of_torch,
    source_name,
    tensor_method,
)
from planner.torch_private.core import FunctionalTensor

read_names_of_torch()


@contextmanager
def allow_requires_grad_writes() -> Iterator[None]:
    """Follow ``hidden.requires_grad_()`` and ``hidden.requires_grad = True`` on intermediate tensors.

    Models do so to get gradients where their first layers are frozen (``enable_input_require_grads`` of Transformers). Nobody
    reads the gradient of `hidden` itself. A write that changes nothing is left out. Dynamo refuses results that depend on such
    a tensor, since ``torch.compile`` might return them without their history; the loss of a step has its own. Before torch 2.13
    it follows none: they are left out.

    Raises:
        TraceError: a tensor of the batch is told to require a gradient. Eager PyTorch gives it one, at every step.
    """
    owner_of, method = SETATTR
    set_attribute = getattr(owner_of, method)
    holder, name_of = tensor_method("requires_grad_")
    write = getattr(holder, name_of)

    def is_made(owner: Any) -> bool:
        return bool(owner.is_tensor() and owner.as_proxy().node.op not in ("placeholder", "get_attr"))

    def refuse_input(owner: Any) -> None:
        if owner.source is not None and source_name(owner.source).startswith(("L['args']", "L['kwargs']")):
            raise TraceError(
                f"{location(current_line())} changes requires_grad of a tensor of the batch, which a plan takes as it is given: "
                "write x = x.detach().requires_grad_() instead, which is a tensor of the step's own, or call requires_grad_() on "
                "the batch before the step, which then gives it a gradient"
            )

    def set_or_write(function: Any, translator: Any, owner: Any, name: Any, value: Any) -> Any:
        if _is_attribute(owner, name, "requires_grad") and value.is_python_constant():
            if owner.as_proxy().node.meta["example_value"].requires_grad is value.as_python_constant():
                return value
            if is_made(owner):
                owner.call_method(translator, "requires_grad_", [value], {})
                return value
            refuse_input(owner)
        return set_attribute(function, translator, owner, name, value)

    def write_or_leave(owner: Any, *args: Any, **kwargs: Any) -> Any:
        return owner if is_made(owner) else write_or_refuse(owner, *args, **kwargs)

    def write_or_refuse(owner: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return write(owner, *args, **kwargs)
        except TorchDynamoException:
            refuse_input(owner)
            raise

    with ExitStack() as stack:
        stack.enter_context(patch.object(owner_of, method, set_or_write))
        if FOLLOWS_REQUIRES_GRAD:
            stack.enter_context(patch.object(OutputGraph, FOLLOWS_REQUIRES_GRAD, lambda *_: None))
        stack.enter_context(patch.object(holder, name_of, write_or_refuse if FOLLOWS_REQUIRES_GRAD else write_or_leave))
        yield


def _is_attribute(owner: Any, name: Any, asked: str) -> bool:
    """Return True if `name`, a variable of Dynamo's, is the name `asked` of an attribute of the tensor `owner`."""
    return bool(owner.is_tensor() and name.is_python_constant() and name.as_python_constant() == asked)


def write_data_in_place_where(wanted: Callable[[InstructionTranslatorBase], bool], stack: ExitStack) -> None:
    """Capture ``weight.data = value`` of parameters and buffers as ``weight.data.copy_(value)``, until `stack` is closed.

    That is how moving averages of weights are written (MoCo). AOTAutograd follows no input that gets another storage. The values
    are the same if nothing else shares the memory of `value`; otherwise Dynamo's own way is tried.

    Args:
        wanted: tells whether a frame is captured for the planner.
    """
    owner_of, method = SETATTR
    set_attribute = getattr(owner_of, method)

    def set_or_copy(function: Any, translator: Any, owner: Any, name: Any, value: Any) -> Any:
        if _is_attribute(owner, name, "data") and owner.source is not None and value.is_tensor() and wanted(translator):
            old, new = (variable.as_proxy().node.meta["example_value"] for variable in (owner, value))
            inputs = {
                storage(tracked.fake) for tracked in translator.output.tracked_fakes if isinstance(tracked.fake, torch.Tensor)
            }
            same = same_layout(old, new) and old.dtype is new.dtype and old.storage_offset() == new.storage_offset()
            if same and storage(new) == storage(old):
                return value
            if same and storage(new) not in inputs:
                owner.var_getattr(translator, "data").call_method(
                    translator, "copy_", [value.call_method(translator, "detach", [], {})], {}
                )
                return value
        return set_attribute(function, translator, owner, name, value)

    stack.enter_context(patch.object(owner_of, method, set_or_copy))


@contextmanager
def keep_attributes(module: nn.Module) -> Iterator[None]:
    """Keep the attributes of tensors of a captured `module` where AOTAutograd replaces the tensors.

    The captured code reads tensors from them, such as ``weight.quant_state.absmax`` of a quantized weight. A custom Function
    takes only tensors that are known in the graph, which their views are.
    """
    flatten = DynamoBytecodeFlatten.__call__
    attributes = {name: vars(tensor) for name, tensor in (*module.named_parameters(), *module.named_buffers()) if vars(tensor)}

    def functional(constant: torch.Tensor) -> torch.Tensor:
        return FunctionalTensor.to_functional(constant.detach())

    def with_attributes(self: DynamoBytecodeFlatten, *inputs: object) -> object:
        for name, held in attributes.items():
            path, _, last = name.rpartition(".")
            tensor = getattr(module.get_submodule(path), last)
            vars(tensor).update({key: value for key, value in held.items() if key not in vars(tensor)})
        return tuple(functional(value) if type(value) is torch.Tensor else value for value in flatten(self, *inputs))

    with patch.object(DynamoBytecodeFlatten, "__call__", with_attributes) if attributes else nullcontext():
        yield


@contextmanager
def read_optimizers() -> Iterator[None]:
    """Read the groups of an optimizer, such as its learning rate, as those of any object: its parameters are no inputs then."""
    with patch.object(OptimizerVariable, "var_getattr", UserDefinedObjectVariable.var_getattr):
        yield


@contextmanager
def read_numpy_floats() -> Iterator[None]:
    """Read an ``np.float64``, which is a Python float, as that: Dynamo makes an array of it, and its ops round differently."""

    def wrap(builder: Any, value: np.float64) -> Any:
        return builder.wrap_literal(float(value))

    wraps = VariableBuilder._type_dispatch()  # by types; Dynamo caches it
    with patch.object(VariableBuilder, "_type_dispatch", lambda *_: {**wraps, np.float64: wrap}):
        yield


@contextmanager
def ignore_cudnn_flags(device: torch.device) -> Iterator[None]:
    """Leave out ``with torch.backends.cudnn.flags(...)`` on the CPU, where it has no effect."""

    def flags(*_: object, **__: object) -> AbstractContextManager[None]:
        return nullcontext()

    with patch.object(torch.backends.cudnn, "flags", flags) if device.type == "cpu" else nullcontext():
        yield


@contextmanager
def skip_distribution_checks() -> Iterator[None]:
    """Keep ``torch.distributions`` from checking values, which no graph can do, unless they are asked to.

    ``torch.compile`` disables the checks for the whole process.
    """
    with patch.object(Distribution, "_validate_args", False):
        yield
