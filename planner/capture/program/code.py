"""Generation of straight-line Python for a pass: a line for each call, and a ``del`` for each freed tensor.

FX's own code frees each value after its last use, and looks up ``torch.ops.aten.mm.default`` at each call. Here a schedule frees
tensors, by nodes that call ``free``; targets and constants are globals; and views are inlined into the calls that read them.

Known weakness: a call in Python takes 2 to 4 us more than its boxed kernel, so that a step of small kernels is slower than eager
PyTorch's, whose backward pass is C++. Therefore most passes are run by ``planner.native``, and this code is what they fall back
to, and what errors point at.
"""

import keyword
import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import isfinite
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import fx

from planner.torch_private.core import OpOverload
from planner.torch_private.fx import CodeGen

# Keys of node.meta: True if the node is inlined into its reader; the step of the node; and the variable that holds it until it
# is freed, even if nothing reads it.
INLINE, STEP, VARIABLE = "inline", "step", "variable"


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of a pass.

    Attributes:
        unpacked: placeholders of its items if it is a list; None if it is a placeholder itself.
        emptied: True if the list is emptied first.
    """

    name: str
    unpacked: Sequence[fx.Node] | None = None
    emptied: bool = False


def free(value: object) -> None:
    """Mark the end of `value`'s life in the graph; the generated code is a ``del``."""


class StraightLine(CodeGen):
    """A generator of the code of a pass.

    Attributes:
        steps: for each line of a step, its position in the schedule.
        lines: by the name of a node, its line.
    """

    def __init__(self, parameters: Sequence[Parameter], names: Mapping[str, object]) -> None:
        """Initialize with `names` for some targets and constants."""
        super().__init__()
        self.steps: dict[int, int] = {}
        self.lines: dict[str, int] = {}
        self._parameters, self._names = parameters, names

    def write_source(self, nodes: Iterable[fx.Node]) -> tuple[str, dict[str, Any]]:
        """Return the source of ``forward`` and its globals; see ``CodeGen``."""
        nodes = list(nodes)
        taken = {get_variable(node) for node in nodes if not node.meta.get(INLINE)}
        written = _NamedGlobals(self._names, taken | {parameter.name for parameter in self._parameters})
        lines = [f"def forward({', '.join(parameter.name for parameter in self._parameters)}):"]
        for parameter in self._parameters:
            if parameter.unpacked:
                lines.append(f"    {', '.join(map(get_variable, parameter.unpacked))}, = {parameter.name}")
            if parameter.emptied:
                lines.append(f"    {parameter.name}.clear()")
        for node in nodes:
            if (line := written.write_line(node)) is not None:
                lines.append(f"    {line}")
                self.lines[node.name] = len(lines)
                if STEP in node.meta:
                    self.steps[len(lines)] = node.meta[STEP]
        return "\n".join(lines) + "\n", written.values


class _NamedGlobals:
    """Code of nodes, and the global names of their targets and constants."""

    def __init__(self, names: Mapping[str, object], taken: Collection[str]) -> None:
        """Initialize with preferred `names` of objects, and the names `taken`."""
        self.values: dict[str, Any] = {}
        self._taken = taken
        self._wanted = {id(value): name for name, value in names.items() if value is not None}
        self._names: dict[int, str] = {}

    def write_line(self, node: fx.Node) -> str | None:
        """Return the line of a node; None if it has none."""
        if node.op == "placeholder" or node.meta.get(INLINE):
            return None
        if node.op == "output":
            return f"return {self.write_expression(node.args[0])}"
        if node.target is free:
            (freed,) = node.args
            assert isinstance(freed, fx.Node)
            return f"del {get_variable(freed)}"
        is_held = node.users or VARIABLE in node.meta
        return f"{get_variable(node)} = {self.call(node)}" if is_held else self.call(node)

    def call(self, node: fx.Node) -> str:
        """Return the expression that computes a node."""
        if node.target is operator.getitem:
            return f"{self.write_expression(node.args[0])}[{self._write_subscript(node.args[1])}]"
        args = [self.write_expression(arg) for arg in node.args]
        target = self._name(node.target) if node.op == "call_function" else f"{args.pop(0)}.{node.target}"
        return f"{target}({', '.join([*args, *(f'{name}={self.write_expression(arg)}' for name, arg in node.kwargs.items())])})"

    def write_expression(self, value: Any) -> str:
        """Return the expression of an argument."""
        match value:
            case fx.Node():
                return self.call(value) if value.meta.get(INLINE) else get_variable(value)
            case list():
                return f"[{', '.join(map(self.write_expression, value))}]"
            case tuple():
                return f"({''.join(f'{self.write_expression(each)}, ' for each in value)})"
        if value is None or type(value) in (bool, int, str) or (type(value) is float and isfinite(value)):
            return repr(value)
        return self._name(value)

    def _write_subscript(self, value: Any) -> str:
        if isinstance(value, slice):
            return ":".join("" if each is None else self.write_expression(each) for each in (value.start, value.stop, value.step))
        return self.write_expression(value)

    def _name(self, value: Any) -> str:
        if id(value) not in self._names:
            wanted = name = self._wanted.get(id(value)) or _name_of(value)
            number = 2
            while name in self.values or name in self._taken:
                name, number = f"{wanted}_{number}", number + 1
            self.values[name] = value  # held, so that its id stays unique
            self._names[id(value)] = name
        return self._names[id(value)]


def get_variable(node: fx.Node) -> str:
    """Return the variable of `node`; all producers of a tensor share it."""
    name: str = node.meta.get(VARIABLE, node.name)
    return name


def _name_of(value: Any) -> str:
    """Return a name for a target or a constant."""
    value = value.func if isinstance(value, partial) else value
    shown = type(value).__name__
    if isinstance(value, OpOverload | torch.dtype | torch.device | torch.layout | torch.memory_format):
        shown = str(value)
    elif isinstance(value, type | FunctionType | BuiltinFunctionType | MethodType):
        shown = value.__name__
    name = shown.replace(".", "_").replace(":", "_")
    return name if name.isidentifier() and not keyword.iskeyword(name) else "function"
