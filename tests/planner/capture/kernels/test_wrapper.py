"""What the code around Inductor's kernels does, read as launches: executed, or merged, they return what it returns."""

import re

import pytest
import torch
from torch import Tensor

from planner.capture.kernels.merge import Group, group_launches
from planner.capture.kernels.wrapper import Launch, Value, Wrapper
from planner.capture.program.program import Call, Ref, Statement
from planner.graphs.errors import TraceError
from planner.graphs.ir import Phase
from tests.support.inductor.wrapper_code import call, cpp, execute, lines, module, namespace, read, triton as triton_kernel

KERNELS = {
    "cpp_add": cpp("const float*", "const float*", "float*"),
    "cpp_both": cpp("const float*", "float*", "float*"),
    "cpp_ones": cpp("float*"),
    "triton_scale": triton_kernel("in_out_ptr0", "in_ptr0", "out_ptr0", "xnumel"),
}


def cpp_add(a: Tensor, b: Tensor, out: Tensor) -> None:
    out.copy_(a + b)


def cpp_both(a: Tensor, doubled: Tensor, halved: Tensor) -> None:
    doubled.copy_(2 * a)
    halved.copy_(a / 2)


def cpp_ones(out: Tensor) -> None:
    out.fill_(1.0)


class TritonScale:
    @staticmethod
    def run(in_out: Tensor, a: Tensor, out: Tensor, numel: int, *, stream: int) -> None:
        assert (numel, stream) == (4, 70)
        out.copy_(in_out)
        in_out.mul_(a)


NAMES = namespace(
    cpp_add=cpp_add,
    cpp_both=cpp_both,
    cpp_ones=cpp_ones,
    triton_scale=TritonScale,
    get_raw_stream=lambda device: 70 + device,
    assert_size_stride=lambda *_: None,
    copy_if_misaligned=lambda value: value,
)


def launches(body: str, *inputs: Tensor) -> list[Launch]:
    """What the code `body` launches; executed, they return what it returns."""
    return read_and_executed(body, *inputs).launches


def read_and_executed(body: str, *inputs: Tensor) -> Wrapper:
    """What the code `body` does; executed, its launches return what it returns."""
    source = module(body, KERNELS)
    wanted = call(source, NAMES, [value.clone() for value in inputs])
    wrapper, returned = read(source, NAMES, len(inputs))
    found = execute(wrapper, returned, [value.clone() for value in inputs])
    for a, b in zip(wanted, found, strict=True):
        assert (a is b is None) or torch.equal(a, b)
    return wrapper


X, Y = torch.arange(4.0), torch.arange(4.0) + 10


def test_kernel_makes_the_buffer_it_is_first_to_write() -> None:
    body = """
primals_1, primals_2 = args
args.clear()
assert_size_stride(primals_1, (4, ), (1, ))
buf0 = empty_strided_cpu((4, ), (1, ), torch.float32)
# Topologically Sorted Source Nodes: [add], Original ATen: [aten.add]
cpp_add(primals_1, primals_2, buf0)
del primals_1
return (buf0, primals_2, None, )
"""
    wrapper = read_and_executed(body, X, Y)
    (launch,) = wrapper.launches
    assert (launch.target, launch.phase, launch.makes, launch.reads) == ("cpp_add", Phase.FORWARD, [2], {0, 1})
    assert lines(wrapper, 2) == ["t2 = empty_strided_cpu((4, ), (1, ), torch_float32)", "cpp_add(t0, t1, t2)"]


def test_a_buffer_may_have_room_behind_each_row() -> None:
    """As for the product of a matrix that is padded where it lies."""
    body = """
primals_1, = args
buf0 = empty_strided_cpu((2, 4), (5, 1), torch.float32).as_strided((2, 2), (5, 1))
cpp_add(reinterpret_tensor(primals_1, (2, 2), (2, 1), 0), reinterpret_tensor(primals_1, (2, 2), (2, 1), 0), buf0)
cpp_ones(reinterpret_tensor(buf0, (2, 2), (5, 1), 2))
buf1 = empty_strided_cpu((2, 2), (2, 1), torch.float32)
extern_kernels.mm(reinterpret_tensor(buf0, (2, 4), (5, 1), 0), reinterpret_tensor(buf0, (4, 2), (1, 5), 0), out=buf1)
return (buf1, )
"""
    wrapper = read_and_executed(body, X)
    first, second, _ = wrapper.launches
    assert lines(wrapper, 1)[0] == "t1 = empty_strided_cpu((2, 4, ), (5, 1, ), torch_float32).as_strided((2, 2, ), (5, 1, ))"
    assert (first.makes, second.makes, second.writes) == ([1], [], {1})


SEVERAL_OUTPUTS = """
primals_1, = args
buf0 = empty_strided_cpu((4, ), (1, ), torch.float32)
buf1 = empty_strided_cpu((4, ), (1, ), torch.float32)
cpp_both(primals_1, buf0, buf1)
buf2 = empty_strided_cpu((4, ), (1, ), torch.float32)
cpp_add(buf1, buf1, buf2)
del buf1
return (buf0, buf2)
"""
EXISTING_BUFFER = """
primals_1, = args
buf0 = empty_strided_cpu((8, ), (1, ), torch.float32)
cpp_ones(reinterpret_tensor(buf0, (4, ), (1, ), 0))
cpp_add(primals_1, primals_1, reinterpret_tensor(buf0, (4, ), (1, ), 4))
return (buf0, )
"""


@pytest.mark.parametrize(
    ("body", "first", "second"),
    [
        (SEVERAL_OUTPUTS, ([1, 2], {0}, set()), ([3], {2}, set())),
        (EXISTING_BUFFER, ([1], set(), set()), ([], {0, 1}, {1})),
    ],
)
def test_kernels_make_their_outputs_or_write_to_an_existing_buffer(body: str, first: object, second: object) -> None:
    assert [(launch.makes, launch.reads, launch.writes) for launch in launches(body, X)] == [first, second]


def test_extern_kernels_write_where_out_says() -> None:
    body = """
primals_1, primals_2 = args
buf0 = empty_strided_cpu((2, 2), (2, 1), torch.float32)
extern_kernels.mm(reinterpret_tensor(primals_1, (2, 2), (2, 1), 0), reinterpret_tensor(primals_2, (2, 2), (1, 2), 0), out=buf0)
return (buf0, )
"""
    (launch,) = launches(body, X, Y)
    assert (launch.target, launch.makes, launch.reads) == ("extern_kernels.mm", [2], {0, 1})


def test_allocating_call_makes_its_result() -> None:
    body = """
primals_1, = args
buf0 = torch.ops.aten.relu.default(primals_1)
buf1 = buf0
del buf0
buf2 = extern_kernels.mm(reinterpret_tensor(buf1, (2, 2), (2, 1), 0), reinterpret_tensor(buf1, (2, 2), (2, 1), 0))
return (buf2, )
"""
    first, second = launches(body, X)
    assert first.statements == [Statement(Call(torch.ops.aten.relu.default, (Ref(0),)), ((1, ()),))]
    assert (first.makes, first.reads) == ([1], {0})
    assert (second.target, second.makes, second.reads) == ("extern_kernels.mm", [2], {1})


def test_each_item_of_a_tuple_is_a_value_of_its_own() -> None:
    body = """
primals_1, = args
buf0 = torch.ops.aten.sort.stable(primals_1, stable=False, dim=0, descending=True)
buf1 = buf0[0]
assert_size_stride(buf1, (4, ), (1, ))
buf2 = buf0[1]
del buf0
return (buf2, buf1)
"""
    wrapper = read_and_executed(body, X)
    assert wrapper.launches[0].makes == [1, 2]
    assert lines(wrapper, 1)[1:] == ["t1 = made[0]", "t2 = made[1]", "del made"]


def test_views_are_inlined_into_their_readers() -> None:
    body = """
primals_1, = args
buf0 = empty_strided_cpu((8, ), (1, ), torch.float32)
buf1 = reinterpret_tensor(buf0, (6, ), (1, ), 2)
cpp_add(primals_1, primals_1, reinterpret_tensor(buf1, (4, ), (1, ), 1))
buf2 = empty_strided_cpu((4, ), (1, ), torch.float32)
cpp_add(reinterpret_tensor(buf1, (4, ), (1, ), 1), primals_1, buf2)
return (buf2, reinterpret_tensor(buf0, (4, ), (1, ), 3), )
"""
    wrapper = read_and_executed(body, X)
    first, second = wrapper.launches
    view = "reinterpret_tensor(reinterpret_tensor(t1, (6, ), (1, ), 2), (4, ), (1, ), 1)"
    assert lines(wrapper, 1)[1] == f"cpp_add(t0, t0, {view})"
    assert lines(wrapper, 1)[-1] == f"cpp_add({view}, t0, t2)"
    assert (first.makes, second.reads) == ([1], {0, 1})


def test_an_op_writes_as_its_schema_says() -> None:
    body = """
primals_1, primals_2 = args
buf0 = torch.ops.aten.clone.default(primals_1)
aten.copy_(reinterpret_tensor(buf0, (2, ), (1, ), 2), reinterpret_tensor(primals_2, (2, ), (1, ), 0))
buf1 = torch.ops.aten.mul_.Tensor(buf0, primals_2)
buf2 = torch.ops.aten.view.default(buf1, [2, 2])
return (buf2, )
"""
    made, copied, scaled = launches(body, X, Y)
    assert (made.makes, made.reads) == ([2], {0})
    assert (copied.target, copied.reads, copied.writes) == ("aten.copy_", {1, 2}, {2})
    assert scaled.statements == [Statement(Call(torch.ops.aten.mul_.Tensor, (Ref(2), Ref(1))))]
    assert (scaled.reads, scaled.writes) == ({1, 2}, {2})


def test_random_call_is_marked_random() -> None:
    body = """
primals_1, = args
buf0 = empty_strided_cpu((1, ), (1, ), torch.int64)
aten.randint.low_out(-9223372036854775808, 9223372036854775807, [1], out=buf0)
buf1 = torch.ops.aten.relu.default(primals_1)
return (buf1, )
"""
    drawn, plain = launches(body, X)
    assert (drawn.random, drawn.makes, drawn.reads) == (True, [1], set())
    assert not plain.random


def test_cuda_wrapper_code_is_read() -> None:
    body = """
primals_1, primals_2 = args
args.clear()
with torch.cuda._DeviceGuard(0):
    torch.cuda.set_device(0)
    buf0 = torch.ops.aten.clone.default(primals_1)
    buf1 = empty_strided_cuda((4, ), (1, ), torch.float32)
    stream0 = get_raw_stream(0)
    triton_scale.run(buf0, primals_2, buf1, 4, stream=stream0)
    buf2 = empty_strided_cuda((4, ), (1, ), torch.float32)
    stream0 = get_raw_stream(0)
    triton_scale.run(buf2, primals_2, buf1, 4, stream=stream0)
return (buf0, )
"""
    names = {**NAMES, "empty_strided_cuda": NAMES["empty_strided_cpu"]}
    wrapper, returned = read(module(body, KERNELS), names, 2)
    assert sum("get_raw_stream(0)" in line for line in lines(wrapper, 2)) == 1  # for all launches
    _, scaled, again = wrapper.launches
    assert (scaled.target, scaled.makes, scaled.reads, scaled.writes) == ("triton_scale", [3], {1, 2}, {2})
    # What in_out_ptr0 points to need not have been written before.
    assert (again.makes, again.reads, again.writes) == ([4], {1, 3}, {3})
    (scale,) = execute(wrapper, returned, [X, Y])
    assert torch.equal(scale, X * Y)


def test_an_input_that_kernels_expect_aligned_is_bound_to_the_tensor_itself() -> None:
    """Static tensors are aligned before they are read; see ``builder.align``."""
    body = """
primals_1, primals_2 = args
primals_1 = copy_if_misaligned(primals_1)
buf0 = empty_strided_cpu((4, ), (1, ), torch.float32)
cpp_add(primals_1, primals_2, buf0)
primals_2_orig = primals_2
primals_2 = copy_if_misaligned(primals_2_orig)
buf1 = empty_strided_cpu((4, ), (1, ), torch.float32)
cpp_add(primals_2, buf0, buf1)
del primals_2_orig
return (buf1, primals_1, primals_2, )
"""
    first, second = launches(body, X, Y)
    assert (first.statements[-1].value, first.reads) == (Call(cpp_add, (Ref(0), Ref(1), Ref(2))), {0, 1})
    assert (second.statements[-1].value, second.reads) == (Call(cpp_add, (Ref(1), Ref(2), Ref(3))), {1, 2})


def test_a_method_in_place_writes_to_its_tensor() -> None:
    body = """
workspace_0 = empty_strided_cpu((4, ), (1, ), torch.float32)
workspace_0.zero_()
buf0 = empty_strided_cpu((4, ), (1, ), torch.float32)
cpp_add(workspace_0, workspace_0, buf0)
return (buf0, )
"""
    zeroed, added = launches(body)
    assert (zeroed.target, zeroed.makes, zeroed.reads) == ("zero_", [0], set())
    assert [statement.value for statement in zeroed.statements[1:]] == [Call("zero_", (Ref(0),))]
    assert (added.reads, added.makes) == ({0}, [1])


def test_parts_of_a_workspace_are_summed() -> None:
    """As where Inductor reduces rows and columns of a matrix by one kernel."""
    body = """
primals_1, = args
workspace_0 = empty_strided_cpu((8, ), (1, ), torch.float32)
cpp_add(reinterpret_tensor(primals_1, (8, ), (1, ), 0), reinterpret_tensor(primals_1, (8, ), (1, ), 0), workspace_0)
buf0 = workspace_0[0 * (2) * (2) : (0 + 1) * (2) * (2)].view(2, 2).sum(dim=0).view([2])
buf1 = workspace_0[1 * (2) * (2) : (1 + 1) * (2) * (2)].view(2, 2).amax(dim=0).view([1, 2]).to(torch.float16)
del workspace_0
return (buf0, buf1, )
"""
    filled, summed, greatest = launches(body, torch.arange(8.0))
    assert (filled.makes, filled.reads) == ([1], {0})
    assert (summed.target, summed.makes, summed.reads, summed.writes) == ("sum", [2], {1}, set())
    assert (greatest.target, greatest.makes, greatest.reads) == ("amax", [3], {1})


def test_two_modules_may_use_one_name_for_two_things() -> None:
    body = "primals_1, = args\nbuf0 = empty_strided_cpu((4, ), (1, ), torch.float32)\ncpp_ones(buf0)\nreturn (buf0, )"
    other = {**NAMES, "cpp_ones": lambda out: out.fill_(5.0)}
    wrapper, first = read(module(body, KERNELS), NAMES, 1)
    value = wrapper.add_value(Value())
    second = wrapper.read(module(body, KERNELS), other, [value], {}, Phase.BACKWARD)
    third = wrapper.read(module(body, KERNELS), NAMES, [value], {}, Phase.BACKWARD)
    called = [line.partition("(")[0] for line in lines(wrapper, 1) if line.startswith("cpp")]
    assert called == ["cpp_ones", "cpp_ones_2", "cpp_ones"]
    assert [launch.phase for launch in wrapper.launches] == [Phase.FORWARD, Phase.BACKWARD, Phase.BACKWARD]
    found = execute(wrapper, [*first, *second, *third], [X])
    assert [each.tolist() for each in found] == [[1.0] * 4, [5.0] * 4, [1.0] * 4]


def test_constants_are_values_that_are_there_before() -> None:
    wrapper = Wrapper()
    constant = wrapper.add_value(Value())
    body = """
primals_1, = args
buf0 = empty_strided_cpu((4, ), (1, ), torch.float32)
cpp_add(primals_1, _frozen0, buf0)
return (buf0, )
"""
    value = wrapper.add_value(Value())
    returned = wrapper.read(module(body, KERNELS), NAMES, [value], {"_frozen0": constant}, Phase.FORWARD)
    (launch,) = wrapper.launches
    assert launch.reads == {0, 1}
    assert torch.equal(execute(wrapper, returned, [Y, X])[0], X + Y)


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("if buf0.item():\n    pass", "the statement 'if buf0.item"),
        ("for i in range(3):\n    cpp_ones(buf0)", "the statement 'for i in range"),
        ("u0 = buf0.item()", "the statement 'buf0.item()'"),
        ("s0 = 3 + 4", "the statement 's0 = 3 + 4'"),
        ("buf1 = buf0[0:2].view(2)", "the statement 'buf0[0:2].view(2)'"),
        ("buf1 = buf0[0:2].sum().tolist()", "the statement 'buf0[0:2].sum().tolist()'"),
        ("unknown_kernel(buf0)", "calls unknown_kernel, and it is not known what that writes to"),
        ("buf1 = torch.relu(buf0)", "calls torch.relu, and it is not known"),
        (
            "view = reinterpret_tensor(buf0, (2, ), (1, ), 1)\nview = copy_if_misaligned(view)",
            "aligns 'view', a view of another tensor,",
        ),
    ],
)
def test_unsupported_statements_raise(statement: str, said: str) -> None:
    body = f"primals_1, = args\nbuf0 = torch.ops.aten.relu.default(primals_1)\n{statement}\nreturn (buf0, )"
    with pytest.raises(TraceError, match=f"^Inductor's code (has )?{re.escape(said)}.* plan with kernels='eager'"):
        read(module(body, KERNELS), NAMES, 1)


WRITTEN = Call("over")


def launch(makes: int | None = None, *, reads: str = "", writes: str = "", phase: Phase = Phase.FORWARD) -> Launch:
    """A launch that makes a value, reads some and writes to some: ``reads="12"`` are values 1 and 2."""
    made = [] if makes is None else [makes]
    return Launch("kernel", phase, [], makes=made, reads=set(map(int, reads)), writes=set(map(int, writes)))


def parts(launches: list[Launch], static: tuple[int, ...] = ()) -> tuple[list[Group], list[list[int]]]:
    """The groups, and which launches are in them."""
    groups = group_launches(launches, static)
    return groups, [[next(i for i, each in enumerate(launches) if each is one) for one in group.launches] for group in groups]


def test_launches_that_write_values_of_their_own_stay_apart() -> None:
    groups, found = parts([launch(0), launch(1, reads="0"), launch(2, reads="01")])
    assert found == [[0], [1], [2]]
    assert not any(group.once or group.follows for group in groups)


def test_zeros_and_their_accumulation_merge_into_one_op() -> None:
    # 1: what is added; 2: zeros, 3: another kernel in between.
    groups, found = parts([launch(1), launch(2), launch(3, reads="1"), launch(reads="12", writes="2"), launch(4, reads="2")])
    assert found == [[0], [2], [1, 3], [4]]
    merged = groups[2]
    assert (merged.makes, merged.reads, merged.writes, merged.once, merged.follows) == ({2}, {1}, set(), False, set())


def test_all_parts_of_a_concatenation_are_one_op_where_nobody_reads_in_between() -> None:
    _, found = parts(
        [launch(1), launch(reads="01", writes="1"), launch(reads="01", writes="1"), launch(2, reads="1")], static=(0,)
    )
    assert found == [[0, 1, 2], [3]]


def test_parts_with_a_reader_in_between_are_executed_once_and_in_order() -> None:
    launches = [launch(1), launch(3, reads="1"), launch(2), launch(reads="21", writes="1"), launch(4, reads="1")]
    groups, found = parts(launches)
    assert found == [[0], [1], [2], [3], [4]]
    assert [group.once for group in groups] == [True, True, False, True, False]
    assert [group.follows for group in groups] == [set(), set(), set(), {0, 1}, {3}]


def test_random_ops_stay_in_order() -> None:
    def drawn(makes: int) -> Launch:
        return Launch("rand", Phase.FORWARD, [], makes=[makes], random=True)

    _, found = parts([drawn(1), launch(2), launch(reads="12", writes="1")])
    assert found == [[1], [0, 2]]
    groups, found = parts([drawn(1), drawn(2), launch(reads="12", writes="1")])
    assert found == [[0], [1], [2]]
    assert [group.random for group in groups] == [True, True, False]
    assert groups[2].follows == {0}


def test_launches_needed_in_between_are_not_merged() -> None:
    # What made 1 also made 2, which is read before 1 is written to again.
    both = Launch("kernel", Phase.FORWARD, [], makes=[1, 2])
    groups, found = parts([both, launch(3, reads="2"), launch(reads="13", writes="1"), launch(4, reads="1")])
    assert found == [[0], [1], [2], [3]]
    assert [group.once for group in groups] == [True, False, True, False]
    assert [group.follows for group in groups] == [set(), set(), {0}, {2}]


def test_readers_of_a_buffer_stay_before_its_update() -> None:
    # 0 is static: 1 is made of it, then it is overwritten, then 1 is written to again.
    groups, found = parts([launch(1, reads="0"), launch(reads="0", writes="0"), launch(reads="1", writes="1")], static=(0,))
    assert found == [[0], [1], [2]]
    assert [group.once for group in groups] == [True, False, True]
    assert groups[2].follows == {0}


def test_static_values_are_written_by_several_ops() -> None:
    groups, found = parts([launch(reads="0", writes="0"), launch(1, reads="0"), launch(reads="01", writes="0")], static=(0,))
    assert found == [[0], [1], [2]]
    assert not any(group.once or group.follows for group in groups)  # the graph orders them by what it mutates


def test_the_two_passes_are_not_merged() -> None:
    groups, found = parts([launch(1), launch(reads="1", writes="1", phase=Phase.BACKWARD)])
    assert found == [[0], [1]]
    assert all(group.once for group in groups)


def test_readers_between_two_writers_follow_the_first() -> None:
    launches = [
        launch(1),
        launch(2, reads="1"),
        launch(reads="1", writes="1"),
        launch(3, reads="1"),
        launch(reads="13", writes="1"),
    ]
    groups, found = parts(launches)
    assert found == [[0], [1], [2], [3], [4]]
    assert [group.once for group in groups] == [True] * 5
    assert [group.follows for group in groups] == [set(), set(), {0, 1}, {2}, {2, 3}]


def test_only_ops_of_one_launch_may_overwrite_their_inputs() -> None:
    first, second = launch(2, reads="1"), launch(reads="12", writes="2")
    first.over = [(2, 1, WRITTEN)]
    (group,), _ = parts([first, second], static=(1,))
    assert group.over == []
    alone, other = launch(3, reads="1"), launch(4, reads="1")
    alone.over = [(3, 1, WRITTEN)]
    groups, _ = parts([alone, other], static=(1,))
    assert [group.over for group in groups] == [[(3, 1, WRITTEN)], []]
