"""Calls of a step that nothing in it reads: they are made after its forward pass, on tensors that it returns for them.

A planned step runs kernels and no Python. What it appends to a list (``self.outputs.append(loss.detach())``), and what a metric
of torchmetrics accumulates, changes Python objects in each step all the same. If the step does not read them, the captured graph
returns the tensors, and the calls are made with these. A list that the step reads is left to ``capture.frontend.effects``.
"""

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from operator import methodcaller
from typing import Any
from unittest.mock import patch

import torch
from torch import fx, nn

from graphs.errors import TraceError
from planner.capture.frontend.effects import Scratch
from planner.capture.frontend.source_lines import find_current_line, format_location
from planner.capture.guards.names import Scope, build_accessor
from planner.torch_private.capture import (
    ConstantVariable,
    GetAttrVariable,
    ListVariable,
    OutputGraph,
    SymNodeVariable,
    TensorVariable,
    UnspecializedNNModuleVariable,
    UserDefinedObjectVariable,
    get_constant_key,
    get_source_name,
)
from planner.torch_private.core import pytree

_UPDATES = ("update", "forward", "__call__")
_OTHERS = ("compute", "reset", "merge_state")


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A tensor that the graph returns, by its position."""

    index: int


@dataclass(frozen=True, slots=True)
class _Number:
    """The number in a tensor that the graph returns (``loss.item()``), by the tensor's position."""

    index: int


@dataclass(frozen=True, slots=True)
class _Computed:
    """What is computed from such numbers (``round(loss.item(), 3)``): a function and its arguments."""

    function: Callable[..., Any]
    args: tuple[object, ...]


@dataclass(frozen=True, slots=True)
class MetricResult:
    """What a metric returns, before it is known: the result of an earlier call, by its position."""

    index: int


@dataclass(frozen=True, slots=True)
class LaterCall:
    """A call that is made after the forward pass.

    Attributes:
        name: name of the object whose method is called, as Dynamo writes it.
        find: a function that returns it.
        method: name of the method.
        args, kwargs: nested arguments, with stand-ins for tensors and for results of earlier calls.
    """

    name: str
    find: Callable[[Scope, Scope], Any]
    method: str
    args: tuple[object, ...]
    kwargs: dict[str, object]


def make_calls(calls: Sequence[LaterCall], tensors: Sequence[torch.Tensor], local: Scope, scope: Scope) -> None:
    """Make `calls` with the `tensors` that the graph has returned for them."""
    results: list[object] = []

    def fill(leaf: object) -> object:
        match leaf:
            case _Tensor(index):
                return tensors[index]
            case _Number(index):
                return tensors[index].item()
            case _Computed(function, args):
                return function(*map(fill, args))
            case MetricResult(index):
                return results[index]
        return leaf

    for call in calls:
        args, kwargs = pytree.tree_map(fill, (call.args, call.kwargs))
        results.append(getattr(call.find(local, scope), call.method)(*args, **kwargs))


class Collector(Scratch):
    """Base class of objects of front ends that take values which are known after the step.

    Attributes:
        taken: the calls that were taken: method, arguments and options.
    """

    def __init__(self) -> None:
        self.taken: list[tuple[str, tuple[object, ...], dict[str, object]]] = []

    def is_known(self, number: float) -> bool:
        """Return True; False while a step is captured, if the number comes from a tensor of it."""
        del number
        return True

    def take_later(self, method: str, *args: object, **kwargs: object) -> None:
        """Take a call that depends on such values; a captured step takes it after its forward pass."""
        self.taken.append((method, args, kwargs))


@dataclass(slots=True)
class LaterCalls:
    """The calls of one capture that are made after the forward pass.

    Attributes:
        calls: these calls.
        lists: names of the lists that they append to, as Dynamo writes them.
    """

    calls: list[LaterCall] = field(default_factory=list)
    lists: set[str] = field(default_factory=set)
    _output: OutputGraph | None = None
    _recorded: list[tuple[Any, str, Sequence[Any], dict[str, Any]]] = field(default_factory=list)
    _numbers: dict[fx.Node, Any] = field(default_factory=dict)  # the tensor that each call of ``item`` reads

    def record(self, translator: Any, owner: Any, method: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Record a call, and return a stand-in for its result."""
        if translator.output is not self._output:  # a restarted capture begins again
            self._output, self._recorded = translator.output, []
        self._recorded.append((owner, method, args, kwargs))
        return UserDefinedObjectVariable(MetricResult(len(self._recorded) - 1))

    def note_number(self, number: Any, tensor: Any) -> None:
        """Note that a variable of Dynamo's is the number in a tensor."""
        self._numbers[number.as_proxy().node] = tensor

    def is_known(self, variable: Any) -> bool:
        """Return True if a variable of Dynamo's is no number that comes from a tensor of the step."""
        variable = variable.realize()
        waiting = [variable.as_proxy().node] if isinstance(variable, SymNodeVariable) else []
        while waiting:
            if (node := waiting.pop()) in self._numbers:
                return False
            waiting += node.all_input_nodes
        return True

    def end(self, translator: Any, output: OutputGraph) -> None:
        """Make the captured code return the tensors of the calls, as its last result, as the graph ends."""
        recorded = self._recorded if output is self._output else []
        self.calls, self.lists = [], set()
        converter = _Converter(self._numbers)
        convert, tensors = converter.convert, converter.tensors
        for owner, method, args, kwargs in recorded:
            try:
                given = tuple(map(convert, args)), {name: convert(value) for name, value in kwargs.items()}
            except _UnknownError as error:
                raise TraceError(
                    f"{get_source_name(owner.source)}.{method} takes a {error}, which is not known after a planned step"
                ) from error
            name = get_source_name(owner.source)
            self.calls.append(LaterCall(name, build_accessor(name), method, *given))
        for owner in output.side_effects._get_modified_vars():
            if isinstance(owner, ListVariable) and owner.source is not None:
                self._add_list(owner, output, converter)
        if self.calls:
            detached = [tensor.call_method(translator, "detach", [], {}) for tensor in tensors]
            returned = translator.stack[-1].realize()
            translator.stack[-1] = type(returned)([*returned.items, type(returned)(detached)])
            for node in reversed(output.graph.nodes):
                if node in converter.found and not node.users:
                    node.graph.erase_node(node)

    def _add_list(self, owner: Any, output: OutputGraph, converter: "_Converter") -> None:
        """Add the calls that append to a list that existed before the step, if it does nothing else to the list."""
        name, made = get_source_name(owner.source), len(converter.tensors)
        if not name.startswith(("L['self']", "G[")):
            return
        before = len(output.resolve_source_value(owner.source))
        old, new = owner.items[:before], owner.items[before:]
        if [getattr(item.source, "index", None) for item in old] != [*range(before)]:
            return
        try:
            items = list(map(converter.convert, new))
        except _UnknownError:
            del converter.tensors[made:]
            return
        self.lists.add(name)
        self.calls += (LaterCall(name, build_accessor(name), "append", (item,), {}) for item in items)

    def keep_unread(self, run: Callable[[], object], local: Scope, scope: Scope) -> None:
        """Forget the lists that the step reads; `run` executes it on fake tensors."""
        read = {name for name in self.lists if _is_read(name, run, local, scope)}
        self.lists -= read
        self.calls = [call for call in self.calls if call.name not in read]


@contextmanager
def defer_calls() -> Iterator[LaterCalls]:
    """Make Dynamo capture calls of metrics, and appended items of lists, as results of the graph."""
    found = LaterCalls()
    compile_graph = OutputGraph.compile_subgraph

    def compile_with_results(output: Any, translator: Any, *args: Any, **kwargs: Any) -> Any:
        found.end(translator, output)
        return compile_graph(output, translator, *args, **kwargs)

    def wrap_class(kind: Any) -> None:
        get_attribute, call_method, call_function = kind.var_getattr, kind.call_method, kind.call_function

        def find_attribute_or_method(owner: Any, translator: Any, name: str) -> Any:
            if _is_deferred(owner, name):
                return GetAttrVariable(owner, name)
            return get_attribute(owner, translator, name)

        def call_or_record_method(owner: Any, translator: Any, name: str, args: Any, kwargs: Any) -> Any:
            if name == "is_known" and isinstance(owner.value, Collector):
                return ConstantVariable.create(found.is_known(*args))
            if _is_deferred(owner, name):
                return found.record(translator, owner, name, args, kwargs)
            return call_method(owner, translator, name, args, kwargs)

        def call_or_record(owner: Any, translator: Any, args: Any, kwargs: Any) -> Any:
            if _is_deferred(owner, "__call__"):
                return found.record(translator, owner, "__call__", args, kwargs)
            return call_function(owner, translator, args, kwargs)

        stack.enter_context(patch.object(kind, "var_getattr", find_attribute_or_method))
        stack.enter_context(patch.object(kind, "call_method", call_or_record_method))
        stack.enter_context(patch.object(kind, "call_function", call_or_record))

    with ExitStack() as stack:
        for kind in (UnspecializedNNModuleVariable, UserDefinedObjectVariable):
            wrap_class(kind)
        call_of_tensor = TensorVariable.call_method

        def call_and_note(owner: Any, translator: Any, name: str, args: Any, kwargs: Any) -> Any:
            result = call_of_tensor(owner, translator, name, args, kwargs)
            if name == "item" and isinstance(result, SymNodeVariable):
                found.note_number(result, owner)
            return result

        stack.enter_context(patch.object(TensorVariable, "call_method", call_and_note))
        stack.enter_context(patch.object(OutputGraph, "compile_subgraph", compile_with_results))
        yield found


def _is_deferred(owner: Any, name: str) -> bool:
    """Return True if the method `name` of an object is called after the step.

    Raises:
        TraceError: the step needs what a metric has accumulated.
    """
    if isinstance(owner.value, Collector):
        return name in ("take_later", "is_known")
    if not is_metric(owner.value) or owner.source is None:
        return False
    if name in _OTHERS:
        raise TraceError(
            f"{format_location(find_current_line())} calls {name} of a metric, which is updated after a planned step: call it "
            "where the loop goes on, as at the end of an epoch"
        )
    return name in _UPDATES


def is_metric(value: object) -> bool:
    """Return True if `value` is a metric of torchmetrics, or a collection of them."""
    library = sys.modules.get("torchmetrics")
    return library is not None and isinstance(value, library.Metric | library.MetricCollection)


@contextmanager
def skip_metrics(step: nn.Module) -> Iterator[None]:
    """Make the metrics in `step` return 0 and update nothing, and numbers from tensors differ: fake tensors have no values."""
    numbers = count(1)
    with ExitStack() as stack:
        stack.enter_context(patch.object(Collector, "take_later", lambda *_, **__: None))
        for name, kind in (("item", _get_number_type), ("__float__", lambda _: float), ("__int__", lambda _: int)):
            stack.enter_context(patch.object(torch.Tensor, name, lambda tensor, kind=kind: kind(tensor)(next(numbers))))
        for metric in filter(is_metric, step.modules()):
            for name in ("update", "forward"):
                stack.enter_context(patch.object(metric, name, lambda *_, **__: torch.zeros(())))
        yield


def _get_number_type(tensor: torch.Tensor) -> type[float | int]:
    return float if tensor.is_floating_point() else int


class _UnknownError(Exception):
    """Raised for a value that is not known after the step."""


@dataclass(slots=True)
class _Converter:
    """A converter of variables of Dynamo's to their values, with stand-ins for what is known after the step.

    Attributes:
        numbers: the tensors in which numbers are.
        tensors: those that are needed after the step.
        found: the nodes of numbers that are needed after it.
    """

    numbers: Mapping[fx.Node, Any]
    tensors: list[Any] = field(default_factory=list)
    found: set[fx.Node] = field(default_factory=set)

    def convert(self, variable: Any) -> object:
        """Return the value of a variable."""
        variable = variable.realize()
        if variable.is_tensor():
            return _Tensor(self._add(variable))
        if variable.is_python_constant():
            return variable.as_python_constant()
        if isinstance(variable, SymNodeVariable):
            return self._convert_number(variable.as_proxy().node)
        kind, items = variable.python_type(), getattr(variable, "items", None)
        if kind in (list, tuple) and items is not None:
            return kind(map(self.convert, items))
        if kind is dict and items is not None:
            return {get_constant_key(key): self.convert(value) for key, value in items.items()}
        if isinstance(variable, UserDefinedObjectVariable) and (
            variable.source is not None or isinstance(variable.value, MetricResult)
        ):
            return variable.value
        raise _UnknownError(kind.__name__)

    def _convert_number(self, value: Any) -> object:
        """Return the value of a node whose value is a number, or of a constant."""
        if not isinstance(value, fx.Node):
            return value
        self.found.add(value)
        if value in self.numbers:
            return _Number(self._add(self.numbers[value]))
        args = tuple(map(self._convert_number, value.args))
        if value.op == "call_function" and callable(value.target) and not value.kwargs:
            return _Computed(value.target, args)
        if value.op == "call_method" and not value.kwargs:  # of a number, such as __round__
            return _Computed(methodcaller(str(value.target), *args[1:]), args[:1])
        raise _UnknownError("number")

    def _add(self, tensor: Any) -> int:
        self.tensors.append(tensor)
        return len(self.tensors) - 1


class _Spy(list[Any]):
    """A list that notes when it is read."""

    was_read = False


def _note_read(name: str) -> Callable[..., Any]:
    def read(self: _Spy, *args: Any) -> Any:
        self.was_read = True
        return getattr(list, name)(self, *args)

    return read


for _name in ("__len__", "__iter__", "__getitem__", "__contains__", "__reversed__", "__eq__", "__add__", "pop", "index", "copy"):
    setattr(_Spy, _name, _note_read(_name))


def _is_read(name: str, run: Callable[[], object], local: Scope, scope: Scope) -> bool:
    """Return True if a run of the step reads the list of this name, or cannot tell."""
    path = re.fullmatch(r"(?P<owner>.+)(?:\.(?P<attribute>\w+)|\['(?P<key>\w+)'\])", name)
    if path is None:
        return True
    if path["attribute"]:
        owner = build_accessor(path["owner"])(local, scope)
        write = partial(setattr, owner, path["attribute"])
    else:
        write = partial(build_accessor(path["owner"])(local, scope).__setitem__, path["key"])
    before = build_accessor(name)(local, scope)
    spy = _Spy(before)
    write(spy)
    try:
        run()
    except Exception:  # noqa: BLE001  # it cannot run on fake tensors
        return True
    finally:
        write(before)
    return spy.was_read
