"""Lowering of a joint graph to ops and storages, and to the program that executes them.

Storages are told apart by the fake tensors, not by schemas: ``aten._unsafe_view`` aliases its input though its schema denies it.
An op that reads what the step overwrites is never recomputed: after the write it would read the new value, and gave wrong
gradients in a model with moving averages of buffers. The state of the generator is an op's output of its own, so that it is
planned and counted like other memory.

Known weakness: nodes that share a part of another's storage, such as two results of one op in one memory, are refused.
"""

import operator
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from planner.capture.guards.data_guards import DataGuards
from planner.capture.guards.python_guards import PythonGuards
from planner.capture.lowering.references import References
from planner.capture.lowering.statics import StaticTensors, compute_allocated_bytes, format_dtype
from planner.capture.program.numbers import Number
from planner.capture.program.program import Argument, Call, OpCalls, Path, Program, Ref, call_of, format_path, get_item, read_by
from planner.capture.rewrites.batch_norms import find_ignored_inputs
from planner.capture.rewrites.convolutions import is_chosen_by_timing, warn_not_recomputed
from planner.capture.rewrites.explicit_generators import get_explicit_generator
from planner.capture.rewrites.hook_calls import HOOK
from planner.capture.rewrites.in_place_updates import list_written
from planner.capture.rewrites.outputs import (
    EFFECTS,
    find_first_backward,
    find_operator,
    get_fake,
    get_storage,
    is_random,
    list_outputs,
)
from planner.capture.signature import Signature
from planner.capture.source_lines import format_module_path, format_node
from planner.graphs.errors import TraceError
from planner.graphs.ir import Graph, Kind, Op, Phase, Tensor
from planner.graphs.provenance import Provenance
from planner.torch_private.capture import GradAOTOutput, TangentAOTInput
from planner.torch_private.core import OpOverload, with_effects


@dataclass(frozen=True, slots=True)
class Capture:
    """A captured training step: its graph (without op times yet) and its program.

    Attributes:
        graph, program: the ops, and their calls.
        signature: structure of its arguments and results.
        nodes: for each op its captured node, with fake values; None for ops that save the generator's state.
        guards: conditions under which the program is valid; None if it is never executed, or checked elsewhere.
        conditions: conditions on the data; None if there are none.
        values: argument of calls for each node.
        copied: static tensors that are written between the passes: the backward pass reads copies.
        whole: both passes run by PyTorch with the same kernels, called as the step is; None for eager PyTorch's kernels.
    """

    graph: Graph
    program: Program
    signature: Signature
    nodes: tuple[fx.Node | None, ...]
    guards: PythonGuards | None = None
    conditions: DataGuards | None = None
    values: Mapping[fx.Node, Argument] = field(default_factory=dict)
    copied: frozenset[int] = frozenset()
    whole: Callable[..., Any] | None = None


def lower(
    graph: fx.Graph,
    statics: StaticTensors,
    signature: Signature,
    *,
    generator: torch.Generator,
    provenance: Provenance,
    forward_outputs: int | None = None,
) -> Capture:
    """Lower a joint graph whose outputs are explicit (``fix_outputs``).

    Args:
        forward_outputs: number of outputs of the forward pass, for one of several graphs of a model. Its program returns what
            AOTAutograd expects: all these, the first in place of a loss; and a value, or None, for each other output.

    Raises:
        TraceError: an op that no static graph can hold (dynamic shapes, control flow, partial aliases).
    """
    lowering = _GraphLowering(graph, statics, generator, forward_outputs)
    ops, program, nodes = lowering.run(provenance)
    if timed := sum(is_chosen_by_timing(op.target, statics.device) for op in ops.ops):
        warn_not_recomputed(timed)
    return Capture(ops, program, signature, nodes, values=lowering.values)


class _GraphLowering:
    def __init__(self, graph: fx.Graph, statics: StaticTensors, generator: torch.Generator, forward_outputs: int | None) -> None:
        self.graph = graph
        self.forward_outputs = forward_outputs
        self.statics = statics
        # CUDA's generators keep their state on the host.
        self.state_bytes = 0 if statics.device.type == "cuda" else generator.get_state().numel()
        self.tensors = statics.tensors
        self.ops: list[Op] = []
        self.calls: list[OpCalls] = []
        self.nodes: list[fx.Node | None] = []
        self.generator, self.own_generator = generator, torch.Generator(device=generator.device)
        self.references = References()
        self.values = self.references.values
        self.constants: dict[str, torch.Tensor] = {}
        self.owner: dict[int, int] = {}  # storage -> tensor
        self.modules: dict[object, str] = {}  # autograd sequence number -> module path
        self.written: set[int] = set()
        self.made_once: set[int] = set()
        self.numbers: set[fx.Node] = set()

    def run(self, provenance: Provenance) -> tuple[Graph, Program, tuple[fx.Node | None, ...]]:
        boundary = find_first_backward(self.graph)
        # Before the first op: whether an op may be recomputed depends on writes that come after it.
        self.written = self.statics.find_in_memory_of(
            self.statics.find(written.meta["desc"]) for node in self.graph.nodes for written in list_written(node)
        )
        phase = Phase.FORWARD
        for node in self.graph.nodes:
            if node is boundary:
                phase = Phase.BACKWARD
            if node.op == "placeholder":
                self._lower_input(node)
            elif node.op == "get_attr":
                self._lower_constant(node)
            elif node.op == "call_function":
                self._call(node, phase)
            elif node.op != "output":
                raise TraceError(f"node {node.name!r} is a {node.op}, which a static graph cannot hold")
        return self._finish(provenance)

    def _finish(self, provenance: Provenance) -> tuple[Graph, Program, tuple[fx.Node | None, ...]]:
        (loss, *extras), gradients = self._lower_outputs(list_outputs(self.graph))
        program = Program(
            calls=tuple(
                calls if node is None else replace(calls, trace=node.meta.get("stack_trace"))
                for calls, node in zip(self.calls, self.nodes, strict=True)
            ),
            sources=tuple(self.statics.sources),
            loss=loss,
            extras=tuple(extras),
            gradients=tuple(gradients),
            constants=self.constants,
            generator=self.generator,
            own_generator=self.own_generator,
        )
        return build_graph(self.ops, self.tensors, program, provenance), program, tuple(self.nodes)

    def _lower_outputs(self, found: Sequence[tuple[Any, object]]) -> tuple[list[Argument], list[tuple[int, Argument]]]:
        """Return the results of the forward pass, and the gradients."""
        if (count := self.forward_outputs) is not None:
            values = [self.values[v] if isinstance(v, fx.Node) else v for v, _ in found]
            return _separate([value for value, _ in found[:count]], values[:count]), [(-1, value) for value in values[count:]]
        returned, gradients = [], []
        for value, desc in found:
            if isinstance(value, fx.Node) and isinstance(desc, GradAOTOutput):
                gradients.append((self.statics.find(desc.grad_of), self.values[value]))
            elif isinstance(value, fx.Node):
                returned.append(self.values[value])
        # A saved output would keep itself alive through its own backward pass.
        return [*returned[:1], *(Call(torch.ops.aten.detach.default, (extra,)) for extra in returned[1:])], gradients

    def _lower_input(self, node: fx.Node) -> None:
        desc, value = node.meta["desc"], node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            return  # a number of the batch: it is part of the graph
        tensor = self.statics.add_tangent(value) if isinstance(desc, TangentAOTInput) else self.statics.find(desc)
        self.owner[get_storage(value)] = tensor
        self.values[node] = Ref(tensor)

    def _lower_constant(self, node: fx.Node) -> None:
        assert isinstance(node.target, str)
        value = getattr(self.graph.owning_module, node.target)
        if not isinstance(value, torch.Tensor):
            raise TraceError(
                f"the model uses {node.target!r} ({type(value).__name__}), which a static graph cannot hold: "
                "write control flow on tensors without torch.cond and the like"
            )
        self.constants[node.target] = value
        tensor = self.statics.add(Kind.CONSTANT, node.target, value)
        self.owner[get_storage(get_fake(node) if "val" in node.meta else value)] = tensor
        self.values[node] = Ref(tensor)

    def _call(self, node: fx.Node, phase: Phase) -> None:
        number, stack = node.meta.get("seq_nr"), node.meta.get("nn_module_stack")
        if number is not None and stack:
            self.modules.setdefault(number, format_module_path(stack))
        if node.target is operator.getitem:
            if node not in self.values:  # an item of a view that returns several
                self.values[node] = get_item(self.values[_get_node(node.args[0])], (int(node.args[1]),))  # type: ignore[arg-type]
            return
        called, read = find_operator(node), node.all_input_nodes
        if node.target is Number or (called is None and read and self.numbers.issuperset(read)):
            self.numbers.add(node)  # it is computed wherever it is read
            call = self.references.call(node)
            self.values[node] = Number(*call.args) if node.target is Number else call
            return
        if node.target is with_effects:
            raise TraceError(
                f"{format_node(node)} calls {node.args[1]}, whose effects "
                "torch.compile orders, and no plan can: call it before or after the model"
            )
        if called is None:
            raise TraceError(
                f"the step calls {node.target}, which a static graph cannot hold: shapes and control flow must not depend on data"
            )
        if written := list_written(node):
            held = {get_storage(get_fake(each)) for each in written}
            new = [(path, t) for path, t in _iterate_storages(node.meta["val"]) if get_storage(t) not in held]
            self._add(node, phase, new, mutates=tuple(self.statics.find(each.meta["desc"]) for each in written))
            return
        made = list(_iterate_storages(node.meta.get("val")))  # missing for ops that return nothing, before PyTorch 2.12
        if called in EFFECTS:
            self._add(node, phase, made)
            return
        if not made or any(isinstance(size, torch.SymInt) for _, t in made for size in t.shape):
            raise TraceError(
                f"{node.target} in {self._get_module(node) or 'the step'} makes a size or a number that depends on the data: "
                "a static graph needs shapes that are known before it runs"
            )
        given = {get_storage(t) for arg in read for _, t in _iterate_storages(arg.meta["val"])}
        aliases = [get_storage(t) in given for _, t in made]
        if made and all(aliases):
            self.values[node] = self.references.view(node)
            return
        if any(aliases) or len({get_storage(t) for _, t in made}) < len(made):
            raise TraceError(f"op {node.name!r} ({node.target}) returns tensors that share memory, which cannot be planned")
        if is_random(node) and (generator := get_explicit_generator(node)) is not None:
            self._add(node, phase, made, generator=generator)
            return
        state = self._save_state(node, phase) if is_random(node) else None
        self._add(node, phase, made, state=state)

    def _save_state(self, node: fx.Node, phase: Phase) -> int:
        """Add an op before `node` that saves the generator's state for recomputation; return its tensor."""
        tensor = self._add_tensor(f"{node.name}_state", self.state_bytes, Kind.RANDOM_STATE, (self.state_bytes,), "uint8")
        self.ops.append(
            Op(
                id=len(self.ops),
                name=f"{node.name}_state",
                target="generator.get_state",
                inputs=(),
                outputs=(tensor,),
                time_s=0.0,
                phase=phase,
                recomputable=False,
                random=True,
                module=self._get_module(node),
            )
        )
        self.calls.append(call_of(Call("get_state", (self.generator,)), ((tensor, ()),)))
        self.nodes.append(None)
        return tensor

    def _add(
        self,
        node: fx.Node,
        phase: Phase,
        made: list[tuple[Path, torch.Tensor]],
        *,
        state: int | None = None,
        generator: torch.Generator | None = None,
        mutates: tuple[int, ...] = (),
    ) -> None:
        ignored = find_ignored_inputs(node)
        read = [t for arg in node.all_input_nodes if arg not in ignored for _, t in _iterate_storages(arg.meta["val"])]
        bases = dict.fromkeys(self.owner[get_storage(t)] for t in read)
        # A write to any tensor in the same memory changes what this op reads.
        shared = (other for base in bases for other in sorted(self.statics.find_in_memory_of((base,))))
        inputs = (*dict.fromkeys(shared), *(() if state is None else (state,)))
        call = self.references.call(node) if generator is None else self.references.build_with_generator(node, generator)
        results = []
        for path, value in made:
            size = compute_allocated_bytes(value.untyped_storage().nbytes(), self.statics.device)
            name, shape = f"{node.name}{format_path(path)}", tuple(value.shape)
            tensor = self._add_tensor(name, size, Kind.ACTIVATION, shape, format_dtype(value.dtype))
            self.owner[get_storage(value)] = tensor
            results.append((tensor, path))
            self._bind(node, path, tensor)
        once = generator is not None or node.target in EFFECTS or is_chosen_by_timing(str(node.target), self.statics.device)
        again = self.references.build_again(node, results) if mutates or self.forward_outputs is not None else None
        writes = isinstance(node.target, OpOverload) and node.target._schema.is_mutable
        self.ops.append(
            Op(
                id=len(self.ops),
                name=node.name,
                target=str(find_operator(node)),
                inputs=inputs,
                outputs=tuple(t for t, _ in results),
                time_s=0.0,
                phase=phase,
                # Values computed from an input that the step overwrites are valid only before the write. Running statistics
                # that a batch norm returns are made once: a second execution leaves them out.
                recomputable=not (once or self.written.intersection(inputs) or self.made_once.intersection(inputs))
                and (again is not None or not writes),
                random=is_random(node) or HOOK in node.meta,  # keeps the order of hooks
                mutates=mutates,
                module=self._get_module(node),
            )
        )
        if again is not None:
            self.made_once.update({t for t, _ in results} - {t for t, _ in again.outputs})
        redraw = None if state is None else self.references.build_redraw(node, self.own_generator)
        self.calls.append(call_of(call, results, random_state=state, redraw=redraw, again=again))
        self.nodes.append(node)

    def _bind(self, node: fx.Node, path: Path, tensor: int) -> None:
        """Bind the nodes that select an output of `node` to that output."""
        if not path:
            self.values[node] = Ref(tensor)
            return
        for user in node.users:
            if user.target is operator.getitem and user.args[1] == path[0]:
                self._bind(user, path[1:], tensor)

    def _add_tensor(self, name: str, size_bytes: int, kind: Kind, shape: tuple[int, ...], dtype: str) -> int:
        tensor = len(self.tensors)
        self.tensors.append(Tensor(tensor, name, size_bytes, (len(self.ops),), kind, shape, dtype))
        return tensor

    def _get_module(self, node: fx.Node) -> str:
        """Return the module in which `node` was called; for a backward node, the module of its forward node."""
        stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
        return format_module_path(stack) if stack else self.modules.get(node.meta.get("seq_nr"), "")


def _separate(nodes: Sequence[object], values: Sequence[Argument]) -> list[Argument]:
    """Return `values` with a tensor of its own for each result: one of two that share memory may need no gradient."""
    results: list[Argument] = []
    for node, value in zip(nodes, values, strict=True):
        done = len(results)  # a node that is returned twice stays one tensor, whose gradients autograd adds
        is_alias = isinstance(node, fx.Node) and (
            node.target is torch.ops.aten.detach.default or (value in values[:done] and node not in nodes[:done])
        )
        results.append(Call(torch.ops.aten.detach.default, (value,)) if is_alias else value)
    return results


def build_graph(ops: Sequence[Op], tensors: Sequence[Tensor], program: Program, provenance: Provenance) -> Graph:
    """Return the graph of `ops`, which keeps what `program` returns."""
    kinds = {t: Kind.GRADIENT for _, value in program.gradients for t in read_by(value)}
    kinds |= {t: Kind.OUTPUT for value in (program.loss, *program.extras) for t in read_by(value)}
    kept = frozenset(t for t in kinds if not tensors[t].static)
    named = tuple(replace(t, kind=kinds[t.id]) if t.id in kept else t for t in tensors)
    return Graph(tuple(ops), named, kept, provenance)


def count_module_calls(nodes: Iterable[fx.Node | None]) -> Counter[str]:
    """Return how often the step calls each module, by its paths, from the captured `nodes`."""
    stacks = (node.meta.get("nn_module_stack") or {} for node in nodes if node is not None)
    places = {(key, place) for stack in stacks for key, place in stack.items()}  # Dynamo numbers the calls by a path in the key
    return Counter(format_module_path({key: place}) for key, place in places)


def _get_node(arg: object) -> fx.Node:
    assert isinstance(arg, fx.Node)
    return arg


def _iterate_storages(value: object, path: Path = ()) -> Iterator[tuple[Path, torch.Tensor]]:
    """Yield the tensors in an op's value, each with its path."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, list | tuple):
        for i, each in enumerate(value):
            yield from _iterate_storages(each, (*path, i))
