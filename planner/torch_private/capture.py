"""Private names of Dynamo and AOTAutograd: capture of a step, and changes to it.

Where the supported releases of PyTorch differ, it is decided here, and ``make test TORCH=2.11.0`` and ``make test-latest`` hold
both ends.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from inspect import signature
from itertools import dropwhile
from random import Random
from traceback import walk_tb
from types import CodeType
from typing import Any, TypeVar
from unittest.mock import patch
from weakref import WeakKeyDictionary

import torch
from torch import fx
from torch._C._dynamo.guards import GuardManager  # checks a value, and those in it
from torch._dynamo import (
    config as dynamo_config,  # settings of the capture
    eval_frame as _eval_frame,  # whether functions are compiled at present
    guards as _guards,  # times the guards that it builds
    pgo as _pgo,  # the sizes that a frame was compiled for
    utils as dynamo_utils,  # run_node executes one node on fake tensors
)
from torch._dynamo.backends.common import aot_autograd  # a backend of torch.compile, from two compilers and a partitioner
from torch._dynamo.backends.debugging import boxed_nop  # calls a graph so that it can free its inputs
from torch._dynamo.compiled_autograd import _disable as disable_compiled_autograd  # it would compile backward passes
from torch._dynamo.convert_frame import (
    CaptureOutput,  # the captured code, with its guards
    fullgraph_capture,  # Dynamo's part of a capture
    get_traced_fn,  # the captured function, which guards belong to
)
from torch._dynamo.decorators import substitute_in_graph  # replaces a function in the capture
from torch._dynamo.eval_frame import (
    OptimizedModule,  # the module that torch.compile(model) returns
    innermost_backend,  # the call of torch.compile that a graph belongs to
)
from torch._dynamo.exc import (
    BackendCompilerFailed,  # wraps errors of a backend
    FailOnRecompileLimitHit,  # inputs of too many sizes
    ObservedAttributeError,  # the captured code reads an attribute that is missing
    TorchDynamoException,  # its messages need no class name
    TorchRuntimeError,
    Unsupported,  # code that Dynamo does not follow
    unimplemented,  # breaks the graph
)
from torch._dynamo.functional_export import (
    DynamoBytecodeFlatten,  # finds the inputs of the captured graph, starting from the step
    create_fx_graph_from_captured_output,  # a graph with the arguments of the step
)
from torch._dynamo.guards import (
    CheckFunctionManager,  # checks guards before each step
    GuardBuilder,  # what a guard checks
    install_guard,
)
from torch._dynamo.output_graph import OutputGraph  # the graph of a frame while it is captured
from torch._dynamo.side_effects import SideEffects  # Python values that a step changes
from torch._dynamo.source import (
    AttrSource,  # where a value comes from: from an attribute
    ClosureSource,  # from what encloses a function
    ConstantSource,  # from nowhere
    GetItemSource,  # from a container
    GlobalSource,  # from a global variable
)
from torch._dynamo.symbolic_convert import (
    InstructionTranslator,  # which frame is being compiled
    InstructionTranslatorBase,  # executes the captured code: calls and jumps are observed
)
from torch._dynamo.utils import (
    dynamo_timed as _dynamo_timed,
    get_metrics_context as _metrics_context,
    numpy_method_wrapper,
    numpy_operator_wrapper,
    numpy_to_tensor_wrapper,
)
from torch._dynamo.variables import (
    BackwardHookVariable,  # full backward hooks of a module, around a call
    BuiltinVariable,  # `@` between captured values
    ConstantVariable,  # a constant while code is captured
    FunctoolsPartialVariable,  # a partial function that captured code makes
    GetAttrVariable,  # a method that is about to be called
    LazyVariableTracker,  # a value that the captured code has not used yet
    ListVariable,  # a list while code is captured
    NestedUserFunctionVariable,  # a function that captured code defines
    OptimizerVariable,  # an optimizer, whose parameters become inputs
    RandomVariable,  # an object of Python's random.Random
    RemovableHandleVariable,  # of a hook
    SkipFunctionVariable,  # a function that Dynamo does not capture
    StringFormatVariable,  # a text with values in it
    SymNodeVariable,  # a number that is a symbol
    TensorVariable,  # a tensor while code is captured
    TorchCtxManagerClassVariable,  # a class such as torch.no_grad
    TorchInGraphFunctionVariable,  # has the handlers of specially captured functions
    UnspecializedNNModuleVariable,  # a module while code is captured
    UserDefinedClassVariable,  # a class while code is captured
    UserDefinedObjectVariable,  # an object that is carried along unchanged
    UserFunctionVariable,  # a function or method that is about to be called
    UserMethodVariable,  # a method of an object
    VariableTracker,  # makes an answer for the captured code
    builtin as _builtin,
    misc as dynamo_misc,  # calls random functions
    user_defined as dynamo_user_defined,  # calls them too
)
from torch._dynamo.variables.base import ValueMutationNew  # of what captured code makes
from torch._dynamo.variables.builder import (
    GraphArg,  # an input of the captured graph
    SourcelessBuilder,  # takes a value into the capture that the captured code has made
    VariableBuilder,  # takes a user's value into the capture
    wrap_fx_proxy,  # a tensor for a new node
)
from torch._dynamo.variables.higher_order_ops import (
    CheckpointHigherOrderVariable,  # torch.utils.checkpoint
    speculate_subgraph,  # captures a function into a graph of its own
)
from torch._dynamo.variables.iter import ItertoolsVariable  # functions of itertools while code is captured
from torch._dynamo.variables.misc import CellVariable  # of an enclosing function's name
from torch._export.utils import _compiling_state_context as compiling_state  # is_exporting() is True during a capture
from torch._functorch import config as functorch_config  # how joint graphs are made
from torch._functorch._aot_autograd.descriptors import (  # descriptions of the inputs and outputs of a joint graph
    AOTInput,
    AOTOutput,
    BackwardTokenAOTInput,
    BackwardTokenAOTOutput,
    BufferAOTInput,
    ForwardTokenAOTInput,
    ForwardTokenAOTOutput,
    GradAOTOutput,
    InputMutationAOTOutput,
    ParamAOTInput,
    PlainAOTInput,
    PlainAOTOutput,
    SavedForBackwardsAOTOutput,
    SubclassGetAttrAOTInput,
    TangentAOTInput,
    ViewBaseAOTInput,
)
from torch._functorch._aot_autograd.schemas import JointWithDescriptors  # forward and backward pass in one graph
from torch._functorch.aot_autograd import (
    aot_compile_joint_with_descriptors,  # splits it in two, and has each compiled
    aot_export_joint_with_descriptors,  # makes it
)
from torch._functorch.partitioners import default_partition  # keeps the tensors that autograd would
from torch._guards import (
    Guard,  # one condition on Python values
    GuardsSet,  # those of a capture
    TracingContext,  # where in the code a capture is
    tracing,  # the context in which the joint graph is made
)
from torch._higher_order_ops.wrap import TagActivationCheckpoint  # tells a checkpoint's options from its function's arguments
from torch._inductor import config as inductor_config  # random numbers as eager PyTorch draws them, to compare with
from torch.autograd.graph import GradientEdge
from torch.utils._device import _device_constructors  # what makes tensors where ``with torch.device(...)`` says

from planner.graphs.errors import PlannerError
from planner.graphs.short_tracebacks import hide_frames
from planner.torch_private.core import pytree
from planner.torch_private.patches import wrap_for_good

T = TypeVar("T")

_NAMES_OF_GRADIENTS = tuple(signature(torch.autograd.grad).parameters)
_MOST_ITERATIONS = 24  # of a loop with a graph break in it, each of which is captured of its own

# The function that captures setattr(): torch 2.13 has a class for it, earlier releases a method.
SETATTR: tuple[Any, str] = (
    (_builtin.SetAttrBuiltinVariable, "_call_setattr")
    if hasattr(_builtin, "SetAttrBuiltinVariable")
    else (_builtin.BuiltinVariable, "call_setattr")
)

# The method that captures getattr(), of all variables.
GETATTR = "tp_getattro_impl" if hasattr(VariableTracker, "tp_getattro_impl") else "var_getattr"

# Before 2.13 Dynamo does not follow copy.deepcopy of objects with their own __deepcopy__, or of any (2.11).
FOLLOWS_COPIES = torch.__version__ >= "2.13"

# The method that refuses results which depend on requires_grad_(); empty before 2.13, where Dynamo refuses the call itself.
_REQUIRES_GRAD_CHECK = "_check_requires_grad_intermediate_outputs"
FOLLOWS_REQUIRES_GRAD = _REQUIRES_GRAD_CHECK if hasattr(OutputGraph, _REQUIRES_GRAD_CHECK) else ""

# Torch 2.11 skips guards on the tensors of an unchanged dictionary, though their requires_grad may have changed. Only the
# version tells; torch compares it with strings as versions.
GUARD_SETTINGS: dict[str, Any] = {"skip_tensor_guards_with_matching_dict_tags": False} if torch.__version__ < "2.12" else {}

NUMPY_WRAPPERS = (numpy_method_wrapper, numpy_operator_wrapper, numpy_to_tensor_wrapper)  # what a graph calls for NumPy

# Gradients inside the step (torch.autograd.grad) are captured as ops, where Dynamo knows how: not before 2.12.
GRADIENT_SETTINGS: dict[str, Any] = {"trace_autograd_ops": True} if hasattr(dynamo_config, "trace_autograd_ops") else {}


def find_tensor_method(name: str) -> tuple[Any, str]:
    """Return the object, and the name of its attribute, that captures ``torch.Tensor.name`` specially.

    Torch 2.14 has a table of them, earlier releases a method of the class for each.
    """
    table = getattr(TensorVariable, "tp_methods", {})
    return (table[name], "handler") if name in table else (TensorVariable, f"method_{name}")


def get_constant_key(key: Any) -> Any:
    """Return the key of an item of a dict while code is captured, as the captured code knows it."""
    return getattr(key, "vt", key).as_python_constant()


def is_constant_key(key: Any) -> bool:
    """Return True if the key of an item of a dict is a text or a number while code is captured."""
    key = getattr(key, "vt", key)
    return key.is_python_constant() and isinstance(key.as_python_constant(), str | int)


def call_compiled_modules_by(wanted: Callable[[Any], bool], call: Callable[..., Any]) -> None:
    """Make ``call(module, run, args, kwargs)`` call what ``torch.compile(module)`` returns for the backends that are `wanted`."""
    run = OptimizedModule.__call__

    def call_or_run(module: OptimizedModule, *args: Any, **kwargs: Any) -> Any:
        made_by = getattr(module.dynamo_ctx, "callback", None)
        try:
            if torch.compiler.is_compiling() or not callable(made_by) or not wanted(innermost_backend(made_by)):
                return run(module, *args, **kwargs)
            return call(module._orig_mod, partial(run, module), args, kwargs)
        except Exception as error:
            hide_frames(error)
            raise

    OptimizedModule.__call__ = call_or_run  # type: ignore[method-assign, assignment]


def fix_sizes_where(wanted: Callable[[InstructionTranslatorBase], bool]) -> None:
    """Make Dynamo compile the frames that are `wanted` again for each size, where it would make a size symbolic."""
    wrap_for_good(_pgo, "update_automatic_dynamic", partial(_run_configured, wanted, {"automatic_dynamic_shapes": False}))


def follow_more_code() -> None:
    """Make Dynamo follow code that it refuses, or fails at, in each of these functions."""
    wrap_for_good(InstructionTranslatorBase, "_load_attr", _load_or_read)
    wrap_for_good(TorchInGraphFunctionVariable, "call_function", _call_with_tuples)
    wrap_for_good(*find_tensor_method("register_hook"), _register_and_note)
    wrap_for_good(SideEffects, "remove_hook", _remove_noted)
    create = SourcelessBuilder.create
    SourcelessBuilder.create = staticmethod(partial(_create_or_name, create))  # type: ignore[method-assign]
    wrap_for_good(UserMethodVariable, "call_obj_hasattr", _has_function)
    wrap_for_good(TensorVariable, GETATTR, _get_or_read)
    wrap_for_good(UserDefinedClassVariable, "call_function", _call_or_make)
    wrap_for_good(ConstantVariable, "call_method", _call_and_own)


def _load_or_read(load: Callable[..., None], tx: InstructionTranslatorBase, attr: Any) -> None:
    """Read texts such as ``type(weight).__module__`` of PyTorch's own classes and functions.

    Libraries ask for them to find tensors of another library without importing it.
    """
    load(tx, attr)
    if isinstance(getattr(tx.stack[-1], "obj", None), TorchInGraphFunctionVariable):
        found = tx.stack[-1].as_python_constant()
        tx.stack[-1] = VariableTracker.build(tx, found) if isinstance(found, str) else tx.stack[-1]


def _call_with_tuples(call: Any, function: Any, tx: Any, args: Any, kwargs: Any) -> Any:
    """Take every call of ``torch.autograd.grad`` that eager PyTorch takes.

    Dynamo knows lists of tensors only, where models pass ``weights.values()`` or ``model.parameters()``; and it checks the first
    arguments only if they are not passed by name, and the others only if they are. Those that it would take wrongly break the
    graph: gradients through a custom function's ``backward()``, which it captures without autograd.
    """
    if function.value is not torch.autograd.grad:
        return call(function, tx, args, kwargs)
    given = dict(zip(_NAMES_OF_GRADIENTS, args, strict=False)) | kwargs
    for name in _NAMES_OF_GRADIENTS[:3]:
        if name in given:
            given[name] = _make_tuple(tx, given[name].realize())
    keeps_graph = given.get("create_graph")
    is_kept = keeps_graph is not None and keeps_graph.is_python_constant() and keeps_graph.as_python_constant()
    if is_kept and _reads_custom_function(given.get("outputs")):
        unimplemented(
            gb_type="torch.autograd.grad(create_graph=True) of what a custom autograd function computes",
            context="",
            explanation="Dynamo captures its backward() without the gradients of these gradients",
            hints=[],
        )
    return call(function, tx, [given.pop(name) for name in _NAMES_OF_GRADIENTS[:2]], given)


def _reads_custom_function(outputs: Any) -> bool:
    """Return True if captured tensors are computed by a custom autograd function, or from its results."""
    parts = [each.realize() for each in getattr(outputs, "items", [outputs]) if each is not None]
    waiting = [each.as_proxy().node for each in parts if each.is_tensor()]  # and no edges of autograd's graph
    seen = set(waiting)
    while waiting:
        if (node := waiting.pop()).target is torch.ops.higher_order.autograd_function_apply:
            return True
        waiting += (new := {*node.all_input_nodes} - seen)
        seen |= new
    return False


def _register_and_note(register: Any, tensor: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
    """Follow ``handle.remove()`` for hooks of tensors that captured code makes, where Dynamo fails in an assertion.

    The node that registers such a hook is the handle's place in the list of hooks that Dynamo keeps.
    """
    handle = register(tensor, tx, *args, **kwargs)
    if isinstance(handle, RemovableHandleVariable) and tensor.source is None:
        handle.idx = tensor.as_proxy().node
    return handle


def _remove_noted(remove: Callable[..., None], effects: SideEffects, place: Any) -> None:
    if not isinstance(place, fx.Node):
        return remove(effects, place)
    if torch.autograd.grad in {node.target for node in dropwhile(lambda node: node is not place, place.graph.nodes)}:
        unimplemented(
            gb_type="a hook is removed after torch.autograd.grad, which may have called it",
            context="",
            explanation="register it behind that call, or remove it before",
            hints=[],
        )
    place.target, place.args = _return_tensor, place.args[:1]
    return None


def _return_tensor(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


# Modules that a step makes, such as the loss of DETR: their ``nn.Buffer``, and methods without gradients. ``nn.Module`` asks for
# ``__func__`` of its method, and the buffer whether it is persistent.


def _create_or_name(create: Any, tx: Any, value: Any) -> Any:
    """Return the variable of `value`; the method by which ``@torch.no_grad()`` makes its context is the class itself."""
    maker = getattr(value, "__self__", None)
    makes_context = isinstance(maker, torch.no_grad | torch.enable_grad) and value.__name__ == "clone"
    return TorchCtxManagerClassVariable(type(maker)) if makes_context else create(tx, value)


def _has_function(has: Any, method: Any, tx: Any, name: str) -> Any:
    return VariableTracker.build(tx, True) if name == "__func__" else has(method, tx, name)


def _get_or_read(get: Any, tensor: Any, tx: Any, name: str) -> Any:
    if name != "persistent" or tensor.as_proxy().node.target is not torch.nn.Buffer:
        return get(tensor, tx, name)
    return VariableTracker.build(tx, tensor.as_proxy().node.kwargs.get(name, True))


def _call_and_own(call: Any, text: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
    """Let captured code change the lists that ``text.split()`` and the like return, as ``repr(module)`` does."""
    result = call(text, tx, name, args, kwargs)
    if isinstance(result, ListVariable) and result.mutation_type is None:
        result.mutation_type = ValueMutationNew()
    return result


def _call_or_make(call: Any, kind: Any, tx: Any, args: Any, kwargs: Any) -> Any:
    """Follow ``torch.autograd.Variable(tensor, requires_grad=True)``, as older models call it."""
    if kind.value is not torch.autograd.Variable:
        return call(kind, tx, args, kwargs)
    return VariableTracker.build(tx, _make_variable).call_function(tx, args, kwargs)


def _make_variable(data: torch.Tensor, requires_grad: bool = False) -> torch.Tensor:  # noqa: FBT001, FBT002 (its signature)
    return data.detach().requires_grad_(requires_grad)


def _make_tuple(tx: Any, variable: Any) -> Any:
    """Return a captured iterable as a tuple; what Dynamo knows, and an edge of autograd's graph, as they are."""
    if variable.is_tensor() or variable.python_type() in (list, tuple, dict, type(None), GradientEdge):
        return variable
    return BuiltinVariable(tuple).call_function(tx, [variable], {})


def configure_dynamo_where(wanted: Callable[[InstructionTranslatorBase], bool], **settings: Any) -> None:
    """Make Dynamo capture the frames that are `wanted` with `settings`."""
    wrap_for_good(InstructionTranslator, "run", partial(_run_configured, wanted, settings))


def _run_configured(
    wanted: Callable[[Any], bool], settings: Mapping[str, Any], run: Callable[..., Any], tx: Any, *args: Any, **kwargs: Any
) -> Any:
    with dynamo_config.patch(**settings) if wanted(tx) else nullcontext():
        return run(tx, *args, **kwargs)


def guard_empty_hooks_where(wanted: Callable[[Any], bool]) -> None:
    """Make Dynamo capture frames of compilers that are `wanted` again when hooks come to modules that had none."""
    wrap_for_good(CheckFunctionManager, "__init__", partial(_guard_empty_hooks, wanted))


def _guard_empty_hooks(
    wanted: Callable[[Any], bool], build: Any, manager: Any, code: Any, graph: Any, *others: Any, **by_name: Any
) -> None:
    compiler = getattr(graph, "compiler_fn", None)
    with dynamo_config.patch(skip_nnmodule_hook_guards=False) if compiler is not None and wanted(compiler) else nullcontext():
        build(manager, code, graph, *others, **by_name)


def follow_requires_grad_where(wanted: Callable[[InstructionTranslatorBase], bool]) -> None:
    """Make Dynamo return, from the frames that are `wanted`, results that depend on a tensor after its ``requires_grad_()``.

    Tensors may be made so, too (``torch.zeros(8, requires_grad=True)``). Dynamo breaks the graph before such a call. What it is
    afraid of is the tensor itself, which would be returned without being a leaf of autograd, as would its views; losses have
    the history that their parameters give them (R1 penalties). The break is not harmless: where a parameter is used before and
    after it, its gradients are added in another order.
    """
    if FOLLOWS_REQUIRES_GRAD:
        wrap_for_good(OutputGraph, FOLLOWS_REQUIRES_GRAD, partial(_check_leaves, wanted))
        wrap_for_good(TorchInGraphFunctionVariable, "call_function", partial(make_with_gradient, wanted=wanted))


def make_with_gradient(
    call: Any, function: Any, tx: Any, args: Any, kwargs: dict[str, Any], *, wanted: Callable[[Any], bool] = lambda _: True
) -> Any:
    """Capture a call that makes a tensor with ``requires_grad=True`` without it, in frames that are `wanted`; set it after."""
    required = kwargs.get("requires_grad")
    if required is None or isinstance(function.value, type) or not (required.is_python_constant() and wanted(tx)):
        return call(function, tx, args, kwargs)
    made = call(function, tx, args, {name: value for name, value in kwargs.items() if name != "requires_grad"})
    return made.call_method(tx, "requires_grad_", [], {}) if required.as_python_constant() else made


def _check_leaves(wanted: Callable[[Any], bool], check: Callable[..., None], output: Any, returned: list[Any], tx: Any) -> None:
    if wanted(tx):
        leaves = {_get_storage(variable) for variable in output.leaf_var_creation_order}
        returned = [variable for variable in returned if variable.is_tensor() and _get_storage(variable) in leaves]
    check(output, returned, tx)


def _get_storage(variable: Any) -> int:
    storage: int = variable.as_proxy().node.meta["example_value"].untyped_storage()._cdata
    return storage


def leave_random_objects_where(wanted: Callable[[InstructionTranslatorBase], bool]) -> None:
    """Make Dynamo break the graph in the frames that are `wanted` where a ``random.Random`` draws a number.

    It would keep the first number for all calls.
    """
    is_supported = partial(_is_supported_elsewhere, wanted, RandomVariable.is_supported_random_obj)
    RandomVariable.is_supported_random_obj = staticmethod(is_supported)  # type: ignore[method-assign]


def _is_supported_elsewhere(wanted: Callable[[Any], bool], is_supported: Callable[[Random], bool], value: Random) -> bool:
    return is_supported(value) and not wanted(InstructionTranslator.current_tx())


def break_graphs_in_loops_where(wanted: Callable[[InstructionTranslatorBase], bool]) -> None:
    """Make Dynamo break the graph inside of loops in the frames that are `wanted`, where it would leave out the whole frame.

    Its code is valid either way. Each iteration is a capture, so that what is left of long loops is left out.
    """
    wrap_for_good(InstructionTranslatorBase, "maybe_has_backedge", partial(_leave_out, wanted, WeakKeyDictionary()))


def _leave_out(
    wanted: Callable[[Any], bool], captures: WeakKeyDictionary[CodeType, int], is_in_loop: Callable[[Any], bool], tx: Any
) -> bool:
    if not is_in_loop(tx) or not wanted(tx):
        return is_in_loop(tx)
    captures[tx.f_code] = captures.get(tx.f_code, 0) + 1
    return captures[tx.f_code] > _MOST_ITERATIONS


def carry_sparse_tensors_where(wanted: Callable[[InstructionTranslatorBase], bool]) -> None:
    """Make Dynamo carry sparse tensors along in the frames that are `wanted`, and break the graph where they are used.

    It breaks the graph where it meets them, otherwise, and then cannot go on in the frame. Where something was captured before,
    Dynamo has the function in a table.
    """
    wrap_for_good(VariableBuilder, "wrap_tensor", partial(_wrap_or_carry, wanted))
    VariableBuilder._type_dispatch_impl.cache_clear()


def _wrap_or_carry(wanted: Callable[[Any], bool], wrap: Callable[..., Any], builder: Any, value: torch.Tensor) -> Any:
    if value.layout is torch.strided or not wanted(builder.tx):
        return wrap(builder, value)
    builder.install_guards(GuardBuilder.TYPE_MATCH)
    return UserDefinedObjectVariable(value, source=builder.source)


def find_backward_nodes(outputs: object) -> set[Any]:
    """Return the node of autograd that runs the backward pass of AOTAutograd's function with these `outputs`; or none."""
    found = (output.grad_fn for output in pytree.tree_leaves(outputs) if isinstance(output, torch.Tensor))
    return {node for node in found if is_backward_node(node)}


def is_backward_node(node: Any) -> bool:
    """Return True if a node of autograd runs the backward pass of a function of AOTAutograd."""
    return hasattr(getattr(node, "_forward_cls", None), "_double_backward")


def refuse_double_backward(compiled: Callable[..., T], message: str) -> Callable[..., T]:
    """Return `compiled`, a function of AOTAutograd, that raises a `PlannerError` when its gradients are differentiated.

    AOTAutograd raises an error of its own, without a way out. Its class of autograd functions is known from the first call on;
    before torch 2.13 it has no method for this.
    """
    return partial(_run_watched, compiled, message, [])


def _run_watched(compiled: Callable[..., T], message: str, classes: list[Any], *args: Any) -> T:
    outputs = compiled(*args)
    if not classes:
        classes.extend({node._forward_cls for node in find_backward_nodes(outputs)})
        for kind in classes:
            kind._double_backward = staticmethod(partial(_watch_gradients, message, kind._double_backward))
    return outputs


def _watch_gradients(message: str, differentiable: Callable[..., Any], *args: Any) -> Any:
    gradients = differentiable(*args)
    nodes = {g.grad_fn for g in pytree.tree_leaves(gradients) if isinstance(g, torch.Tensor) and g.grad_fn is not None}
    for node in nodes:
        node.register_prehook(partial(_raise_error, message))
    return gradients


def _raise_error(message: str, _: object) -> None:
    raise PlannerError(message)


def forget_saved_values() -> None:
    """Let go of what custom autograd functions have saved in captures that are done: fake tensors, in a cycle through C++.

    The garbage collector does not see that cycle, and who counts the tensors that Python knows of would find them.
    """
    for kind in torch.autograd.Function.__subclasses__():
        if kind.__qualname__.startswith("AutogradFunctionApply.__call__."):
            cells = dict(zip(kind.forward.__code__.co_freevars, kind.forward.__closure__ or (), strict=True))
            if "saved_values" in cells:
                cells["saved_values"].cell_contents = None


def forget_compiled(output: CaptureOutput) -> None:
    """Remove the global that Dynamo makes for a capture, which would keep the model's tensors alive."""
    if output.backend_input is not None:
        output.graph_capture_output.f_globals.pop(output.backend_input.backend_id, None)


def infer_sizes_by_broadcasting() -> AbstractContextManager[Any]:
    """Let Dynamo follow the private function by which ``torch.distributions`` broadcasts sizes: to it a size is no argument."""
    return patch.object(torch._C, "_infer_size", torch.broadcast_shapes)


@contextmanager
def enter_dynamo_phase(name: str) -> Iterator[None]:
    """Enter the context that Dynamo's functions must be called in.

    Its log of compilations, which has nothing about captures, is disabled: torch 2.11 fails at it, with a page on stderr, if
    methods of loggers are ignored.
    """
    metrics = _metrics_context()
    with patch.object(metrics, "_on_exit", lambda *_: None), metrics, _dynamo_timed(name):
        yield


@contextmanager
def build_guards_for_plan() -> Iterator[None]:
    """Build guards without those on marks of tensors, such as ``mark_dynamic``, and without timing them for Dynamo's logs.

    Sizes in a plan do not depend on marks; to look for five on each tensor is up to half of the time of the guards. The timing
    empties the processor's caches first and takes 30 ms.
    """
    marks = "add_dimension_marking_guard"  # not in torch 2.11
    without_marks = patch.object(GuardManager, marks, lambda *_: None) if hasattr(GuardManager, marks) else nullcontext()
    with without_marks, patch.object(_guards, "profile_guard_manager", lambda *_: 0.0):
        yield


def get_source_name(source: Any) -> str:
    """Return the name of a value as Dynamo writes it; "" for one without a name, as the stack of modes.

    Torch 2.11 has a method for it.
    """
    try:
        return "" if source is None else str(source.name if isinstance(source.name, str) else source.name())
    except NotImplementedError:
        return ""


def get_other_name(guard: Any) -> str | None:
    """Return the other name of a value that a guard wants to be one object under two names; None for other guards."""
    other = getattr(guard.create_fn, "keywords", {}).get("source_b")
    return None if other is None else get_source_name(other)


def get_attribute_name(guard: Any) -> str:
    """Return the name of the attribute that a guard asks for (``hasattr``); that of the object itself for other guards."""
    attribute = getattr(guard.create_fn, "keywords", {}).get("attr")
    return guard.name if attribute is None else f"{guard.name}.{attribute}"


def find_graph_breaks(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the graph breaks when Dynamo compiles and calls `function`: a line of code and a reason each."""
    found = torch._dynamo.explain(function)(*args, **kwargs)
    return [
        (
            "".join(f"{frame.filename}:{frame.lineno}" for frame in reason.user_stack[-1:]) or "unknown line",
            " ".join(reason.reason.partition("Hint:")[0].split()),
        )
        for reason in found.break_reasons
    ]


def list_recompile_reasons(error: FailOnRecompileLimitHit) -> list[str]:
    """Return the guards that a call does not pass, one of each capture of code that was captured too often, the last first."""
    for frame, _ in walk_tb(error.__traceback__):
        code, entries = frame.f_locals.get("code"), frame.f_locals.get("cache_entries")
        if code is not None and entries:
            reasons = dynamo_utils.guard_failures[code][-len(entries) :]
            return [re.sub(r"^\d+/\d+: ", "", reason.partition("\n")[0]) for reason in reasons]
    return []


def is_compiling_forbidden() -> bool:
    """Return True if compiled functions run as they are written at present: under ``set_stance``, or a mode that sees ops."""
    return _would_skip() or _eval_frame._stance.stance != "default"


def _would_skip() -> bool:
    """Return True if Dynamo would not capture a function that is called now, nor ever again."""
    return bool(dynamo_config.disable or torch._C._len_torch_dispatch_stack())


DEVICE_CONSTRUCTORS = tuple(_device_constructors())


def capture_later() -> AbstractContextManager[object]:
    """Return a context for a call of a compiled function: captured code runs, but what cannot be captured now may be later."""
    is_free = _eval_frame._stance.stance == "default"
    return torch.compiler.set_stance("eager_on_recompile") if is_free and _would_skip() else nullcontext()
