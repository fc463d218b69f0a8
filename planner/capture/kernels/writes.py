"""Written arguments of calls in Inductor's wrapper code."""

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import torch

from planner.graphs.errors import TraceError
from planner.torch_private.core import OpOverload, OpOverloadPacket

# Arguments of Triton kernels that Inductor generates: results, in-place results, workspaces.
_WRITTEN = re.compile(r"(out_ptr|in_out_ptr|ws_ptr|sem_ptr)\d*$")


@dataclass(frozen=True, slots=True)
class Writes:
    """The writes of a call.

    Attributes:
        positions, keywords: the arguments that it writes.
        returns: position of the argument that it returns; None if the result is new.
        random: True if it draws from the generator.
    """

    positions: frozenset[int] = frozenset()
    keywords: frozenset[str] = frozenset()
    returns: int | None = None
    random: bool = False


class Kernels:
    """The kernels that a module of Inductor's defines, and the other functions that it calls."""

    def __init__(self, module: ast.Module, namespace: Mapping[str, object]) -> None:
        self._namespace = namespace
        self._compiled: dict[str, Writes] = {}
        for statement in module.body:
            match statement:
                case ast.Assign(
                    targets=[ast.Name(id=name)],
                    value=ast.Call(func=ast.Attribute(value=ast.Name(id="async_compile"), attr=how), args=args),
                ):
                    self._compiled[name] = (
                        self._find_writes_of_kernels(args) if how == "multi_kernel" else _find_writes_of_source(name, how, args)
                    )

    def _find_writes_of_kernels(self, args: list[ast.expr]) -> Writes:
        """Return the writes of a choice of kernels: any of them gets the arguments, and the first call times them."""
        names = [kernel.id for kernel in ast.walk(args[1]) if isinstance(kernel, ast.Name)]
        return Writes(positions=frozenset().union(*(self._compiled[name].positions for name in names)))

    def resolve_call(self, call: ast.Call) -> tuple[str, Writes]:
        """Return the target of `call` as text, and its writes; raise TraceError if these are unknown."""
        match call.func:
            case ast.Name(id=name) | ast.Attribute(value=ast.Name(id=name), attr="run") if name in self._compiled:
                return name, self._compiled[name]
            case ast.Attribute(value=ast.Name(id="extern_kernels"), attr=name):
                return f"extern_kernels.{name}", Writes(keywords=frozenset({"out"}))
        name = ast.unparse(call.func)
        first, *attributes = name.split(".")
        try:
            target: Any = reduce(getattr, attributes, self._namespace[first])
        except (KeyError, AttributeError):
            target = None
        # Some ops are written by name only, without the overload.
        overloads = [getattr(target, each) for each in target.overloads()] if isinstance(target, OpOverloadPacket) else [target]
        writes = {_find_writes_of_op(op) if isinstance(op, OpOverload) else None for op in overloads}
        found = writes.pop()
        if found is None or writes:
            raise TraceError(
                f"Inductor's code calls {name}, and it is not known what that writes to: plan with kernels='eager', or "
                "keep the op that it comes from out of the model"
            )
        return str(target), replace(found, random=found.random and not _is_without_dropout(overloads[0], call))


def _find_writes_of_source(name: str, how: str, args: list[ast.expr]) -> Writes:
    """Return the writes of a kernel that is compiled from the source among `args`."""
    match how, args:
        case "cpp_pybinding", [types, *_]:
            signature: list[str] = ast.literal_eval(types)
            written = (i for i, declared in enumerate(signature) if "*" in declared and not declared.startswith("const "))
        # Triton kernels of the model itself do not declare their writes, and are refused.
        case "triton", [ast.Constant(value=kernel), ast.Constant(value=str(source)), *_] if (
            names := _find_mutated_names(module := ast.parse(source))
        ) is not None:
            # Kernels with scans have further functions: those that combine two elements.
            function = next(f for f in module.body if isinstance(f, ast.FunctionDef) and f.name == kernel)
            parameters = [parameter.arg for parameter in function.args.args]
            written = (i for i, p in enumerate(parameters) if p in names or _WRITTEN.match(p))
        case _:
            raise TraceError(
                f"Inductor compiled {name} by async_compile.{how}, and it is not known what that writes to: plan with "
                "kernels='eager'"
            )
    return Writes(positions=frozenset(written))


def _find_mutated_names(module: ast.Module) -> frozenset[str] | None:
    """Return the arguments that a Triton kernel of Inductor's declares as mutated; None if it declares none."""
    for node in ast.walk(module):
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and key.value == "mutated_arg_names":
                    return frozenset(ast.literal_eval(value))
    return None


def _is_without_dropout(op: OpOverload, call: ast.Call) -> bool:
    """Return True if an op with a dropout argument is called without dropout."""
    names = [argument.name for argument in op._schema.arguments]
    if "dropout_p" not in names:
        return False
    position = names.index("dropout_p")
    given = [keyword.value for keyword in call.keywords if keyword.arg == "dropout_p"] + call.args[position : position + 1]
    return all(isinstance(value, ast.Constant) and value.value == 0 for value in given)


def _find_writes_of_op(op: OpOverload) -> Writes:
    """Return the writes of an operator, by its schema."""
    schema = op._schema
    written = [(i, a) for i, a in enumerate(schema.arguments) if a.alias_info is not None and a.alias_info.is_write]
    aliased = [
        i
        for i, argument in enumerate(schema.arguments)
        if argument.alias_info is not None
        and any(r.alias_info is not None and r.alias_info.before_set & argument.alias_info.before_set for r in schema.returns)
    ]
    return Writes(
        positions=frozenset(i for i, a in written if not a.kwarg_only),
        keywords=frozenset(a.name for _, a in written),
        returns=aliased[0] if aliased else None,
        random=torch.Tag.nondeterministic_seeded in op.tags,
    )
