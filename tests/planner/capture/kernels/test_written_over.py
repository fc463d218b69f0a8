"""What the code around Inductor's kernels says of the inputs that may be written over."""

from dataclasses import replace

import pytest
import torch

from planner.capture.program.program import Call, Ref
from tests.support.inductor.wrapper_code import call, cpp, execute, module, namespace, read


def cpp_add(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(a + b)


KERNELS = {"cpp_add": cpp("const float*", "const float*", "float*")}
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
    source = module(body, KERNELS)
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
    wrapper, _ = read(module(body, KERNELS), NAMES, 2)
    assert [launch.over for launch in wrapper.launches] == [[]]
