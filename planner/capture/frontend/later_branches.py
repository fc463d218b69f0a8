"""Branches that only choose what a step records: the whole statement is done after the forward pass.

``if loss.item() < self.best: self.best = loss.item()`` needs a number in the step, though no op depends on it. Where both sides
of an ``if`` do nothing but set attributes and items, call what only records, or raise an error, the statement is a later call: it
is compiled as a function of the local names that it reads, and the capture goes on behind it. What it sets is read later from
then on, wherever the step reads it.

Calls that are not known to record only (the user's own functions, whose code may change what the step computes with) leave the
branch to ``guards.branches``; so do assignments to local names, and what the step has changed before.
"""

import ast
import builtins
import linecache
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

from graphs.errors import TraceError
from planner.capture.frontend.python_state import is_followed
from planner.torch_private.capture import GETATTR, AttrSource, CellVariable, GlobalSource, VariableTracker, get_source_name

_STATEMENTS = (ast.If, ast.Assign, ast.AugAssign, ast.Expr, ast.Raise, ast.Pass)
_REFUSED = (ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.Await, ast.Yield, ast.YieldFrom)
_BUILTINS = {print, float, int, str, bool, repr, len, abs, round, min, max, sum, sorted, list, dict, tuple, format}
_CONVERSIONS = {"item", "tolist", "numpy", "float", "double", "detach", "clone", "cpu", "size", "dim", "numel", "format", "join"}
_STATISTICS = {"mean", "sum", "max", "min", "std", "var", "norm", "abs", "round", "any", "all", "argmax", "argmin"}
_OF_VALUES = _CONVERSIONS | _STATISTICS | {"isnan", "isinf", "isfinite"}  # methods of tensors, numbers and texts
_CONTAINERS = (list, dict, set, deque)
_FILLS = {"append", "appendleft", "extend", "add", "setdefault"}  # methods of containers in containers


class _NotRecordingError(Exception):
    """Raised for a statement that may do more than record."""


@dataclass(slots=True)
class RecordingBranch:
    """An ``if`` statement of a frame that is captured.

    Attributes:
        translator: of the frame.
        statement: the statement.
        changed: sources of what it sets or changes.
    """

    translator: Any
    statement: ast.If
    changed: list[Any]

    @classmethod
    def find(cls, translator: Any) -> "RecordingBranch | None":
        """Return the statement whose test decides the next jump, if it only records; None otherwise."""
        statement = _find_statement(translator)
        if statement is None:
            return None
        branch = cls(translator, statement, [])
        try:
            branch._check()
        except _NotRecordingError:
            return None
        return branch

    @property
    def raises(self) -> bool:
        """True if one side raises an error."""
        return any(isinstance(node, ast.Raise) for node in ast.walk(self.statement))

    def build(self) -> tuple[Callable[..., None], list[VariableTracker]]:
        """Return the statement as a function, and the variables of its arguments."""
        names = sorted({node.id for node in ast.walk(self.statement) if isinstance(node, ast.Name) and self._find_local(node.id)})
        arguments = ast.arguments([], [ast.arg(name) for name in names], None, [], [], None, [])
        function = ast.copy_location(ast.FunctionDef("record_later", arguments, [self.statement], []), self.statement)
        module = ast.fix_missing_locations(ast.Module([function], []))
        code = compile(module, self.translator.f_code.co_filename, "exec")
        inner = next(constant for constant in code.co_consts if hasattr(constant, "co_code"))
        return FunctionType(inner, self.translator.f_globals), [self._find_local(name) for name in names]

    def find_end(self) -> int | None:
        """Return the position of the instruction behind the statement; None if it is not known."""
        instructions, otherwise = self.translator.instructions, 0
        for instruction in instructions[self.translator.instruction_pointer :]:
            if not _is_of_test(instruction.positions, self.statement):
                break
            if instruction.target is not None:  # of several, the last jump goes to the other side or the end
                otherwise = self.translator.indexof[instruction.target]
        if not self.statement.orelse:
            return otherwise
        last = instructions[otherwise - 1]
        if last.opname.startswith("JUMP") or last.opname == "RETURN_CONST":
            return otherwise - 1
        is_end = last.opname == "RETURN_VALUE" and instructions[otherwise - 2].opname == "LOAD_CONST"
        return otherwise - 2 if is_end else None

    def _check(self) -> None:
        """Raise unless the statement only records, and note what it changes."""
        stored = {ast.unparse(node) for node in ast.walk(self.statement) if isinstance(getattr(node, "ctx", None), ast.Store)}
        for node in ast.walk(self.statement):
            if isinstance(node, _REFUSED) or (isinstance(node, ast.stmt) and not isinstance(node, _STATEMENTS)):
                raise _NotRecordingError
            if isinstance(node, ast.Compare) and len(node.ops) > 1:
                raise _NotRecordingError
            if isinstance(node, ast.Name | ast.Attribute) and _is_mangled(node.id if isinstance(node, ast.Name) else node.attr):
                raise _NotRecordingError
            match node:
                case ast.Name(ctx=ast.Store()) | ast.Starred():
                    raise _NotRecordingError
                case ast.Attribute(value=owner, attr=name, ctx=ast.Store()):
                    self.changed.append(AttrSource(self._find_source(owner), name))
                    self._check_unchanged(owner, name)
                case ast.Subscript(value=owner, ctx=ast.Store()):
                    self.changed.append(self._find_source(owner))
                case ast.Attribute(value=owner, attr=name):
                    self._check_unchanged(owner, name)
                    if _is_buffer(self._evaluate(node)) and ast.unparse(node) not in stored:  # the step may write it
                        raise _NotRecordingError
                case ast.Call(func=called):
                    self._check_call(called)

    def _check_call(self, called: ast.expr) -> None:
        """Raise unless a call only records."""
        found = self._evaluate(called) if isinstance(called, ast.Name) else None
        if isinstance(called, ast.Name):
            is_error = isinstance(found, type) and issubclass(found, BaseException)
            if is_error or found in _BUILTINS or not is_followed(getattr(found, "__module__", None) or "torch"):
                return
        if not isinstance(called, ast.Attribute):
            raise _NotRecordingError
        named = called.value
        while isinstance(named, ast.Subscript):  # what is changed belongs to a container
            named = named.value
        owner = self._evaluate(named)
        if isinstance(owner, ModuleType):
            if owner.__name__ == "torch" or not is_followed(owner.__name__):
                return
        elif isinstance(owner, VariableTracker) or owner is None or isinstance(owner, str):
            if called.attr in _OF_VALUES:  # of a tensor, a number or a text
                return
        elif isinstance(owner, _CONTAINERS):
            if called.attr in _FILLS or (named is called.value and hasattr(type(owner), called.attr)):
                self.changed.append(self._find_source(named))
                return
        elif not is_followed(getattr(getattr(owner, called.attr, None), "__module__", None) or type(owner).__module__):
            return
        raise _NotRecordingError

    def _check_unchanged(self, owner: ast.expr, name: str) -> None:
        """Raise if the step has set an attribute before: the statement would read the value before the step."""
        effects, value = self.translator.output.side_effects, self._evaluate(owner)
        if value is not None and value in effects and effects.has_pending_mutation_of_attr(effects[value], name):
            raise _NotRecordingError

    def _evaluate(self, node: ast.expr) -> Any:
        """Return the object that an expression names, or its variable if it is known while the step runs; None if unknown."""
        match node:
            case ast.Name(id=name):
                if (variable := self._find_local(name)) is None:
                    return self.translator.f_globals.get(name, getattr(builtins, name, None))
                return vars(variable).get("value", variable)
            case ast.Attribute(value=owner, attr=name):
                found = self._evaluate(owner)
                return None if found is None or isinstance(found, VariableTracker) else getattr(found, name, None)
            case ast.Constant(value=str(text)):
                return text
        return None

    def _find_source(self, node: ast.expr) -> Any:
        """Return the source of the object that an expression names; raise if it has none that lasts."""
        match node:
            case ast.Name(id=name) if (variable := self._find_local(name)) is not None:
                source = variable.source
            case ast.Name(id=name):
                source = self._find_global_source(name)
            case ast.Attribute(value=ast.Name(id=name) as owner, attr=attribute) if self._find_local(name) is not None:
                source = AttrSource(self._find_source(owner), attribute)
            case ast.Attribute(value=owner, attr=attribute):
                base: Any = self._find_variable(owner).source
                source = AttrSource(base, attribute)
            case _:
                source = None
        if source is None:
            raise _NotRecordingError
        return source

    def _find_global_source(self, name: str) -> Any:
        if self.translator.output.global_scope is self.translator.f_globals:
            return GlobalSource(name)
        _, _, source = self.translator.get_globals_source_and_value(name)
        return source

    def _find_variable(self, node: ast.expr) -> VariableTracker:
        """Return the variable of ``a.b.c``, where `a` is a local name."""
        match node:
            case ast.Name(id=name) if isinstance(variable := self._find_local(name), VariableTracker):
                return variable
            case ast.Attribute(value=owner, attr=name):
                found: VariableTracker = getattr(self._find_variable(owner), GETATTR)(self.translator, name).realize()
                return found
        raise _NotRecordingError

    def _find_local(self, name: str) -> Any:
        """Return the variable of a local name, or of one of an enclosing function; None if it is global."""
        variable = self.translator.symbolic_locals.get(name)
        if variable is None:
            return None
        variable = variable.realize()
        if isinstance(variable, CellVariable):
            variable = self.translator.output.side_effects.load_cell(variable).realize()
        return variable


def record_branch(values: Any, translator: Any) -> bool:
    """Record the statement whose test decides the next jump as a later call, and go on behind it; return False if it does more.

    Args:
        values: the later values of the capture.

    Raises:
        TraceError: the capture has to begin again.
    """
    branch = RecordingBranch.find(translator)
    if branch is None or (translator.stack[-1].realize().is_tensor() and branch.raises):
        return False  # an error on a tensor is an assertion, which is checked in the step
    end = branch.find_end()
    if end is None or not values.may_change(branch.changed):
        return False
    function, arguments = branch.build()
    try:
        values.record(translator, function, arguments)
    except TraceError:  # what it reads is not known after the step
        return False
    known, changed = translator.output.variable_tracker_cache, tuple(map(get_source_name, branch.changed))
    for source in [source for source in known if get_source_name(source).startswith(changed)]:
        del known[source]  # read again from here on
    translator.pop()
    translator.instruction_pointer = end
    return True


def _find_statement(translator: Any) -> ast.If | None:
    position = translator.instruction_pointer
    instruction = translator.instructions[position]
    text = "".join(linecache.getlines(translator.f_code.co_filename))
    if not instruction.opname.startswith("POP_JUMP") or not text:
        return None
    return next((node for node in _list_branches(text) if _is_of_test(instruction.positions, node)), None)


@lru_cache(maxsize=8)
def _list_branches(text: str) -> tuple[ast.If, ...]:
    return tuple(_iterate_branches(text))


def _iterate_branches(text: str) -> Iterator[ast.If]:
    try:
        yield from (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.If))
    except SyntaxError:  # as in a notebook's cell with magic commands
        return


def _is_of_test(positions: Any, statement: ast.If) -> bool:
    """Return True if an instruction belongs to the test of a statement, or, as some of its jumps, to the statement itself."""
    if positions is None or positions.lineno is None or positions.col_offset is None:
        return False
    found = (positions.lineno, positions.col_offset), (positions.end_lineno, positions.end_col_offset)
    test, whole = _locate(statement.test), _locate(statement)
    return found == whole or (test[0] <= found[0] and found[1] <= test[1])


def _locate(node: ast.expr | ast.stmt) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return where the code of a node begins and ends: lines and columns."""
    return (node.lineno, node.col_offset), (node.end_lineno or 0, node.end_col_offset or 0)


def _is_buffer(value: object) -> bool:
    return isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter)


def _is_mangled(name: str) -> bool:
    return name.startswith("__") and not name.endswith("__")
