"""Expressions of Inductor's code as arguments of calls: references to values, views of these, and constants."""

import ast
import builtins
import operator
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any, NoReturn

import torch

from planner.capture.program.program import Argument, Call, Ref, Shared

_CONSTANTS = (float, int, torch.device)  # calls of them are constants
_OPERATORS: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}
_LATE = ("run",)  # attributes of kernels that tuning replaces


class Expressions:
    """The reader of expressions in the code of a module.

    Attributes:
        bound: values of the module's variables.
        parts: values of the items of unpacked variables, by variable and subscript.
    """

    def __init__(
        self,
        namespace: Mapping[str, object],
        bound: Mapping[str, Argument],
        names: dict[str, object],
        refuse: Callable[[ast.AST], NoReturn],
    ) -> None:
        """Initialize for a module that defines `namespace`; named objects are added to `names`, and `refuse` raises."""
        self.bound: dict[str, Argument] = dict(bound)
        self.parts: dict[tuple[str, object], Ref] = {}
        self._namespace, self._names, self._refuse = namespace, names, refuse

    def call(self, expression: ast.expr) -> Call:
        """Return the call that `expression` represents."""
        found = self.build_value(expression)
        if not isinstance(found, Call):
            self._refuse(expression)
        return found

    def build_value(self, expression: ast.expr) -> Argument:
        """Return the value that `expression` represents."""
        match expression:
            case ast.Constant(value=value):
                return value
            case ast.Name(id=name):
                return self._register_name(name, expression)
            case ast.Tuple(elts=elements):
                return tuple(map(self.build_value, elements))
            case ast.List(elts=elements):
                return list(map(self.build_value, elements))
            case ast.Slice(lower=lower, upper=upper, step=step):
                return slice(*(None if each is None else self.build_value(each) for each in (lower, upper, step)))
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -self.build_value(operand)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
                return _OPERATORS[type(op)](self.build_value(left), self.build_value(right))
            case ast.Subscript(value=ast.Name(id=name), slice=ast.Constant(value=index)) if (name, index) in self.parts:
                return self.parts[name, index]
            case ast.Subscript(value=whole, slice=index):
                return Call(operator.getitem, (self.build_value(whole), self.build_value(index)))
            case ast.Attribute(value=owner, attr=attribute) if not _is_computed(found := self.build_value(owner)):
                return getattr(found, attribute)
            case ast.Call(func=func, args=args, keywords=keywords) if all(keyword.arg is not None for keyword in keywords):
                given = tuple(map(self.build_value, args))
                return self._build_called(
                    func, given, {str(keyword.arg): self.build_value(keyword.value) for keyword in keywords}
                )
        return self._refuse(expression)

    def _build_called(self, func: ast.expr, args: tuple[Argument, ...], kwargs: dict[str, Argument]) -> Argument:
        if isinstance(func, ast.Attribute):
            owner = self.build_value(func.value)
            if _is_computed(owner) or func.attr in _LATE:
                return Call(func.attr, (owner, *args), kwargs)
        target = self.build_value(func)
        return target(*args, **kwargs) if target in _CONSTANTS else Call(target, args, kwargs)

    def _register_name(self, name: str, expression: ast.expr) -> Argument:
        if name in self.bound:
            return self.bound[name]
        if name not in self._namespace:
            if not hasattr(builtins, name):
                self._refuse(expression)
            return getattr(builtins, name)
        value, unique, number = self._namespace[name], name, 2
        while self._names.setdefault(unique, value) is not value:
            unique, number = f"{name}_{number}", number + 1
        return value


def _is_computed(value: Argument) -> bool:
    return isinstance(value, Ref | Call | Shared)


def find_items(statements: Iterable[ast.stmt]) -> dict[str, list[int]]:
    """Return for each variable that is unpacked the subscripts used on it."""
    found: dict[str, list[int]] = {}
    for statement in statements:
        match statement:
            case ast.Assign(value=ast.Subscript(value=ast.Name(id=name), slice=ast.Constant(value=int(index)))):
                found.setdefault(name, []).append(index)
    return found


def find_methods_on(expression: ast.expr, variables: Container[str]) -> list[str] | None:
    """Return the methods called in sequence on one of `variables` or a part of it; None for other expressions."""
    found: list[str] = []
    while True:
        match expression:
            case ast.Call(func=ast.Attribute(value=called, attr=method)):
                found.insert(0, method)
                expression = called
            case ast.Subscript(value=whole):
                expression = whole
            case ast.Name(id=name) if name in variables:
                return found
            case _:
                return None
