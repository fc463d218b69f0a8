"""Private names of ``torch`` itself: dispatch, fake tensors, nested containers of tensors.

Known weakness: a private function may keep its name and change what it does, which only the tests of its callers notice.
"""

import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import cache, partial
from traceback import walk_tb
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch._C import DispatchKey  # names the kernels of an operator that are removed or added
from torch._C._profiler import _EventType  # tells allocations from ops
from torch._dispatch.python import no_python_dispatcher  # ops are timed without the capture's dispatcher
from torch._functorch._aot_autograd import graph_capture_wrappers as _graph_capture_wrappers  # copies inputs that are written
from torch._guards import detect_fake_mode  # new values in a graph have its fake mode
from torch._ops import (
    HigherOrderOperator,  # takes functions as arguments
    OpOverload,  # the target of nodes
    OpOverloadPacket,  # to go over all operators
)
from torch._prims_common import compute_elementwise_output_strides, suggest_memory_format  # how kernels lay out results
from torch._subclasses.fake_impls import op_implementations_checks  # which ops have rules of their own on fake tensors
from torch._subclasses.fake_tensor import (
    FakeTensor,  # tells captured values from real ones
    FakeTensorMode,  # shapes without memory
    _BypassDispatchCache as BypassDispatchCache,  # keeps an op out of the mode's cache
)
from torch._subclasses.functional_tensor import (
    FunctionalTensor,  # the target of an in-place op during a capture
    FunctionalTensorMode,  # sees in-place ops before they are made functional
)
from torch.fx.experimental import proxy_tensor as _proxy_tensor  # captures graphs without autocast's cache
from torch.fx.experimental.proxy_tensor import (
    get_proxy_mode,  # makes the graph that ops are captured in
    track_tensor_tree,  # lets a value stand for a node of that graph
)
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,  # a symbol has no value of its own
    ShapeEnv,  # decides conditions on symbols
    has_free_unbacked_symbols,  # sizes that depend on data
)
from torch.multiprocessing.reductions import StorageWeakRef  # tells whether memory is still in use
from torch.nn.modules import (
    module as nn_module,  # has the hooks on all modules
    transformer,
)
from torch.utils import _pytree as pytree  # batches and arguments are nested
from torch.utils._mode_utils import no_dispatch  # concrete values are computed outside of all modes
from torch.utils._python_dispatch import (
    TorchDispatchMode,  # sees each op that eager PyTorch runs
    _disable_current_modes as disable_current_modes,  # checks and timings are no ops of the step
    is_in_torch_dispatch_mode,  # disabling modes takes time
    is_traceable_wrapper_subclass as _is_traceable_wrapper_subclass,
)
from torch.utils._sympy.interp import sympy_interp  # evaluates a condition on other numbers
from torch.utils._sympy.reference import PythonReferenceAnalysis  # in Python's arithmetic
from torch.utils.hooks import RemovableHandle

from planner.torch_private.patches import wrap

_ARE_LOGGED = ContextVar("_ARE_LOGGED", default=True)  # in this thread
logging.getLogger("torch._subclasses.fake_tensor").addFilter(lambda _: _ARE_LOGGED.get())

# The transform of torch.func (vmap, grad) that code runs under.
current_transform = torch._C._functorch.peek_interpreter_stack
# Their tensors wrap others, which have the memory.
is_functorch_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
is_functional_tensor = torch._is_functional_tensor

# The node that runs in a backward pass, which has autograd's saved tensors.
current_autograd_node = torch._C._current_autograd_node
# The backward pass that runs, and what is called at its end.
current_backward_pass = torch._C._current_graph_task_id
at_end_of_backward = torch.autograd.Variable._execution_engine.queue_callback
# True if the backward pass may run again, so that its saved tensors must not be overwritten.
backward_retains_graph = torch._C._autograd._get_current_graph_task_keep_graph
# Lets a replacement of a kernel call the op itself, without recursion.
below_autograd = torch._C._AutoDispatchBelowAutograd
# Calls inside a capture or a custom operator run as outside: with the dispatch keys of the outside.
force_dispatch_keys = torch._C._ForceDispatchKeyGuard
included_dispatch_keys = torch._C._dispatch_tls_local_include_set
excluded_dispatch_keys = torch._C._dispatch_tls_local_exclude_set
disable_python_dispatcher = torch._C._DisablePythonDispatcher
# The node of a tensor is stored in the mode that makes the graph.
get_dispatch_mode = torch._C._get_dispatch_mode
PROXY_MODE = torch._C._TorchDispatchModeKey.PROXY
from_functional_tensor = torch._from_functional_tensor
# In functional graphs they replace ops that write to their arguments, and ops with effects.
auto_functionalized = torch.ops.higher_order.auto_functionalized_v2
with_effects = torch.ops.higher_order.with_effects
# Conditions on values are ops in a graph.
assert_true = torch._assert
assert_async = torch._assert_async
# CUDA's attention for tensors on the CPU, while it is needed.
scoped_library = torch.library._scoped_library
# A restored tensor counts for autograd as not written.
preserve_version_counter = torch.autograd._unsafe_preserve_version_counter
set_version_counter = torch._C._autograd._unsafe_set_version_counter
# Workspaces are measured by the profiler; only one can run.
profiler_enabled = torch.autograd._profiler_enabled
# The identity of the memory of a tensor, at the cost of a call.
storage_address: Callable[[torch.Tensor], int] = torch._C._storage_address  # type: ignore[attr-defined]
# Copies many tensors by few kernels.
foreach_copy_ = torch._foreach_copy_
# Reads the numbers in a mask, which no graph can do.
detect_is_causal_mask = transformer._detect_is_causal_mask


def apply_function(function: type[torch.autograd.Function], *args: object) -> Any:
    """Apply a function outside of the transforms of ``torch.func``, for which ``Function.apply`` goes through all arguments."""
    return super(torch.autograd.Function, function).apply(*args)  # type: ignore[misc]


def get_local_tensor(value: Any) -> Any:
    """Return this process's part of a DTensor; any other value as it is."""
    return getattr(value, "_local_tensor", value)


def list_profiled(profiler: Any) -> list[tuple[int, str, int, int]]:
    """Return the events of a profiler of memory: time in nanoseconds, name, and bytes and address of allocations, "" by name."""
    found, waiting = [], list(profiler.kineto_results.experimental_event_tree())
    while waiting:
        event = waiting.pop()
        waiting += event.children
        if event.tag != _EventType.Allocation:
            found.append((event.start_time_ns, event.name, 0, 0))
        elif event.extra_fields.device.type == "cpu":
            found.append((event.start_time_ns, "", event.extra_fields.alloc_size, event.extra_fields.ptr))
    return sorted(found, key=lambda event: event[0])


def list_names_of_parts(value: torch.Tensor) -> list[str]:
    """Return the names of the attributes with the tensors that a tensor of a subclass is made of; none of a plain tensor."""
    parts: Any = value  # no subclass of both types exists for type checkers
    names = parts.__tensor_flatten__()[0] if _is_traceable_wrapper_subclass(parts) else ()
    return [name for name in names if isinstance(getattr(parts, name), torch.Tensor)]  # the device mesh of a DTensor is none


def list_parts(value: torch.Tensor) -> list[torch.Tensor]:
    """Return the plain tensors that a tensor of a subclass is made of; a plain tensor itself."""
    return [part for name in list_names_of_parts(value) for part in list_parts(getattr(value, name))] or [value]


def clear_cublas_workspaces() -> None:
    """Free cuBLAS's workspaces, so that new ones lie in the pool of a CUDA graph. Builds without CUDA have no such function."""
    torch._C._cuda_clearCublasWorkspaces()


# Ops with rules of their own on fake tensors only for arguments that name a device, or for masks.
_LIKE = ("empty_like", "full_like", "ones_like", "zeros_like", "new_empty", "new_full", "new_ones", "new_zeros")
_ON_META = {"aten.index.Tensor", *(f"aten.{name}.default" for name in _LIKE)}


@cache
def has_meta_kernel(op: object) -> bool:
    """Return True if the outputs of an operator have the sizes on meta tensors that they have on fake ones."""
    if not isinstance(op, OpOverload):
        return False
    if str(op) in _ON_META:
        return True
    # oneDNN's ops choose layouts, which take other bytes, by the device.
    if "mkldnn" in op.name() or any(has_rule(op) for has_rule, _ in op_implementations_checks):
        return False
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "Meta"))


def list_full_backward_hooks(module: nn.Module) -> list[Callable[..., Any]]:
    """Return the full backward hooks that a call of `module` goes through."""
    hooks: list[Callable[..., Any]] = module._get_backward_hooks()[0]
    return hooks


def list_backward_pre_hooks(module: nn.Module) -> list[Callable[..., Any]]:
    """Return the hooks before the backward pass that a call of `module` goes through."""
    hooks: list[Callable[..., Any]] = module._get_backward_pre_hooks()
    return hooks


def is_in_backward_pass() -> bool:
    """Return True if autograd runs a backward pass in this thread."""
    return bool(torch._C._current_graph_task_id() != -1)


def list_hooks_with_gradient(tensor: torch.Tensor) -> dict[int, Callable[..., Any]]:
    """Return the hooks that autograd calls with the gradient of `tensor`, by key."""
    return tensor._backward_hooks or {}


def list_hooks_after_gradient(leaf: torch.Tensor) -> dict[int, Callable[..., Any]]:
    """Return the hooks that autograd calls after it has accumulated the gradient of `leaf`, by key."""
    return leaf._post_accumulate_grad_hooks or {}


def list_hooks_of_handle(handle: RemovableHandle) -> dict[int, Callable[..., Any]]:
    """Return the hooks beside the one that `handle` removes, with it, by key."""
    return handle.hooks_dict_ref() or {}


@contextmanager
def keep_in_graphs(ops: Collection[OpOverload]) -> Iterator[None]:
    """Keep `ops` in captured graphs, even if their results are not used."""
    effectful = torch.fx.node._side_effectful_functions
    added = set(ops) - effectful
    effectful.update(added)
    try:
        yield
    finally:
        effectful.difference_update(added)


def keep_random_ops_in_graphs() -> AbstractContextManager[object]:
    """Keep random ops whose results are not used in captured graphs: without them, later ones would draw other numbers."""
    return wrap(torch.fx.Node, "is_impure", _is_random_or_impure)


def _is_random_or_impure(is_impure: Callable[..., bool], node: torch.fx.Node, *args: Any, **kwargs: Any) -> bool:
    random = isinstance(node.target, OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags
    return random or is_impure(node, *args, **kwargs)


@contextmanager
def register_python_kernels(op: OpOverload, kernels: Mapping[DispatchKey, Callable[..., Any]]) -> Iterator[None]:
    """Give `op` these kernels where Python dispatches it, as during a capture."""
    with patch.dict(op.py_kernels, kernels):
        op._dispatch_cache.clear()  # the kernel that it called before
        try:
            yield
        finally:
            op._dispatch_cache.clear()


@contextmanager
def keep_autocast_cache() -> Iterator[None]:
    """Cast parameters once under autocast during captures, as eager PyTorch does, and not at each use.

    PyTorch turns autocast's cache off during captures, where it might hold the tensors of another one: it is cleared here. The
    cache takes leaves only. To make a parameter functional, PyTorch adds a node to it that is never used: it is removed again.
    A parameter that the step writes is a copy there; where autograd does not see the write, none is needed.
    """
    with (
        patch.object(_proxy_tensor, "disable_autocast_cache", enter_autocast_anew),
        wrap(_graph_capture_wrappers, "maybe_to_fresh_input", _keep_or_copy),
        wrap(FunctionalTensor, "to_functional", _make_functional_leaf),
    ):
        yield


@contextmanager
def enter_autocast_anew() -> Iterator[None]:
    """Cast weights inside, and let go of these casts, as training loops do: they leave autocast before the backward pass."""
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.clear_autocast_cache()


def find_higher_order_operator(error: BaseException) -> str | None:
    """Return the name of the higher-order operator (``cond``, ``scan``) in whose call `error` was raised; None if in none."""
    callers = (frame.f_locals.get("self") for frame, _ in walk_tb(error.__traceback__))
    return next((caller.name() for caller in callers if isinstance(caller, HigherOrderOperator)), None)


def _make_functional_leaf(make: Callable[[torch.Tensor], torch.Tensor], tensor: torch.Tensor) -> torch.Tensor:
    functional = make(tensor)
    return functional.detach_().requires_grad_() if tensor.requires_grad and tensor.is_leaf else functional


def _keep_or_copy(copy: Callable[..., Any], index: int, value: Any, meta: Any) -> Any:
    if not isinstance(value, torch.Tensor) or index not in meta.mutated_inp_runtime_indices:
        return copy(index, value, meta)
    info = meta.input_info[index]
    is_hidden = info.mutations_under_no_grad_or_inference_mode or info.mutations_hidden_from_autograd
    return value if is_hidden and info.mutates_data else copy(index, value, meta)


@contextmanager
def enable_saved_tensors_hooks() -> Iterator[None]:
    """Call hooks on saved tensors while AOTAutograd traces, which disables them."""
    before = torch._C._autograd._saved_tensors_hooks_set_tracing(False)
    try:
        yield
    finally:
        torch._C._autograd._saved_tensors_hooks_set_tracing(before)


@contextmanager
def silence_fakes() -> Iterator[None]:
    """Suppress the log entries of ops that fail on fake tensors in this thread: the error has the message."""
    before = _ARE_LOGGED.set(False)
    try:
        yield
    finally:
        _ARE_LOGGED.reset(before)


def allow_fake_conversions() -> AbstractContextManager[object]:
    """Allow ``nn.Module.to`` and the like for fake parameters, which a fake mode has weak references to."""
    without_references = SimpleNamespace(getweakrefs=lambda _: [])
    return patch.object(torch.utils, "weakref", without_references)  # swap_tensors looks for them there
