"""From a joint graph to ops and storages, and to the program that executes them."""

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from torch import fx, nn
from torch._functorch._aot_autograd.descriptors import (
    AOTInput,
    BufferAOTInput,
    GradAOTOutput,
    ParamAOTInput,
    PlainAOTInput,
    TangentAOTInput,
)

from graphs.capture.conditions import DataGuards
from graphs.capture.eager_ops import called
from graphs.capture.guards import Guards
from graphs.capture.layouts import drawn_in_place, laid_out, read_strides, to_be_filled
from graphs.capture.outputs import fake, first_backward, ignored_inputs, is_random, outputs, storage
from graphs.capture.program import TANGENT, Call, Program, Source, variable
from graphs.capture.redraw import LOCK, drawing_from
from graphs.capture.signature import Batch, Signature, leaves
from graphs.errors import TraceError
from graphs.ir import Graph, Kind, Op, Phase, Tensor


@dataclass(frozen=True, slots=True)
class Capture:
    """A training step: what it is (op times still 0) and how to execute it.

    Attributes:
        graph, program: op by op.
        signature: what it is called with, and what it returns.
        nodes: for each op the node it was captured as, with its fake values; None for ops that
            save the generator's state.
        guards: what must be as it was for the program to be right; None for what is never executed, or checked by others.
        conditions: what must hold of the data for this to be the step; None if nothing need.
    """

    graph: Graph
    program: Program
    signature: Signature
    nodes: tuple[fx.Node | None, ...]
    guards: Guards | None = None
    conditions: DataGuards | None = None


def allocated_bytes(size_bytes: int, device: torch.device) -> int:
    """What the allocator of `device` takes for `size_bytes`: CUDA's deals in blocks of 512 bytes."""
    return -(-size_bytes // 512) * 512 if device.type == "cuda" else size_bytes


class StaticTensors:
    """What is in memory throughout: each storage is counted once, under the first name it is found by.

    Args:
        device: whose allocator holds it.
    """

    def __init__(self, step: nn.Module, batch: Batch, device: torch.device) -> None:
        self.device = device
        self.tensors: list[Tensor] = []
        self.sources: list[Source] = []
        self._by_name: dict[tuple[Kind, str], int] = {}
        self._by_object: dict[int, int] = {}
        self._counted: set[int] = set()
        self._objects: list[torch.Tensor] = []
        for name, parameter in step.named_parameters(remove_duplicate=False):
            self.add(Kind.PARAMETER, name, parameter)
        for name, buffer in step.named_buffers(remove_duplicate=False):
            self.add(Kind.BUFFER, name, buffer)
        for index, leaf in enumerate(leaves(batch)):
            if isinstance(leaf, torch.Tensor):
                self.add(Kind.INPUT, str(index), leaf)

    def add(self, kind: Kind, name: str, value: torch.Tensor) -> int:
        """The id of `value`, which is known as `name` from now on."""
        if id(value) not in self._by_object:
            cdata = storage(value)
            # An input may be a slice of a data set: only its own bytes are the step's.
            size = value.numel() * value.element_size() if kind is Kind.INPUT else value.untyped_storage().nbytes()
            size = 0 if cdata in self._counted else allocated_bytes(size, self.device)
            self._by_object[id(value)] = self._append(kind, name, size, value)
            self._counted.add(cdata)
            self._objects.append(value)  # keeps id() and storage identities valid
        self._by_name[kind, name] = self._by_object[id(value)]
        return self._by_object[id(value)]

    def reserve(self, name: str, kind: Kind, size_bytes: int) -> None:
        """Count `size_bytes` that no op reads; nothing where there are none."""
        if size_bytes:
            self._append(kind, name, size_bytes, None)

    def find(self, desc: AOTInput) -> int:
        """The id of the tensor that a joint graph's input stands for."""
        match desc:
            case ParamAOTInput(target=name):
                return self._by_name[Kind.PARAMETER, name]
            case BufferAOTInput(target=name):
                return self._by_name[Kind.BUFFER, name]
            case PlainAOTInput(idx=index):
                return self._by_name[Kind.INPUT, str(index)]
        raise TraceError(f"the step has an input {desc!r}, a kind that is not supported: pass plain tensors")

    def tangent(self, value: torch.Tensor) -> int:
        """The id of the gradient of the loss, which autograd holds during the backward pass."""
        if (Kind.INPUT, TANGENT) not in self._by_name:
            size = allocated_bytes(value.numel() * value.element_size(), self.device)
            self._by_name[Kind.INPUT, TANGENT] = self._append(Kind.INPUT, TANGENT, size, value)
        return self._by_name[Kind.INPUT, TANGENT]

    def _append(self, kind: Kind, name: str, size_bytes: int, value: torch.Tensor | None) -> int:
        tensor = len(self.tensors)
        shape = () if value is None else tuple(value.shape)
        dtype = "" if value is None else _dtype_name(value)
        unique = name if kind in (Kind.PARAMETER, Kind.BUFFER) else f"{kind}_{name}"
        self.tensors.append(Tensor(tensor, unique, size_bytes, (), kind, shape, dtype))
        if value is not None:
            self.sources.append(Source(tensor, kind, name))
        return tensor


def lower(
    graph: fx.Graph,
    statics: StaticTensors,
    signature: Signature,
    *,
    generator: torch.Generator,
    provenance: Mapping[str, object],
) -> Capture:
    """Lower a joint graph whose outputs are explicit (``fix_outputs``).

    Args:
        statics: the tensors that are there throughout.
        signature: of the step.
        generator: what random ops draw from.

    Raises:
        TraceError: an op that no static graph can hold (dynamic shapes, control flow, partial aliases).
    """
    ops, program, nodes = _Lowering(graph, statics, generator).run(provenance)
    return Capture(ops, program, signature, nodes)


class _Lowering:
    def __init__(self, graph: fx.Graph, statics: StaticTensors, generator: torch.Generator) -> None:
        self.graph = graph
        self.statics = statics
        # CUDA's generators keep their state on the host.
        self.state_bytes = 0 if statics.device.type == "cuda" else generator.get_state().numel()
        self.tensors = statics.tensors
        self.ops: list[Op] = []
        self.calls: list[Call] = []
        self.nodes: list[fx.Node | None] = []
        own = torch.Generator(device=generator.device)
        self.namespace: dict[str, object] = {"generator": generator, "own_generator": own, "lock": LOCK}
        self.names: dict[object, str] = {}
        self.expressions: dict[fx.Node, str] = {}
        self.owner: dict[int, int] = {}  # storage -> tensor
        self.modules: dict[object, str] = {}  # autograd sequence number -> module path
        self.written: set[int] = set()

    def run(self, provenance: Mapping[str, object]) -> tuple[Graph, Program, tuple[fx.Node | None, ...]]:
        boundary = first_backward(self.graph)
        self.written = {
            self.statics.find(target.meta["desc"])
            for node in self.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
            if isinstance(target := node.args[0], fx.Node)
        }
        phase = Phase.FORWARD
        for node in self.graph.nodes:
            if node is boundary:
                phase = Phase.BACKWARD
            if node.op == "placeholder":
                self._input(node)
            elif node.op == "get_attr":
                self._constant(node)
            elif node.op == "call_function":
                self._call(node, phase)
            elif node.op != "output":
                raise TraceError(f"node {node.name!r} is a {node.op}, which a static graph cannot hold")
        return self._finish(provenance)

    def _finish(self, provenance: Mapping[str, object]) -> tuple[Graph, Program, tuple[fx.Node | None, ...]]:
        returned, gradients, kinds = [], [], {}
        for value, desc in outputs(self.graph):
            if not isinstance(value, fx.Node):
                continue
            owner = self.owner[storage(fake(value))]
            if isinstance(desc, GradAOTOutput):
                gradients.append((self.statics.find(desc.grad_of), self.expressions[value]))
                kinds[owner] = Kind.GRADIENT
            else:
                returned.append(self.expressions[value])
                kinds[owner] = Kind.OUTPUT
        kept = frozenset(t for t in kinds if not self.tensors[t].static)
        tensors = tuple(replace(t, kind=kinds[t.id]) if t.id in kept else t for t in self.tensors)
        program = Program(
            calls=tuple(self.calls),
            sources=tuple(self.statics.sources),
            loss=returned[0],
            extras=tuple(returned[1:]),
            gradients=tuple(gradients),
            namespace=self.namespace,
        )
        return Graph(tuple(self.ops), tensors, kept, provenance), program, tuple(self.nodes)

    def _input(self, node: fx.Node) -> None:
        desc, value = node.meta["desc"], node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            return  # a number of the batch: it is part of the graph
        tensor = self.statics.tangent(value) if isinstance(desc, TangentAOTInput) else self.statics.find(desc)
        self.owner[storage(value)] = tensor
        self.expressions[node] = variable(tensor)

    def _constant(self, node: fx.Node) -> None:
        assert isinstance(node.target, str)
        value = getattr(self.graph.owning_module, node.target)
        if not isinstance(value, torch.Tensor):
            raise TraceError(
                f"the model uses {node.target!r} ({type(value).__name__}), which a static graph cannot hold: "
                "write control flow on tensors without torch.cond and the like"
            )
        self.namespace[node.target] = value
        tensor = self.statics.add(Kind.CONSTANT, node.target, value)
        self.owner[storage(fake(node) if "val" in node.meta else value)] = tensor
        self.expressions[node] = variable(tensor)

    def _call(self, node: fx.Node, phase: Phase) -> None:
        self._learn_module(node)
        if node.target is operator.getitem:
            if node not in self.expressions:  # an item of a view that returns several
                self.expressions[node] = f"{self.expressions[_node(node.args[0])]}[{node.args[1]!r}]"
            return
        if not isinstance(node.target, torch._ops.OpOverload):
            raise TraceError(
                f"the step calls {node.target}, which a static graph cannot hold: shapes and control flow must not depend on data"
            )
        if node.target is torch.ops.aten.copy_.default:
            self._add(node, phase, [], mutates=(self.owner[storage(fake(_node(node.args[0])))],))
            return
        made = list(_storages(node.meta["val"]))
        if not made or any(isinstance(size, torch.SymInt) for _, t in made for size in t.shape):
            raise TraceError(
                f"{node.target} in {self._module(node) or 'the step'} makes a size or a number that depends on the data: "
                "a static graph needs shapes that are known before it runs"
            )
        read = {storage(t) for arg in node.all_input_nodes for _, t in _storages(arg.meta["val"])}
        aliases = [storage(t) in read for _, t in made]
        if made and all(aliases):
            self.expressions[node] = self._render_view(node)
            return
        if any(aliases) or len({storage(t) for _, t in made}) < len(made):
            raise TraceError(f"op {node.name!r} ({node.target}) returns tensors that share memory, which cannot be planned")
        state = self._save_state(node, phase) if is_random(node) else None
        self._add(node, phase, made, state=state)

    def _save_state(self, node: fx.Node, phase: Phase) -> int:
        """An op before `node` that saves the generator's state, for recomputing `node`."""
        tensor = self._new_tensor(f"{node.name}_state", self.state_bytes, Kind.RANDOM_STATE, (self.state_bytes,), "uint8")
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
                module=self._module(node),
            )
        )
        self.calls.append(Call("generator.get_state()", ((tensor, ""),)))
        self.nodes.append(None)
        return tensor

    def _add(
        self,
        node: fx.Node,
        phase: Phase,
        made: list[tuple[str, torch.Tensor]],
        *,
        state: int | None = None,
        mutates: tuple[int, ...] = (),
    ) -> None:
        ignored = ignored_inputs(node)
        read = [t for arg in node.all_input_nodes if arg not in ignored for _, t in _storages(arg.meta["val"])]
        inputs = (*dict.fromkeys(self.owner[storage(t)] for t in read), *(() if state is None else (state,)))
        expression = self._render_call(node)
        results = []
        for path, value in made:
            size = allocated_bytes(value.untyped_storage().nbytes(), self.statics.device)
            name, shape = f"{node.name}{path}", tuple(value.shape)
            tensor = self._new_tensor(name, size, Kind.ACTIVATION, shape, _dtype_name(value))
            self.owner[storage(value)] = tensor
            results.append((tensor, path))
            self._bind(node, path, tensor)
        assert isinstance(node.target, torch._ops.OpOverload)
        self.ops.append(
            Op(
                id=len(self.ops),
                name=node.name,
                target=str(node.target),
                inputs=inputs,
                outputs=tuple(t for t, _ in results),
                time_s=0.0,
                phase=phase,
                # What is computed from an input that the step overwrites is right only before the write.
                recomputable=not mutates and not self.written.intersection(inputs) and not node.target._schema.is_mutable,
                random=state is not None,
                mutates=mutates,
                module=self._module(node),
            )
        )
        redraw = None if state is None else self._render_redraw(node)
        self.calls.append(Call(expression, tuple(results), state, redraw))
        self.nodes.append(node)

    def _bind(self, node: fx.Node, path: str, tensor: int) -> None:
        """Let the nodes that pick an output of `node` out of its value stand for the output's variable."""
        if not path:
            self.expressions[node] = variable(tensor)
            return
        for user in node.users:
            if user.target is operator.getitem and path.startswith(step := f"[{user.args[1]!r}]"):
                self._bind(user, path[len(step) :], tensor)

    def _new_tensor(self, name: str, size_bytes: int, kind: Kind, shape: tuple[int, ...], dtype: str) -> int:
        tensor = len(self.tensors)
        self.tensors.append(Tensor(tensor, name, size_bytes, (len(self.ops),), kind, shape, dtype))
        return tensor

    def _render_view(self, node: fx.Node) -> str:
        base = node.args[0]
        if node.target is torch.ops.aten.detach.default:
            return self._render(base)  # nothing is recorded where a program runs
        if node.target is torch.ops.aten.t.default and isinstance(base, fx.Node) and base.target is torch.ops.aten.t.default:
            return self._render(base.args[0])
        return self._render_call(node)

    def _render_call(self, node: fx.Node) -> str:
        # An ignored input may be gone by the time the op is executed; only the static ones cannot.
        gone = {arg for arg in ignored_inputs(node) if arg.op != "placeholder"}
        strides = read_strides(node)
        args = ["None" if isinstance(arg, fx.Node) and arg in gone else self._render(arg, strides) for arg in node.args]
        args += [f"{key}={self._render(value, strides)}" for key, value in node.kwargs.items()]
        assert isinstance(node.target, torch._ops.OpOverload)
        target, name = called(node.target), str(node.target)
        if drawn := drawn_in_place(node):
            target, name, args[0] = drawn[0], str(drawn[0]), self._render_filled(args[0], drawn[1])
        return f"{self._name(target, name.replace('.', '_'))}({', '.join(args)})"

    def _render_filled(self, like: str, strides: Sequence[int]) -> str:
        return f"{self._name(to_be_filled, 'to_be_filled')}({like}, {tuple(strides)})"

    def _render_redraw(self, node: fx.Node) -> str | None:
        """The call of `node` with a generator to draw from."""
        target, drawn = drawing_from(node), drawn_in_place(node)
        if target is None:
            return None
        args = [self._render(arg) for arg in node.args]
        if drawn:
            target, args[0] = drawn[0], self._render_filled(args[0], drawn[1])
        args += [f"{key}={self._render(value)}" for key, value in node.kwargs.items() if key != "generator"]
        name = getattr(target, "__name__", str(target)).replace(".", "_")
        return f"{self._name(target, f'{name}_from')}({', '.join((*args, 'generator=own_generator'))})"

    def _render(self, arg: object, strides: Mapping[fx.Node, Sequence[int]] = MappingProxyType({})) -> str:
        match arg:
            case fx.Node() if arg in strides:
                return f"{self._name(laid_out, 'laid_out')}({self.expressions[arg]}, {tuple(strides[arg])})"
            case fx.Node():
                return self.expressions[arg]
            case list() | tuple():
                return f"[{', '.join(self._render(item, strides) for item in arg)}]"
            case None | bool() | int() | str():
                return repr(arg)
            case float() if arg == arg and abs(arg) != float("inf"):
                return repr(arg)
            case torch.SymInt() | torch.SymFloat() | torch.SymBool():
                raise TraceError(f"the step depends on the size {arg}, which is not known before it runs: shapes must be static")
        return self._name(arg, f"const_{len(self.names)}")

    def _name(self, value: object, wanted: str) -> str:
        if value not in self.names:
            self.names[value] = wanted
            self.namespace[wanted] = value
        return self.names[value]

    def _learn_module(self, node: fx.Node) -> None:
        number, stack = node.meta.get("seq_nr"), node.meta.get("nn_module_stack")
        if number is not None and stack:
            self.modules.setdefault(number, _module_path(stack))

    def _module(self, node: fx.Node) -> str:
        """The module `node` was called in; for a backward node, the one of the forward node it belongs to."""
        stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
        return _module_path(stack) if stack else self.modules.get(node.meta.get("seq_nr"), "")


def _module_path(stack: Mapping[str, tuple[str, object]]) -> str:
    path = list(stack.values())[-1][0]
    return path.removeprefix("L['self'].").replace("_modules['", "").replace("']", "")


def _node(arg: object) -> fx.Node:
    assert isinstance(arg, fx.Node)
    return arg


def _storages(value: object, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in an op's value, each with the subscripts that pick it out."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            yield from _storages(item, f"{path}[{i}]")


def _dtype_name(value: torch.Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")
