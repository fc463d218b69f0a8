"""A graph of a compiled model that runs Inductor's kernels."""

import copy
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from graphs.ir import Kind, Phase
from graphs.schedule import Schedule
from planner.capture.kernels.halves import compile_halves
from planner.capture.kernels.lower import lower_graph
from planner.capture.kernels.variants import Variant
from planner.capture.lowering.lower import Capture
from planner.capture.options.traced import with_traced
from planner.capture.rewrites.outputs import outputs
from planner.capture.rewrites.reproducible_random import generator_of
from planner.capture.signature import Signature
from planner.keeping_everything import prepare_for_tight_memory
from planner.profiling.profile import profile
from planner.runtime.channels import Channels
from planner.runtime.codegen import compile_schedule
from planner.runtime.undo import undoing
from planner.torch_compile.partition import Placeholders, mutated_inputs, once
from planner.torch_compile.planned_graph import Passes, PlannedGraph, device_of
from planner.torch_private.capture import (
    BufferAOTInput,
    ParamAOTInput,
    PlainAOTInput,
    SavedForBackwardsAOTOutput,
    TangentAOTInput,
    TracingContext,
    tracing,
)
from planner.torch_private.core import disable_current_modes, no_python_dispatcher, pytree

_PASSES = 3


def capture_kernels(module: fx.GraphModule, inputs: Sequence[Any], options: Sequence[str] = ()) -> Capture:
    """`module` as the kernels that Inductor compiles it to, with the time and memory of each op.


    Args:
        module, inputs: what Dynamo captured, real tensors.
        options: choices that are found in what was captured.

    Raises:
        TraceError: Inductor's code is none that can be planned.
    """
    context = TracingContext.try_get()
    assert context is not None
    with ExitStack() as stack:
        stack.enter_context(tracing(TracingContext(context.fake_mode)))  # Dynamo's own is for AOTAutograd, which comes after
        halves = compile_halves(stack, copy.deepcopy(module), tuple(inputs), {}, Variant.DEFAULT)
        joint = halves.joint.graph_module
        placeholders = [n for n in joint.graph.find_nodes(op="placeholder") if isinstance(n.meta.get("val"), torch.Tensor)]
        device = placeholders[0].meta["val"].device
        statics, signature = Placeholders(placeholders, device), Signature.of((), pytree.tree_structure(()))
        captured = lower_graph(halves, statics, signature, generator=generator_of(device), provenance={})
        graph = once(captured.graph, mutated_inputs(joint, statics))
    with disable_current_modes(), no_python_dispatcher():
        given = {node.name: _given(node, module, inputs) for node in placeholders}
        constants: dict[str, Any] = dict(captured.program.namespace)
        static = {s.tensor: given[s.name] if s.name in given else constants[s.name] for s in captured.program.sources}
        captured = profile(replace(captured, graph=graph), list(static.values()), passes=_PASSES)
        prepare_for_tight_memory(captured.graph, device)
        return with_traced(captured, options)


def _given(node: fx.Node, module: fx.GraphModule, inputs: Sequence[Any]) -> torch.Tensor:
    """A real tensor for an input of the joint graph."""
    match node.meta["desc"]:
        case ParamAOTInput(target=name):
            return module.get_parameter(name)
        case BufferAOTInput(target=name):
            return module.get_buffer(name)
        case PlainAOTInput(idx=index):
            given: torch.Tensor = inputs[index]
            return given
    value: torch.Tensor = node.meta["val"]
    return torch.full(value.shape, 0.5, dtype=value.dtype, device=value.device)


class PlannedKernels(PlannedGraph):
    """One that runs Inductor's kernels."""

    def __init__(self, module: fx.GraphModule, captured: Capture, channels: Channels | None, *, outputs: int) -> None:
        """Plan for what was `captured`, of which `module` is the joint graph; with `channels` where it offers copies."""
        placeholders = module.graph.find_nodes(op="placeholder")
        self._module, self._channels = module, channels
        self._primals = [node for node in placeholders if not isinstance(node.meta["desc"], TangentAOTInput)]
        self._incoming = [node for node in placeholders if isinstance(node.meta["desc"], TangentAOTInput)]
        static = {source.name: source.tensor for source in captured.program.sources if source.kind is Kind.INPUT}
        slots = [static[node.name] for node in self._primals if node.name in static]
        slots += [t for op in captured.graph.program if op.phase is Phase.FORWARD for t in op.outputs]
        tangents = [static[node.name] for node in self._incoming if node.name in static]
        super().__init__(captured, device_of(module), tangents=tangents, slots=slots, outputs=outputs)

    def passes(self, schedule: Schedule) -> Passes:
        """See ``PlannedGraph``."""
        code = compile_schedule(self.captured.graph, self.captured.program, schedule, self._channels)
        # What a backward pass would need to undo the forward pass is handed over only where copies are.
        code = undoing(self.captured.graph, self.captured.program, code, in_backward=self._channels is not None)
        sources = self.captured.program.sources
        constants = {s.name: self.captured.program.namespace[s.name] for s in sources if s.kind is Kind.CONSTANT}
        read = {source.tensor for source, reads in zip(sources, code.backward_reads, strict=True) if reads}
        position = {t: i for i, t in enumerate(self.slots)}
        among = [t in position for t in code.saved]  # the others are on the host

        def forward(args: list[Any]) -> tuple[list[Any], list[Any]]:
            given = {node.name: value for node, value in zip(self._primals, args, strict=True)} | constants
            args.clear()
            first, others, alive = code.forward([given.get(source.name) for source in sources])
            saved = {source.tensor: given.get(source.name) for source in sources if source.tensor in read}
            saved |= dict(zip(code.saved, alive, strict=False))
            apart = [value for value, known in zip(alive, among, strict=False) if not known] + alive[len(among) :]
            return [first, *others, *(saved.get(t) for t in self.slots)], apart

        def backward(args: list[Any]) -> Any:
            here = len(self.slots) + len(self._incoming)
            incoming = {node.name: value for node, value in zip(self._incoming, args[len(self.slots) : here], strict=True)}
            apart = deque(args[here:])
            given = constants | incoming
            static = [args[position[s.tensor]] if s.tensor in position else given.get(s.name) for s in sources]
            alive = [args[position[t]] if known else apart.popleft() for t, known in zip(code.saved, among, strict=True)]
            alive += apart
            args.clear()
            apart.clear()
            return code.backward(static, alive)

        return Passes(forward, backward, code.lines)

    def interface(self) -> tuple[fx.GraphModule, fx.GraphModule]:
        """See ``PlannedGraph``. What the modules compute is not looked at."""
        returned = outputs(self._module.graph)
        forward = fx.Graph()
        primals = [forward.node_copy(node) for node in self._primals]
        by_name = {node.name: node for node in primals}
        some = next(node for node in primals if isinstance(node.meta.get("val"), torch.Tensor))
        names = {source.tensor: source.name for source in self.captured.program.sources}
        made = [_like(forward, value) for value, _ in returned[: self.outputs]]
        saved = [by_name[names[t]] if t in names else _like(forward, some) for t in self.slots]
        output = forward.output([*made, *saved, _like(forward, some)])
        output.meta["desc"] = [
            *(desc for _, desc in returned[: self.outputs]),
            *(SavedForBackwardsAOTOutput(i) for i in range(len(saved) + 1)),
        ]
        backward = fx.Graph()
        for i in range(len(saved) + 1):
            backward.placeholder(f"saved_{i}").meta = {"val": some.meta["val"]}
        for node in self._incoming:
            backward.node_copy(node)
        gradients = [_like(backward, value) for value, _ in returned[self.outputs :]]
        backward.output(gradients).meta["desc"] = [desc for _, desc in returned[self.outputs :]]
        return fx.GraphModule(self._module, forward), fx.GraphModule(self._module, backward)


def _like(graph: fx.Graph, value: object) -> fx.Node | None:
    """A node that stands for one like `value`; None for what is no tensor."""
    if not isinstance(value, fx.Node):
        return None
    node = graph.call_function(torch.ops.aten.empty.memory_format, ([0],))
    node.meta = {"val": value.meta["val"]}
    return node
