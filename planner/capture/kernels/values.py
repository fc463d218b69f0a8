"""Values as expressions: each is a variable ``_v<number>``, and views of it are part of the expressions that read them."""

import ast
import re
from collections.abc import Callable, Container, Iterable

VALUE = "_v"  # the name of a value's variable begins with it; those of Inductor's do not


class Inline(ast.NodeTransformer):
    """Puts expressions in place of names: `name_of` says of each which, None where it stays."""

    def __init__(self, name_of: Callable[[str], ast.expr | None]) -> None:
        self._name_of = name_of

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """What the name stands for; a name of Python's own stays."""
        found = self._name_of(node.id)
        return node if found is None else found


def items(statements: Iterable[ast.stmt]) -> dict[str, list[str]]:
    """For each variable that is taken apart, the subscripts by which it is."""
    found: dict[str, list[str]] = {}
    for statement in statements:
        match statement:
            case ast.Assign(value=ast.Subscript(value=ast.Name(id=name), slice=index)):
                found.setdefault(name, []).append(f"[{ast.unparse(index)}]")
    return found


def methods_on(expression: ast.expr, variables: Container[str]) -> list[str] | None:
    """Return the methods that are called on one of `variables` or a part of it, one after the other; None where it is none."""
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


def variable_of(number: int) -> ast.Name:
    """The variable of the value with this number."""
    return ast.Name(id=f"{VALUE}{number}")


def number_of(variable: ast.expr) -> int:
    """The number of the value whose variable this is."""
    assert isinstance(variable, ast.Name)
    return int(variable.id.removeprefix(VALUE))


def with_variables(source: str, variable: Callable[[int], str]) -> str:
    """`source` with the variables that `variable` names for the numbers of values."""
    return re.sub(rf"\b{VALUE}(\d+)\b", lambda found: variable(int(found[1])), source)


def numbers(expression: ast.expr) -> list[int]:
    """The values that `expression` names, in the order in which it does."""
    names = (node.id for node in ast.walk(expression) if isinstance(node, ast.Name))
    found = (name.removeprefix(VALUE) for name in dict.fromkeys(names) if name.startswith(VALUE))
    return [int(number) for number in found if number.isdecimal()]
