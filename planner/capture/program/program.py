"""The calls that execute the ops of a graph, as data.

A graph describes a training step; its program says how to run it. Arguments of calls are references to tensors, views of them,
and constants. A view is a call itself, repeated wherever it is read, so that only the base holds a storage.

A program was Python source before. As it is data, one writer makes the passes of ``planner.compile``, ``torch.compile``, several
devices, Inductor's kernels and the profiler.
"""

import operator
from collections.abc import Callable, Container, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import groupby
from typing import Any, Protocol, runtime_checkable

import torch

from planner.graphs.ir import TANGENT, Kind

Path = tuple[int, ...]  # the subscripts that pick an item out of a value; none for the value itself


@dataclass(frozen=True, slots=True)
class Ref:
    """A reference to the tensor of the graph with this id."""

    tensor: int


@dataclass(frozen=True, slots=True)
class Call:
    """A target applied to arguments: the call of an op or, as an argument, a view.

    Attributes:
        target: the function; a string names a method of the first argument.
        args, kwargs: references, calls, and lists and tuples of them; anything else is a constant.
    """

    target: Callable[..., Any] | str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Shared:
    """The result of a call that each pass makes once, before its first use."""

    call: Call


Argument = Any  # a reference, a call, a list or tuple of them, or a constant


def iterate_leaves(value: Argument) -> Iterator[Any]:
    """Yield the references and constants in `value`, in order, without targets of calls."""
    match value:
        case Call(args=args, kwargs=kwargs):
            for each in (*args, *kwargs.values()):
                yield from iterate_leaves(each)
        case Shared(call=call):
            yield from iterate_leaves(call)
        case list() | tuple():
            for each in value:
                yield from iterate_leaves(each)
        case _:
            yield value


def read_by(value: Argument) -> list[int]:
    """Return the tensors that `value` reads, each once, in order of appearance."""
    return list(dict.fromkeys(leaf.tensor for leaf in iterate_leaves(value) if isinstance(leaf, Ref)))


def map_leaves(value: Argument, leaf: Callable[[Any], Any]) -> Argument:
    """Return `value` with each reference and constant replaced by ``leaf`` of it."""
    match value:
        case Call(target=target, args=args, kwargs=kwargs):
            given = tuple(map_leaves(each, leaf) for each in args)
            return Call(target, given, {name: map_leaves(each, leaf) for name, each in kwargs.items()})
        case Shared(call=call):
            return Shared(map_leaves(call, leaf))
        case list():
            return [map_leaves(each, leaf) for each in value]
        case tuple():
            return tuple(map_leaves(each, leaf) for each in value)
    return leaf(value)


def renumber(value: Argument, numbers: Mapping[int, int]) -> Argument:
    """Return `value` with tensor ids replaced as in `numbers`; others are unchanged."""
    return map_leaves(value, lambda leaf: Ref(numbers.get(leaf.tensor, leaf.tensor)) if isinstance(leaf, Ref) else leaf)


def format_path(path: Path) -> str:
    """Return `path` as text: ``[0][2]``."""
    return "".join(f"[{index}]" for index in path)


def get_item(value: Argument, path: Path) -> Argument:
    """Return the item of `value` at `path`."""
    for index in path:
        value = Call(operator.getitem, (value, index))
    return value


@dataclass(frozen=True, slots=True)
class Source:
    """The source of a static tensor when the step runs.

    Attributes:
        tensor: its id in the graph.
        kind: PARAMETER and BUFFER are fetched from the model, INPUT from the batch, CONSTANT from
            the program.
        name: qualified name in the model, leaf number in the batch, name in the program, or
            TANGENT for the gradient of the loss.
        parts: names of attributes that lead to the tensor, where the model's is a subclass made of others (quantized weights).
    """

    tensor: int
    kind: Kind
    name: str
    parts: tuple[str, ...] = ()

    @property
    def is_tangent(self) -> bool:
        """True if this is the gradient of the loss."""
        return self.name == TANGENT


Composed = Callable[..., tuple[Any, ...]]  # several operators called as one


@runtime_checkable
class Repeated(Protocol):
    """A composed function that repeats the same work on consecutive parts of its inputs."""

    @property
    def part(self) -> tuple[Composed, tuple[Any, ...]]:
        """The function of a single part, and its arguments as fake tensors."""
        ...

    @property
    def count(self) -> int:
        """The number of parts."""
        ...

    @property
    def alike(self) -> Hashable:
        """A key that is equal for the same operators on parts of the same sizes."""
        ...

    def __call__(self, *given: Any) -> tuple[Any, ...]:
        """Return the outputs of the op."""
        ...


@runtime_checkable
class Comparable(Protocol):
    """A composed function whose outputs may be bit-identical to the program's.

    Kernels are chosen by shapes, not by values: what was bit-identical once always is, if its order of summation is fixed.
    """

    def list_rounding(self, equal: Sequence[bool]) -> list[bool]:
        """Return for each output True if it may be rounded differently.

        Args:
            equal: for each output, True if it was bit-identical in a comparison on the step's device.
        """
        ...

    def __call__(self, *given: Any) -> tuple[Any, ...]:
        """Return the outputs of the op."""
        ...


@dataclass(frozen=True, slots=True)
class Statement:
    """A computed value, and the tensors in its items.

    Attributes:
        value: a call; None for a tensor that only marks that an op is done.
        outputs: for each tensor that it makes, its id and its path in the value.
    """

    value: Call | None
    outputs: tuple[tuple[int, Path], ...] = ()

    def renumber(self, numbers: Mapping[int, int]) -> "Statement":
        """Return the same statement on other tensors."""
        return Statement(renumber(self.value, numbers), tuple((numbers.get(t, t), path) for t, path in self.outputs))


@dataclass(frozen=True, slots=True)
class OpCalls:
    """The calls that execute one op.

    Attributes:
        statements: the statements, in order. An op of eager PyTorch has one; Inductor's allocate outputs, and launch kernels.
        random_state: id of the tensor that holds the generator's state as it was before the first
            execution; None for an op that draws nothing.
        redraw: the call that draws from ``Program.own_generator``; None if no kernel does.
        fakes: the arguments as fake tensors, if a single call runs several operators; else None.
        over: pairs of an output and an input that it may overwrite, with the call that does so.
        launches: True if these are launches of Inductor's kernels.
        again: replacement for the single statement once the forward pass has ended or, if the op writes in place, once it was
            executed; None if it is the same.
        trace: the stack of the user's code that called the op, as text; None if it is not known.
    """

    statements: tuple[Statement, ...]
    random_state: int | None = None
    redraw: Call | None = None
    fakes: tuple[Any, ...] | None = None
    over: tuple[tuple[int, int, Call], ...] = ()
    launches: bool = False
    again: Statement | None = None
    trace: str | None = field(default=None, repr=False, compare=False)

    @property
    def outputs(self) -> tuple[tuple[int, Path], ...]:
        """The tensors that the statements make, with their paths in the values."""
        return tuple(output for statement in self.statements for output in statement.outputs)

    @property
    def call(self) -> Call:
        """The single call of an op of eager PyTorch."""
        (statement,) = self.statements
        assert statement.value is not None
        return statement.value

    @property
    def composed(self) -> Composed | None:
        """The function, if it runs several operators; None for a single one."""
        target = None if self.fakes is None else self.call.target
        assert not isinstance(target, str)
        return target

    @property
    def is_nothing(self) -> bool:
        """True if the op makes no call."""
        return all(statement.value is None for statement in self.statements)

    def list_written_over(self, pairs: Container[tuple[int, int]]) -> tuple[Statement, ...]:
        """Return the statements that write the output of each of `pairs` over the input."""
        instead = {o: call for o, t, call in self.over if (o, t) in pairs}
        calls = (next((instead[t] for t, _ in each.outputs if t in instead), each.value) for each in self.statements)
        return tuple(replace(each, value=call) for each, call in zip(self.statements, calls, strict=True))

    def renumber(self, numbers: Mapping[int, int]) -> "OpCalls":
        """Return the calls of the same op on other tensors, without in-place writes."""
        again = None if self.again is None else self.again.renumber(numbers)
        return replace(self, statements=tuple(each.renumber(numbers) for each in self.statements), over=(), again=again)


def call_of(call: Call, outputs: Sequence[tuple[int, Path]], **more: Any) -> OpCalls:
    """Return the calls of an op with a single `call`; `more` are attributes of ``OpCalls``."""
    return OpCalls((Statement(call, tuple(outputs)),), **more)


@dataclass(frozen=True, slots=True)
class _Lookups:
    """Lookups of static tensors, repeated in each step because parameters and modules may be replaced.

    Attributes:
        modules: for each module but the step itself: the position of its parent module, and its name there.
        runs: runs of tensors of one kind: the kind, and for each tensor the position of its module or leaf (-1 for the gradient
            of the loss), and its name.
        parts: for tensors that are part of another one: their position, and the names of the attributes.
    """

    modules: tuple[tuple[int, str], ...]
    runs: tuple[tuple[Kind, tuple[tuple[int, str], ...]], ...]
    parts: tuple[tuple[int, tuple[str, ...]], ...]

    @staticmethod
    def of(sources: Sequence[Source]) -> "_Lookups":
        """Return the lookups of `sources`."""
        places, modules, tensors = {"": 0}, list[tuple[int, str]](), list[tuple[Kind, int, str]]()
        for source in sources:
            place, name = -1, source.name
            if source.kind in (Kind.PARAMETER, Kind.BUFFER):
                *path, name = name.split(".")
                for i, part in enumerate(path):
                    if (outer := ".".join(path[: i + 1])) not in places:
                        modules.append((places[".".join(path[:i])], part))
                        places[outer] = len(modules)
                place = places[".".join(path)]
            elif source.kind is not Kind.CONSTANT and not source.is_tangent:
                place = int(name)
            tensors.append((source.kind, place, name))
        parts = tuple((i, source.parts) for i, source in enumerate(sources) if source.parts)
        runs = tuple(
            (kind, tuple((place, name) for _, place, name in run)) for kind, run in groupby(tensors, operator.itemgetter(0))
        )
        return _Lookups(tuple(modules), runs, parts)

    def find(self, step: Any, leaves: Sequence[object], constants: Mapping[str, torch.Tensor]) -> list[Any]:
        """Return the static tensors of a step."""
        modules = [step]
        for parent, name in self.modules:
            modules.append(modules[parent]._modules[name])
        found: list[Any] = []
        for kind, run in self.runs:  # in comprehensions: each step waits for this
            if kind is Kind.PARAMETER:
                found += [modules[place]._parameters[name] for place, name in run]
            elif kind is Kind.BUFFER:
                found += [modules[place]._buffers[name] for place, name in run]
            elif kind is Kind.CONSTANT:
                found += [constants[name] for _, name in run]
            else:
                found += [leaves[place] if place >= 0 else None for place, _ in run]
        for position, names in self.parts:
            found[position] = reduce(getattr, names, found[position])
        return found


@dataclass(frozen=True, slots=True)
class Program:
    """The calls of a graph's ops, and the inputs and outputs of the step.

    Attributes:
        calls: one per op.
        sources: one per static tensor that an op or an output reads.
        extras: values of the other returned tensors.
        gradients: for each parameter or input with a gradient, its static tensor id and the gradient's value.
        constants: tensors that are part of the step, by name.
        own_generator: generator of recomputed random ops (``capture.rewrites.reproducible_random``).
        guard: makes the context that the passes run in; None for none.
        aligned: static tensors that kernels for CUDA expect to begin at a multiple of 16 bytes.
        names: names of some targets, for display.
        numbers: how many numbers of Python the calls take, which follow the static tensors (``planner.capture.program.numbers``).
    """

    calls: tuple[OpCalls, ...]
    sources: tuple[Source, ...]
    loss: Argument
    extras: tuple[Argument, ...]
    gradients: tuple[tuple[int, Argument], ...]
    constants: Mapping[str, torch.Tensor] = field(default_factory=dict)
    generator: torch.Generator | None = None
    own_generator: torch.Generator | None = None
    guard: Call | None = None
    aligned: frozenset[int] = frozenset()
    names: Mapping[str, object] = field(default_factory=dict)
    numbers: int = 0
    _lookups: "list[_Lookups]" = field(default_factory=list, init=False, repr=False, compare=False)

    def gather(self, step: Any, leaves: Sequence[object]) -> list[Any]:
        """Return the static tensors in the order of `sources`; None for the gradient of the loss."""
        if not self._lookups:  # which each step repeats; a graph within a step has no batch
            self._lookups.append(_Lookups.of(self.sources))
        return self._lookups[0].find(step, leaves, self.constants)
