"""Construction of one pass of calls as an FX graph.

The pass is an FX graph, so that one writer serves Python and C++ (``planner.native``), and users can read it. Classes and graphs
are in circles: neither may hold the function of a pass, which holds the channels of transfers.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from planner.capture.program.code import INLINE, STEP, VARIABLE, Parameter, StraightLine, free, get_variable
from planner.capture.program.numbers import Number
from planner.capture.program.program import Argument, Call, Program, Ref, Shared, Statement, get_item, read_by
from planner.torch_private.fx import build_module

Line = tuple[str, int]  # file name, line number

_ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class Pass:
    """A runnable pass.

    Attributes:
        module: the module with the code of the pass.
        run: function of them.
        guard: makes the context that it runs in; None for none.
        read: the variables of parameters that any node reads.
        lines: for each line of a step, the position of that step in the schedule.
        node_lines: by the name of a node, its line.
    """

    module: fx.GraphModule
    parameters: Sequence[Parameter]
    run: Callable[..., Any]
    guard: Call | None
    read: frozenset[str]
    lines: Mapping[Line, int]
    node_lines: Mapping[str, Line]


class PassBuilder:
    """A builder of a pass, call by call.

    Attributes:
        tensors: for each tensor in memory its node.
        step: position in the schedule of the step that is being built; None outside of steps.
    """

    def __init__(self, program: Program) -> None:
        """Start a pass of `program`."""
        self.tensors: dict[int, fx.Node] = {}
        self.step: int | None = None
        known = {"generator": program.generator, "own_generator": program.own_generator}
        self._program, self._names = program, {**known, **program.names}
        self._graph = fx.Graph()
        self._parameters: list[Parameter] = []
        self._shared: list[tuple[Shared, fx.Node]] = []
        self._unaligned = set(program.aligned)
        self._numbers: list[fx.Node] = []

    def add_parameter(self, name: str) -> fx.Node:
        """Add a parameter."""
        self._parameters.append(Parameter(name))
        return self._graph.placeholder(name)

    def add_tensor_parameters(self, tensors: Sequence[int]) -> None:
        """Add a parameter for each of `tensors`."""
        for tensor in tensors:
            self.tensors[tensor] = self.add_parameter(f"t{tensor}")

    def add_static_list(self, *, emptied: bool = False) -> None:
        """Add the parameter with the static tensors of the program, and the numbers that it takes; see ``add_tensor_list``."""
        tensors, names = (
            [source.tensor for source in self._program.sources],
            [f"number_{i}" for i in range(self._program.numbers)],
        )
        self._numbers = self.add_tensor_list("static", tensors, names, emptied=emptied)

    def add_tensor_list(
        self, name: str, tensors: Sequence[int], others: Sequence[str] = (), *, emptied: bool = False
    ) -> list[fx.Node]:
        """Add a parameter that is a list of `tensors`, followed by `others`, by name; return the nodes of the others.

        Args:
            emptied: True if the pass empties the list, so that only its own variables hold the items.
        """
        nodes = [self._graph.placeholder(f"t{tensor}") for tensor in tensors]
        for tensor, node in zip(tensors, nodes, strict=True):
            node.meta[VARIABLE] = f"t{tensor}"
            self.tensors[tensor] = node
        more = [self._graph.placeholder(other) for other in others]
        self._parameters.append(Parameter(name, [*nodes, *more], emptied))
        return more

    def get_value(self, value: Argument, own: Mapping[int, fx.Node] = MappingProxyType({})) -> Any:
        """Return the node or argument for `value` in the graph; nodes in `own` replace those of tensors in memory."""
        match value:
            case fx.Node():
                return value
            case Ref(tensor=tensor):
                return own[tensor] if tensor in own else self._use_tensor(tensor)
            case Call():
                node = self.call(value, "view", own)
                node.meta[INLINE] = True
                return node
            case Shared():
                return self._build_once(value)
            case Number(index=index, value=captured):
                return self._numbers[index] if self._numbers else captured
            case list():
                return [self.get_value(each, own) for each in value]
            case tuple():
                return tuple(self.get_value(each, own) for each in value)
        return value

    def call(self, call: Call, name: str = "made", own: Mapping[int, fx.Node] = MappingProxyType({})) -> fx.Node:
        """Add a call on its own line; `name` is that of its variable, if the result is read."""
        args = tuple(self.get_value(arg, own) for arg in call.args)
        kwargs = {key: self.get_value(arg, own) for key, arg in call.kwargs.items()}
        kind = "call_method" if isinstance(call.target, str) else "call_function"
        return self._note_node(self._graph.create_node(kind, call.target, args, kwargs, name))

    def execute(self, statements: Sequence[Statement], wanted: Collection[int]) -> None:
        """Execute an op, and hold those of its outputs that are `wanted`; the others are freed when it is done."""
        own: dict[int, fx.Node] = {}
        for i, statement in enumerate(statements):
            later = {t for other in statements[i + 1 :] for t in read_by(other.value)}
            bound = [(t, path) for t, path in statement.outputs if t in wanted or t in later]
            made = self.call(Call(_run_nothing) if statement.value is None else statement.value, "made", own)
            for tensor, path in bound:
                node = made if path == () else self.call(get_item(made, path), "item")
                node.meta[VARIABLE] = f"t{tensor}" if tensor in wanted else f"_t{tensor}"
                own[tensor] = node
            if bound and bound[0][1] != ():
                self.free(made)
        for tensor, node in own.items():
            if tensor in wanted:
                self.tensors[tensor] = node
            else:
                self.free(node)

    def replace_by_call(self, tensor: int, call: Call) -> None:
        """Replace `tensor` by the result of `call`."""
        self.tensors[tensor] = self.call(call, f"t{tensor}")
        self.tensors[tensor].meta[VARIABLE] = f"t{tensor}"

    def free(self, node: fx.Node) -> None:
        """Free the value of `node` from here on."""
        self._note_node(self._graph.create_node("call_function", free, (node,), {}, "free"))

    def free_tensor(self, tensor: int) -> None:
        """Free `tensor`."""
        self.free(self.tensors.pop(tensor))

    def free_read(self, tensors: Sequence[int], returned: Argument) -> None:
        """Free each of the static `tensors` after its last use, unless `returned` contains it."""
        last: dict[str, tuple[fx.Node, fx.Node]] = {}  # by variable, the node that holds it, and the line
        for node in self._graph.nodes:
            if not node.meta.get(INLINE):
                last.update({get_variable(read): (read, node) for read in _read_in_line(node)})
        kept = {*read_by(returned)}
        for tensor in tensors:
            if tensor not in kept and (found := last.get(f"t{tensor}")) is not None:
                with self._graph.inserting_after(found[1]):
                    self.free(found[0])

    def finish(self, returned: Argument, title: str) -> Pass:
        """Return the pass, with `returned` as its result and `title` as its name in tracebacks."""
        self.step = None
        self._graph.output(self.get_value(returned))
        codegen = StraightLine(self._parameters, self._names)
        module = build_module(self._graph, codegen, title)
        file, guard = module.forward.__code__.co_filename, self._program.guard
        read = frozenset(get_variable(node) for node in self._graph.find_nodes(op="placeholder") if node.users)
        lines = {(file, number): step for number, step in codegen.steps.items()}
        node_lines = {name: (file, number) for name, number in codegen.lines.items()}
        run = run_within(guard, module.forward)
        return Pass(module, self._parameters, run, guard, read, lines, node_lines)

    def _use_tensor(self, tensor: int) -> fx.Node:
        """Return the node that holds a tensor; a static tensor is aligned before its first use if kernels expect that."""
        if tensor in self._unaligned:
            self._unaligned.remove(tensor)
            self.replace_by_call(tensor, Call(align, (self.tensors[tensor],)))
        return self.tensors[tensor]

    def _build_once(self, shared: Shared) -> fx.Node:
        for known, node in self._shared:
            if known == shared:
                return node
        self._shared.append((shared, self.call(shared.call, "shared")))
        return self._shared[-1][1]

    def _note_node(self, node: fx.Node) -> fx.Node:
        if self.step is not None:
            node.meta[STEP] = self.step
        return node


def _read_in_line(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the nodes that the line of `node` reads, including those of inlined views."""
    for read in node.all_input_nodes:
        if read.meta.get(INLINE):
            yield from _read_in_line(read)
        else:
            yield read


def align(value: torch.Tensor) -> torch.Tensor:
    """Return `value`, or a copy if it does not start at a multiple of 16 bytes, as CUDA kernels expect."""
    return value if value.data_ptr() % _ALIGNMENT == 0 else value.clone()


def _run_nothing() -> None:
    pass


def run_within(guard: Call | None, run: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that runs `run` in the context that `guard` makes; `run` itself if there is none."""
    if guard is None:
        return run
    assert callable(guard.target)
    return partial(_run_guarded, partial(guard.target, *guard.args, **guard.kwargs), run)


def _run_guarded(enter: Callable[[], AbstractContextManager[object]], run: Callable[..., Any], *given: Any) -> Any:
    with enter():
        return run(*given)
