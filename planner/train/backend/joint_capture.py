"""Capture of AOTAutograd's joint graph as ops and calls, with their costs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from planner.capture.frontend.eager_ops import separate_biases
from planner.capture.lowering.lower import Capture, lower
from planner.capture.lowering.random_ops import execute_random_ops_once
from planner.capture.lowering.references import References
from planner.capture.lowering.statics import StaticTensors
from planner.capture.options.traced import add_traced
from planner.capture.rewrites.dropout import replace_dropout
from planner.capture.rewrites.layouts import find_eager_layouts, read_strides, record_eager_layouts
from planner.capture.rewrites.outputs import check_layouts, get_fake, get_storage, list_outputs, list_tensors, unwrap_checks
from planner.capture.rewrites.sparse_products import is_sparse
from planner.capture.signature import Signature
from planner.graphs.errors import TraceError
from planner.graphs.ir import Graph, Kind
from planner.graphs.options.option import Feature
from planner.graphs.provenance import Provenance
from planner.measure.profile import profile
from planner.measure.roofline import model_times
from planner.measure.unrepeatable_ops import mark_custom_ops
from planner.runtime.tight_memory import prepare_for_tight_memory
from planner.settings.compatibility import check_compatible
from planner.settings.devices import DeviceSpec
from planner.torch_private.capture import AOTInput, InputMutationAOTOutput, SubclassGetAttrAOTInput, TangentAOTInput
from planner.torch_private.core import pytree


def capture_joint(
    module: fx.GraphModule,
    device: DeviceSpec,
    *,
    measure: bool,
    forward_outputs: int,
    options: Sequence[str] = (),
    on_op: Callable[[int, int], None] | None = None,
) -> Capture:
    """Return a joint graph, after ``rewrite_as_eager``, as ops and storages, with the time and memory of each op.

    Times are modelled on `device`, or with `measure` measured where the graph runs. Ops of `options` that may round otherwise
    count as rounding, because results are not compared.

    Raises:
        UsageError: sizes are dynamic.
        TraceError: an op cannot be in a static graph.
    """
    check_layouts(module.graph)
    unwrap_checks(module.graph)
    placeholders = module.graph.find_nodes(op="placeholder")
    values = [node.meta["val"] for node in placeholders]
    if any(isinstance(value, torch.Tensor) and is_sparse(value) for value in values):
        raise TraceError(
            "the graph has a sparse input, which torch.compile(backend='planner') does not support: plan with planner.compile"
        )
    if any(isinstance(n.meta["desc"], SubclassGetAttrAOTInput) and "Tangent" in str(n.meta["desc"]) for n in placeholders):
        raise TraceError("the graph returns a nested tensor, whose gradient is no plain tensor: return its values() to plan it")
    dynamic = any(
        isinstance(size, torch.SymInt)
        for value in values
        for size in (value.shape if isinstance(value, torch.Tensor) else (value,))
    )
    if dynamic:
        check_compatible({Feature.TORCH_COMPILE, Feature.VARYING_SIZES})
    where = next(value.device for value in values if isinstance(value, torch.Tensor))
    separate_tangents(module.graph)
    statics = Placeholders(placeholders, where)
    generator = torch.default_generator
    signature, found_on = Signature.of((), pytree.tree_structure(())), Provenance.of({"device": where.type})
    lowered = lower(module.graph, statics, signature, generator=generator, provenance=found_on, forward_outputs=forward_outputs)
    prepare_for_tight_memory(lowered.graph, where)
    captured = execute_random_ops_once(lowered)
    if measure:
        known: dict[str, Any] = {node.name: node.meta["val"] for node in placeholders} | dict(captured.program.constants)
        static = [known[source.name] for source in captured.program.sources]
        captured = profile(captured, static, model=device, on_op=on_op)
        if options:
            captured = profile(add_traced(captured, options), static, model=device)
    else:
        captured = add_traced(mark_custom_ops(captured), options)
        captured = replace(captured, graph=model_times(captured, device))
    return replace(captured, graph=mark_not_recomputable(captured.graph, find_mutated_inputs(module, statics)))


def rewrite_as_eager(graph: fx.Graph) -> None:
    """Make a joint graph compute what eager PyTorch computes, to the last bit, in place."""
    separate_biases(graph)
    record_eager_layouts(graph)
    replace_dropout(graph)


def lay_out_tangents(
    graph: fx.Graph, captured: Capture, strides: Mapping[fx.Node, Sequence[int] | None]
) -> tuple[Capture, list[fx.Node]]:
    """Return `captured`, of a joint graph, with ops that read gradients as eager PyTorch lays them out; and those that cannot.

    AOTAutograd copies each gradient of a result to the layout of the result. The copies back count as memory of the ops. Calls
    of several operators (an op in chunks) and calls that may write over an input read gradients as AOTAutograd gives them.

    Args:
        strides: those that the gradients of results come with, by input of `graph`; None where the loss does not read the result.
    """
    layouts = find_eager_layouts(graph, strides)
    references = References(captured.values, layouts)
    ops, calls, others = list(captured.graph.ops), list(captured.program.calls), list[fx.Node]()
    for i, (node, known) in enumerate(zip(captured.nodes, captured.program.calls, strict=False)):
        recorded = {} if node is None else read_strides(node)
        if node is None or {**recorded, **layouts.get(node, {})} == recorded:
            continue
        if known.fakes or known.over:
            others.append(node)
            continue
        laid_out = {get_fake(arg): strides for arg, strides in layouts[node].items() if recorded.get(arg) != strides}
        # Where kernels need contiguous memory they copy such inputs, too.
        elements = (
            (t, t.numel() + 1 + sum((n - 1) * stride for n, stride in zip(t.shape, strides, strict=True)))
            for t, strides in laid_out.items()
        )
        copied_bytes = sum(n * t.element_size() for t, n in elements)
        again = references.build_again(node, known.outputs) if known.again else None
        calls[i] = replace(known, statements=(replace(known.statements[0], value=references.call(node)),), again=again)
        ops[i] = replace(ops[i], workspace_bytes=ops[i].workspace_bytes + copied_bytes)
    if ops == list(captured.graph.ops):
        return captured, others
    graph_of_ops, program = replace(captured.graph, ops=tuple(ops)), replace(captured.program, calls=tuple(calls))
    return replace(captured, graph=graph_of_ops, program=program), others


def separate_tangents(graph: fx.Graph) -> None:
    """Give the gradients of outputs that share memory (views of an input) memory of their own, in their fake values."""
    placeholders = [node for node in graph.find_nodes(op="placeholder") if isinstance(node.meta["val"], torch.Tensor)]
    tangents = [node for node in placeholders if isinstance(node.meta["desc"], TangentAOTInput)]
    taken = {get_storage(node.meta["val"]) for node in placeholders if node not in tangents}
    separated: set[fx.Node] = set()
    for node in graph.nodes:
        if node in tangents:
            if get_storage(node.meta["val"]) in taken:
                node.meta["val"] = node.meta["val"].new_empty_strided(node.meta["val"].shape, node.meta["val"].stride())
                separated.add(node)
            taken.add(get_storage(node.meta["val"]))
        elif not separated.isdisjoint(node.all_input_nodes) and any(
            get_storage(t) in taken for t in list_tensors(node.meta.get("val"))
        ):
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda arg: arg.meta["val"])
            node.meta["val"] = node.target(*args, **kwargs)
            separated.add(node)


def find_mutated_inputs(module: fx.GraphModule, statics: StaticTensors) -> set[int]:
    """Return the inputs of a joint graph that are overwritten after its forward pass."""
    return {statics.find(d.mutated_input) for _, d in list_outputs(module.graph) if isinstance(d, InputMutationAOTOutput)}


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
        """Return the tensor id of an input; see the base class."""
        return self.by_desc[desc]

    def add_tangent(self, value: torch.Tensor) -> int:
        """Return the tensor id of a tangent; unlike in the base class, there may be several."""
        return self.add(Kind.INPUT, self.names[id(value)], value)


def mark_not_recomputable(graph: Graph, mutated: set[int]) -> Graph:
    """Return `graph` with ops that read inputs overwritten after the forward pass marked as not recomputable."""
    ops = tuple(replace(op, recomputable=op.recomputable and not mutated.intersection(op.inputs)) for op in graph.ops)
    return replace(graph, ops=ops)
