"""Reader of Inductor's code around its kernels: launches that make, read and write values.

The function ``call`` of a generated module is a flat list of statements: allocations, views of buffers, calls, deletions, and the
return. Views are inlined into their readers, so that only owners of memory have names.

Inductor's code is read, not called, since its functions free and allocate by themselves. Its form changes with PyTorch's releases
(torch 2.13 added ``copy_if_misaligned``), so a statement that is not known is refused with its text: a guess would give wrong
memory, or wrong values. Which arguments a launch writes is in ``writes.py``.
"""

import ast
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from planner.capture.kernels.expressions import Expressions, find_items, find_methods_on
from planner.capture.kernels.in_place import parse_note
from planner.capture.kernels.writes import Kernels, Writes
from planner.capture.program.program import Argument, Call, Path, Ref, Shared, Statement, read_by
from planner.graphs.errors import TraceError
from planner.graphs.ir import Phase

_IGNORED = ("args.clear", "assert_size_stride", "assert_alignment", "torch.cuda.set_device")
_SETUP = ("get_raw_stream",)  # its result is no tensor, and is computed at each step
_REDUCTIONS = ("sum", "prod", "amin", "amax")  # methods that return new memory


@dataclass(slots=True)
class Value:
    """An owner of memory: a buffer, or the result of a call.

    Attributes:
        shape, dtype: for display, if known before the value is made.
    """

    shape: tuple[int, ...] = ()
    dtype: str = ""


@dataclass(slots=True)
class Launch:
    """One call.

    Attributes:
        target: name of the function, for display.
        phase: the part of the step that it belongs to.
        statements: allocations and calls; their tensors are numbers of values.
        makes: numbers of the values that it makes.
        reads: numbers of the values that it reads.
        writes: numbers of the existing values that it writes.
        random: True if it draws from the generator.
        over: pairs of a value that it makes and one that it may overwrite, by number, with the call in place of the allocation.
    """

    target: str
    phase: Phase
    statements: list[Statement]
    makes: list[int] = field(default_factory=list)
    reads: set[int] = field(default_factory=set)
    writes: set[int] = field(default_factory=set)
    random: bool = False
    over: list[tuple[int, int, Call]] = field(default_factory=list)


class Wrapper:
    """The launches of one or several modules, one after the other.

    Attributes:
        guard: the call that makes their context; None without one.
    """

    def __init__(self) -> None:
        self.values: list[Value] = []
        self.launches: list[Launch] = []
        self.names: dict[str, object] = {}
        self.guard: Call | None = None

    def add_value(self, value: Value) -> Ref:
        """Return the reference to a new value."""
        self.values.append(value)
        return Ref(len(self.values) - 1)

    def read(
        self,
        source: str,
        namespace: Mapping[str, object],
        inputs: Sequence[Argument],
        constants: Mapping[str, Argument],
        phase: Phase,
    ) -> list[Argument]:
        """Add the launches of a module.

        Args:
            source: source of the module, which is the `phase` of a step.
            namespace: the names that the module defines.
            inputs: values of its inputs; None for inputs that are no tensors.
            constants: values of its constant tensors, by name.

        Returns:
            The values that the module returns.

        Raises:
            TraceError: the code contains something that no static graph can hold.
        """
        return _Reader(self, ast.parse(source), namespace, constants, phase).read(inputs)


class _Reader:
    """A reader of the function ``call`` of one module."""

    def __init__(
        self,
        wrapper: Wrapper,
        module: ast.Module,
        namespace: Mapping[str, object],
        constants: Mapping[str, Argument],
        phase: Phase,
    ) -> None:
        self.wrapper = wrapper
        self.kernels = Kernels(module, namespace)
        self.expressions = Expressions(namespace, constants, wrapper.names, self._refuse)
        self.phase = phase
        self.body = next(s for s in ast.walk(module) if isinstance(s, ast.FunctionDef) and s.name == "call").body
        self.bound = self.expressions.bound  # the values of the module's variables
        self.parts = self.expressions.parts  # and of their items
        self.allocated: dict[int, Call] = {}  # values without a writer so far, and the calls that allocate them
        self.layouts: dict[str, tuple[Any, Any]] = {}  # sizes and strides of allocated buffers, by variable
        self.over: dict[str, dict[str, None]] = {}  # by output variable, the inputs of its kernel that it may overwrite

    def read(self, inputs: Sequence[Argument]) -> list[Argument]:
        statements = list(self._flatten(self.body))
        self.items = find_items(statements)
        for read, made in filter(None, (parse_note(s.value) for s in statements if isinstance(s, ast.Expr))):
            self.over.setdefault(made, {})[read] = None  # Inductor generates a kernel several times
        for statement in statements:
            match statement:
                case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Name(id="args")):
                    for name, value in zip(names, inputs, strict=True):
                        if value is not None:
                            self.bound[ast.unparse(name)] = value
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    self._assign(name, value)
                case ast.Expr(value=ast.Call() as call):
                    if not ast.unparse(call.func).startswith(_IGNORED):
                        self._add_launch(call)
                case ast.Return(value=ast.Tuple(elts=values)):
                    return [self.expressions.build_value(value) for value in values]
                case ast.Delete() | ast.Pass():
                    pass
                case ast.Expr(value=value) if parse_note(value):
                    pass
                case _:
                    self._refuse(statement)
        raise AssertionError("no value is returned")

    def _assign(self, name: str, value: ast.expr) -> None:
        match value:
            case ast.Call(func=ast.Name(id=function), args=[shape, stride, dtype]) if function.startswith("empty_strided"):
                self._allocate(name, value, shape, stride, dtype)
            # With padding after each row, for products of padded matrices.
            case ast.Call(
                func=ast.Attribute(value=ast.Call(func=ast.Name(id=function), args=[_, _, dtype]), attr="as_strided"),
                args=[shape, stride],
            ) if function.startswith("empty_strided"):
                self._allocate(name, value, shape, stride, dtype)
            case ast.Call(func=ast.Name(id=function)) if function in _SETUP:
                self.bound[name] = Shared(self.expressions.call(value))
            case ast.Call(func=ast.Name(id="copy_if_misaligned"), args=[given]):
                self.bound[name] = self._align(given)
            case ast.Call(func=ast.Name(id="reinterpret_tensor")) | ast.Name():
                self.bound[name] = self.expressions.build_value(value)
            case ast.Subscript(value=ast.Name(id=base), slice=ast.Constant(value=index)) if (base, index) in self.parts:
                self.bound[name] = self.parts[base, index]
            case ast.Call():
                self._add_launch(value, name)
            case _:
                self._refuse(ast.Assign(targets=[ast.Name(id=name)], value=value, lineno=0))

    def _allocate(self, name: str, call: ast.expr, shape: ast.expr, stride: ast.expr, dtype: ast.expr) -> None:
        """Bind `name` to a new value, which `call` allocates before the first launch that writes to it."""
        made = self.bound[name] = self.wrapper.add_value(
            Value(ast.literal_eval(shape), ast.unparse(dtype).removeprefix("torch."))
        )
        self.allocated[made.tensor] = self.expressions.call(call)
        self.layouts[name] = self.expressions.build_value(shape), self.expressions.build_value(stride)

    def _align(self, given: ast.expr) -> Ref:
        """Return an input that kernels expect to start at a multiple of 16 bytes; static tensors are aligned beforehand."""
        value = self.expressions.build_value(given)
        if not isinstance(value, Ref):
            raise TraceError(
                f"Inductor's code aligns {ast.unparse(given)!r}, a view of another tensor, which a plan cannot: "
                "plan with kernels='eager'"
            )
        return value

    def _add_launch(self, call: ast.Call, name: str | None = None) -> None:
        """Add a launch for a call, and bind its result to `name` if it has one."""
        target, writes = self._resolve_call(call)
        written = self._find_written(call, writes)
        launch = Launch(target, self.phase, [], random=writes.random)
        # A buffer is allocated by the launch that writes to it first, and not where Inductor does: a schedule decides what is
        # in memory before.
        for value in sorted(written):
            if value in self.allocated:
                self._make(value, launch)
            else:
                launch.writes.add(value)
        called = self.expressions.call(call)
        for value in read_by(called):
            if value in self.allocated:  # nothing has written to it, nor does this call: its contents do not matter
                self._make(value, launch)
            elif value not in launch.makes:
                launch.reads.add(value)
        if name is None or (writes.returns is not None and written):
            launch.statements.append(Statement(called))
            if name is not None and writes.returns is not None:
                self.bound[name] = self.expressions.build_value(call.args[writes.returns])
        elif writes.returns is not None:
            self.bound[name] = called
            return
        else:
            self._bind(name, called, launch)
        launch.over = list(self._iterate_written_over(call, launch))
        self.wrapper.launches.append(launch)

    def _make(self, value: int, launch: Launch) -> None:
        """Add the allocation of a value to `launch`."""
        launch.statements.append(Statement(self.allocated.pop(value), ((value, ()),)))
        launch.makes.append(value)

    def _iterate_written_over(self, call: ast.Call, launch: Launch) -> Iterator[tuple[int, int, Call]]:
        """Yield the in-place writes of `call` (``Launch.over``); repeated arguments are excluded, as they may be read
        elsewhere.
        """
        given = [argument.id for argument in call.args if isinstance(argument, ast.Name)]
        owners = [value for argument in call.args for value in read_by(self.expressions.build_value(argument))]
        for made in given:
            for read in self.over.get(made, ()):
                if read not in given or made not in self.layouts or len(read_by(self.bound[read])) != 1:
                    continue
                (value,), (source,) = read_by(self.bound[made]), read_by(self.bound[read])
                if value in launch.makes and source in launch.reads and owners.count(source) == 1:
                    view = self.expressions.build_value(ast.Name(id="reinterpret_tensor"))
                    yield value, source, Call(view, (Ref(source), *self.layouts[made], 0))

    def _bind(self, name: str, call: Call, launch: Launch) -> None:
        """Bind `name` to the result of `call`, made by `launch`."""
        if name not in self.items:
            value = self.bound[name] = self.wrapper.add_value(Value())
            made: list[tuple[int, Path]] = [(value.tensor, ())]
        else:
            parts = {index: self.wrapper.add_value(Value()) for index in self.items[name]}
            self.parts.update({(name, index): value for index, value in parts.items()})
            made = [(value.tensor, (index,)) for index, value in parts.items()]
        launch.makes += [value for value, _ in made]
        launch.statements.append(Statement(call, tuple(made)))

    def _resolve_call(self, call: ast.Call) -> tuple[str, Writes]:
        methods = find_methods_on(call, self.bound)
        if methods is None:
            return self.kernels.resolve_call(call)
        reductions = [method for method in methods if method in _REDUCTIONS]
        reduces = len(reductions) > 0 and {*_REDUCTIONS, "view", "to"}.issuperset(methods)  # partial results in a workspace
        if not reduces and not (len(methods) == 1 and _is_in_place(methods[0])):
            self._refuse(ast.Expr(call))
        return (reductions or methods)[0], Writes()

    def _find_written(self, call: ast.Call, writes: Writes) -> set[int]:
        arguments = [arg for i, arg in enumerate(call.args) if i in writes.positions]
        arguments += [keyword.value for keyword in call.keywords if keyword.arg in writes.keywords]
        if isinstance(call.func, ast.Attribute) and find_methods_on(call, self.bound) and _is_in_place(call.func.attr):
            arguments.append(call.func.value)
        return {value for argument in arguments for value in read_by(self.expressions.build_value(argument))}

    def _flatten(self, body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
        """Yield the statements of `body`, including those under a device guard."""
        for statement in body:
            if isinstance(statement, ast.With) and "DeviceGuard" in ast.unparse(statement.items[0]):
                self.wrapper.guard = self.expressions.call(statement.items[0].context_expr)
                yield from self._flatten(statement.body)
            else:
                yield statement

    @staticmethod
    def _refuse(statement: ast.AST) -> NoReturn:
        raise TraceError(
            f"Inductor's code has the statement {ast.unparse(statement)!r}, which a static graph cannot hold: shapes and "
            "control flow must not depend on data; or plan with kernels='eager'"
        )


def _is_in_place(method: str) -> bool:
    return method.endswith("_") and not method.startswith("_")
