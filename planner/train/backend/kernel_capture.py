"""Capture of a graph of a compiled model as Inductor's kernels, with their costs."""

import copy
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from planner.capture.kernels.halves import compile_halves
from planner.capture.kernels.lower import lower_graph
from planner.capture.kernels.variants import CompileVariant
from planner.capture.lowering.lower import Capture
from planner.capture.options.traced import add_traced
from planner.capture.program.draws import get_default_generator
from planner.capture.signature import Signature
from planner.measure.profile import profile
from planner.runtime.tight_memory import prepare_for_tight_memory
from planner.torch_private import capture as private
from planner.torch_private.core import disable_current_modes, no_python_dispatcher, pytree
from planner.train.backend.joint_capture import Placeholders, find_mutated_inputs, mark_not_recomputable

_PASSES = 3


def capture_kernels(module: fx.GraphModule, inputs: Sequence[Any], options: Sequence[str] = ()) -> Capture:
    """Return `module` as the kernels that Inductor compiles, with `options` found and ops measured; raise TraceError if none."""
    context = private.TracingContext.try_get()
    assert context is not None
    with ExitStack() as stack:
        # Dynamo's is for AOTAutograd, which runs later.
        stack.enter_context(private.tracing(private.TracingContext(context.fake_mode)))
        halves = compile_halves(stack, copy.deepcopy(module), tuple(inputs), {}, CompileVariant.DEFAULT)
        joint = halves.joint.graph_module
        placeholders = [n for n in joint.graph.find_nodes(op="placeholder") if isinstance(n.meta.get("val"), torch.Tensor)]
        device = placeholders[0].meta["val"].device
        statics, signature = Placeholders(placeholders, device), Signature.of((), pytree.tree_structure(()))
        captured = lower_graph(halves, statics, signature, generator=get_default_generator(device))
        graph = mark_not_recomputable(captured.graph, find_mutated_inputs(joint, statics))
    with disable_current_modes(), no_python_dispatcher():
        given = {node.name: _build_input(node, module, inputs) for node in placeholders}
        constants: dict[str, Any] = dict(captured.program.constants)
        static = {s.tensor: given[s.name] if s.name in given else constants[s.name] for s in captured.program.sources}
        captured = profile(replace(captured, graph=graph), list(static.values()), passes=_PASSES)
        prepare_for_tight_memory(captured.graph, device)
        return add_traced(captured, options)


def _build_input(node: fx.Node, module: fx.GraphModule, inputs: Sequence[Any]) -> torch.Tensor:
    """Return a real tensor for an input of the joint graph."""
    match node.meta["desc"]:
        case private.ParamAOTInput(target=name):
            return module.get_parameter(name)
        case private.BufferAOTInput(target=name):
            return module.get_buffer(name)
        case private.PlainAOTInput(idx=index):
            given: torch.Tensor = inputs[index]
            return given
    value: torch.Tensor = node.meta["val"]
    return torch.full(value.shape, 0.5, dtype=value.dtype, device=value.device)
