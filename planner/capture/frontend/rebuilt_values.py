"""Functions that a step defines, made again outside of its capture: of constants, and of objects that exist before the step."""

import dis
from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

from planner.capture.frontend.later_branches import get_known_name
from planner.capture.guards.names import Scope, build_accessor
from planner.graphs.errors import TraceError
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
            if made.isdisjoint(each.argval for each in dis.get_instructions(code) if each.opname == "STORE_DEREF"):
                defaults = [] if parts["defaults"] is None else parts["defaults"].items
                given = [*map(build, defaults), *(_find_cell(output, cell) for cell in cells)]
                return partial(_make, partial(_make_function, code, held.f_globals, len(defaults)), given)
        case private.FunctoolsPartialVariable():
            given = [*map(build, (held.func, *held.args, *held.keywords.values()))]
            return partial(_make, partial(_make_partial, tuple(held.keywords)), given)
        case private.GetAttrVariable():
            return partial(_make, attrgetter(held.name), [build(held.obj)])
        case private.UserMethodVariable():
            return partial(_make, partial(MethodType, held.fn), [build(held.obj)])
        case private.UserFunctionVariable():
            return partial(_make, partial(_return, held.fn), [])
        case private.ConstantVariable():
            return partial(_make, partial(_return, held.value), [])
        case private.UnspecializedNNModuleVariable() | private.UserDefinedObjectVariable() if held.source is not None:
            return partial(_make, partial(_return, held.value), [])
    raise TraceError(f"what the step makes ({held.python_type().__name__})")


def _find_cell(output: Any, cell: Any) -> Find:
    """Return a function that returns a cell, made again if the step has made it."""
    if get_known_name(cell.source) is not None:
        return build_finder(output, cell)
    return partial(_make, CellType, [build_finder(output, output.side_effects.load_cell(cell))])


def _make(make: Callable[..., Any], parts: Sequence[Find], local: Scope, scope: Scope) -> Any:
    """Return what `make` makes of the present values of `parts`."""
    return make(*(find(local, scope) for find in parts))


def _make_function(code: CodeType, scope: dict[str, Any], defaults: int, *given: Any) -> FunctionType:
    return FunctionType(code, scope, code.co_name, given[:defaults], given[defaults:])


def _make_partial(names: Sequence[str], function: Callable[..., Any], *given: Any) -> Any:
    first = len(given) - len(names)
    return partial(function, *given[:first], **dict(zip(names, given[first:], strict=True)))


def _return(value: object) -> object:
    return value
