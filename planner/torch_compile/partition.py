"""A joint graph of AOTAutograd, planned and split: a forward and a backward module whose order is that of the schedule.

What a schedule frees is what the modules no longer name: their generated code deletes each value after its last use.
What it computes again stands in the code again. Views are made again from their base wherever they are read, so that
no name but the base's holds a storage.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from graphs.errors import TraceError
from graphs.ir import Graph, Kind, Phase
from graphs.pools import COMPUTE
from graphs.schedule import Compute, Schedule, Step, boundary
from planner.capture.frontend.eager_ops import separate_biases
from planner.capture.lowering.lower import Capture, lower
from planner.capture.lowering.program import file_of
from planner.capture.lowering.statics import StaticTensors
from planner.capture.options.traced import with_traced
from planner.capture.rewrites.batch_norms import ignored_inputs
from planner.capture.rewrites.layouts import layouts_as_eager
from planner.capture.rewrites.outputs import items, outputs
from planner.capture.rewrites.random_ops import execute_random_ops_once
from planner.capture.rewrites.sparse_products import is_sparse
from planner.capture.signature import Signature
from planner.keeping_everything import prepare_for_tight_memory
from planner.profiling.devices import DeviceSpec
from planner.profiling.profile import profile
from planner.profiling.roofline import model_times
from planner.profiling.unrepeatable_ops import mark_custom_ops
from planner.runtime.channels import Channels
from planner.runtime.step_lines import Line
from planner.torch_compile.emitter import Emitter
from planner.torch_private.capture import AOTInput, InputMutationAOTOutput, TangentAOTInput
from planner.torch_private.core import pytree

aten = torch.ops.aten


def capture_joint(
    module: fx.GraphModule,
    device: DeviceSpec,
    *,
    measure: bool,
    options: Sequence[str] = (),
    on_op: Callable[[int, int], None] | None = None,
) -> Capture:
    """The joint graph as ops and storages, with the time and memory of each op.

    Args:
        module: the joint graph.
        device: whose times are modelled.
        measure: run each op on the device it is on, instead.
        options: choices besides recomputing that are found in the graph. What they round counts as rounded, for nothing is
            compared.
        on_op: as in ``planner.profiling.profile.profile``.

    Raises:
        TraceError: shapes that are not known yet, or an op that no static graph can hold.
    """
    placeholders = module.graph.find_nodes(op="placeholder")
    values = [node.meta["val"] for node in placeholders]
    if any(isinstance(value, torch.Tensor) and is_sparse(value) for value in values):
        raise TraceError("the graph takes a sparse tensor, which no plan of torch.compile does: use planner.compile for the step")
    dynamic = any(
        isinstance(size, torch.SymInt)
        for value in values
        for size in (value.shape if isinstance(value, torch.Tensor) else (value,))
    )
    if dynamic:
        raise TraceError("the graph has sizes that are not fixed: use torch.compile(..., dynamic=False), a plan for each shape")
    where = next(value.device for value in values if isinstance(value, torch.Tensor))
    separate_biases(module.graph)
    layouts_as_eager(module.graph)
    statics = Placeholders(placeholders, where)
    generator = torch.default_generator
    signature, found_on = Signature.of((), pytree.tree_structure(())), {"device": where.type}
    lowered = lower(module.graph, statics, signature, generator=generator, provenance=found_on)
    prepare_for_tight_memory(lowered.graph, where)
    captured = execute_random_ops_once(lowered)
    if measure:
        known: dict[str, Any] = {node.name: node.meta["val"] for node in placeholders} | dict(captured.program.namespace)
        static = [known[source.name] for source in captured.program.sources]
        captured = profile(captured, static, model=device, on_op=on_op)
        if options:
            captured = profile(with_traced(captured, options), static, model=device)
    else:
        captured = with_traced(mark_custom_ops(captured), options)
        captured = replace(captured, graph=model_times(captured, device))
    return replace(captured, graph=once(captured.graph, mutated_inputs(module, statics)))


def mutated_inputs(module: fx.GraphModule, statics: StaticTensors) -> set[int]:
    """The inputs of a joint graph that are overwritten behind its forward pass."""
    return {statics.find(d.mutated_input) for _, d in outputs(module.graph) if isinstance(d, InputMutationAOTOutput)}


class Placeholders(StaticTensors):
    """The inputs of a joint graph."""

    def __init__(self, placeholders: Sequence[fx.Node], device: torch.device) -> None:
        super().__init__(torch.nn.Module(), (), device)
        self.by_desc: dict[AOTInput, int] = {}
        self.names = {id(node.meta["val"]): node.name for node in placeholders}
        for node in placeholders:
            value, desc = node.meta["val"], node.meta["desc"]
            if isinstance(value, torch.Tensor) and not isinstance(desc, TangentAOTInput):
                self.by_desc[desc] = self.add(Kind.INPUT, node.name, value)

    def find(self, desc: AOTInput) -> int:
        """As the base class's."""
        return self.by_desc[desc]

    def tangent(self, value: torch.Tensor) -> int:
        """As the base class's, of which there may be several here."""
        return self.add(Kind.INPUT, self.names[id(value)], value)


def once(graph: Graph, mutated: set[int]) -> Graph:
    """`graph` with ops that are executed once only, where they read an input that is overwritten behind the forward pass."""
    ops = tuple(replace(op, recomputable=op.recomputable and not mutated.intersection(op.inputs)) for op in graph.ops)
    return replace(graph, ops=ops)


@dataclass(frozen=True, slots=True)
class Part:
    """One pass of a schedule.

    Attributes:
        module: that runs it.
        steps: for each node of a step, by name, the position of that step in the schedule.
    """

    module: fx.GraphModule
    steps: Mapping[str, int]

    def lines(self) -> dict[Line, int]:
        """Return the steps of the lines of the module's source, as it is now."""
        file = file_of(self.module.forward)
        names = [line.strip().partition(" = ")[0] for line in self.module.code.splitlines()]
        return {(file, number): self.steps[name] for number, name in enumerate(names, 1) if name in self.steps}


def split(
    module: fx.GraphModule,
    captured: Capture,
    schedule: Schedule,
    channels: Channels | None = None,
    *,
    forward_outputs: int,
    slots: Sequence[int],
) -> tuple["Part", "Part"]:
    """The forward and the backward module of `schedule`, as AOTAutograd calls them.

    Forward: the primal inputs in, the graph's first `forward_outputs` outputs and what is saved out.
    Backward: what is saved and the tangents in, the graph's other outputs out. Behind what is saved, and behind the
    tangents, comes what AOTAutograd does not know of: tensors on the host, and copies that may be under way.

    Args:
        module, captured, schedule: the joint graph, and how to run it.
        channels: by which it copies to the host and back, if at all.
        forward_outputs: how many of its outputs are not gradients.
        slots: a tensor for each place among what is saved, where None stands for what is not.
    """
    cut = boundary(captured.graph, schedule)
    origins, returned = _origins(module, captured), outputs(module.graph)
    read = _read_later(captured, origins, schedule.steps[cut:], [value for value, _ in returned[forward_outputs:]])
    forward = Emitter(module, captured, origins, channels, after_forward=False)
    for node in _inputs(module, tangents=False):
        forward.input(node)
    forward.run(schedule.steps[:cut])
    read.update(forward.under_way.issued)  # there until they have been waited for
    saved = {t: value for t, value in forward.env.items() if t in read}
    first = forward.finish_forward(returned[:forward_outputs], [saved.get(t) for t in slots])

    backward = Emitter(module, captured, origins, channels, after_forward=True)
    for t in slots:
        backward.saved(t, saved.get(t))
    for node in _inputs(module, tangents=True):
        backward.input(node)
    backward.take_over(forward)
    backward.run(schedule.steps[cut:])
    second = backward.finish_backward(returned[forward_outputs:])
    later = {name: cut + step for name, step in backward.steps.items()}
    return Part(first, forward.steps), Part(second, later)


def interface(
    module: fx.GraphModule, captured: Capture, slots: Sequence[int], *, forward_outputs: int
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Modules with the inputs and outputs of those that ``split`` makes with `slots`, all of which are saved.

    Among the saved is one more at the end.
    """
    graph = captured.graph
    origins, returned = _origins(module, captured), outputs(module.graph)
    steps = [Compute(op.id) for op in graph.program]
    cut = boundary(graph, Schedule(tuple(steps)))
    forward = Emitter(module, captured, origins, after_forward=False)
    for node in _inputs(module, tangents=False):
        forward.input(node)
    forward.run(steps[:cut])
    some = next(iter(forward.env.values()))  # for what only optional ops make
    saved = [forward.env.get(t, some) for t in slots]
    first = forward.finish_forward(returned[:forward_outputs], [*saved, saved[0]])

    backward = Emitter(module, captured, origins, after_forward=True)
    for t, value in zip(slots, saved, strict=True):
        backward.saved(t, value)
    backward.graph.placeholder("one_more").meta = dict(saved[0].meta)
    for node in _inputs(module, tangents=True):
        backward.input(node)
    backward.run(steps[cut:])
    return first, backward.finish_backward(returned[forward_outputs:])


def tangents(module: fx.GraphModule, captured: Capture) -> tuple[int, ...]:
    """The static tensors of a joint graph that are gradients of its outputs."""
    names = {node.name for node in _inputs(module, tangents=True)}
    return tuple(source.tensor for source in captured.program.sources if source.name in names)


def slots(module: fx.GraphModule, captured: Capture) -> tuple[int, ...]:
    """The tensors that some schedule may save for the backward pass: the inputs, and what the forward ops make."""
    graph, excluded = captured.graph, set(tangents(module, captured))
    primals = {node.name for node in _inputs(module, tangents=False)}
    found = [s.tensor for s in captured.program.sources if s.name in primals and s.tensor not in excluded]
    for op, node in zip(graph.program, captured.nodes, strict=False):
        if op.phase is Phase.FORWARD and node is not None:
            found += op.outputs
    made = {t for op in graph.program for t in op.outputs}
    found += dict.fromkeys(t for op in graph.ops if op.optional and op.stream == COMPUTE for t in op.outputs if t not in made)
    return tuple(found)


def _inputs(module: fx.GraphModule, *, tangents: bool) -> list[fx.Node]:
    placeholders = module.graph.find_nodes(op="placeholder")
    return [node for node in placeholders if isinstance(node.meta["desc"], TangentAOTInput) is tangents]


def _origins(module: fx.GraphModule, captured: Capture) -> dict[fx.Node, int]:
    """The tensor that each node of the joint graph stands for; views and tuples stand for none."""
    by_name = {source.name: source.tensor for source in captured.program.sources}
    found = {node: by_name[node.name] for node in module.graph.find_nodes(op="placeholder") if node.name in by_name}
    found |= {node: by_name[str(node.target)] for node in module.graph.find_nodes(op="get_attr")}
    for node, call in zip(captured.nodes, captured.program.calls, strict=True):
        if node is not None:
            for tensor, path in call.outputs:
                found |= dict.fromkeys(items(node, path), tensor)
    return found


def _read_later(captured: Capture, origins: Mapping[fx.Node, int], steps: Sequence[Step], results: Sequence[object]) -> set[int]:
    """The tensors that `steps` and the values returned after them read."""
    read: set[int] = set()
    ops = [captured.graph.ops[step.op] for step in steps if isinstance(step, Compute)]
    read.update(t for op in ops if op.optional for t in op.inputs)
    nodes = [captured.nodes[op.id] for op in ops if not op.optional]
    pending = [arg for node in nodes if node is not None for arg in node.all_input_nodes if arg not in ignored_inputs(node)]
    pending += [value for value in results if isinstance(value, fx.Node)]
    while pending:
        node = pending.pop()
        if node in origins:
            read.add(origins[node])
        else:
            pending += node.all_input_nodes
    return read
