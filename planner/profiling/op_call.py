"""One op of a captured step as a function of its input tensors, to execute it alone."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch

from graphs.ir import Op
from planner.capture.lowering.lower import Capture
from planner.capture.lowering.program import Call, Program, load, variable
from planner.capture.rewrites.outputs import KNOWN_NAMESPACES
from planner.torch_private.core import OpOverload

_VARIABLE = re.compile(r"\bt(\d+)\b")
_NAME = re.compile(r"(?<![.\w])[A-Za-z_]\w*")

OpFunction = Callable[..., tuple[torch.Tensor | None, ...]]


@dataclass(frozen=True, slots=True)
class OpCall:
    """The source of one op, with variables numbered in order of appearance, so that equal ops have equal source.

    Attributes:
        op: the op.
        reads: ids of the arguments of the function, in order.
        source: code that defines the function ``run``, which returns the outputs of the op.
        identity: texts that identify the values of the names in the source.
        is_shared: True if equal source and identity mean the same call in other captures too.
    """

    op: Op
    reads: tuple[int, ...]
    source: str
    identity: tuple[str, ...]
    is_shared: bool

    @classmethod
    def of(cls, capture: Capture, op: Op) -> "OpCall | None":
        """Return the call of `op`; None if nothing is called, such as for the unused state of a generator."""
        program = capture.program
        call = program.calls[op.id]
        if isinstance(call, Call) and call.expression == "None":
            return None
        lines = call.bind(op.outputs)
        available = {*op.inputs, *op.mutates, *(source.tensor for source in program.sources)} - set(op.outputs)
        reads = tuple(t for t in dict.fromkeys(map(int, _VARIABLE.findall("\n".join(lines)))) if t in available)
        source = _function(program, lines, reads, op.outputs)
        tokens = [_token(program.namespace[name]) for name in _names(source, program.namespace)]
        return cls(op, reads, source, tuple(text for text, _ in tokens), all(shared for _, shared in tokens))

    def load(self, program: Program) -> OpFunction:
        """Return the function ``run(*tensors)``."""
        return load(program, self.source, f"op {self.op.name} alone")["run"]


def _function(program: Program, lines: Sequence[str], reads: Sequence[int], outputs: Sequence[int]) -> str:
    available = set(reads)
    setup = [line for line in program.setup if available.issuperset(map(int, _VARIABLE.findall(line)))]
    body = [*setup, *lines, f"return ({''.join(f'{variable(t)}, ' for t in outputs)})"]
    if program.guard:
        body = [f"with {program.guard}:", *(f"    {line}" for line in body)]
    text = f"def run({', '.join(map(variable, reads))}):\n" + "".join(f"    {line}\n" for line in body)
    numbers: dict[str, int] = {}
    return _VARIABLE.sub(lambda found: variable(numbers.setdefault(found[1], len(numbers))), text)


def _names(source: str, namespace: Mapping[str, object]) -> list[str]:
    """Return the names of the namespace that the source uses, in order of appearance."""
    return [name for name in dict.fromkeys(_NAME.findall(source)) if name in namespace]


def _token(value: Any) -> tuple[str, bool]:
    """Return a text that identifies `value`, and whether it does so in other captures too."""
    if isinstance(value, OpOverload) and value.namespace not in KNOWN_NAMESPACES:
        return f"{value} {id(value)}", False  # it may be defined again
    if isinstance(value, OpOverload | torch.dtype | torch.device | torch.layout | torch.memory_format | float | complex):
        return str(value), True
    if isinstance(value, torch.Generator):
        return "generator", True
    if isinstance(value, FunctionType) and "<" not in value.__qualname__:
        return f"{value.__module__}.{value.__qualname__}", True
    return f"{type(value).__name__} {id(value)}", False
