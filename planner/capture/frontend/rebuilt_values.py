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
        case private.NestedUserFunctionVariable():
            parts, code = vars(held), held.get_code()
            cells = [] if parts["closure"] is None else parts["closure"].items
            made = {name for name, cell in zip(code.co_freevars, cells, strict=True) if cell.source is None}
            if made.isdisjoint(_list_written(code)):
                defaults = [] if parts["defaults"] is None else parts["defaults"].items
                function = partial(FunctionType, code, held.f_globals, code.co_name)
                return partial(_make_function, function, [*map(build, defaults)], [_find_cell(output, cell) for cell in cells])
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
        case private.UnspecializedNNModuleVariable() | private.UserDefinedObjectVariable() if held.source is not None:
            return partial(_return, held.value)
    raise TraceError(f"what the step makes ({held.python_type().__name__})")


def _list_written(code: CodeType) -> set[str]:
    return {each.argval for each in dis.get_instructions(code) if each.opname == "STORE_DEREF"}


def _find_cell(output: Any, cell: Any) -> Find:
    """Return a function that returns a cell, made again if the step has made it."""
    if get_known_name(cell.source) is not None:
        return build_finder(output, cell)
    return partial(_make_cell, build_finder(output, output.side_effects.load_cell(cell)))


def _make_cell(find: Find, local: Scope, scope: Scope) -> CellType:
    return CellType(find(local, scope))


def _make_function(make: Any, defaults: Sequence[Find], cells: Sequence[Find], local: Scope, scope: Scope) -> FunctionType:
    function: FunctionType = make(*(tuple(find(local, scope) for find in each) for each in (defaults, cells)))
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
