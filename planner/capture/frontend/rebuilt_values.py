"""Functions that a step defines, made again outside of its capture: of constants, and of objects that exist before the step."""

import dis
from collections.abc import Callable, Sequence
from functools import partial
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

from graphs.errors import TraceError
from planner.capture.frontend.later_branches import get_known_name
from planner.capture.guards.names import Scope, build_accessor
from planner.torch_private import capture as private

Find = Callable[[Scope, Scope], Any]


def build_finder(output: Any, variable: Any) -> Find:
    """Return a function that returns the present value of a variable; raise TraceError if it is made by the step."""
    if (name := get_known_name(variable.source)) is not None:  # before it is looked at, on which there would be guards
        return build_accessor(name)
    build = partial(build_finder, output)
    match held := variable.realize():
        case private.NestedUserFunctionVariable() if not _writes_closure(code := held.get_code()):
            parts: Any = held
            cells = [] if parts.closure is None else [output.side_effects.load_cell(cell) for cell in parts.closure.items]
            defaults = [] if parts.defaults is None else parts.defaults.items
            function = partial(FunctionType, code, held.f_globals, code.co_name)
            return partial(_make_function, function, [*map(build, defaults)], [*map(build, cells)])
        case private.FunctoolsPartialVariable():
            names, given = [*held.keywords], [held.func, *held.args, *held.keywords.values()]
            return partial(_make_partial, names, [*map(build, given)])
        case private.GetAttrVariable():
            return partial(_get_attribute, build(held.obj), held.name)
        case private.UserMethodVariable():
            return partial(_bind, held.fn, build(held.obj))
        case private.UserFunctionVariable():
            return partial(_return, held.fn)
        case private.ConstantVariable():
            return partial(_return, held.value)
    raise TraceError(f"what the step makes ({held.python_type().__name__})")


def _writes_closure(code: CodeType) -> bool:
    return any(each.opname == "STORE_DEREF" and each.argval in code.co_freevars for each in dis.get_instructions(code))


def _make_function(make: Any, defaults: Sequence[Find], cells: Sequence[Find], local: Scope, scope: Scope) -> FunctionType:
    held = tuple(CellType(find(local, scope)) for find in cells)
    function: FunctionType = make(tuple(find(local, scope) for find in defaults), held)
    return function


def _make_partial(names: Sequence[str], parts: Sequence[Find], local: Scope, scope: Scope) -> Any:
    function, *given = (find(local, scope) for find in parts)
    first = len(given) - len(names)
    return partial(function, *given[:first], **dict(zip(names, given[first:], strict=True)))


def _get_attribute(find: Find, name: str, local: Scope, scope: Scope) -> Any:
    return getattr(find(local, scope), name)


def _bind(function: Any, find: Find, local: Scope, scope: Scope) -> MethodType:
    return MethodType(function, find(local, scope))


def _return(value: object, _: Scope, __: Scope) -> object:
    return value
