"""How to execute the ops of a graph: for each op, the Python source of its call.

A graph says what a training step is; its program says how to run it. Tensors are variables
``t<id>``; views are part of the expressions that read them, so that no variable but the base ever
holds a storage. Targets, generators and other objects are names in the program's namespace.
"""

import linecache
import re
import weakref
from collections.abc import Callable, Collection, Container, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from types import MappingProxyType
from typing import Any, ClassVar, Protocol, runtime_checkable

from graphs.ir import TANGENT, Kind

_LOADED = count(1)


def variable(tensor: int) -> str:
    """The name of a tensor's variable."""
    return f"t{tensor}"


@dataclass(frozen=True, slots=True)
class Source:
    """Where a static tensor comes from when the step runs.

    Attributes:
        tensor: its id in the graph.
        kind: PARAMETER and BUFFER are fetched from the model, INPUT from the batch, CONSTANT from
            the namespace.
        name: qualified name in the model, leaf number in the batch, name in the namespace, or
            TANGENT for the gradient of the loss.
    """

    tensor: int
    kind: Kind
    name: str

    @property
    def is_tangent(self) -> bool:
        """Whether this is the gradient of the loss."""
        return self.name == TANGENT


class Composed(Protocol):
    """Several operators that are called as one."""

    @property
    def fakes(self) -> tuple[Any, ...]:
        """What it is called with, as fake tensors."""
        ...

    def __call__(self, *given: Any) -> tuple[Any, ...]:
        """The outputs of the op."""
        ...


@runtime_checkable
class Repeated(Composed, Protocol):
    """What does the same time and again, on one part of what it is called with after the other."""

    @property
    def part(self) -> "Repeated":
        """What it does with one of the parts, of which ``count`` is 1."""
        ...

    @property
    def count(self) -> int:
        """How many parts there are."""
        ...

    @property
    def alike(self) -> Hashable:
        """Equal for those that run the same operators on tensors of the same sizes."""
        ...


@dataclass(frozen=True, slots=True)
class Call:
    """One op's call.

    Attributes:
        expression: Python source of the call, over variables and namespace names.
        outputs: for each output tensor its id and where it stands in the value of the expression
            ("" the value itself, "[1]" its second item).
        random_state: id of the tensor that holds the generator's state as it was before the first
            execution; None for an op that draws nothing.
        redraw: the expression that draws from the generator ``Program.own_generator``; None where no kernel does.
        composed: what the expression calls, where that runs several operators; None where it is one.
        in_place: the expression that writes the output over the input that ``Op.overwrites`` says; None where it says none.
    """

    expression: str
    outputs: tuple[tuple[int, str], ...]
    random_state: int | None = None
    redraw: str | None = None
    composed: "Composed | None" = None
    in_place: str | None = None

    def bind(self, wanted: Container[int], over: Collection[tuple[int, int]] = ()) -> list[str]:
        """The lines that execute it and bind the outputs in `wanted` to their variables.

        Args:
            over: the output, and the input that it is written over; nothing where it is not.
        """
        if over:
            assert self.in_place is not None
            return self.bind_to(self.in_place, wanted)
        return self.bind_to(self.expression, wanted)

    def bind_to(self, expression: str, wanted: Container[int]) -> list[str]:
        """The lines that bind the outputs in `wanted` to parts of the value of `expression`."""
        bound = [(t, path) for t, path in self.outputs if t in wanted]
        if len(bound) == 1 and bound[0][1] == "":
            return [f"{variable(bound[0][0])} = {expression}"]
        if not bound:
            return [expression]
        return [f"_ = {expression}", *(f"{variable(t)} = _{path}" for t, path in bound), "del _"]


@dataclass(frozen=True, slots=True)
class Launches:
    """One op that allocates its outputs, and launches kernels that write to them.

    Attributes:
        lines: Python source over variables and namespace names, which binds the variables of all outputs.
        made: ids of the output tensors.
        over: ids of outputs and of the inputs that they may be written over, with the line that binds the output then, in place
            of the one that allocates it.
    """

    lines: tuple[str, ...]
    made: tuple[int, ...]
    over: tuple[tuple[int, int, str], ...] = ()
    random_state: ClassVar[None] = None  # what draws is executed once
    composed: ClassVar[None] = None

    @property
    def outputs(self) -> tuple[tuple[int, str], ...]:
        """As in ``Call``: each output is a variable of its own."""
        return tuple((t, "") for t in self.made)

    def bind(self, wanted: Container[int], over: Collection[tuple[int, int]] = ()) -> list[str]:
        """The lines that execute it and bind the outputs in `wanted`; the others are made beside what is there of them.

        Args:
            over: outputs, and the inputs that they are written over.
        """
        others = [t for t in self.made if t not in wanted]
        instead = {f"{variable(o)} = ": line for o, t, line in self.over if (o, t) in over}
        lines = [next((instead[begin] for begin in instead if line.startswith(begin)), line) for line in self.lines]
        for t in others:
            lines = [re.sub(rf"\b{variable(t)}\b", f"_{variable(t)}", line) for line in lines]
        return lines + ([f"del {', '.join(f'_{variable(t)}' for t in others)}"] if others else [])


@dataclass(frozen=True, slots=True)
class Program:
    """The calls of a graph's ops and what goes in and out of the step.

    Attributes:
        calls: one per op.
        sources: one per static tensor that an op or an output reads.
        loss: expression of the loss.
        extras: expressions of the other returned tensors, detached.
        gradients: for each parameter or input that gets one: its static tensor id, the expression.
        namespace: the objects that expressions name.
        generator: namespace name of the random generator.
        own_generator: namespace name of the one that repeated ops draw from (``capture.rewrites.redraw``).
        lock: namespace name of what is held while ops draw.
        setup: lines that come before those of ops.
        guard: expression of the context that kernels are launched in, "" for none.
    """

    calls: tuple[Call | Launches, ...]
    sources: tuple[Source, ...]
    loss: str
    extras: tuple[str, ...]
    gradients: tuple[tuple[int, str], ...]
    namespace: Mapping[str, object]
    generator: str = "generator"
    own_generator: str = "own_generator"
    lock: str = "lock"
    setup: tuple[str, ...] = ()
    guard: str = ""

    def gather(self, step: Any, leaves: Sequence[object]) -> list[Any]:
        """The static tensors in the order of `sources`, None for the gradient of the loss.

        Args:
            step: module whose parameters and buffers the sources name.
            leaves: of the batch.
        """
        # By name each time, for parameters may be replaced; get_parameter would take longer than some steps.
        owners: dict[str, Any] = {"": step}

        def owner(path: str) -> Any:
            if path not in owners:
                parent, _, name = path.rpartition(".")
                owners[path] = owner(parent)._modules[name]
            return owners[path]

        def fetch(source: Source) -> Any:
            match source.kind:
                case Kind.PARAMETER | Kind.BUFFER as kind:
                    path, _, name = source.name.rpartition(".")
                    module = owner(path)
                    return (module._parameters if kind is Kind.PARAMETER else module._buffers)[name]
                case Kind.CONSTANT:
                    return self.namespace[source.name]
            return None if source.is_tangent else leaves[int(source.name)]

        return [fetch(source) for source in self.sources]

    def define(self, name: str, parameters: str, lines: Iterable[str]) -> str:
        """Source of the function `name`, one of whose parameters is a list called ``static``: of the static tensors."""
        static = f"{', '.join(variable(source.tensor) for source in self.sources)}, = static"
        body = [static, *self.setup, *lines]
        if self.guard:
            body = [f"with {self.guard}:", *(f"    {line}" for line in body)]
        return f"def {name}({parameters}):\n" + "".join(f"    {line}\n" for line in body)


class _Life:
    """Ends with the functions whose namespace holds it."""


def load(
    program: Program, source: str, filename: str, names: Mapping[str, object] = MappingProxyType({})
) -> dict[str, Callable[..., Any]]:
    """The functions that `source` defines in a copy of the program's namespace. They do not see each other.

    Args:
        names: that stand for something else, or besides.
        filename: what tracebacks call the source, with a number that no other has; they show the line that failed
            for as long as one of the functions is there.
    """
    filename = f"<{filename}, {next(_LOADED)}>"
    life = _Life()
    namespace = {**program.namespace, **names, "_life": life}
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    weakref.finalize(life, linecache.cache.pop, filename, None)
    defined: dict[str, Callable[..., Any]] = {}
    exec(compile(source, filename, "exec"), namespace, defined)
    return defined


def file_of(function: Callable[..., Any]) -> str:
    """Return what tracebacks call the source of a `function` that ``load`` has defined."""
    return str(function.__code__.co_filename)
