"""Patches for statements that Dynamo refuses, though a capture can leave them out or run them beforehand.

Each replaces methods of Dynamo during a capture only. Tried and given up: ``buffer.data = value`` as a write at its place in the
step. Later reads of the old data, and later writes to `value`, were then wrong without a message; the write comes at the end of
the graph now.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import fx, nn
from torch.distributions import Distribution

from graphs.errors import TraceError
from planner.capture.frontend.source_lines import find_current_line, find_traced_line, format_location
from planner.capture.rewrites.outputs import get_storage, is_same_layout
from planner.torch_private.capture import (
    FOLLOWS_REQUIRES_GRAD,
    GETATTR,
    SETATTR,
    DynamoBytecodeFlatten,
    GetAttrVariable,
    InstructionTranslatorBase,
    OptimizerVariable,
    OutputGraph,
    TensorVariable,
    TorchDynamoException,
    TracingContext,
    UserDefinedObjectVariable,
    VariableBuilder,
    VariableTracker,
    find_tensor_method,
    get_constant_key,
    get_source_name,
    infer_sizes_by_broadcasting,
    read_arguments_of_gradients,
    read_legacy_variables,
    read_names_of_torch,
)
from planner.torch_private.core import FunctionalTensor

read_names_of_torch()
read_arguments_of_gradients()
read_legacy_variables()

EndOfCapture = Callable[[Any, Any], object]  # called with the translator of a frame and the graph that was made of it


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
    holder, name_of = find_tensor_method("requires_grad_")
    write = getattr(holder, name_of)

    def is_made(owner: Any) -> bool:
        return bool(owner.is_tensor() and owner.as_proxy().node.op not in ("placeholder", "get_attr"))

    def refuse_input(owner: Any) -> None:
        if owner.source is not None and get_source_name(owner.source).startswith(("L['args']", "L['kwargs']")):
            raise TraceError(
                f"{format_location(find_current_line())} changes requires_grad of a tensor of the batch, which a plan takes as "
                "it is given: write x = x.detach().requires_grad_() instead, which is a tensor of the step's own, or call "
                "requires_grad_() on the batch before the step, which then gives it a gradient"
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


@dataclass(frozen=True, slots=True)
class _DataWrites:
    """Writes to the data of inputs, by the capture they are in.

    Attributes:
        pending: by input its proxy and its data, which are written as the graph ends.
        at_once: copies to parameters that are trained, with the memory of both sides.
    """

    pending: "WeakKeyDictionary[TracingContext, dict[Any, tuple[Any, Any]]]" = field(default_factory=WeakKeyDictionary)
    at_once: "WeakKeyDictionary[TracingContext, list[tuple[fx.Node, set[int]]]]" = field(default_factory=WeakKeyDictionary)

    def add(self, translator: Any, owner: Any, value: Any) -> bool:
        """Write `value` to the data of the input `owner`; return False, and do nothing, where Dynamo has to refuse it."""
        output = translator.output
        if len(output.tracers) > 1:
            return False
        old, new = (variable.as_proxy().node.meta["example_value"] for variable in (owner, value))
        if not (is_same_layout(old, new) and old.dtype is new.dtype and old.storage_offset() == new.storage_offset()):
            return False
        if get_storage(old) == get_storage(new) and not old.requires_grad:
            return True  # its own data, which the 8-bit layers of bitsandbytes assign again in each call
        data = getattr(owner, GETATTR)(translator, "data")
        detached = value.call_method(translator, "detach", [], {})
        if old.requires_grad:
            copy = data.call_method(translator, "copy_", [detached], {})
            self.at_once.setdefault(output.tracing_context, []).append(
                (copy.as_proxy().node, {get_storage(old), get_storage(new)})
            )
            return True
        self.pending.setdefault(output.tracing_context, {}).setdefault(owner, (owner.proxy, data))
        owner.proxy = detached.as_proxy()
        return True

    def end(self, translator: Any, output: Any) -> None:
        """Write what is pending, as the graph ends.

        Raises:
            TraceError: the step goes on with another name of the memory of a parameter that was written.
        """
        pending = self.pending.pop(output.tracing_context, {})
        values = [owner.call_method(translator, "clone", [], {}) for owner in pending]  # one may be the old value of another
        for (owner, (proxy, data)), value in zip(pending.items(), values, strict=True):
            owner.proxy = proxy
            data.call_method(translator, "copy_", [value], {})
        for copy, storages in self.at_once.pop(output.tracing_context, []):
            _refuse_other_names(copy, storages)


def call_at_end(*functions: EndOfCapture) -> AbstractContextManager[object]:
    """Return the patch with which Dynamo calls `functions`, in this order, where it has followed a frame to its end."""
    compile_graph = OutputGraph.compile_subgraph

    def end_and_compile(output: Any, translator: Any, *args: Any, **kwargs: Any) -> Any:
        for end in functions:
            end(translator, output)
        return compile_graph(output, translator, *args, **kwargs)

    return patch.object(OutputGraph, "compile_subgraph", end_and_compile)


def write_data_in_place_where(wanted: Callable[[InstructionTranslatorBase], bool], stack: ExitStack) -> EndOfCapture:
    """Capture ``buffer.data = value`` and ``buffer.set_(value)`` as a write into its own memory, until `stack` is closed.

    That is how moving averages of weights, and queues, are written (MoCo). AOTAutograd follows no input that gets another
    storage. The rest of the step reads `value`, and what it has read of the buffer stays, so the write comes at the end of the
    graph. A parameter that is trained is written at once: what reads it gets its gradient.

    Args:
        wanted: tells whether a frame is captured for the planner.

    Returns:
        What is to be called at the end: it writes. It raises a TraceError if the step goes on with another name of the memory of
        such a parameter.
    """
    owner_of, method = SETATTR
    set_attribute = getattr(owner_of, method)
    holder, name_of = find_tensor_method("set_")
    set_storage, attribute = getattr(holder, name_of), getattr(TensorVariable, GETATTR)
    writes = _DataWrites()

    def write(translator: Any, owner: Any, value: Any) -> bool:
        is_input = owner.source is not None and value.is_tensor() and wanted(translator)
        return is_input and writes.add(translator, owner, value)

    def set_or_write(function: Any, translator: Any, owner: Any, name: Any, value: Any) -> Any:
        if _is_attribute(owner, name, "data") and write(translator, owner, value):
            return value
        return set_attribute(function, translator, owner, name, value)

    def set_storage_or_write(owner: Any, translator: Any, *args: Any, **kwargs: Any) -> Any:
        if owner.source is None or not wanted(translator):
            return set_storage(owner, translator, *args, **kwargs)
        if len(args) == 1 and not kwargs and write(translator, owner, args[0]):
            return owner
        return attribute(owner, translator, "set_").call_function(translator, list(args), kwargs)

    def find_attribute_or_method(owner: Any, translator: Any, name: str) -> Any:
        if name == "set_" and owner.source is not None and wanted(translator):
            return GetAttrVariable(owner, name)
        return attribute(owner, translator, name)

    stack.enter_context(patch.object(owner_of, method, set_or_write))
    stack.enter_context(patch.object(holder, name_of, set_storage_or_write))
    stack.enter_context(patch.object(TensorVariable, GETATTR, find_attribute_or_method))
    return writes.end


def write_replaced_buffers(translator: Any, output: Any) -> None:
    """Write what ``self.buffer = value`` has set into the buffer's own memory, as the capture ends.

    A planned step has its buffers from the first step to the last. Values of another layout, or with a history in autograd, are
    left to ``planner.capture.frontend.effects``, which refuses them.
    """
    replaced = [found for table in output.side_effects._get_modified_vars() for found in _iterate_replaced_buffers(table)]
    values = [items[key].call_method(translator, "clone", [], {}) for items, key, _ in replaced]  # as above
    for (items, key, buffer), value in zip(replaced, values, strict=True):
        getattr(buffer, GETATTR)(translator, "data").call_method(translator, "copy_", [value], {})
        items[key] = buffer


def _iterate_replaced_buffers(table: Any) -> Iterator[tuple[dict[Any, Any], Any, Any]]:
    """Yield the items of a module's table of buffers, the key of a tensor that replaces another of its layout, and the other."""
    if table.source is None or not get_source_name(table.source).endswith("._buffers"):
        return
    before = {get_constant_key(key): value for key, value in table.original_items.items()}
    for key, value in table.items.items():
        pair = [each.realize() for each in (before.get(get_constant_key(key)), value) if each is not None]
        if len(pair) == 2 and pair[0] is not pair[1] and all(each.is_tensor() for each in pair):
            old, new = (each.as_proxy().node.meta["example_value"] for each in pair)
            if is_same_layout(old, new) and old.dtype is new.dtype and old.device == new.device and not new.requires_grad:
                yield table.items, key, pair[0]


def _refuse_other_names(copy: fx.Node, storages: set[int]) -> None:
    """Raise TraceError if the parameter that `copy` writes was read before it, or nodes after it use views made before it.

    The backward pass of what was read needs the old data, which eager PyTorch keeps.
    """
    before = True
    names: set[fx.Node] = set()  # nodes before `copy` whose values lie in one of `storages`
    for node in copy.graph.nodes:
        if node is copy:
            before, names = False, {name for name in names if name.op != "placeholder"}
            continue
        value = node.meta.get("example_value")
        if before and isinstance(value, torch.Tensor) and get_storage(value) in storages:
            names.add(node)
        elif not names.isdisjoint(node.all_input_nodes) and (not before or getattr(value, "requires_grad", False)):
            raise TraceError(
                f"{format_location(find_traced_line(copy.meta.get('stack_trace')))} replaces the data of a trained parameter, "
                "and the step has read its old data, goes on with it, or writes to the new: replace it before it is read, or "
                "write in place (weight.data.copy_(...)), with a copy (clone) of the old data where that is used later"
            )


@contextmanager
def keep_attributes(module: nn.Module) -> Iterator[None]:
    """Keep the attributes of tensors of a captured `module` where AOTAutograd replaces the tensors.

    The captured code reads tensors from them, such as ``weight.quant_state.absmax`` of a quantized weight. A custom Function
    takes only tensors that are known in the graph, which their views are.
    """
    flatten = DynamoBytecodeFlatten.__call__
    attributes = {name: vars(tensor) for name, tensor in (*module.named_parameters(), *module.named_buffers()) if vars(tensor)}

    def make_functional(constant: torch.Tensor) -> torch.Tensor:
        return FunctionalTensor.to_functional(constant.detach())

    def copy_attributes(self: DynamoBytecodeFlatten, *inputs: object) -> object:
        for name, held in attributes.items():
            path, _, last = name.rpartition(".")
            tensor = getattr(module.get_submodule(path), last)
            vars(tensor).update({key: value for key, value in held.items() if key not in vars(tensor)})
        return tuple(make_functional(value) if type(value) is torch.Tensor else value for value in flatten(self, *inputs))

    with patch.object(DynamoBytecodeFlatten, "__call__", copy_attributes) if attributes else nullcontext():
        yield


@contextmanager
def read_optimizers() -> Iterator[None]:
    """Read the groups of an optimizer, such as its learning rate, as those of any object: its parameters are no inputs then."""
    with patch.object(OptimizerVariable, GETATTR, getattr(UserDefinedObjectVariable, GETATTR)):
        yield


@contextmanager
def read_generic_aliases() -> Iterator[None]:
    """Read ``list[int]`` and the like where types are values, as in ``typing.cast(list[int], x)``; torch 2.13 does not."""

    def get_item(variable: Any, translator: Any, key: Any) -> Any:
        kind: Any = variable.as_python_constant() if variable.is_python_constant() else None
        is_type = isinstance(kind, type)
        if not is_type:
            return refuse(variable, translator, key)
        return VariableTracker.build(translator, kind[getattr(key, "value", None) or key.as_python_constant()])

    refuse: Any = getattr(VariableTracker, "mp_subscript_impl", None)
    with nullcontext() if refuse is None else patch.object(VariableTracker, "mp_subscript_impl", get_item):
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

    def ignore_flags(*_: object, **__: object) -> AbstractContextManager[None]:
        return nullcontext()

    with patch.object(torch.backends.cudnn, "flags", ignore_flags) if device.type == "cpu" else nullcontext():
        yield


@contextmanager
def follow_distributions() -> Iterator[None]:
    """Let Dynamo follow ``torch.distributions``, and keep them from checking values, which no graph can do, unless asked to.

    ``torch.compile`` disables the checks for the whole process.
    """
    with patch.object(Distribution, "_validate_args", False), infer_sizes_by_broadcasting():
        yield
