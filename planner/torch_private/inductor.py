"""Private names of Inductor, which takes a second to import."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import signature
from typing import Any
from unittest.mock import patch

from torch import fx
from torch._functorch.partitioners import default_partition  # keeps what autograd would
from torch._inductor import config as _config
from torch._inductor import ir as inductor_ir  # buffers, and in what layout
from torch._inductor.codecache import PyCodeCache  # the modules that it has loaded
from torch._inductor.codegen.cpp import CppScheduling  # decides which kernels share a function
from torch._inductor.codegen.wrapper import can_match_buffer_size  # whether one buffer may lie where another does
from torch._inductor.compile_fx import (
    CompilerConfigExtra,  # what the two halves of a step share
    compile_fx,  # compiles what is not trained
    compile_fx_backward,  # compiles one half as torch.compile does
    compile_fx_forward,  # and the other
    partition_fn,  # parts a joint graph in two, after Inductor's passes
    run_pre_grad_passes,  # Inductor's passes before autograd
)
from torch._inductor.compile_fx import (
    create_compiler_config_extra as _create_compiler_config_extra,
)
from torch._inductor.custom_graph_pass import CustomPartitionerFn  # the class that a partitioner of our own must have
from torch._inductor.decomposition import select_decomp_table  # what Inductor takes ops apart into
from torch._inductor.dependencies import Dep, MemoryDep  # where a node reads or writes
from torch._inductor.exc import InductorError  # what it says of a step that it does not compile
from torch._inductor.output_code import CompiledFxGraph  # one half with its source
from torch._inductor.scheduler import BaseSchedulerNode, SchedulerNode  # what a kernel is made of
from torch._inductor.utils import is_cudagraph_unsafe_fx_node  # what no CUDA graph can hold
from torch._inductor.virtualized import V  # the fake mode of what is compiled


def create_compiler_config_extra(module: fx.GraphModule) -> CompilerConfigExtra:
    """For both halves of `module`. Torch 2.11 asks for Inductor's configuration, and reads no more of it."""
    wanted: Any = _config if "config" in signature(_create_compiler_config_extra).parameters else module
    return _create_compiler_config_extra(wanted)


def loaded_names(compiled: CompiledFxGraph) -> dict[str, Any]:
    """What the module defines that `compiled`, which has just been made, calls."""
    # With constants a module is loaded each time that a graph is compiled: the last is the one.
    module = next(module for module in reversed(PyCodeCache.modules) if getattr(module, "key", None) == compiled.cache_key)
    return vars(module)


@contextmanager
def kernels_apart(decide_inplace_update: Callable[[BaseSchedulerNode], None]) -> Iterator[None]:
    """Inside, each kernel for the CPU is a function of its own; Inductor puts as many into one as follow each other.

    Args:
        decide_inplace_update: called in place of Inductor's own, for each node of a kernel that is being generated.
    """
    with (
        patch.object(CppScheduling, "ready_to_flush", lambda _: True),
        patch.object(BaseSchedulerNode, "decide_inplace_update", decide_inplace_update),
    ):
        yield
