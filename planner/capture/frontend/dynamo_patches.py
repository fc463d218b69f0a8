"""Patches for statements that Dynamo refuses, though a capture can leave them out or run them beforehand.

Each replaces methods of Dynamo during a capture only. Tried and given up: ``buffer.data = value`` as a write at its place in the
step. Later reads of the old data, and later writes to `value`, were then wrong without a message; the write comes at the end of
the graph now.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest.mock import patch
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import fx, nn
from torch.distributions import Distribution

from planner.capture.frontend.replaced_calls import ignore_context
from planner.capture.guards.names import make_readable
from planner.capture.rewrites.outputs import get_storage, is_same_layout, list_tensors
from planner.capture.source_lines import find_current_line, format_location, format_node
from planner.graphs.errors import TraceError
from planner.graphs.short_tracebacks import warn_caller
from planner.torch_private import capture as private
from planner.torch_private.core import FunctionalTensor
from planner.torch_private.patches import wrap

private.follow_more_code()

EndOfCapture = Callable[[Any, Any], object]  # called with the translator of a frame and the graph that was made of it


@contextmanager
def follow_requires_grad_writes() -> Iterator["RequiresGradWrites"]:
    """Follow ``tensor.requires_grad_()`` and ``tensor.requires_grad = True``, and what sets it to False.

    Models do so on intermediate tensors to get gradients where their first layers are frozen (``enable_input_require_grads`` of
    Transformers). Nobody reads the gradient of `tensor` itself. A write that changes nothing is left out. Dynamo refuses results
    that depend on such a tensor, since ``torch.compile`` might return them without their history; the loss of a step has its
    own. Before torch 2.13 it follows none: they are left out. Tensors that are made so (``torch.zeros(8, requires_grad=True)``)
    are told to afterwards.
    """
    writes = RequiresGradWrites()
    with ExitStack() as stack:
        stack.enter_context(wrap(*private.SETATTR, writes.set_or_write))
        if private.FOLLOWS_REQUIRES_GRAD:
            stack.enter_context(patch.object(private.OutputGraph, private.FOLLOWS_REQUIRES_GRAD, lambda *_: None))
        stack.enter_context(wrap(*private.find_tensor_method("requires_grad_"), writes.call_or_write))
        stack.enter_context(wrap(private.TorchInGraphFunctionVariable, "call_function", private.make_with_gradient))
        yield writes


@dataclass(frozen=True, slots=True)
class RequiresGradWrites:
    """Writes to ``requires_grad`` of tensors that exist before the step.

    A tensor of the batch or another one that is no parameter, as of the points of a differential equation, is read by the rest
    of the step through an alias that requires a gradient, also if eager PyTorch has told it so before. A warning says that the
    tensor itself gets none. A parameter that takes no gradient for a while (of a discriminator; of an adapter that is switched
    off for the answers of a reference) is read through a detached alias until then.

    Attributes:
        aliased: names of tensors that are no parameters, as Dynamo writes them.
        frozen: parameters that take no gradient now, with what stands for them otherwise.
        spans: the first and last node during which a parameter took none.
    """

    aliased: set[str] = field(default_factory=set)
    frozen: dict[Any, Any] = field(default_factory=dict)
    spans: list[tuple[fx.Node, fx.Node]] = field(default_factory=list)

    def set_or_write(self, set_attribute: Any, function: Any, translator: Any, owner: Any, name: Any, value: Any) -> Any:
        """Assign an attribute, or note what is written to ``requires_grad``."""
        if _is_attribute(owner, name, "requires_grad") and value.is_python_constant():
            if self._write(translator, owner, wanted=value.as_python_constant()):
                return value
            if _is_made(owner):
                owner.call_method(translator, "requires_grad_", [value], {})
                return value
        return set_attribute(function, translator, owner, name, value)

    def call_or_write(self, call: Any, owner: Any, translator: Any, *args: Any, **kwargs: Any) -> Any:
        """Call ``requires_grad_``, or note what it writes."""
        wanted = next((value for value in (*args, *kwargs.values()) if isinstance(value, private.VariableTracker)), None)
        is_known = wanted is None or wanted.is_python_constant()
        if is_known and self._write(translator, owner, wanted=wanted is None or wanted.as_python_constant()):
            return owner
        return owner if _is_made(owner) and not private.FOLLOWS_REQUIRES_GRAD else call(owner, translator, *args, **kwargs)

    def _write(self, translator: Any, owner: Any, *, wanted: bool) -> bool:
        """Return False if the write is left to Dynamo."""
        node = owner.as_proxy().node
        if wanted and owner in self.frozen:
            self.spans.append((node, next(iter(reversed(node.graph.nodes)))))
            owner.proxy = self.frozen.pop(owner)
            owner.synchronize_attributes(translator)
        elif wanted and _is_given(owner):
            self._read_through_leaf(owner, translator)
        elif not wanted and _is_trained(owner) and len(translator.output.tracers) == 1:
            self.frozen[owner] = owner.proxy
            _read_through(owner, owner.call_method(translator, "detach", [], {}), translator)
        else:
            return bool(node.meta["example_value"].requires_grad is wanted)
        return True

    def _read_through_leaf(self, owner: Any, translator: Any) -> None:
        """Let the rest of the step read the input `owner` through an alias that requires a gradient, and say so.

        Raises:
            TraceError: a tensor of the batch is told to require a gradient, before torch 2.13.
        """
        place = format_location(find_current_line())
        if not private.FOLLOWS_REQUIRES_GRAD:
            raise TraceError(
                f"{place} changes requires_grad of a tensor of the batch, which a plan takes as it is given: call "
                "requires_grad_() on the batch before the step, which then gives it a gradient"
            )
        leaf = owner.call_method(translator, "detach", [], {})
        leaf.call_method(translator, "requires_grad_", [], {})
        _read_through(owner, leaf, translator)
        self.aliased.add(name := private.get_source_name(owner.source))
        what, where = "a tensor that is no parameter", "it, in the batch,"
        if name.startswith(("L['args']", "L['kwargs']")):
            what, where = "a tensor of the batch", "the batch"
        warn_caller(
            f"{place} makes {what} require a gradient: gradients inside the step are computed by it, but the planned step leaves "
            f"nothing in its grad. If that is read, call requires_grad_() on {where} before the step instead"
        )

    def end(self, _: Any, output: Any) -> None:
        """Check that parameters end as they began, and that nothing reads one by another name where it takes no gradient.

        Raises:
            TraceError: one does not, or something does.
        """
        names = [
            private.get_source_name(owner.source) for owner, proxy in self.frozen.items() if proxy.node.graph is output.graph
        ]
        for first, last in self.spans:
            node, storage = first, get_storage(first.meta["example_value"])
            while first.graph is output.graph and node is not last:
                node = node.next
                names += [n.name for n in node.all_input_nodes if n.op == "placeholder" and _is_of(n, storage)]
        if names:
            raise TraceError(
                f"the step changes requires_grad of a parameter ({make_readable(names[0], {}, {})}) and does not set it back, or "
                "reads it by another name meanwhile: plan one step with and one without its gradient, or train with "
                "planner.checkpoint"
            )


def _is_made(owner: Any) -> bool:
    """Return True if the step computes the tensor `owner`."""
    return bool(owner.is_tensor() and owner.as_proxy().node.op not in ("placeholder", "get_attr"))


def _is_given(owner: Any) -> bool:
    """Return True if a tensor exists before the step and is no parameter; False where the step reads an alias of it already."""
    is_input = owner.source is not None and owner.as_proxy().node.op == "placeholder"
    if not is_input or issubclass(owner.python_type(), nn.Parameter):
        return False
    is_of_batch = private.get_source_name(owner.source).startswith(("L['args']", "L['kwargs']"))
    return not (is_of_batch and owner.as_proxy().node.meta["example_value"].requires_grad)


def _is_trained(owner: Any) -> bool:
    """Return True if a tensor is a parameter that takes a gradient, and exists before the step."""
    node = owner.as_proxy().node
    is_parameter = owner.source is not None and node.op == "placeholder" and issubclass(owner.python_type(), nn.Parameter)
    return is_parameter and node.meta["example_value"].requires_grad


def _read_through(owner: Any, alias: Any, translator: Any) -> None:
    """Let the rest of the step read the input `owner` through `alias`."""
    owner.proxy = alias.as_proxy()
    owner.proxy.node.meta.setdefault("tensor_dict", {})  # Dynamo marks inputs there that a module has, when it meets them
    owner.synchronize_attributes(translator)


def _is_of(node: fx.Node, storage: int) -> bool:
    value = node.meta.get("example_value")
    return isinstance(value, torch.Tensor) and get_storage(value) == storage


def _is_attribute(owner: Any, name: Any, asked: str) -> bool:
    """Return True if `name`, a variable of Dynamo's, is the name `asked` of an attribute of the tensor `owner`."""
    return bool(owner.is_tensor() and name.is_python_constant() and name.as_python_constant() == asked)


@dataclass(frozen=True, slots=True)
class _DataWrites:
    """Writes to the data of inputs, by the capture they are in.

    Attributes:
        wanted: tells whether a frame is captured for the planner.
        pending: by input its proxy and its data, which are written as the graph ends.
        at_once: copies to parameters that are trained, with the memory of both sides.
    """

    wanted: Callable[[private.InstructionTranslatorBase], bool]
    pending: "WeakKeyDictionary[private.TracingContext, dict[Any, tuple[Any, Any]]]" = field(default_factory=WeakKeyDictionary)
    at_once: "WeakKeyDictionary[private.TracingContext, list[tuple[fx.Node, set[int]]]]" = field(
        default_factory=WeakKeyDictionary
    )

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
        data = getattr(owner, private.GETATTR)(translator, "data")
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

    def set_or_write(self, set_attribute: Any, function: Any, translator: Any, owner: Any, name: Any, value: Any) -> Any:
        """Assign an attribute, or write the data."""
        if _is_attribute(owner, name, "data") and self._write(translator, owner, value):
            return value
        return set_attribute(function, translator, owner, name, value)

    def set_storage_or_write(self, attribute: Any, set_storage: Any, owner: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        """Call ``set_``, or write the data; `attribute` finds the method itself."""
        if owner.source is None or not self.wanted(tx):
            return set_storage(owner, tx, *args, **kwargs)
        if len(args) == 1 and not kwargs and self._write(tx, owner, args[0]):
            return owner
        return attribute(owner, tx, "set_").call_function(tx, list(args), kwargs)

    def find_attribute_or_method(self, attribute: Any, owner: Any, translator: Any, name: str) -> Any:
        """Return the variable of an attribute; of ``set_``, one that calls the method above."""
        if name == "set_" and owner.source is not None and self.wanted(translator):
            return private.GetAttrVariable(owner, name)
        return attribute(owner, translator, name)

    def _write(self, translator: Any, owner: Any, value: Any) -> bool:
        is_input = owner.source is not None and value.is_tensor() and self.wanted(translator)
        return is_input and self.add(translator, owner, value)

    def end(self, translator: Any, output: Any) -> None:
        """Write what is pending; raise TraceError if the step goes on with another name of a written parameter's memory."""
        pending = self.pending.pop(output.tracing_context, {})
        values = [owner.call_method(translator, "clone", [], {}) for owner in pending]  # one may be the old value of another
        for (owner, (proxy, data)), value in zip(pending.items(), values, strict=True):
            owner.proxy = proxy
            data.call_method(translator, "copy_", [value], {})
        for copy, storages in self.at_once.pop(output.tracing_context, []):
            _refuse_other_names(copy, storages)


def call_at_end(*functions: EndOfCapture) -> AbstractContextManager[object]:
    """Return the patch with which Dynamo calls `functions`, in this order, where it has followed a frame to its end."""
    return wrap(private.OutputGraph, "compile_subgraph", partial(_end_and_compile, functions))


def _end_and_compile(functions: Iterable[EndOfCapture], compile_graph: Any, output: Any, tx: Any, *args: Any, **more: Any) -> Any:
    for end in functions:
        end(tx, output)
    return compile_graph(output, tx, *args, **more)


def write_data_in_place_where(wanted: Callable[[private.InstructionTranslatorBase], bool], stack: ExitStack) -> EndOfCapture:
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
    writes, attribute = _DataWrites(wanted), getattr(private.TensorVariable, private.GETATTR)
    stack.enter_context(wrap(*private.SETATTR, writes.set_or_write))
    stack.enter_context(wrap(*private.find_tensor_method("set_"), partial(writes.set_storage_or_write, attribute)))
    stack.enter_context(wrap(private.TensorVariable, private.GETATTR, writes.find_attribute_or_method))
    return writes.end


def write_replaced_buffers(translator: Any, output: Any) -> None:
    """Write what ``self.buffer = value`` has set into the buffer's own memory, as the capture ends.

    A planned step has its buffers from the first step to the last. Values of another layout, or with a history in autograd, are
    left to ``planner.capture.frontend.effects``, which refuses them.
    """
    replaced = [found for table in output.side_effects._get_modified_vars() for found in _iterate_replaced_buffers(table)]
    values = [items[key].call_method(translator, "clone", [], {}) for items, key, _ in replaced]  # as above
    for _, _, buffer in replaced:
        _keep_old_value(buffer.as_proxy().node)
    for (items, key, buffer), value in zip(replaced, values, strict=True):
        getattr(buffer, private.GETATTR)(translator, "data").call_method(translator, "copy_", [value], {})
        items[key] = buffer


def _iterate_replaced_buffers(table: Any) -> Iterator[tuple[dict[Any, Any], Any, Any]]:
    """Yield the items of a module's table of buffers, the key of a tensor that replaces another of its layout, and the other."""
    if not private.get_source_name(table.source).endswith("._buffers"):
        return
    before = {private.get_constant_key(key): value for key, value in table.original_items.items()}
    for key, value in table.items.items():
        pair = [each.realize() for each in (before.get(private.get_constant_key(key)), value) if each is not None]
        if len(pair) == 2 and pair[0] is not pair[1] and all(each.is_tensor() for each in pair):
            old, new = (each.as_proxy().node.meta["example_value"] for each in pair)
            if is_same_layout(old, new) and old.dtype is new.dtype and old.device == new.device and not new.requires_grad:
                yield table.items, key, pair[0]


def _keep_old_value(buffer: fx.Node) -> None:
    """Let a step that trains through `buffer` read a copy of it, as the buffer will be written before the backward pass.

    Eager PyTorch gives the module another tensor, and the backward pass reads the old one. After ``buffer.data = value`` it
    reads the new data.
    """
    storage, names = get_storage(buffer.meta["example_value"]), {buffer}
    for node in buffer.graph.nodes:
        value = node.meta.get("example_value")
        if names.isdisjoint(node.all_input_nodes):
            continue
        if isinstance(value, torch.Tensor) and get_storage(value) == storage and not value.requires_grad:
            names.add(node)
        elif any(tensor.requires_grad for tensor in list_tensors(value)):
            break
    else:
        return
    with buffer.graph.inserting_before(next(node for node in buffer.graph.nodes if node.op != "placeholder")):
        old = buffer.graph.call_method("clone", (buffer,))
    old.meta["example_value"] = buffer.meta["example_value"]
    buffer.replace_all_uses_with(old, lambda user: user is not old)


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
                f"{format_node(copy)} replaces the data of a trained parameter, "
                "and the step has read its old data, goes on with it, or writes to the new: replace it before it is read, or "
                "write in place (weight.data.copy_(...)), with a copy (clone) of the old data where that is used later"
            )


def keep_attributes(module: nn.Module) -> AbstractContextManager[object]:
    """Keep the attributes of tensors of a captured `module` where AOTAutograd replaces the tensors.

    The captured code reads tensors from them, such as ``weight.quant_state.absmax`` of a quantized weight. A custom Function
    takes only tensors that are known in the graph, which their views are.
    """
    attributes = {name: vars(tensor) for name, tensor in (*module.named_parameters(), *module.named_buffers()) if vars(tensor)}
    copy = partial(_copy_attributes, module, attributes)
    return wrap(private.DynamoBytecodeFlatten, "__call__", copy) if attributes else nullcontext()


def _copy_attributes(module: nn.Module, attributes: Mapping[str, Mapping[str, Any]], flatten: Any, *given: object) -> object:
    for name, held in attributes.items():
        path, _, last = name.rpartition(".")
        tensor = getattr(module.get_submodule(path), last)
        vars(tensor).update({key: value for key, value in held.items() if key not in vars(tensor)})
    to_functional = FunctionalTensor.to_functional
    return tuple(to_functional(value.detach()) if type(value) is torch.Tensor else value for value in flatten(*given))


@contextmanager
def guard_missing_attributes() -> Iterator[None]:
    """Guard that an attribute is missing where the captured code has met its AttributeError, as Dynamo does for ``hasattr``."""
    with ExitStack() as stack:
        for kind in (private.UnspecializedNNModuleVariable, private.UserDefinedObjectVariable):
            stack.enter_context(wrap(kind, private.GETATTR, _get_or_guard))
        yield


def _get_or_guard(get_attribute: Any, owner: Any, translator: Any, name: str) -> Any:
    try:
        return get_attribute(owner, translator, name)
    except private.ObservedAttributeError:
        if owner.source is not None and name not in getattr(owner.value, "__dict__", {name}):
            missing = partial(private.GuardBuilder.NOT_PRESENT_IN_GENERIC_DICT, attr=name)
            private.install_guard(owner.source.make_guard(missing))
        raise


def read_optimizers() -> AbstractContextManager[object]:
    """Read the groups of an optimizer, such as its learning rate, as those of any object: its parameters are no inputs then."""
    return patch.object(private.OptimizerVariable, private.GETATTR, getattr(private.UserDefinedObjectVariable, private.GETATTR))


def read_generic_aliases() -> AbstractContextManager[object]:
    """Read ``list[int]`` and the like where types are values, as in ``typing.cast(list[int], x)``; torch 2.13 does not."""
    name = "mp_subscript_impl"
    return wrap(private.VariableTracker, name, _get_item) if hasattr(private.VariableTracker, name) else nullcontext()


def _get_item(refuse: Any, variable: Any, translator: Any, key: Any) -> Any:
    kind: Any = variable.as_python_constant() if variable.is_python_constant() else None
    is_type = isinstance(kind, type)
    if not is_type:
        return refuse(variable, translator, key)
    return private.VariableTracker.build(translator, kind[getattr(key, "value", None) or key.as_python_constant()])


def read_numpy_floats() -> AbstractContextManager[object]:
    """Read an ``np.float64``, which is a Python float, as that: Dynamo makes an array of it, and its ops round differently."""
    wraps = private.VariableBuilder._type_dispatch()  # by types; Dynamo caches it
    wrap_float: dict[type, Any] = {np.float64: lambda builder, value: builder.wrap_literal(float(value))}
    return patch.object(private.VariableBuilder, "_type_dispatch", lambda *_: wraps | wrap_float)


def ignore_cudnn_flags(device: torch.device) -> AbstractContextManager[object]:
    """Leave out ``with torch.backends.cudnn.flags(...)`` on the CPU, where it has no effect."""
    return patch.object(torch.backends.cudnn, "flags", ignore_context) if device.type == "cpu" else nullcontext()


@contextmanager
def follow_distributions() -> Iterator[None]:
    """Let Dynamo follow ``torch.distributions``, and keep them from checking values, which no graph can do, unless asked to.

    ``torch.compile`` disables the checks for the whole process.
    """
    with patch.object(Distribution, "_validate_args", False), private.infer_sizes_by_broadcasting():
        yield
