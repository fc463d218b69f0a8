"""What Inductor's code around its kernels does, as launches that make values, read them and write to them.

The function ``call`` of a module that Inductor generates is a flat list of statements: allocations, views of what was allocated,
calls, deletions, and what is returned. Views are inlined into what reads them, so that only what owns memory has a name.
"""

import ast
import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from graphs.errors import TraceError
from graphs.ir import Phase
from planner.capture.kernels.in_place import noted
from planner.capture.kernels.values import VALUE, Inline, items, methods_on, number_of, numbers, variable_of
from planner.capture.kernels.writes import Kernels, Writes

_IGNORED = ("args.clear", "assert_size_stride", "assert_alignment", "torch.cuda.set_device")
_SETUP = ("get_raw_stream",)  # its result is no tensor, and is asked for at each step
_REDUCTIONS = ("sum", "prod", "amin", "amax")  # methods that return memory of their own


@dataclass(slots=True)
class Value:
    """What owns memory: a buffer, or what a call returns.

    Attributes:
        shape, dtype: where they are known before it is made, for people to read.
    """

    shape: tuple[int, ...] = ()
    dtype: str = ""


@dataclass(slots=True)
class Launch:
    """One call.

    Attributes:
        target: what is called, for people to read.
        phase: the part of the step that it belongs to.
        lines: source that allocates and calls; values are variables ``_v<number>``.
        makes: numbers of the values that it makes.
        reads: numbers of those that it reads.
        writes: numbers of those that were there before, which it writes to.
        random: whether it draws from the generator.
        over: numbers of values that it makes and of those that it may write them over, with the line for it, in place of the
            one that allocates.
    """

    target: str
    phase: Phase
    lines: list[str]
    makes: list[int] = field(default_factory=list)
    reads: set[int] = field(default_factory=set)
    writes: set[int] = field(default_factory=set)
    random: bool = False
    over: list[tuple[int, int, str]] = field(default_factory=list)


class Wrapper:
    """The launches of one or several modules, one after the other.

    Attributes:
        values: by number.
        launches: in order.
        namespace: what their source names.
        setup: lines that come before all launches.
        guard: the context that they are in, "" for none.
    """

    def __init__(self) -> None:
        self.values: list[Value] = []
        self.launches: list[Launch] = []
        self.namespace: dict[str, object] = {}
        self.setup: list[str] = []
        self.guard = ""

    def new(self, value: Value) -> ast.expr:
        """The expression of a value that is there before the launches."""
        self.values.append(value)
        return variable_of(len(self.values) - 1)

    def read(
        self,
        source: str,
        namespace: Mapping[str, object],
        inputs: Sequence[ast.expr | None],
        constants: Mapping[str, ast.expr],
        phase: Phase,
    ) -> list[ast.expr]:
        """Add the launches of a module.

        Args:
            source: of the module, which is `phase` of a step.
            namespace: what it defines.
            inputs: what its inputs stand for; None for those that are no tensors.
            constants: what the tensors stand for that are part of it, by name.

        Returns:
            What it returns.

        Raises:
            TraceError: it does something that no static graph can hold.
        """
        return _Reader(self, ast.parse(source), namespace, constants, phase).read(inputs)


class _Reader:
    """Reads the function ``call`` of one module."""

    def __init__(
        self,
        wrapper: Wrapper,
        module: ast.Module,
        namespace: Mapping[str, object],
        constants: Mapping[str, ast.expr],
        phase: Phase,
    ) -> None:
        self.wrapper = wrapper
        self.kernels = Kernels(module, namespace)
        self.phase = phase
        self.body = next(s for s in ast.walk(module) if isinstance(s, ast.FunctionDef) and s.name == "call").body
        self.globals = namespace
        self.names: dict[str, str] = {}  # of globals, in the wrapper's namespace
        self.bound: dict[str, ast.expr] = dict(constants)  # what the variables of the module stand for
        self.allocated: dict[int, ast.expr] = {}  # values that are written to by nobody yet, and how they are allocated
        self.layouts: dict[str, str] = {}  # sizes and strides of what is allocated, by variable
        self.over: dict[str, dict[str, None]] = {}  # for variables the inputs of their kernel that they may be written over

    def read(self, inputs: Sequence[ast.expr | None]) -> list[ast.expr]:
        statements = list(self._flat(self.body))
        self.items = items(statements)
        for read, made in filter(None, (noted(s.value) for s in statements if isinstance(s, ast.Expr))):
            self.over.setdefault(made, {})[read] = None  # Inductor generates a kernel several times, and says so each time
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
                        self._launch(call)
                case ast.Return(value=ast.Tuple(elts=values)):
                    return [self._inlined(value) for value in values]
                case ast.Delete() | ast.Pass():
                    pass
                case ast.Expr(value=value) if noted(value):
                    pass
                case _:
                    self._refuse(statement)
        raise AssertionError("no value is returned")

    def _assign(self, name: str, value: ast.expr) -> None:
        match value:
            case ast.Call(func=ast.Name(id=function), args=[shape, stride, dtype]) if function.startswith("empty_strided"):
                self._allocate(name, value, shape, stride, dtype)
            # With room behind each row, for products of padded matrices.
            case ast.Call(
                func=ast.Attribute(value=ast.Call(func=ast.Name(id=function), args=[_, _, dtype]), attr="as_strided"),
                args=[shape, stride],
            ) if function.startswith("empty_strided"):
                self._allocate(name, value, shape, stride, dtype)
            case ast.Call(func=ast.Name(id=function)) if function in _SETUP:
                self.bound[name] = ast.Name(id=name)
                line = f"{name} = {ast.unparse(self._inlined(value))}"
                if line not in self.wrapper.setup:
                    self.wrapper.setup.append(line)
            case ast.Call(func=ast.Name(id="copy_if_misaligned"), args=[given]):
                self.bound[name] = self._aligned(given)
            case ast.Call(func=ast.Name(id="reinterpret_tensor")) | ast.Name():
                self.bound[name] = self._inlined(value)
            case ast.Subscript(value=ast.Name(id=base)) if f"{base}[{ast.unparse(value.slice)}]" in self.bound:
                self.bound[name] = self.bound[f"{base}[{ast.unparse(value.slice)}]"]
            case ast.Call():
                self._launch(value, name)
            case _:
                self._refuse(ast.Assign(targets=[ast.Name(id=name)], value=value, lineno=0))

    def _allocate(self, name: str, call: ast.expr, shape: ast.expr, stride: ast.expr, dtype: ast.expr) -> None:
        """Let `name` stand for a new value, which `call` allocates before the first launch that writes to it."""
        self.bound[name] = self.wrapper.new(Value(ast.literal_eval(shape), ast.unparse(dtype).removeprefix("torch.")))
        self.allocated[number_of(self.bound[name])] = self._inlined(call)
        self.layouts[name] = f"{ast.unparse(shape)}, {ast.unparse(stride)}"

    def _aligned(self, given: ast.expr) -> ast.expr:
        """An input that kernels expect to begin at a multiple of 16 bytes: static tensors do before all launches."""
        value = self._inlined(given)
        if not isinstance(value, ast.Name):
            raise TraceError(
                f"Inductor's code aligns {ast.unparse(given)!r}, a view of another tensor, which a plan cannot: "
                "plan with kernels='eager'"
            )
        return value

    def _launch(self, call: ast.Call, name: str | None = None) -> None:
        """A call, whose result has a `name` or none."""
        target, writes = self._called(call)
        written = self._written(call, writes)
        launch = Launch(target, self.phase, [], random=writes.random)
        for value in sorted(written):
            if value in self.allocated:
                launch.lines.append(f"{VALUE}{value} = {ast.unparse(self.allocated.pop(value))}")
                launch.makes.append(value)
            else:
                launch.writes.add(value)
        inlined = self._inlined(call)
        for value in numbers(inlined):
            if value in self.allocated:  # nobody has written to it, nor does this: what is in it does not matter
                launch.lines.append(f"{VALUE}{value} = {ast.unparse(self.allocated.pop(value))}")
                launch.makes.append(value)
            elif value not in launch.makes:
                launch.reads.add(value)
        source = ast.unparse(inlined)
        if name is None or (writes.returns is not None and written):
            launch.lines.append(source)
            if name is not None and writes.returns is not None:
                self.bound[name] = self._inlined(call.args[writes.returns])
        elif writes.returns is not None:
            self.bound[name] = inlined
            return
        else:
            self._bind(name, source, launch)
        launch.over = list(self._written_over(call, launch))
        self.wrapper.launches.append(launch)

    def _written_over(self, call: ast.Call, launch: Launch) -> Iterator[tuple[int, int, str]]:
        """See ``Launch.over``. What `call` is given twice is left out: it may be read where it is not written."""
        given = [argument.id for argument in call.args if isinstance(argument, ast.Name)]
        owners = [value for argument in call.args for value in set(numbers(self._inlined(argument)))]
        for made in given:
            for read in self.over.get(made, ()):
                if read not in given or made not in self.layouts or len(numbers(self.bound[read])) != 1:
                    continue
                (value,), (source,) = numbers(self.bound[made]), numbers(self.bound[read])
                if value in launch.makes and source in launch.reads and owners.count(source) == 1:
                    view = ast.unparse(self._inlined(ast.Name(id="reinterpret_tensor")))
                    yield value, source, f"{VALUE}{value} = {view}({VALUE}{source}, {self.layouts[made]}, 0)"

    def _bind(self, name: str, source: str, launch: Launch) -> None:
        """Let `launch` make what the call at `source` returns."""
        paths = self.items.get(name, [""])
        for path in paths:
            value = self.wrapper.new(Value())
            self.bound[name + path] = value
            launch.makes.append(number_of(value))
        if paths == [""]:
            launch.lines.append(f"{ast.unparse(self.bound[name])} = {source}")
        else:
            picked = (f"{ast.unparse(self.bound[name + path])} = _{path}" for path in paths)
            launch.lines += [f"_ = {source}", *picked, "del _"]

    def _called(self, call: ast.Call) -> tuple[str, Writes]:
        methods = methods_on(call, self.bound)
        if methods is None:
            return self.kernels.called(call)
        reductions = [method for method in methods if method in _REDUCTIONS]
        reduces = len(reductions) > 0 and {*_REDUCTIONS, "view", "to"}.issuperset(methods)  # what parts left in a workspace
        if not reduces and not (len(methods) == 1 and _is_in_place(methods[0])):
            self._refuse(ast.Expr(call))
        return (reductions or methods)[0], Writes()

    def _written(self, call: ast.Call, writes: Writes) -> set[int]:
        """The values that `call` writes to."""
        arguments = [arg for i, arg in enumerate(call.args) if i in writes.positions]
        arguments += [keyword.value for keyword in call.keywords if keyword.arg in writes.keywords]
        if isinstance(call.func, ast.Attribute) and methods_on(call, self.bound) and _is_in_place(call.func.attr):
            arguments.append(call.func.value)
        return {value for argument in arguments for value in numbers(self._inlined(argument))}

    def _inlined(self, expression: ast.expr) -> ast.expr:
        """`expression` with values for the module's variables, and the wrapper's names for what it defines."""
        inlined: ast.expr = Inline(self._name_of).visit(copy.deepcopy(expression))
        return inlined

    def _flat(self, body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
        """The statements of `body`, those under the guard of a device among them."""
        for statement in body:
            if isinstance(statement, ast.With) and "DeviceGuard" in ast.unparse(statement.items[0]):
                self.wrapper.guard = ast.unparse(self._inlined(statement.items[0].context_expr))
                yield from self._flat(statement.body)
            else:
                yield statement

    def _name_of(self, name: str) -> ast.expr | None:
        if name in self.bound:
            return self.bound[name]
        if name not in self.globals:
            return None
        if name not in self.names:
            value, taken = self.globals[name], self.wrapper.namespace
            unique, n = name, 2
            while unique in taken and taken[unique] is not value:
                unique, n = f"{name}_{n}", n + 1
            taken[unique] = value
            self.names[name] = unique
        return ast.Name(id=self.names[name])

    @staticmethod
    def _refuse(statement: ast.stmt) -> NoReturn:
        raise TraceError(
            f"Inductor's code has the statement {ast.unparse(statement)!r}, which a static graph cannot hold: shapes and "
            "control flow must not depend on data; or plan with kernels='eager'"
        )


def _is_in_place(method: str) -> bool:
    return method.endswith("_") and not method.startswith("_")
