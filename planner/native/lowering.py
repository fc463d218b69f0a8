"""Translation of a pass from its FX graph to the flat program that ``passes.cpp`` runs.

The program makes the calls and the frees of the Python code, in the same order. What differs is that a view is made once, and
lives until its base is freed: it shares the base's memory, and a pass reads most views several times. What turns out to be a copy
is freed behind its reader and made again for the next, as in Python: kept, it took up to a tenth more memory than was planned.

An operator is called by its boxed kernel if all its arguments are tensors, lists of tensors and constants that its schema knows.
Random ops are called so too, between the reads and writes of generators that ``planner.capture.program.draws`` makes, and
functions that ``passes.cpp`` has as operators. Anything else is called as in Python, which takes the interpreter lock: functions
of options, Inductor's launchers, transfers.
"""

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import torch
from torch import fx

from planner.capture.program.code import INLINE, VARIABLE, Parameter, free, get_variable
from planner.capture.program.draws import LOCK, draw_again, draw_first, draw_once
from planner.capture.rewrites.layouts import copy_with_strides
from planner.capture.rewrites.reproducible_random import draw_dropout
from planner.torch_private.core import OpOverload

Described = tuple[Any, ...]  # an argument or an instruction, as ``passes.cpp`` reads it


class Form(IntEnum):
    """What an argument is made of."""

    CONSTANT = 0
    REGISTER = 1
    LIST = 2
    TUPLE = 3
    SLICE = 4


class Kind(IntEnum):
    """What an instruction does."""

    OPERATOR = 0
    FUNCTION = 1
    ITEM = 2
    STATE = 3


# Functions, by the names of the operators that ``passes.cpp`` has in their place.
_OWN: dict[object, str] = {copy_with_strides: "copy_with_strides", draw_dropout: "draw_dropout"}

_aten = torch.ops.aten
_UNSAFE = {_aten.unsafe_split, _aten.unsafe_split_with_sizes, _aten.unsafe_chunk}  # views, although their schemas do not say so

# Operators that return a copy where the layout of their argument has no such view.
_MAY_COPY = {_aten.reshape, _aten.reshape_as, _aten.flatten, _aten.ravel, _aten.contiguous, _aten.to, _aten.type_as}

# How an op draws, as ``passes.cpp`` numbers it, and the number of arguments before the op.
_DRAWS: dict[object, tuple[int, int]] = {draw_once: (0, 0), draw_first: (1, 3), draw_again: (2, 3)}


@dataclass(frozen=True, slots=True)
class FlatProgram:
    """A pass as data.

    Attributes:
        described: registers, parameters, instructions, returned value and the lock of draws, as ``passes.cpp`` reads them.
        nodes: for each instruction the node on whose line it stands in Python.
    """

    described: Described
    nodes: tuple[fx.Node, ...]

    @property
    def called_in_python(self) -> list[object]:
        """The functions and operators that are called as in Python, one for each call."""
        return [instruction[1] for instruction in self.described[2] if instruction[0] is Kind.FUNCTION]

    @property
    def is_mostly_python(self) -> bool:
        """True if more than half of the instructions call Python."""
        return 2 * len(self.called_in_python) > len(self.described[2])


def lower_pass(parameters: Sequence[Parameter], nodes: Iterable[fx.Node], accepts: Callable[[Described], bool]) -> FlatProgram:
    """Return the flat program of a pass.

    Args:
        nodes: nodes of its graph.
        accepts: returns True if an instruction can call its operator.
    """
    lowering = _Lowering(accepts)
    given = [lowering.add_parameter(parameter) for parameter in parameters]
    returned: Described = (Form.CONSTANT, None)
    for node in nodes:
        if node.op == "output":
            lowering.line = node
            returned = lowering.describe(node.args[0], is_returned=True)
        elif node.op != "placeholder" and not node.meta.get(INLINE):
            lowering.add_line(node)
    described = (lowering.registers, given, lowering.instructions, returned, LOCK)
    return FlatProgram(described, tuple(lowering.nodes))


@dataclass(slots=True)
class _Lowering:
    """A program in construction.

    Attributes:
        accepts: returns True if an instruction can call its operator.
        registers: their number.
        instructions: those so far.
        nodes: for each instruction the node on whose line it stands.
        line: the node whose line is translated.
    """

    accepts: Callable[[Described], bool]
    registers: int = 0
    instructions: list[Described] = field(default_factory=list)
    nodes: list[fx.Node] = field(default_factory=list)
    line: fx.Node | None = None
    _held: dict[str, int] = field(default_factory=dict)  # by variable, its register
    _outputs: dict[str, list[int]] = field(default_factory=dict)  # by variable, the registers of several outputs
    _views: dict[str, dict[object, int]] = field(default_factory=dict)  # by variable, views that live as long
    _temporary: list[int] = field(default_factory=list)  # registers that are freed with the line

    def add_parameter(self, parameter: Parameter) -> Described:
        """Add a parameter, and return its description."""
        if parameter.unpacked is None:
            return (self._hold(parameter.name), None, False)
        return (-1, [self._hold(get_variable(node)) for node in parameter.unpacked], parameter.emptied)

    def add_line(self, node: fx.Node) -> None:
        """Add the instructions of a line of the Python code."""
        self.line = node
        if node.target is free:
            (freed,) = node.args
            assert isinstance(freed, fx.Node)
            self._free(self._release(get_variable(freed)))
            return
        if self._is_output(node):
            made, index = node.args
            assert isinstance(made, fx.Node) and isinstance(index, int)
            self._bind(get_variable(node), self._outputs[get_variable(made)][index])
            self._outputs[get_variable(made)][index] = -1
            return
        name = get_variable(node)
        call = _find_operator_call(node)
        if call is not None and (outputs := _find_outputs_read_by_items(node, call.op)) is not None:
            results = [self._new() if i in outputs else -1 for i in range(len(call.op._schema.returns))]
            if (called := self._operator(node, results, is_returned=False)) is not None:
                self._add(called)
                self._free(self._release(name))
                self._outputs[name] = [*results]
                self._end_line()
                return
        result = self._new() if node.users or VARIABLE in node.meta else -1
        self._add(self._instruction(node, result, is_returned=False))
        if result >= 0:
            self._bind(name, result)
        self._end_line()

    def describe(self, value: Any, *, is_returned: bool = False) -> Described:
        """Return the description of an argument; add the instructions of the views in it.

        Args:
            is_returned: True if the caller of the pass gets the value.
        """
        match value:
            case fx.Node() if value.meta.get(INLINE):
                return (Form.REGISTER, self._view(value, is_returned=is_returned))
            case fx.Node():
                return (Form.REGISTER, self._held[get_variable(value)])
            case list():
                return (Form.LIST, [self.describe(each, is_returned=is_returned) for each in value])
            case tuple():
                return (Form.TUPLE, [self.describe(each, is_returned=is_returned) for each in value])
            case slice():
                return (Form.SLICE, [self.describe(each) for each in (value.start, value.stop, value.step)])
        return (Form.CONSTANT, value)

    def _new(self) -> int:
        self.registers += 1
        return self.registers - 1

    def _hold(self, name: str) -> int:
        """Return a new register for a variable."""
        self._held[name] = self._new()
        return self._held[name]

    def _bind(self, name: str, register: int) -> None:
        """Let a variable be in a register, and free what it held."""
        self._free(self._release(name))
        self._held[name] = register

    def _release(self, name: str) -> list[int]:
        """Return the registers of a variable that ends, and of its views."""
        ended = [*self._views.pop(name, {}).values()]
        if name in self._held:
            ended.append(self._held.pop(name))
        return [*ended, *(register for register in self._outputs.pop(name, []) if register >= 0)]

    def _free(self, registers: Sequence[int]) -> None:
        """Free registers after the last instruction."""
        if registers and self.instructions:
            self.instructions[-1][-1].extend(registers)

    def _view(self, node: fx.Node, *, is_returned: bool) -> int:
        """Return the register of an inlined view, which is made at its first use."""
        root = _find_root(node)
        if root is None or is_returned:
            result = self._new()
            self._add(self._instruction(node, result, is_returned=is_returned))
            self._temporary.append(result)
            return result
        views, key = self._views.setdefault(root, {}), _make_key(node)
        is_first = key not in views
        if is_first:
            views[key] = self._new()
        if is_first or _may_copy(node):  # which does nothing where there is a view
            self._add(self._instruction(node, views[key], is_returned=False))
        if _may_copy(node):
            self._temporary.append(~views[key])
        return views[key]

    def _is_output(self, node: fx.Node) -> bool:
        return (
            node.target is operator.getitem and isinstance(node.args[0], fx.Node) and get_variable(node.args[0]) in self._outputs
        )

    def _add(self, instruction: Described) -> None:
        """Add an instruction to the line."""
        assert self.line is not None
        self.instructions.append(instruction)
        self.nodes.append(self.line)

    def _end_line(self) -> None:
        """Free the views that only the line reads, and then copies."""
        self._free(sorted(self._temporary, reverse=True))
        self._temporary = []

    def _instruction(self, node: fx.Node, result: int, *, is_returned: bool) -> Described:
        """Return the instruction of a node, whose value goes to the register `result`."""
        if node.target is operator.getitem:
            sequence, subscript = (self.describe(arg, is_returned=is_returned) for arg in node.args)
            return (Kind.ITEM, None, [sequence, subscript], None, [result], [])
        if node.target == "get_state":  # of a generator
            return (Kind.STATE, None, [(Form.CONSTANT, node.args[0])], None, [result], [])
        if (called := self._operator(node, [result], is_returned=is_returned)) is not None:
            return called
        target = _MethodCall(node.target) if isinstance(node.target, str) else node.target
        described = [self.describe(value) for value in (*node.args, *node.kwargs.values())]
        return (Kind.FUNCTION, target, described, tuple(node.kwargs), [result], [])

    def _operator(self, node: fx.Node, results: list[int], *, is_returned: bool) -> Described | None:
        """Return the instruction that calls an operator by its boxed kernel; None if it is none, or has other arguments."""
        if (call := _find_operator_call(node)) is None or (given := _list_arguments(call)) is None:
            return None
        schema = call.op._schema
        if len(results) != max(1, len(schema.returns)):
            return None
        arguments = [self._describe_argument(value, is_returned=is_returned) for value in given]
        draw = None if call.draw is None else (call.draw, [self._describe_argument(value) for value in call.drawn_from])
        counts_versions = is_returned or _writes(call.op, is_inlined=bool(node.meta.get(INLINE)))
        called = (
            *(Kind.OPERATOR, (schema.name, schema.overload_name), arguments, (counts_versions, draw)),
            *(results if schema.returns else [], list[int]()),
        )
        return called if self.accepts(called) else None

    def _describe_argument(self, value: Any, *, is_returned: bool = False) -> Described:
        return (Form.CONSTANT, value) if _is_constant(value) else self.describe(value, is_returned=is_returned)


@dataclass(frozen=True, slots=True)
class _OperatorCall:
    """A call of an operator of PyTorch itself, or of this library: kernels of others may be in Python, and use autograd.

    Attributes:
        op, args, kwargs: the operator and its arguments.
        draw: how it draws random numbers (``_DRAWS``); None if that does not matter.
        drawn_from: the saved state, the generator and the op's own generator.
    """

    op: OpOverload
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    draw: int | None = None
    drawn_from: tuple[Any, ...] = ()


def _find_operator_call(node: fx.Node) -> _OperatorCall | None:
    """Return the operator that a node calls, or that it lets draw; None if it is none of PyTorch and of this library."""
    op: Any = node.target
    args: tuple[Any, ...] = node.args
    draw, drawn_from = None, tuple[Any, ...]()
    if op in _DRAWS:
        draw, count = _DRAWS[op]
        drawn_from, op, args = args[:count], args[count], args[count + 1 :]
    if op in _OWN:
        op = getattr(torch.ops.remat_planner, _OWN[op]).default
    elif not (isinstance(op, OpOverload) and op.namespace == "aten"):
        return None
    return _OperatorCall(op, args, node.kwargs, draw, drawn_from)


@dataclass(frozen=True, slots=True)
class _MethodCall:
    """A call of a method of the first argument."""

    name: str

    def __call__(self, owner: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(owner, self.name)(*args, **kwargs)


def _list_arguments(call: _OperatorCall) -> list[Any] | None:
    """Return the arguments of an operator in the order of its schema; None if one has no value."""
    given = []
    for i, argument in enumerate(call.op._schema.arguments):
        if i < len(call.args) and not argument.kwarg_only:
            given.append(call.args[i])
        elif argument.name in call.kwargs:
            given.append(call.kwargs[argument.name])
        elif argument.has_default_value():
            given.append(argument.default_value)
        else:
            return None
    return given


def _writes(op: OpOverload, *, is_inlined: bool) -> bool:
    """Return True if an operator writes, or if a line keeps a view that it returns."""
    aliases = any(argument.alias_info is not None for argument in op._schema.arguments)
    return op._schema.is_mutable or (aliases and not is_inlined)


def _find_outputs_read_by_items(node: fx.Node, op: OpOverload) -> set[int] | None:
    """Return the outputs that are read of an operator with several, each by one subscript; None if it is read otherwise."""
    if len(op._schema.returns) < 2:
        return None
    readers = [user for user in node.users if user.target is not free]
    if any(user.target is not operator.getitem or user.meta.get(INLINE) for user in readers):
        return None
    read = [user.args[1] for user in readers]
    return {*read} if len({*read}) == len(read) else None  # type: ignore[arg-type]


def _is_constant(value: Any) -> bool:
    """Return True if a value is no node, and has none in it."""
    return all(map(_is_constant, value)) if isinstance(value, list | tuple) else not isinstance(value, fx.Node)


def _find_root(node: fx.Node) -> str | None:
    """Return the variable that an inlined node is a view of, or perhaps a copy; None if it is neither."""
    if not node.meta.get(INLINE):
        return get_variable(node)
    if node.target is not operator.getitem and not (isinstance(node.target, OpOverload) and _is_view(node.target)):
        return None
    bases = set(map(_find_root, node.all_input_nodes))
    return bases.pop() if len(bases) == 1 else None


def _may_copy(node: fx.Node) -> bool:
    """Return True if an inlined node is a view or a copy, as its argument is laid out, or a view of such a node."""
    if not node.meta.get(INLINE):
        return False
    copies = isinstance(node.target, OpOverload) and node.target.overloadpacket in _MAY_COPY
    return copies or any(map(_may_copy, node.all_input_nodes))


def _is_view(op: OpOverload) -> bool:
    """Return True if all outputs of an operator may alias its first argument, and it writes nothing."""
    if op.overloadpacket in _UNSAFE:
        return True
    return not op._schema.is_mutable and all(returned.alias_info is not None for returned in op._schema.returns)


def _make_key(value: Any) -> object:
    """Return a key that is equal for equal views of one variable."""
    match value:
        case fx.Node() if value.meta.get(INLINE):
            return (value.target, _make_key(value.args), _make_key(value.kwargs))
        case fx.Node():
            return get_variable(value)
        case list() | tuple():
            return tuple(map(_make_key, value))
        case Mapping():
            return tuple((name, _make_key(each)) for name, each in value.items())
        case slice():
            return ("slice", value.start, value.stop, value.step)
    return (type(value), value)
