"""Modules as Inductor generates them, with kernels that are written in Python: nothing is compiled."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._C._dynamo.guards import _empty_strided_cpu, _reinterpret_tensor

from planner.capture.kernels.wrapper import Value, Wrapper
from planner.capture.program.builder import Pass, PassBuilder
from planner.capture.program.program import Argument, Program, Ref
from planner.graphs.ir import Phase


class Extern:
    """What Inductor calls ``extern_kernels``."""

    mm = staticmethod(torch.mm)
    addmm = staticmethod(torch.addmm)
    bmm = staticmethod(torch.bmm)
    baddbmm = staticmethod(torch.baddbmm)
    convolution = staticmethod(torch.convolution)


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


def read(source: str, names: Mapping[str, Any], count: int) -> tuple[Wrapper, list[Argument]]:
    """What `source` does, with `count` inputs, and what it returns."""
    wrapper = Wrapper()
    inputs = [wrapper.add_value(Value()) for _ in range(count)]
    return wrapper, wrapper.read(source, names, inputs, {}, Phase.FORWARD)


def passed(wrapper: Wrapper, returned: Sequence[Argument], inputs: int) -> Pass:
    """The launches as a pass with so many `inputs`."""
    builder = PassBuilder(Program((), (), None, (), (), names=wrapper.names))
    builder.add_tensor_parameters(range(inputs))
    for launch in wrapper.launches:
        builder.execute(launch.statements, launch.makes)
    return builder.finish(list(returned), "launches")


def execute(wrapper: Wrapper, returned: Sequence[Argument], inputs: Sequence[torch.Tensor]) -> list[Any]:
    """What is returned when the launches are executed."""
    found: list[Any] = passed(wrapper, returned, len(inputs)).run(*inputs)
    return found


def lines(wrapper: Wrapper, inputs: int) -> list[str]:
    """The lines of the launches."""
    made = [Ref(value) for launch in wrapper.launches for value in launch.makes]
    return [line.strip() for line in passed(wrapper, made, inputs).module.code.splitlines()[1:-1]]


def call(source: str, names: Mapping[str, Any], inputs: Sequence[torch.Tensor]) -> list[Any]:
    """What the module's own function returns."""
    scope = dict(names)
    exec(source[source.index("def call") :], scope)
    return list(scope["call"](list(inputs)))
