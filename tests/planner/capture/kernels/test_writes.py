"""What calls of Inductor's wrapper write to, by types, source or schema, and the inputs that may be written over."""

import ast
import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from planner.capture.kernels.writes import Kernels, Writes
from planner.capture.program.program import Call, Ref
from planner.graphs.errors import TraceError
from tests.support.inductor.wrapper_code import call, cpp, execute, module, namespace, read, triton

TRITON = ("in_out_ptr0", "in_ptr0", "in_ptr1", "out_ptr0", "out_ptr12", "ws_ptr", "output", "xnumel")
KERNELS = {
    "cpp_two": cpp("const float*", "bool*", "const int64_t*", "float*", "const int64_t"),
    "triton_all": triton(*TRITON, mutated=["in_out_ptr0", "in_ptr1"]),
    "triton_plain": triton(*TRITON),
}


def called(call: str, kernels: dict[str, str] = KERNELS, **names: Any) -> tuple[str, Writes]:
    expression = ast.parse(call, mode="eval").body
    assert isinstance(expression, ast.Call)
    return Kernels(ast.parse(module("return ()", kernels)), namespace(**names)).resolve_call(expression)


@pytest.mark.parametrize(
    ("call", "target", "writes"),
    [
        ("cpp_two(a, b, c, d, 4)", "cpp_two", Writes(positions=frozenset({1, 3}))),
        ("triton_all.run(a, b, c, d, e, f, g, 4, stream=stream0)", "triton_all", Writes(positions=frozenset({0, 2, 3, 4, 5}))),
        ("triton_plain.run(a, b, c, d, e, f, g, 4)", "triton_plain", Writes(positions=frozenset({0, 3, 4, 5}))),
        ("extern_kernels.mm(a, b, out=c)", "extern_kernels.mm", Writes(keywords=frozenset({"out"}))),
        ("torch.ops.aten.sort.stable(a, stable=False)", "aten.sort.stable", Writes()),
        ("torch.ops.aten.add_.Tensor(a, b)", "aten.add_.Tensor", Writes(frozenset({0}), frozenset({"self"}), returns=0)),
        ("torch.ops.aten.view.default(a, [4])", "aten.view.default", Writes(returns=0)),
        ("torch.ops.aten.bernoulli.default(a)", "aten.bernoulli.default", Writes(random=True)),
        (
            "aten.randint.low_out(0, 9, [1], out=a)",
            "aten.randint.low_out",
            Writes(keywords=frozenset({"out"}), returns=3, random=True),
        ),
        # Names of ops without their overloads, which all write to the same argument.
        ("aten.copy_(a, b)", "aten.copy_", Writes(frozenset({0}), frozenset({"self"}), returns=0)),
        ("aten.index_put_(a, [b], c, True)", "aten.index_put_", Writes(frozenset({0}), frozenset({"self"}), returns=0)),
    ],
)
def test_written_arguments_of_calls_are_found(call: str, target: str, writes: Writes) -> None:
    assert called(call) == (target, writes)


@pytest.mark.parametrize(
    "call",
    ["somebodys_kernel(a, b)", "torch.relu(a)", "torch.ops.aten.no_such_op(a)", "aten.add(a, b)", "relu(a).add_(b)"],
)
def test_unknown_calls_raise_without_being_evaluated(call: str) -> None:
    """Nothing of what is called is evaluated."""
    name = call.rpartition("(")[0]
    said = f"Inductor's code calls {re.escape(name)}, and it is not known what that writes to: plan with kernels='eager'"
    with pytest.raises(TraceError, match=f"^{said}"):
        called(call, somebodys_kernel=lambda *_: None, relu=lambda _: pytest.fail("it is called"))


def test_writes_of_scan_kernels_with_a_combine_function_are_found() -> None:
    combine = "@triton.jit\ndef _triton_helper_fn_add0(arg0_0, arg1_0):\n    return arg0_0 + arg1_0\n"
    scan = triton("in_ptr0", "out_ptr0", "ws_ptr", "xnumel", before=combine)
    writes = Writes(positions=frozenset({1, 2}))
    assert called("scan.run(a, b, c, 4, stream=stream0)", {"scan": scan}) == ("scan", writes)


def test_a_kernel_that_a_model_brings_along_is_refused() -> None:
    source = "@triton_heuristics.user_autotune(custom_kernel=True)\n@triton.jit\ndef add_(in_ptr0, out_ptr0, y_ptr):\n    pass\n"
    with pytest.raises(TraceError, match=r"^Inductor compiled add_0 by async_compile\.triton, and it is not known"):
        called("add_0.run(a, b, c)", {"add_0": f"async_compile.triton('add_0', {source!r}, device_str='cuda')"})


def test_another_way_to_compile_is_refused() -> None:
    with pytest.raises(TraceError, match=r"^Inductor compiled cuda_gemm by async_compile\.cuda, and it is not known"):
        called("cuda_gemm.run(a)", {"cuda_gemm": "async_compile.cuda(r'''extern''', 'so')"})


def cpp_add(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(a + b)


ADDITIONS = {"cpp_add": cpp("const float*", "const float*", "float*")}
NAMES = namespace(cpp_add=cpp_add)
X, Y = torch.arange(4.0), torch.arange(4.0) + 10


def over(*pairs: tuple[str, str]) -> str:
    """Statements by which a module says what may be written over what."""
    return "".join(f"{('may be written over', *pair)!r}\n" for pair in pairs)


def test_launch_lists_the_inputs_it_may_overwrite() -> None:
    body = f"""
primals_1, primals_2 = args
buf0 = empty_strided_cpu((1, 4), (4, 1), torch.float32)
{over(("primals_1", "buf0"), ("primals_2", "buf0"), ("buf7", "buf0"))}cpp_add(primals_1, primals_2, buf0)
return (buf0, )
"""
    source = module(body, ADDITIONS)
    wrapper, returned = read(source, NAMES, 2)
    (launch,) = wrapper.launches
    views = [Call(NAMES["reinterpret_tensor"], (Ref(i), (1, 4), (4, 1), 0)) for i in range(2)]
    assert launch.over == [(2, 0, views[0]), (2, 1, views[1])]
    assert torch.equal(execute(wrapper, returned, [X, Y])[0], call(source, NAMES, [X, Y])[0])
    given = X.clone()
    launch.statements[0] = replace(launch.statements[0], value=views[0])
    (found,) = execute(wrapper, returned, [given, Y])
    assert found.data_ptr() == given.data_ptr()
    assert torch.equal(found.view(4), X + Y)


@pytest.mark.parametrize(
    "kernel",
    [
        "cpp_add(primals_1, reinterpret_tensor(primals_1, (4, ), (1, ), 0), buf0)",  # another element of it may be read
        "cpp_add(reinterpret_tensor(primals_1, (4, ), (1, ), 0), primals_2, buf0)",  # not as the kernel was generated for
        "cpp_add(primals_2, primals_2, buf0)",
    ],
)
def test_inputs_passed_in_another_form_are_not_overwritten(kernel: str) -> None:
    body = f"""
primals_1, primals_2 = args
buf0 = empty_strided_cpu((4, ), (1, ), torch.float32)
{over(("primals_1", "buf0"))}{kernel}
return (buf0, )
"""
    wrapper, _ = read(module(body, ADDITIONS), NAMES, 2)
    assert [launch.over for launch in wrapper.launches] == [[]]
