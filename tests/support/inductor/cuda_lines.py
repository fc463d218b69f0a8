"""Lines of what Inductor writes around its kernels: of which kind each is, and the least code that has each kind."""

import ast
import math
import re
from collections.abc import Iterable, Iterator

_ALLOCATES = "empty_strided_cuda"
_NAMED = ("torch", "aten", "extern_kernels", "inductor_ops")


def body_of(module: ast.Module) -> list[ast.stmt]:
    """The statements of a module's function ``call``, those under the guard of a device behind it."""
    function = next(s for s in ast.walk(module) if isinstance(s, ast.FunctionDef) and s.name == "call")
    return list(_flat(function.body))


def _flat(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    for statement in body:
        yield statement
        if isinstance(statement, ast.With):
            yield from _flat(statement.body)


def kinds(source: str) -> set[str]:
    """The kinds of lines in a module."""
    return {kind(statement) for statement in body_of(ast.parse(source))}


def kind(statement: ast.stmt) -> str:
    """`statement` without what is another from one model to the next: names, numbers, and how many there are of each."""
    if isinstance(statement, ast.With):
        return f"with {ast.unparse(statement.items[0])}"
    return ast.unparse(_Alike().visit(ast.parse(ast.unparse(statement)).body[0]))


class _Alike(ast.NodeTransformer):
    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Name("x")

    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        return ast.Constant("" if isinstance(node.value, str) else None if node.value is None else 0)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.expr:
        return ast.Constant(0)

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        return ast.Constant(0)

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        root = ast.unparse(node).partition(".")[0]
        if root == "torch" and isinstance(node.value, ast.Name):
            return ast.Name("dtype")
        return node if root in _NAMED else ast.Attribute(self.visit(node.value), node.attr)

    def visit_Tuple(self, node: ast.Tuple) -> ast.expr:
        return ast.Tuple(sorted(_unique(map(self.visit, node.elts)), key=ast.unparse))

    def visit_List(self, node: ast.List) -> ast.expr:
        return ast.List(_unique(map(self.visit, node.elts)))

    def visit_Delete(self, node: ast.Delete) -> ast.stmt:
        return ast.Delete([ast.Name("x")])

    def visit_Call(self, node: ast.Call) -> ast.expr:
        func = node.func
        if isinstance(func, ast.Attribute) and ast.unparse(func).partition(".")[0] not in _NAMED:
            func = ast.Attribute(ast.Name("kernel") if func.attr == "run" else self.visit(func.value), func.attr)
        keywords = [ast.keyword(each.arg, self.visit(each.value)) for each in node.keywords]
        return ast.Call(func, _unique(map(self.visit, node.args)), keywords)


def _unique(nodes: Iterable[ast.expr]) -> list[ast.expr]:
    return list({ast.unparse(node): node for node in nodes}.values())


def over(source: str) -> list[tuple[str, int, int]]:
    """For each note of what may be written over: the kernel, the elements that it writes there, and that it iterates over."""
    module = ast.parse(source)
    statements = body_of(module)
    sizes = {name: math.prod(ast.literal_eval(call.args[0])) for name, call in _allocations(statements)}
    parameters = {name: kernel[1] for name, kernel in _kernels(module).items()}
    found = []
    for i, statement in enumerate(statements):
        match statement:
            case ast.Expr(value=ast.Tuple(elts=[_, ast.Constant(value=str(read)), ast.Constant(value=str(made))])):
                for launch in statements[i:]:
                    match launch:
                        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="run"), args=args)) if {
                            read,
                            made,
                        } <= {ast.unparse(each) for each in args}:
                            numbers = zip(parameters[name], args, strict=False)
                            iterated = [ast.literal_eval(each) for p, each in numbers if re.search(r"numel(_\d+)?$", p)]
                            found.append((name, sizes[made], math.prod(iterated)))
                            break
    return found


def _allocations(statements: Iterable[ast.stmt]) -> Iterator[tuple[str, ast.Call]]:
    """Variables, and the calls that allocate what they stand for: the outer one, where that is given another shape."""
    for statement in statements:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call() as call) if _ALLOCATES in ast.unparse(call.func):
                yield name, call


def _kernels(module: ast.Module) -> dict[str, tuple[str, list[str]]]:
    """For each kernel of a module the arguments that it changes, as they are written, and the names of all."""
    found = {}
    for statement in module.body:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call(args=[ast.Constant(value=own), source, *_])):
                if isinstance(source, ast.List):  # one of several kernels, which get the same arguments
                    found[name] = found[ast.unparse(source.elts[0])]
                    continue
                source = ast.literal_eval(source)
                mutated = re.search(r"'mutated_arg_names': (\[[^\]]*\])", source)
                function = next(f for f in ast.parse(source).body if isinstance(f, ast.FunctionDef) and f.name == own)
                parameters = [each.arg for each in function.args.args if each.annotation is None]
                found[name] = (mutated[1] if mutated else "[]", parameters)
    return found


def excerpts(modules: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """For each of `modules`, by name, that has lines of a kind that those before have not, these lines and what they need."""
    seen: set[str] = set()
    for about, source in modules:
        module = ast.parse(source)
        statements = body_of(module)
        new = {}
        for i, statement in enumerate(statements):
            if (found := kind(statement)) not in seen:
                seen.add(found)
                new[i] = statement
        if new:
            yield about, _excerpt(module, statements, set(new))


def _excerpt(module: ast.Module, statements: list[ast.stmt], chosen: set[int]) -> str:
    """A module of the `chosen` statements, and of those by which they get what they name: the rest are inputs."""
    todo = list(chosen)
    while todo:
        i = todo.pop()
        if isinstance(statements[i], ast.With):
            continue
        for name in _names(statements[i]):
            needed = [next((j for j in range(i - 1, -1, -1) if _makes(statements[j], name)), i)]
            if name.startswith("workspace"):  # what fills it
                needed.append(next(j for j in range(needed[0] + 1, len(statements)) if name in _names(statements[j])))
            todo += {*needed} - chosen
            chosen.update(needed)
    lines = [s for i, s in enumerate(statements) if i in chosen and not isinstance(s, ast.With)]
    args = next(s for s in statements if isinstance(s, ast.Assign) and ast.unparse(s.value) == "args")
    lines = [line for line in lines if line is not args and ast.unparse(line) != "args.clear()"]
    kernels = _kernels(module)
    used = dict.fromkeys(name for line in lines for name in _names(line))
    inputs = [name for name in _names(args)[:-1] if name in used]
    text = [_kernel(name, *kernels[name]) for name in used if name in kernels]
    text.append("def call(args):")
    text += [f"    {', '.join(inputs)}, = args"] if inputs else []
    text += ["    args.clear()", "    with torch.cuda._DeviceGuard(0):"]
    text += [f"        {ast.unparse(line)}" for line in lines if not isinstance(line, ast.Return)]
    return "\n".join([*text, f"    {next((ast.unparse(line) for line in lines if isinstance(line, ast.Return)), 'return ()')}"])


def _names(statement: ast.stmt) -> list[str]:
    return [node.id for node in ast.walk(statement) if isinstance(node, ast.Name)]


def _makes(statement: ast.stmt, name: str) -> bool:
    """Whether a variable is bound by `statement`, to something that is no input."""
    return isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == name


def _kernel(name: str, mutated: str, parameters: list[str]) -> str:
    return (
        f"{name} = async_compile.triton('{name}', '''\n"
        f"@triton_heuristics.pointwise(inductor_meta={{'mutated_arg_names': {mutated}}})\n"
        f"@triton.jit\ndef {name}({', '.join(parameters)}, XBLOCK: tl.constexpr):\n    pass\n''', device_str='cuda')"
    )
