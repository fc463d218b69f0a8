"""Guards on names: functions, classes and environment variables that captured code uses and that may be replaced.

Dynamo has no guards on functions of PyTorch, on methods, or on ``os.environ``. The names that a step uses are read from the
captured code: what a function loads from its globals, through modules, and what classes have by the names of methods. They
are compared by identity before every step, in some tens of nanoseconds each.
"""

import dis
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from operator import is_
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

from planner.torch_private.capture import InstructionTranslatorBase
from planner.torch_private.patches import wrap

ABSENT = object()
_ATTRIBUTES = {"LOAD_ATTR", "LOAD_METHOD"}
_BETWEEN = {"PUSH_NULL", "EXTENDED_ARG", "CACHE"}
_ENVIRONMENT = {"environ", "getenv"}
_CALLS = ("forward", "__call__", "_call_impl")

Frames = dict[CodeType, dict[str, Any]]
Table = Mapping[str, object]
_Name = tuple[type | Table, str]  # a name, and the class or the globals of the module that has it


@dataclass(frozen=True, slots=True)
class TableNames:
    """Names in one table, such as the functions of a module.

    Attributes:
        owner: name of the module or class, for messages.
        values: their values when the step was captured; ``ABSENT`` for missing ones.
    """

    owner: str
    table: Table
    keys: tuple[str, ...]
    values: tuple[object, ...]

    def describe_change(self) -> str | None:
        """Return a message about the first name whose object was replaced; None if all are the same."""
        now = map(self.table.get, self.keys, repeat(ABSENT))
        if all(map(is_, now, self.values)):
            return None
        key, before = next((k, v) for k, v in zip(self.keys, self.values, strict=True) if self.table.get(k, ABSENT) is not v)
        return f"{self.owner}.{key} was {'added' if before is ABSENT else 'replaced'} since the step was planned"


@dataclass(frozen=True, slots=True)
class Replaceable:
    """The names that must keep their objects for a captured step to be valid.

    Attributes:
        environment: environment variables with their values, None if not set.
    """

    names: tuple[TableNames, ...]
    environment: Mapping[str, str | None]

    def describe_change(self, *, is_unchanged: bool) -> str | None:
        """Return a message about the first change since the step was captured; None if there is none.

        Args:
            is_unchanged: True if the names are known to be unchanged.
        """
        for names in () if is_unchanged else self.names:
            if (changed := names.describe_change()) is not None:
                return changed
        for name, value in self.environment.items():
            if (now := os.environ.get(name)) != value:
                return f"the environment variable {name} was {value!r} when the step was planned, and is {now!r} now"
        return None


@contextmanager
def record_frames() -> Iterator[Frames]:
    """Record the functions that Dynamo captures: their code, and the globals that it sees."""
    found: Frames = {}
    with wrap(InstructionTranslatorBase, "run", partial(_record_frame, found)):
        yield found


def _record_frame(found: Frames, run: Callable[..., object], translator: InstructionTranslatorBase) -> object:
    found[translator.f_code] = translator.f_globals
    return run(translator)


def needs_layout(frames: Frames) -> bool:
    """Return True if captured code asks for the layout of tensors in memory; layers have a ``stride`` of their own."""
    return any("is_contiguous" in code.co_names for code in frames)


def find_replaceable(frames: Frames, step: nn.Module) -> Replaceable:
    """Return the names that the captured `frames` of `step` use."""
    tables: dict[int, tuple[type | Table, dict[str, None]]] = {}
    for owner, key in _iterate_names(frames, step):
        tables.setdefault(id(owner), (owner, {}))[1][key] = None
    return Replaceable(tuple(_group_in_table(owner, tuple(keys)) for owner, keys in tables.values()), _read_environment(frames))


def _group_in_table(owner: type | Table, keys: tuple[str, ...]) -> TableNames:
    if isinstance(owner, type):
        table: Table = vars(owner)
        said = f"{owner.__module__}.{owner.__qualname__}"
    else:
        table, said = owner, str(owner.get("__name__"))
    return TableNames(said, table, keys, tuple(table.get(key, ABSENT) for key in keys))


def _iterate_names(frames: Frames, step: nn.Module) -> Iterator[_Name]:
    """Yield the names that may be replaced."""
    classes = {type(module): set(_CALLS) for module in step.modules()}
    loaded: set[str] = set()
    for code, scope in frames.items():
        for path in _iterate_paths(code):
            yield from _iterate_along(scope, path)
            loaded.update(path[1:])
        if code.co_name.isidentifier() and isinstance(owner := scope.get(code.co_qualname.partition(".")[0]), type):
            classes.setdefault(owner, set()).add(code.co_name)
    for owner, names in classes.items():
        methods = {name for each in owner.__mro__ for name, value in vars(each).items() if _get_code(value) in frames}
        for name in sorted(names | methods):
            yield from _iterate_of_class(owner, name)
    for name in sorted(loaded):
        if callable(getattr(torch.Tensor, name, None)):
            yield from _iterate_of_class(torch.Tensor, name)


def _iterate_paths(code: CodeType) -> Iterator[tuple[str, ...]]:
    """Yield the names that `code` loads from its globals, with the attributes that it reads from them; "" is any other object.

    An attribute that is read by its name, ``hasattr(torch, "compiler")``, counts as well.
    """
    path: tuple[str, ...] = ()
    asks = False
    for instruction in dis.get_instructions(code):
        if instruction.opname in _BETWEEN:
            continue
        if instruction.opname == "LOAD_GLOBAL":
            yield path
            asks = path in (("hasattr",), ("getattr",))
            path = (instruction.argval,)
        elif instruction.opname in _ATTRIBUTES:
            path = (*(path or ("",)), instruction.argval)
        else:
            yield path
            if asks and instruction.opname == "LOAD_CONST" and isinstance(instruction.argval, str):
                yield (*path, instruction.argval)
            path, asks = (), False


def _iterate_along(scope: Table, path: Iterable[str]) -> Iterator[_Name]:
    """Yield the first name along `path`, through modules, that is a function, a class, or missing."""
    table = scope
    for key in path:
        value = table.get(key, ABSENT)
        if isinstance(value, ModuleType):
            if value.__name__.partition(".")[0] in sys.stdlib_module_names:
                return
            table = vars(value)
            continue
        if callable(value) or (value is ABSENT and table is not scope):
            yield table, key
        return


def _iterate_of_class(owner: type, name: str) -> Iterator[_Name]:
    """Yield a method by its `name`, in the class that has it and in those before it in the method resolution order."""
    for each in owner.__mro__[:-1]:
        yield each, name
        if name in vars(each):
            return


def _get_code(value: object) -> object:
    """Return the code of a function, method or property."""
    match value:
        case FunctionType():
            return value.__code__
        case staticmethod() | classmethod():
            return _get_code(value.__func__)
        case property():
            return _get_code(value.fget)
    return None


def _read_environment(frames: Frames) -> dict[str, str | None]:
    """Return the environment variables that may be read, if any code names the environment: all constants that can be names."""
    if all(_ENVIRONMENT.isdisjoint(code.co_names) for code in frames):
        return {}
    constants = {constant for code in frames for constant in code.co_consts if isinstance(constant, str)}
    names = sorted(text for text in constants if text.isidentifier() and (text.isupper() or text in os.environ))
    return {name: os.environ.get(name) for name in names}
