"""Sizes of a captured step on a smaller batch, without capturing it again: its calls run on tensors without memory.

Capturing a step again takes seconds, and runs the model's Python code. But sizes that are constants of the program, as those of a
mask, are those of the batch that was captured, and which of them have to do with its rows is not known. So each value is kept in
all the shapes that it may have: by the constants as they are, and by each that is a multiple of the rows made smaller. Shapes
that do not go together at an op are dropped there, and then, from the last op to the first, those that no op reads. The largest
that is left counts; where none is left, the captured one. Sizes of a reshape follow from its input: a size that is less belongs
to the one whose strides cover it.

Known weakness: Python code that does something else for few rows is not noticed.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import torch

from planner.capture.lowering.statics import compute_allocated_bytes
from planner.capture.program.numbers import Number
from planner.capture.program.program import Call, Program, Ref, Shared, Statement, read_by
from planner.graphs.ir import Graph, Kind
from planner.graphs.options import extract_eager_program
from planner.memory.reserved import predict_eager_bytes
from planner.settings.counted_memory import CountedMemory
from planner.torch_private.core import OpOverload, disable_current_modes

# Names of arguments of operators.
_SIZES = {"size", "sizes", "shape", "input_size", "input_sizes", "self_size", "N", "n", "repeats", "split_size", "split_sizes"}
_RESHAPES = {torch.ops.aten.reshape.default, torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default}
_MOST_COMBINATIONS = 64  # of what the inputs of an op may be: with more, the captured sizes count
_META = torch.device("meta")


def is_sure_to_fit(
    graph: Graph, program: Program, static: Sequence[torch.Tensor | None], memory: CountedMemory, budget_bytes: int
) -> bool:
    """Return True if eager PyTorch takes a smaller batch within a budget, with the bits of the program."""
    if any(calls.launches for calls in program.calls):  # Inductor's kernels round differently
        return False
    shapes = ((graph.tensors[source.tensor].shape, value) for source, value in zip(program.sources, static, strict=True))
    shares = [value.shape[0] / planned[0] for planned, value in shapes if value is not None and tuple(value.shape) != planned]
    whole_bytes = predict_eager_bytes(graph, memory)
    if graph.static_bytes + min(shares) * (whole_bytes - graph.static_bytes) > budget_bytes:
        return False  # also if all sizes were in proportion to the rows
    return predict_eager_bytes(bound_graph(graph, program, static), memory) <= budget_bytes


def bound_graph(graph: Graph, program: Program, static: Sequence[torch.Tensor | None]) -> Graph:
    """Return the program of a captured step with sizes that suffice for a smaller batch; workspaces stay, nothing is executed.

    Args:
        static: the static tensors, in the order of the program's sources, with the inputs of the smaller batch; None for the
            gradient of the loss.
    """
    graph = extract_eager_program(graph)
    sizes = _Sizes(graph, program)
    with disable_current_modes(), torch.no_grad():
        sizes.run(static)
    tensors = tuple(replace(t, size_bytes=sizes.found.get(t.id, t.size_bytes)) for t in graph.tensors)
    return replace(graph, ops=tuple(replace(op, requests=()) for op in graph.ops), tensors=tensors)


@dataclass(frozen=True, slots=True)
class _Form:
    """A value without memory as it was captured, and as it may be on the smaller batch."""

    whole: Any
    part: Any

    def get_item(self, path: Iterable[int]) -> "_Form":
        """Return the item at a path."""
        whole, part = self.whole, self.part
        for index in path:
            whole, part = whole[index], part[index]
        return _Form(whole, part)


@dataclass(slots=True)
class _Sizes:
    """The sizes of the tensors of a step.

    Attributes:
        found: bytes by tensor, where they are less than captured.
        forms: by tensor, all that it may be.
        rows: those of the batch that was captured, and of the smaller one.
        ways: by statement, its inputs and the shapes that go together; none if they are not known.
    """

    graph: Graph
    program: Program
    found: dict[int, int] = field(default_factory=dict)
    forms: dict[int, list[_Form]] = field(default_factory=dict)
    rows: tuple[int, int] = (1, 1)
    ways: list[tuple[Sequence[int], list[dict[int, torch.Size]]]] = field(default_factory=list)
    _known: dict[str, Any] = field(default_factory=dict)  # results by call: layers repeat them

    def run(self, static: Sequence[torch.Tensor | None]) -> None:
        """Find the sizes by executing the program."""
        for source, value in zip(self.program.sources, static, strict=True):
            whole = part = self._make_captured(source.tensor) if value is None else value.detach().to(_META)
            if source.kind is Kind.INPUT and part.shape != (planned := self.graph.tensors[source.tensor]).shape:
                self.rows, whole = (planned.shape[0], part.shape[0]), self._make_captured(source.tensor)
            self.forms[source.tensor] = [_Form(whole, part)]
        for op in self.graph.ops:
            for statement in self.program.calls[op.id].statements:
                if statement.value is not None:
                    self._execute(statement)
        self._drop_unread()
        for tensor, forms in self.forms.items():
            self._note(tensor, forms)

    def _execute(self, statement: Statement) -> None:
        """Note all that the outputs of a statement may be."""
        read = read_by(statement.value)
        choices = [self.forms[t] for t in read]
        ways = list[dict[int, _Form]]()
        for forms in product(*choices) if math.prod(map(len, choices)) <= _MOST_COMBINATIONS else ():
            known = dict(zip(read, forms, strict=True))
            for made in self._evaluate(statement.value, known):
                way = known | {t: made.get_item(path) for t, path in statement.outputs}
                if all(isinstance(form.part, torch.Tensor) for form in way.values()):
                    ways.append(way)
        for t, _ in statement.outputs:
            known = {way[t].part.shape: way[t] for way in ways}
            self.forms[t] = [*known.values()] or [_Form(self._make_captured(t), self._make_captured(t))]
        self.ways.append((read, [{t: form.part.shape for t, form in way.items()} for way in ways]))

    def _drop_unread(self) -> None:
        """Drop what a tensor cannot be, as a later op does not take it."""
        for read, ways in reversed(self.ways):
            shapes = {t: {form.part.shape for form in self.forms[t]} for t in (ways[0] if ways else ())}
            left = [way for way in ways if all(shape in shapes[t] for t, shape in way.items())]
            for t in read if left else ():
                self.forms[t] = [form for form in self.forms[t] if form.part.shape in {way[t] for way in left}]

    def _evaluate(self, value: Any, known: Mapping[int, _Form]) -> Iterator[_Form]:
        """Yield all that an argument may be, if the tensors that it reads are `known`."""
        match value:
            case Ref(tensor=tensor):
                yield known[tensor]
            case Shared(call=call):
                yield from self._evaluate(call, known)
            case Call():
                yield from self._call(value, known)
            case Number(value=number):
                yield _Form(number, number)
            case torch.device():
                yield _Form(_META, _META)
            case list() | tuple():
                for forms in product(*(list(self._evaluate(each, known)) for each in value)):
                    yield _Form(type(value)(form.whole for form in forms), type(value)(form.part for form in forms))
            case _:
                yield _Form(value, value)

    def _call(self, call: Call, known: Mapping[int, _Form]) -> Iterator[_Form]:
        """Yield the results of a call for all arguments that go together."""
        given = ([*call.args], [*call.kwargs.values()])
        for forms in self._evaluate(given, known):
            whole = self._execute_call(call, *forms.whole)
            for args in self._list_arguments(call.target, forms.whole[0], forms.part[0]):
                part = self._execute_call(call, args, forms.part[1])
                if part is not None and whole is not None:
                    yield _Form(whole, part)

    def _execute_call(self, call: Call, args: Sequence[Any], named: Sequence[Any]) -> Any:
        """Return the result of a call; None if its arguments do not go together, or there is no kernel for shapes."""
        key = f"{call.target} {_describe(args)} {_describe(named)} {[*call.kwargs]}"
        if key not in self._known:
            function = getattr(args[0], call.target) if isinstance(call.target, str) else call.target
            try:
                self._known[key] = function(*args[isinstance(call.target, str) :], **dict(zip(call.kwargs, named, strict=True)))
            except Exception:  # noqa: BLE001
                self._known[key] = None
        return self._known[key]

    def _list_arguments(self, target: object, whole: Sequence[Any], part: Sequence[Any]) -> Iterator[Sequence[Any]]:
        """Yield arguments as they are, and with the number of rows, or any sizes that are multiples of it, made smaller."""
        names = [argument.name for argument in target._schema.arguments] if isinstance(target, OpOverload) else []
        counted = _SIZES | {"end"} if names[:1] in (["end"], ["start"]) else _SIZES  # indices of rows
        captured_rows, rows = self.rows
        place = next((place for place, name in enumerate(names[: len(part)]) if name in counted), None)
        if place is None:
            yield part
            return
        if target in _RESHAPES:
            yield from ([part[0], sizes] for sizes in _list_resized(whole[0].shape, part[0].shape, part[1], self.rows))
            return
        sizes = part[place] if isinstance(part[place], list | tuple) else [part[place]]
        is_multiple = [isinstance(n, int) and n > 0 and n % captured_rows == 0 for n in sizes]
        choices = ((n, n // captured_rows * rows) if more else (n,) for n, more in zip(sizes, is_multiple, strict=True))
        for new in product(*choices):
            yield [*part[:place], new if isinstance(part[place], list | tuple) else new[0], *part[place + 1 :]]

    def _make_captured(self, tensor: int) -> torch.Tensor:
        """Return a value in the captured shape."""
        planned = self.graph.tensors[tensor]
        return torch.empty(planned.shape, dtype=getattr(torch, planned.dtype or "uint8"), device=_META)

    def _note(self, tensor: int, forms: list[_Form]) -> None:
        """Note the bytes of a tensor relative to the captured ones: kernels may allocate more than it needs."""
        planned, most = self.graph.tensors[tensor], max(form.part.numel() for form in forms)
        elements = math.prod(planned.shape)
        if most < elements:
            device = torch.device(self.graph.device)
            self.found[tensor] = compute_allocated_bytes(-(-planned.size_bytes * most // elements), device)


def _list_resized(whole: Sequence[int], part: Sequence[int], sizes: Sequence[int], rows: tuple[int, int]) -> list[list[int]]:
    """Return what the sizes of a reshape of `part` may be, given those of `whole`.

    Where a size of the input is less, rows are its outer or its inner factor, and belong to the size whose strides cover them.
    """
    known = -math.prod(sizes)  # of all but the one that is -1, if there is one
    sizes = [math.prod(whole) // known if size == -1 else size for size in sizes]
    captured_rows, fewer = rows
    found = list[list[int]]()
    for is_outer in (True, False):
        resized = list(sizes)
        for place, (size, less) in enumerate(zip(whole, part, strict=True)):
            low = math.prod(whole[place + 1 :]) * (size // captured_rows if is_outer else 1)
            for m, other in enumerate(sizes if size != less else ()):
                other_low = math.prod(sizes[m + 1 :])
                if other % captured_rows == 0 and other_low <= low and low * captured_rows <= other_low * other:
                    resized[m] = resized[m] // captured_rows * fewer
        if resized not in found:
            found.append(resized)
    return found


def _describe(value: Any) -> str:
    """Return a text that is equal for arguments with the same results."""
    if isinstance(value, torch.Tensor):
        return f"{tuple(value.shape)} {value.stride()} {value.dtype}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_describe, value))}]"
    return repr(value)
