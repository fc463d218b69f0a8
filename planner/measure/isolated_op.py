"""One op of a captured step as a function of its input tensors, to execute it alone."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch

from planner.capture.lowering.lower import Capture
from planner.capture.program.builder import PassBuilder
from planner.capture.program.program import Argument, Call, OpCalls, Program, Ref, Shared, read_by
from planner.capture.rewrites.outputs import KNOWN_NAMESPACES
from planner.graphs.ir import Op
from planner.native.passes import SwitchedPass
from planner.torch_private.core import OpOverload

OpFunction = Callable[..., tuple[torch.Tensor | None, ...]]


@dataclass(frozen=True, slots=True)
class IsolatedOp:
    """The calls of one op.

    Attributes:
        reads: ids of the arguments of the function, in order.
        identity: equal for ops with the same calls, with tensors numbered in order of appearance.
        is_shared: True if the identity has the same meaning in other captures.
    """

    op: Op
    reads: tuple[int, ...]
    calls: OpCalls
    identity: Hashable
    is_shared: bool

    @classmethod
    def of(cls, capture: Capture, op: Op) -> "IsolatedOp | None":
        """Return the call of `op`; None if nothing is called, such as for the unused state of a generator."""
        program = capture.program
        calls = program.calls[op.id]
        if calls.is_nothing:
            return None
        available = {*op.inputs, *op.mutates, *(source.tensor for source in program.sources)} - set(op.outputs)
        read = dict.fromkeys(t for statement in calls.statements for t in read_by(statement.value))
        reads = tuple(t for t in read if t in available)
        identity = _Identity(program)
        found = tuple(identity.identify_statement(s.value, s.outputs) for s in calls.statements)
        return cls(op, reads, calls, (found, *map(identity.number, op.outputs)), identity.is_shared)

    def load(self, program: Program) -> OpFunction:
        """Return the function ``run(*tensors)``, in C++ once that is there, as in steps: the host issues it sooner."""
        builder = PassBuilder(program)
        builder.add_tensor_parameters(self.reads)
        builder.execute(self.calls.statements, self.op.outputs)
        return SwitchedPass(builder.finish(tuple(map(Ref, self.op.outputs)), f"op {self.op.name} alone"))


class _Identity:
    """A numbering of tensors that identifies equal calls.

    Attributes:
        is_shared: True if the identities so far have the same meaning in other captures.
    """

    def __init__(self, program: Program) -> None:
        self.is_shared = True
        self._aligned = program.aligned
        self._numbers: dict[int, int] = {}

    def number(self, tensor: int) -> int:
        """Return the number of a tensor, in order of appearance."""
        return self._numbers.setdefault(tensor, len(self._numbers))

    def identify_statement(self, value: Call | None, outputs: tuple[tuple[int, tuple[int, ...]], ...]) -> Hashable:
        """Return the identity of a statement."""
        return self._identify(value), tuple((self.number(tensor), path) for tensor, path in outputs)

    def _identify(self, value: Argument) -> Hashable:
        match value:
            case Ref(tensor=tensor):
                return "tensor", self.number(tensor), tensor in self._aligned
            case Call(target=target, args=args, kwargs=kwargs):
                named = tuple((name, self._identify(arg)) for name, arg in kwargs.items())
                return "call", self._identify(target), tuple(map(self._identify, args)), named
            case Shared(call=call):
                return "shared", self._identify(call)
            case list() | tuple():
                return type(value).__name__, tuple(map(self._identify, value))
        return self._identify_constant(value)

    def _identify_constant(self, value: Any) -> Hashable:
        if value is None or isinstance(value, bool | int | float | complex | str):
            return type(value).__name__, repr(value)
        if isinstance(value, OpOverload) and value.namespace in KNOWN_NAMESPACES:  # another one may be defined in its place
            return str(value)
        if isinstance(value, torch.dtype | torch.device | torch.layout | torch.memory_format):
            return str(value)
        if isinstance(value, torch.Generator):
            return "generator"
        if isinstance(value, FunctionType) and "<" not in value.__qualname__:
            return f"{value.__module__}.{value.__qualname__}"
        self.is_shared = False
        return type(value).__name__, id(value)
