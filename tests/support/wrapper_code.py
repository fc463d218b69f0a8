"""Modules as Inductor generates them, with kernels that are written in Python: nothing is compiled."""

import ast
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._C._dynamo.guards import _empty_strided_cpu, _reinterpret_tensor

from graphs.ir import Phase
from planner.capture.kernels.wrapper import Value, Wrapper


class Extern:
    """What Inductor calls ``extern_kernels``."""

    mm = staticmethod(torch.mm)
    addmm = staticmethod(torch.addmm)


def cpp(*types: str) -> str:
    """A kernel for the CPU with arguments of these types."""
    return f"async_compile.cpp_pybinding({list(types)}, r'''extern \"C\" void kernel() {{}}''')"


def triton(*parameters: str, mutated: Sequence[str] = (), before: str = "") -> str:
    """A kernel for CUDA with these parameters, of which it also writes to those that are `mutated`.

    Args:
        before: source of other functions.
    """
    source = (
        f"{before}\n"
        f"@triton_heuristics.pointwise(inductor_meta={{'kernel_name': 'triton_', 'mutated_arg_names': {list(mutated)}}})\n"
        f"@triton.jit\ndef triton_({', '.join(parameters)}, XBLOCK: tl.constexpr):\n    pass\n"
    )
    return f"async_compile.triton('triton_', {source!r}, device_str='cuda')"


def module(body: str, kernels: Mapping[str, str]) -> str:
    """Source of a module whose function ``call`` is `body`.

    Args:
        kernels: for each the expression that compiles it.
    """
    compiled = "\n".join(f"{name} = {expression}" for name, expression in kernels.items())
    lines = "\n".join(f"    {line}" for line in body.strip("\n").splitlines())
    return f"{compiled}\nasync_compile.wait(globals())\ndel async_compile\n\ndef call(args):\n{lines}\n"


def namespace(**functions: Callable[..., Any]) -> dict[str, Any]:
    """What a module defines, `functions` in the place of its kernels."""
    return {
        "torch": torch,
        "aten": torch.ops.aten,
        "extern_kernels": Extern,
        "empty_strided_cpu": _empty_strided_cpu,
        "reinterpret_tensor": _reinterpret_tensor,
        **functions,
    }


def read(source: str, names: Mapping[str, Any], count: int) -> tuple[Wrapper, list[ast.expr]]:
    """What `source` does, with `count` inputs, and what it returns."""
    wrapper = Wrapper()
    inputs = [wrapper.new(Value()) for _ in range(count)]
    return wrapper, wrapper.read(source, names, inputs, {}, Phase.FORWARD)


def execute(wrapper: Wrapper, returned: Sequence[ast.expr], inputs: Sequence[torch.Tensor]) -> list[Any]:
    """What is returned when the launches are executed."""
    scope = {**wrapper.namespace, **{f"_v{i}": value for i, value in enumerate(inputs)}}
    for line in (*wrapper.setup, *(line for launch in wrapper.launches for line in launch.lines)):
        exec(line, scope)
    return [eval(ast.unparse(value), scope) for value in returned]


def call(source: str, names: Mapping[str, Any], inputs: Sequence[torch.Tensor]) -> list[Any]:
    """What the module's own function returns."""
    scope = dict(names)
    exec(source[source.index("def call") :], scope)
    return list(scope["call"](list(inputs)))
