"""Branches that only choose what a step records: the whole statement is done after the forward pass.

``if loss.item() < self.best: self.best = loss.item()`` needs a number in the step, though no op depends on it. Where both sides
of an ``if`` do nothing but set attributes, items, ``nonlocal`` and ``global`` names, call what only records, or raise an error,
the statement is a later call: it is compiled as a function of the local names that it reads, and the capture goes on behind it.
What it sets is read later from then on, wherever the step reads it. So is a ``try`` statement that looks up what is only known
then, as in ``try: self.log[name].append(value)``, ``except KeyError: self.log[name] = [value]``.

The user's own functions and methods are read in turn, with what their parameters and local names stand for. Code that may do
more than record, or cannot be read, leaves the branch to ``guards.branches``; so do assignments to the step's local names, and
what the step has changed before.
"""

import ast
import builtins
import inspect
import linecache
import re
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import lru_cache
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from planner.capture.frontend.python_state import is_followed, is_own
from planner.capture.guards.names import build_accessor
from planner.graphs.errors import TraceError
from planner.torch_private.capture import (
    GETATTR,
    AttrSource,
    CellVariable,
    ClosureSource,
    GetItemSource,
    GlobalSource,
    NestedUserFunctionVariable,
    UserFunctionVariable,
    VariableTracker,
    get_source_name,
)

_STATEMENTS = (ast.If, ast.Try, ast.With, ast.Assign, ast.AugAssign, ast.Expr, ast.Raise, ast.Pass)
_IN_FUNCTIONS = (*_STATEMENTS, ast.Return, ast.For, ast.AnnAssign, ast.Continue, ast.Break, ast.Nonlocal, ast.Global)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_REFUSED = (ast.Lambda, ast.Await, ast.Yield, ast.YieldFrom, ast.NamedExpr, ast.Starred)
_NEW = (ast.Dict, ast.List, ast.Set, ast.JoinedStr, ast.BinOp, *_COMPREHENSIONS)  # expressions that make an object
_BUILTINS = {print, float, int, str, bool, repr, len, abs, round, min, max, sum, sorted, list, dict, tuple, format}
_CONVERSIONS = {"item", "tolist", "numpy", "float", "double", "detach", "clone", "cpu", "size", "dim", "numel", "format", "join"}
_STATISTICS = {"mean", "sum", "max", "min", "std", "var", "norm", "abs", "round", "any", "all", "argmax", "argmin"}
_OF_VALUES = _CONVERSIONS | _STATISTICS | {"isnan", "isinf", "isfinite"}  # methods of tensors, numbers and texts
_CONTAINERS = (list, dict, set, deque)
_FILLS = {"append", "appendleft", "extend", "add", "setdefault"}  # methods of containers in containers


class _NotRecordingError(Exception):
    """Raised for a statement that may do more than record."""


@dataclass(frozen=True, slots=True)
class _Function:
    """A function of the user's that a statement calls.

    Attributes:
        scope: its global names.
        names: its parameters and local names, with the expression that each stands for, and the function that this is of (None
            for the step itself); None if it is not known.
        cells: of the names of enclosing functions, or their variables.
        named: the expression that names the function, and the function that calls it.
    """

    body: list[ast.stmt]
    scope: dict[str, Any]
    names: dict[str, tuple[ast.expr, "_Function | None"] | None]
    cells: dict[str, CellType | CellVariable]
    named: tuple[ast.expr, "_Function | None"]

    @classmethod
    def of(cls, function: FunctionType, owner: ast.expr | None, call: ast.Call, caller: "_Function | None") -> "_Function":
        """Return `function` as `caller` calls it, as a method of `owner` if that is given; raise if its code is not known."""
        definition = _find_definition(function)
        if definition is None:
            raise _NotRecordingError
        given = definition.args
        given_names = [arg.arg for arg in (*given.posonlyargs, *given.args)]
        values = [*([] if owner is None else [owner]), *call.args]
        stored = _list_stored(definition)
        others = [arg.arg for arg in (*given.kwonlyargs, given.vararg, given.kwarg) if arg is not None]
        every = (*given_names, *others, *stored, *function.__code__.co_freevars)
        cells: dict[str, CellType | CellVariable] = dict(
            zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        )
        found = cls(definition.body, function.__globals__, dict.fromkeys(every), cells, (call.func, caller))
        passed = [*zip(given_names, values, strict=False), *((each.arg, each.value) for each in call.keywords if each.arg)]
        found.names.update((name, (value, caller)) for name, value in passed if name in every and name not in stored)
        assigned = _list_assigned(definition)
        outer = {name for each in ast.walk(definition) if isinstance(each, ast.Nonlocal | ast.Global) for name in each.names}
        for name in {*assigned} - {*given_names} - outer:
            if stored.count(name) == 1:
                found.names[name] = assigned[name][0], found
        counted = [each.target for each in ast.walk(definition) if isinstance(each, ast.AugAssign)]
        for name in {target.id for target in counted if isinstance(target, ast.Name)} - outer:
            if name in given_names or not all(isinstance(value, ast.Constant) for value in assigned.get(name, [definition])):
                raise _NotRecordingError  # += may change a container that has other names
        return found


@dataclass(slots=True)
class RecordingBranch:
    """An ``if`` or ``try`` statement, or ``a.b = c if d else e``, of a frame that is captured.

    Attributes:
        changed: sources of what it sets or changes.
        cells: the variables of names of enclosing functions that it sets.
        reading: the functions that are read at present.
    """

    translator: Any
    statement: ast.If | ast.Try | ast.Assign
    changed: list[Any] = field(default_factory=list)
    cells: list[CellVariable] = field(default_factory=list)
    reading: list[FunctionType] = field(default_factory=list)

    @classmethod
    def find(cls, translator: Any, statement: ast.If | ast.Try | ast.Assign | None) -> "RecordingBranch | None":
        """Return the statement if it only records; None otherwise."""
        if statement is None:
            return None
        branch = cls(translator, statement)
        try:
            branch._follow([statement])
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
        cells = {name: cell for name in names if (cell := self.translator.symbolic_locals[name]) in self.cells}
        stored = {*_list_stored(self.statement)} - {*cells}
        declared = [ast.Global([*stored])] if stored else []
        body = [*declared, _ReadCells(cells).visit(deepcopy(self.statement))]
        function = ast.copy_location(ast.FunctionDef("record_later", arguments, body, []), self.statement)
        module = ast.fix_missing_locations(ast.Module([function], []))
        code = compile(module, self.translator.f_code.co_filename, "exec")
        inner = next(constant for constant in code.co_consts if hasattr(constant, "co_code"))
        return FunctionType(inner, self.translator.f_globals), [cells.get(name) or self._find_local(name) for name in names]

    def read_again(self) -> None:
        """Read what the statement sets anew from here on."""
        output, changed = self.translator.output, tuple(map(get_source_name, self.changed))
        for source in [each for each in output.variable_tracker_cache if get_source_name(each).startswith(changed)]:
            del output.variable_tracker_cache[source]
        for cell in self.cells:
            assert cell.source is not None
            source = AttrSource(cell.source, "cell_contents")
            cell.pre_existing_contents = VariableTracker.build(self.translator, self._read_source(source), source)

    def find_end(self) -> int | None:
        """Return the position of the instruction behind the statement; None if it is not known."""
        statement, instructions = self.statement, self.translator.instructions
        if isinstance(statement, ast.Assign):
            passed = self._find_passed(statement)
            returning = {"RETURN_VALUE": 2, "RETURN_CONST": 1}  # has the positions of the last statement, if the code has none
            return passed - returning.get(instructions[passed - 1].opname, 0)
        otherwise = (
            self._find_otherwise(statement)
            if isinstance(statement, ast.If)
            else self._find_passed((statement.orelse or statement.body)[-1])
        )
        if isinstance(statement, ast.If) and not statement.orelse:
            return otherwise
        last = instructions[otherwise - 1]
        if last.opname.startswith("JUMP") or last.opname == "RETURN_CONST":
            return otherwise - 1
        is_end = last.opname == "RETURN_VALUE" and instructions[otherwise - 2].opname == "LOAD_CONST"
        return otherwise - 2 if is_end else None

    def _find_otherwise(self, statement: ast.If) -> int:
        """Return the position of the first instruction of the other side, or behind the statement if it has none."""
        otherwise = 0
        for instruction in self.translator.instructions[self.translator.instruction_pointer :]:
            if not _is_in(instruction.positions, statement.test) and _locate_code(instruction.positions) != _locate(statement):
                break
            if instruction.target is not None:  # of several, the last jump goes to the other side or the end
                otherwise = self.translator.indexof[instruction.target]
        return otherwise

    def _find_passed(self, last: ast.stmt) -> int:
        """Return the position behind the instructions of a statement, such as the last that runs if there is no exception."""
        return max(i for i, each in enumerate(self.translator.instructions) if _is_in(each.positions, last)) + 1

    def _follow(self, statements: Sequence[ast.stmt], within: _Function | None = None) -> None:
        """Raise unless the statements only record, and note what they change; `within` as in ``_Function.names``."""
        nodes = [node for statement in statements for node in ast.walk(statement)]
        stored = {ast.unparse(node) for node in nodes if isinstance(getattr(node, "ctx", None), ast.Store)}
        allowed, refused = (_STATEMENTS, (*_REFUSED, *_COMPREHENSIONS)) if within is None else (_IN_FUNCTIONS, _REFUSED)
        for node in nodes:
            if isinstance(node, refused) or (isinstance(node, ast.stmt) and not isinstance(node, allowed)):
                raise _NotRecordingError
            if isinstance(node, ast.Compare) and len(node.ops) > 1 and within is None:
                raise _NotRecordingError
            if isinstance(node, ast.Name | ast.Attribute) and _is_mangled(node.id if isinstance(node, ast.Name) else node.attr):
                raise _NotRecordingError
            match node:
                case ast.Name(id=name, ctx=ast.Store()) if within is None:
                    self._note_outer([name], within)
                case ast.Nonlocal(names=names) | ast.Global(names=names):
                    self._note_outer(names, within)
                case ast.Attribute(value=owner, attr=name, ctx=ast.Store()):
                    self.changed.append(AttrSource(self._find_source(owner, within), name))
                    self._check_unchanged(owner, name, within)
                case ast.Subscript(value=owner, ctx=ast.Store()):
                    self._note_changed(owner, within)
                case ast.Attribute(value=owner, attr=name):
                    self._check_unchanged(owner, name, within)
                    if _is_buffer(self._evaluate(node, within)) and ast.unparse(node) not in stored:  # the step may write it
                        raise _NotRecordingError
                case ast.Call():
                    self._follow_call(node, within)
                case ast.withitem(context_expr=context, optional_vars=name):  # of a library, such as a lock
                    entered = None if isinstance(context, ast.Call) else type(self._evaluate(context, within))
                    if name is not None or (entered is not None and is_followed(entered.__module__)):
                        raise _NotRecordingError

    def _note_outer(self, names: Sequence[str], within: _Function | None) -> None:
        """Note that names of enclosing functions, or global ones, are set; raise for others, and for what the step has set."""
        translator, code = self.translator, self.translator.f_code
        known = translator.symbolic_locals if within is None else within.cells
        for name in names:
            cell = known.get(name)
            if isinstance(cell, CellType) and within is not None:
                cell = self._find_cell(name, cell, within)
            is_local = within is None and name in (*code.co_varnames, *code.co_cellvars)
            is_foreign = within is not None and within.scope is not translator.f_globals
            if isinstance(cell, CellVariable) and cell.source is not None:
                if translator.output.side_effects.has_pending_mutation_of_attr(cell, "cell_contents"):
                    raise _NotRecordingError
                self.changed.append(AttrSource(cell.source, "cell_contents"))
                self.cells.append(cell)
            elif cell is None and not (is_local or is_foreign or name in translator.symbolic_globals):
                self.changed.append(self._find_global_source(name))
            else:
                raise _NotRecordingError
            if isinstance(self._read_source(self.changed[-1]), (*_CONTAINERS, torch.Tensor)):  # += would change it
                raise _NotRecordingError

    def _read_source(self, source: Any) -> Any:
        """Return the present value of what has a source."""
        output = self.translator.output
        return build_accessor(get_source_name(source))(output.local_scope, output.global_scope)

    def _find_cell(self, name: str, cell: CellType, within: _Function) -> CellVariable:
        """Return the variable of a cell of a function that existed before the step."""
        effects, (node, caller) = self.translator.output.side_effects, within.named
        if cell not in effects:
            if isinstance(self._evaluate(node, caller), MethodType):
                raise _NotRecordingError
            place = GetItemSource(ClosureSource(self._find_source(node, caller)), [*within.cells].index(name))
            value = VariableTracker.build(self.translator, cell.cell_contents, AttrSource(place, "cell_contents"))
            effects.track_cell_existing(place, cell, value)
        found: CellVariable = effects[cell]
        return found

    def _follow_call(self, call: ast.Call, within: _Function | None) -> None:
        """Raise unless a call only records."""
        found, owner = self._evaluate(call.func, within), None
        if isinstance(call.func, ast.Name):
            is_known = self._is_known(found)
        else:
            is_known = isinstance(call.func, ast.Attribute) and self._follow_known_call(call.func, within)
            owner = call.func.value if isinstance(call.func, ast.Attribute) and isinstance(found, MethodType) else None
        if is_known:
            given = [self._find_whole(arg, within) for arg in (*call.args, *(each.value for each in call.keywords))]
            self.changed += [self._find_source(*arg) for arg in given if isinstance(self._evaluate(*arg), _CONTAINERS)]
            return
        outer: tuple[str, ...] = ()
        if isinstance(found, NestedUserFunctionVariable) and (code := found.get_code()) in self.translator.f_code.co_consts:
            outer = code.co_freevars
            found = FunctionType(code, found.f_globals, closure=tuple(map(CellType, outer)))
        function = inspect.unwrap(getattr(found, "__func__", found), stop=_is_own) if callable(found) else None
        is_of_class = isinstance(getattr(found, "__self__", None), type)
        if not isinstance(function, FunctionType) or not _is_own(function) or is_of_class or function in self.reading:
            raise _NotRecordingError
        called = _Function.of(function, owner, call, within)
        called.names.update((name, (ast.Name(name, ast.Load()), None)) for name in outer)
        called.cells.update((name, self.translator.symbolic_locals[name]) for name in outer)
        self.reading.append(function)
        self._follow(called.body, called)
        self.reading.pop()

    def _is_known(self, found: Any) -> bool:
        """Return True if a function only records, and may change the containers that it gets."""
        is_error = isinstance(found, type) and issubclass(found, BaseException)
        if is_error or getattr(found, "__module__", None) == "builtins":
            return is_error or found in _BUILTINS
        return not is_followed(getattr(found, "__module__", None) or "torch")

    def _follow_known_call(self, called: ast.Attribute, within: _Function | None) -> bool:
        """Return True if a method only records: of a library, of a tensor or a text, or of a container, which it changes."""
        named, name = self._find_whole(called.value, within), called.attr
        if isinstance(named[0], _NEW):
            return True
        owner = self._evaluate(*named)
        if isinstance(owner, ModuleType):
            return owner.__name__ == "torch" or not is_followed(owner.__name__)
        if isinstance(owner, VariableTracker) or owner is None or isinstance(owner, str):
            return name in _OF_VALUES
        if isinstance(owner, _CONTAINERS):
            is_part = named != self._resolve(called.value, within)
            if name not in _FILLS and (is_part or not hasattr(type(owner), name)):
                return False
            self.changed.append(self._find_source(*named))
            return True
        return not is_followed(getattr(getattr(owner, name, None), "__module__", None) or type(owner).__module__)

    def _check_unchanged(self, owner: ast.expr, name: str, within: _Function | None) -> None:
        """Raise if the step has set an attribute before: the statement would read the value before the step."""
        effects, value = self.translator.output.side_effects, self._evaluate(owner, within)
        if value is not None and value in effects and effects.has_pending_mutation_of_attr(effects[value], name):
            raise _NotRecordingError

    def _note_changed(self, container: ast.expr, within: _Function | None) -> None:
        """Note that a container is changed, unless the statement has made it."""
        node, within = self._find_whole(container, within)
        if not isinstance(node, _NEW):
            self.changed.append(self._find_source(node, within))

    def _find_whole(self, node: ast.expr, within: _Function | None) -> tuple[ast.expr, _Function | None]:
        """Return the container that an expression takes items out of, at any depth, or what it stands for."""
        node, within = self._resolve(node, within)
        while (container := _find_container(node)) is not None:
            node, within = self._resolve(container, within)
        return node, within

    def _resolve(self, node: ast.expr, within: _Function | None) -> tuple[ast.expr, _Function | None]:
        """Return the expression that a local name of a function stands for, and the function that this is of."""
        while within is not None and isinstance(node, ast.Name) and (known := within.names.get(node.id)) is not None:
            node, within = known
        return node, within

    def _evaluate(self, node: ast.expr, within: _Function | None) -> Any:
        """Return the object that an expression names, or its variable if it is known while the step runs; None if unknown."""
        node, within = self._resolve(node, within)
        match node:
            case ast.Name(id=name) if within is not None:
                return None if name in within.names else within.scope.get(name, getattr(builtins, name, None))
            case ast.Name(id=name):
                if (variable := self._find_local(name)) is None:
                    return self.translator.f_globals.get(name, getattr(builtins, name, None))
                found = vars(variable).get("fn") if type(variable) is UserFunctionVariable else None
                return found or vars(variable).get("value", self._get_container(variable))
            case ast.Attribute(value=owner, attr=name):
                found = self._evaluate(owner, within)
                return None if found is None or isinstance(found, VariableTracker) else getattr(found, name, None)
            case ast.Constant(value=str(text)):
                return text
        return None

    def _get_container(self, variable: VariableTracker) -> Any:
        """Return the container that a variable of the step is, as one of an enclosing function; else the variable."""
        if variable.is_tensor() or get_known_name(variable.source) is None:
            return variable
        found = self._read_source(variable.source)
        return found if isinstance(found, _CONTAINERS) else variable

    def _find_source(self, node: ast.expr, within: _Function | None) -> Any:
        """Return the source of the object that an expression names; raise if it has none that lasts."""
        node, within = self._resolve(node, within)
        match node:
            case ast.Name(id=name) if self._is_global(name, within):
                source = self._find_global_source(name)
            case ast.Name():
                source = self._find_variable(node, within).source
            case ast.Attribute(value=owner, attr=attribute):
                base: Any = self._find_variable(owner, within).source
                source = None if base is None else AttrSource(base, attribute)
            case _:
                source = None
        if source is None:
            raise _NotRecordingError
        return source

    def _is_global(self, name: str, within: _Function | None) -> bool:
        """Return True if a name is one of the globals of the step's own module."""
        if within is None:
            return self._find_local(name) is None
        return name not in within.names and within.scope is self.translator.f_globals

    def _find_global_source(self, name: str) -> Any:
        if self.translator.output.global_scope is self.translator.f_globals:
            return GlobalSource(name)
        _, _, source = self.translator.get_globals_source_and_value(name)
        return source

    def _find_variable(self, node: ast.expr, within: _Function | None) -> VariableTracker:
        """Return the variable of ``a.b.c``, where `a` is a local or a global name."""
        node, within = self._resolve(node, within)
        match node:
            case ast.Name(id=name) if self._is_global(name, within) and name in self.translator.f_globals:
                value, source = self.translator.f_globals[name], self._find_global_source(name)
                built: VariableTracker = VariableTracker.build(self.translator, value, source).realize()
                return built
            case ast.Name(id=name) if within is None and isinstance(variable := self._find_local(name), VariableTracker):
                return variable
            case ast.Attribute(value=owner, attr=name):
                found: VariableTracker = getattr(self._find_variable(owner, within), GETATTR)(self.translator, name).realize()
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


def get_known_name(source: Any) -> str | None:
    """Return the name of the place that a variable comes from, as Dynamo writes it; None if it has none that lasts."""
    name = get_source_name(source)
    return name if re.match(r"(\w+\()*(L\['self'\]|G\[)", name) else None  # dict(type(L['self']).__dict__)['forward'].__closure__


def record_test(values: Any, translator: Any) -> bool:
    """Record the statement whose test decides the next jump (``_record``); its value is on the stack."""
    branch = RecordingBranch.find(translator, _find_tested(translator))
    if branch is None or (translator.stack[-1].realize().is_tensor() and branch.raises):
        return False  # an error on a tensor is an assertion, which is checked in the step
    recorded = _record(values, translator, branch)
    if recorded:
        translator.pop()
    return recorded


def record_try(values: Any, translator: Any) -> bool:
    """Record the ``try`` statement that the next instruction begins (``_record``)."""
    positions = translator.instructions[translator.instruction_pointer].positions
    tries = [node for node in _list_statements(translator) if isinstance(node, ast.Try) and _is_in(positions, node)]
    branch = RecordingBranch.find(translator, tries[-1])
    return branch is not None and _record(values, translator, branch)


def find_try(translator: Any) -> int | None:
    """Return the position of the first instruction of the innermost ``try`` statement that the current one is tried in."""
    positions, instructions = translator.current_instruction.positions, translator.instructions
    tries = [node for node in _list_statements(translator) if isinstance(node, ast.Try)]
    found = [node for node in tries if not node.finalbody and any(_is_in(positions, tried) for tried in node.body)]
    return next((i for i, each in enumerate(instructions) if _is_in(each.positions, found[-1])), None) if found else None


def _record(values: Any, translator: Any, branch: RecordingBranch) -> bool:
    """Record a statement as a later call, and go on behind it; return False if it does more than record.

    Raises:
        TraceError: the capture has to begin again.
    """
    end = branch.find_end()
    if end is None or not values.may_change(branch.changed):
        return False
    function, arguments = branch.build()
    try:
        values.record(translator, function, arguments)
    except TraceError:  # what it reads is not known after the step
        return False
    branch.read_again()
    translator.instruction_pointer = end
    return True


class _ReadCells(ast.NodeTransformer):
    """Make names of a statement the contents of the cells that they stand for."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = {*names}

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """Replace a name."""
        return ast.Attribute(ast.Name(node.id, ast.Load()), "cell_contents", node.ctx) if node.id in self.names else node


def _list_stored(node: ast.AST) -> list[str]:
    """Return the names that code sets, as often as it does."""
    return [each.id for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)]


def _find_definition(function: FunctionType) -> ast.FunctionDef | None:
    """Return the definition of a function; None if its source is not known."""
    code = function.__code__
    text = "".join(linecache.getlines(code.co_filename))
    functions = (node for node in _list_nodes(text) if isinstance(node, ast.FunctionDef) and node.name == code.co_name)
    lines = {code.co_firstlineno}  # of the first decorator, if there is one
    return next((node for node in functions if lines & {node.lineno, *(each.lineno for each in node.decorator_list)}), None)


def _list_assigned(definition: ast.FunctionDef) -> dict[str, list[ast.expr]]:
    """Return the expressions that are assigned to each local name of a function alone."""
    assigned: dict[str, list[ast.expr]] = {}
    for node in ast.walk(definition):
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value) | ast.AnnAssign(
                ast.Name(id=name), value=ast.expr() as value
            ):
                assigned.setdefault(name, []).append(value)
    return assigned


def _find_container(node: ast.expr) -> ast.expr | None:
    """Return the container that an expression takes an item out of."""
    match node:
        case ast.Subscript(value=container) | ast.Call(func=ast.Attribute(value=container, attr="setdefault" | "get")):
            return container
    return None


def _is_own(function: Any) -> bool:
    """Return True if a function's own code, and not that of a decorator of a library, is the user's."""
    return isinstance(function, FunctionType) and is_own(function.__globals__.get("__name__", "torch"))


def _list_statements(translator: Any) -> tuple[ast.AST, ...]:
    return _list_nodes("".join(linecache.getlines(translator.f_code.co_filename)))


def _find_tested(translator: Any) -> ast.If | ast.Assign | None:
    instruction = translator.instructions[translator.instruction_pointer]
    if not instruction.opname.startswith("POP_JUMP"):
        return None
    positions = instruction.positions  # some jumps have those of the statement itself
    for node in _list_statements(translator):
        if not isinstance(node, ast.If | ast.Assign):
            continue
        tested = node if isinstance(node, ast.If) else node.value
        if isinstance(tested, ast.If | ast.IfExp) and (
            _is_in(positions, tested.test) or _locate_code(positions) == _locate(tested)
        ):
            return node
    return None


@lru_cache(maxsize=8)
def _list_nodes(text: str) -> tuple[ast.AST, ...]:
    """Return the branches and functions in `text`, outer ones first."""
    try:
        return tuple(
            node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.If | ast.Try | ast.Assign | ast.FunctionDef)
        )
    except SyntaxError:  # as in a notebook's cell with magic commands
        return ()


def _is_in(positions: Any, node: ast.expr | ast.stmt) -> bool:
    """Return True if an instruction belongs to the code of a node."""
    found, (first, last) = _locate_code(positions), _locate(node)
    return found is not None and first <= found[0] and found[1] <= last


def _locate_code(positions: Any) -> tuple[tuple[int, int], tuple[int, int]] | None:
    """Return where the code of an instruction begins and ends; None if that is not known."""
    if positions is None or positions.lineno is None or positions.col_offset is None:
        return None
    return (positions.lineno, positions.col_offset), (positions.end_lineno, positions.end_col_offset)


def _locate(node: ast.expr | ast.stmt) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return where the code of a node begins and ends: lines and columns."""
    return (node.lineno, node.col_offset), (node.end_lineno or 0, node.end_col_offset or 0)


def _is_buffer(value: object) -> bool:
    return isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter)


def _is_mangled(name: str) -> bool:
    return name.startswith("__") and not name.endswith("__")
