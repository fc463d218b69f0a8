"""Private names of Inductor, which takes a second to import."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import signature
from typing import Any
from unittest.mock import patch

from torch import fx
from torch._inductor import (
    config as _config,
    ir as inductor_ir,  # buffers and their layouts
)
from torch._inductor.codecache import PyCodeCache  # the modules that it has loaded
from torch._inductor.codegen.cpp import CppScheduling  # decides which kernels share a function
from torch._inductor.codegen.wrapper import can_match_buffer_size  # whether one buffer may reuse the memory of another
from torch._inductor.compile_fx import (
    CompilerConfigExtra,  # shared by the two halves of a step
    compile_fx,  # compiles graphs without training
    compile_fx_backward,  # compiles the backward half as torch.compile does
    compile_fx_forward,  # compiles the forward half
    create_compiler_config_extra as _create_compiler_config_extra,
    partition_fn,  # splits a joint graph in two, after Inductor's passes
    run_pre_grad_passes,  # Inductor's passes before autograd
)
from torch._inductor.custom_graph_pass import CustomPartitionerFn  # the base class of partitioners
from torch._inductor.decomposition import select_decomp_table  # Inductor's decompositions
from torch._inductor.dependencies import Dep, MemoryDep  # where a node reads or writes
from torch._inductor.exc import InductorError  # raised for steps that do not compile
from torch._inductor.output_code import CompiledFxGraph  # one half with its source
from torch._inductor.scheduler import BaseSchedulerNode, SchedulerNode  # the parts of a kernel
from torch._inductor.utils import is_cudagraph_unsafe_fx_node  # ops that no CUDA graph can hold
from torch._inductor.virtualized import V  # the fake mode of the compilation


def create_compiler_config_extra(module: fx.GraphModule) -> CompilerConfigExtra:
    """Return the configuration of both halves of `module`. Torch 2.11 needs Inductor's configuration for it."""
    wanted: Any = _config if "config" in signature(_create_compiler_config_extra).parameters else module
    return _create_compiler_config_extra(wanted)


def get_loaded_names(compiled: CompiledFxGraph) -> dict[str, Any]:
    """Return the names that the module of `compiled`, which has just been made, defines."""
    # With constants a module is loaded each time that a graph is compiled: take the last one.
    module = next(module for module in reversed(PyCodeCache.modules) if getattr(module, "key", None) == compiled.cache_key)
    return vars(module)


@contextmanager
def separate_kernels(decide_inplace_update: Callable[[BaseSchedulerNode], None]) -> Iterator[None]:
    """Make each CPU kernel a function of its own; Inductor would put consecutive ones into one function."""
    with (
        patch.object(CppScheduling, "ready_to_flush", lambda _: True),
        patch.object(BaseSchedulerNode, "decide_inplace_update", decide_inplace_update),
    ):
        yield
