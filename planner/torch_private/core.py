"""Private names of ``torch`` itself: dispatch, fake tensors, nests of tensors."""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch._C import DispatchKey  # names the kernels of an operator that are taken away or put in
from torch._dispatch.python import no_python_dispatcher  # ops are timed without what captures them
from torch._guards import detect_fake_mode  # new values beside those of a graph are of its fake mode
from torch._ops import (
    OpOverload,  # what the nodes of a graph call
    OpOverloadPacket,  # to go over all operators
)
from torch._subclasses.fake_tensor import (
    FakeTensor,  # tells captured values from real ones
    FakeTensorMode,  # shapes without memory
)
from torch._subclasses.fake_tensor import (
    _BypassDispatchCache as BypassDispatchCache,  # keeps an op out of the mode's cache
)
from torch._subclasses.functional_tensor import (
    FunctionalTensor,  # what an op in place writes, while it is captured
    FunctionalTensorMode,  # sees ops in place before they are made functional
)
from torch.fx.experimental.symbolic_shapes import ShapeEnv  # decides what is asked of symbols
from torch.multiprocessing.reductions import StorageWeakRef  # tells whether memory is still held
from torch.nn.modules import (
    module as nn_module,  # holds the hooks that are on all modules
)
from torch.nn.modules import (
    transformer,
)
from torch.utils import _pytree as pytree  # batches and arguments are nests of tensors
from torch.utils._mode_utils import no_dispatch  # known values are computed outside of all modes
from torch.utils._python_dispatch import (
    TorchDispatchMode,  # sees each op that eager PyTorch runs
    is_in_torch_dispatch_mode,  # to disable modes takes time
)
from torch.utils._python_dispatch import (
    _disable_current_modes as disable_current_modes,  # checks and timings are no ops of the step
)
from torch.utils._sympy.interp import sympy_interp  # a condition on numbers, for other numbers
from torch.utils._sympy.reference import PythonReferenceAnalysis  # in Python's arithmetic

# Which transform of torch.func (vmap, grad) code runs under.
current_transform = torch._C._functorch.peek_interpreter_stack
# What autograd has saved is read by the node that runs.
current_autograd_node = torch._C._current_autograd_node
# What a backward pass may write over, where it does not come again.
backward_comes_again = torch._C._autograd._get_current_graph_task_keep_graph
# A kernel that stands for an op calls the op itself, without coming back to itself.
below_autograd = torch._C._AutoDispatchBelowAutograd
# What is called inside a capture, or a custom operator, runs as it would outside: with the keys that were set there.
force_dispatch_keys = torch._C._ForceDispatchKeyGuard
included_dispatch_keys = torch._C._dispatch_tls_local_include_set
excluded_dispatch_keys = torch._C._dispatch_tls_local_exclude_set
disable_python_dispatcher = torch._C._DisablePythonDispatcher
# The node that stands for a tensor is known to the mode that makes the graph.
get_dispatch_mode = torch._C._get_dispatch_mode
PROXY_MODE = torch._C._TorchDispatchModeKey.PROXY
from_functional_tensor = torch._from_functional_tensor
# In functional graphs they stand for ops that write to their arguments, and for ops with effects.
auto_functionalized = torch.ops.higher_order.auto_functionalized_v2
with_effects = torch.ops.higher_order.with_effects
# Conditions on values are ops in a graph.
assert_true = torch._assert
assert_async = torch._assert_async
# CUDA's attention for tensors on the CPU, as long as it is wanted.
scoped_library = torch.library._scoped_library
# A tensor that is put back is to autograd as if it had not been written.
preserve_version_counter = torch.autograd._unsafe_preserve_version_counter
set_version_counter = torch._C._autograd._unsafe_set_version_counter
# Workspaces are measured by the profiler, of which there can be one.
profiler_enabled = torch.autograd._profiler_enabled
# Many tensors are copied by few kernels.
foreach_copy_ = torch._foreach_copy_
# Looks at the numbers in a mask, which no graph can.
detect_is_causal_mask = transformer._detect_is_causal_mask


def clear_cublas_workspaces() -> None:
    """What cuBLAS works in is to lie in the pool of the CUDA graph that uses it. Builds without CUDA have no such function."""
    torch._C._cuda_clearCublasWorkspaces()


@contextmanager
def kept_in_graphs(ops: Collection[OpOverload]) -> Iterator[None]:
    """Inside, `ops` stay in graphs that are captured, though nobody reads what they return."""
    known = torch.fx.node._side_effectful_functions
    added = set(ops) - known
    known.update(added)
    try:
        yield
    finally:
        known.difference_update(added)


@contextmanager
def python_kernels(op: OpOverload, kernels: Mapping[DispatchKey, Callable[..., Any]]) -> Iterator[None]:
    """Inside, `op` has these kernels where it is dispatched by Python, as it is while a graph is captured."""
    with patch.dict(op.py_kernels, kernels):
        op._dispatch_cache.clear()  # which kernel it called before
        try:
            yield
        finally:
            op._dispatch_cache.clear()


@contextmanager
def conversions_of_fakes() -> Iterator[None]:
    """Inside, ``nn.Module.to`` and the like convert fake parameters, which a fake mode has weak references to."""
    without_references = SimpleNamespace(getweakrefs=lambda _: [])
    with patch.object(torch.utils, "weakref", without_references):  # where swap_tensors asks for them
        yield
