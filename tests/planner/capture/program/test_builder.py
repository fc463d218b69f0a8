"""Passes of calls and of schedules: what they compute, hold and free, how they read, and generators of random ops."""

import weakref

import pytest
import torch

from planner.capture.program.builder import PassBuilder
from planner.capture.program.draws import get_default_generator
from planner.capture.program.program import Call, Program, Ref, Shared, Statement, call_of, get_item
from planner.capture.program.writer import PassWriter
from planner.graphs.ir import Graph, Op, Phase, Tensor
from planner.graphs.schedule import Compute, Free
from tests.support.cuda_device import cuda_device

aten = torch.ops.aten
EMPTY = Program((), (), None, (), ())
X, Y = torch.arange(4.0), torch.ones(4)


def add(*terms: object) -> Call:
    return Call(aten.add.Tensor, terms)


def builder(program: Program = EMPTY, tensors: tuple[int, ...] = (0, 1)) -> PassBuilder:
    found = PassBuilder(program)
    found.add_tensor_list("static", tensors)
    return found


def lines(built: PassBuilder, returned: object) -> list[str]:
    return [line.strip() for line in built.finish(returned, "test").module.code.splitlines()]


def test_a_pass_reads_as_its_calls() -> None:
    built = builder()
    built.execute(call_of(add(Call(aten.view.default, (Ref(0), [2, 2])), 1.5), [(2, ())]).statements, [2])
    built.free_tensor(0)
    assert lines(built, (Ref(2), [None])) == [
        "def forward(static):",
        "t0, t1, = static",
        "t2 = aten_add_Tensor(aten_view_default(t0, [2, 2]), 1.5)",
        "del t0",
        "return (t2, [None], )",
    ]


def test_items_that_are_not_wanted_are_not_held() -> None:
    for wanted, held in (((2, 3), [2, 3]), ((3,), [3]), ((), [])):
        built = builder()
        built.execute([Statement(Call(aten.sort.default, (Ref(0),)), ((2, (0,)), (3, (1,))))], wanted)
        assert sorted(t for t in built.tensors if t > 1) == held
        code = lines(built, None)[2:-1]
        assert code[-1] == "del made" if held else code == ["aten_sort_default(t0)"]


def test_recomputing_one_of_two_outputs_uses_a_temporary_for_the_other() -> None:
    """As launches do that write two buffers, of which one is in memory already."""
    built = builder()
    statements = [
        Statement(Call(torch.empty_like, (Ref(0),)), ((2, ()),)),
        Statement(Call(torch.empty_like, (Ref(0),)), ((3, ()),)),
        Statement(Call("copy_", (Ref(2), Ref(0)))),
        Statement(Call("copy_", (Ref(3), add(Ref(2), Ref(1))))),
    ]
    built.execute(statements, [2, 3])
    built.free_tensor(3)
    built.execute(statements, [3])
    code = lines(built, Ref(3))
    assert code[-6:-1] == [
        "_t2 = empty_like(t0)",
        "t3 = empty_like(t0)",
        "_t2.copy_(t0)",
        "t3.copy_(aten_add_Tensor(_t2, t1))",
        "del _t2",
    ]


def test_unread_tensor_is_held_until_it_is_freed() -> None:
    seen: list[bool] = []
    made: list[weakref.ref[torch.Tensor]] = []

    def make(value: torch.Tensor) -> torch.Tensor:
        made.append(weakref.ref(result := value + 1))
        return result

    def look() -> None:
        seen.append(made[0]() is not None)

    built = builder()
    built.execute([Statement(Call(make, (Ref(0),)), ((2, ()),))], [2])
    built.call(Call(look))
    built.free_tensor(2)
    built.call(Call(look))
    built.finish(None, "test").run([X, Y])
    assert seen == [True, False]


def test_static_tensors_that_are_given_up_go_with_their_last_reader() -> None:
    built = PassBuilder(EMPTY)
    built.add_tensor_list("static", (0, 1), emptied=True)
    built.execute([Statement(add(Ref(0), Ref(1)), ((2, ()),))], [2])
    built.execute([Statement(add(Ref(2), Ref(1)), ((3, ()),))], [3])
    built.free_read((0, 1), (Ref(3), Ref(1)))
    done = built.finish((Ref(3), Ref(1)), "test")
    assert [line.strip() for line in done.module.code.splitlines()][2:5] == [
        "static.clear()",
        "t2 = aten_add_Tensor(t0, t1)",
        "del t0",
    ]
    static = [X, Y]
    assert torch.equal(done.run(static)[0], X + 2) and static == []


def test_a_shared_value_is_made_once() -> None:
    asked: list[int] = []
    shared = Shared(Call(lambda number: asked.append(number) or number, (7,)))
    built = builder()
    for tensor in (2, 3):
        built.execute([Statement(add(Ref(0), shared), ((tensor, ()),))], [tensor])
    assert torch.equal(built.finish(add(Ref(2), Ref(3)), "test").run([X, Y]), 2 * (X + 7)) and asked == [7]


def test_names_of_objects_are_no_variables() -> None:
    def made(value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return value + 1, value + 2

    built = builder()
    built.execute([Statement(Call(made, (Ref(0),)), ((2, (0,)), (3, (1,))))], [2, 3])
    found = built.finish([Ref(2), Ref(3), get_item([Ref(0), Ref(1)], (1,))], "test").run([X, Y])
    assert all(map(torch.equal, found, (X + 1, X + 2, Y)))


def test_a_pass_runs_under_its_guard_with_aligned_tensors() -> None:
    whole = torch.arange(9.0)
    shifted = whole[1:5]
    program = Program((), (), None, (), (), guard=Call(torch.autograd.grad_mode.inference_mode), aligned=frozenset({0}))
    built = builder(program)
    built.execute([Statement(add(Ref(0), Ref(1)), ((2, ()),))], [2])
    found = built.finish([Ref(2), Ref(0)], "test").run([shifted, Y])
    assert found[0].is_inference() and torch.equal(found[0], shifted + 1)
    assert found[1].data_ptr() % 16 == 0 and torch.equal(found[1], shifted)


def test_a_failing_line_is_of_its_step() -> None:
    built = builder()
    for built.step, tensor in enumerate((2, 3)):
        built.execute([Statement(add(Ref(0), 1 if tensor == 2 else "one"), ((tensor, ()),))], [tensor])
    done = built.finish(None, "a test")
    with pytest.raises(RuntimeError, match="'one'") as raised:
        done.run([X, Y])
    frames = [(each.frame.code.raw.co_filename, each.lineno + 1) for each in raised.traceback]
    assert [done.lines[line] for line in frames if line in done.lines] == [1]
    assert any("a test" in file for file, _ in frames)


def test_a_device_without_an_index_is_the_current_one() -> None:
    with cuda_device(devices=2):
        first, second = torch.cuda.default_generators
        assert get_default_generator(torch.device("cuda")) is first
        torch.cuda.set_device(1)
        assert get_default_generator(torch.device("cuda")) is second
        assert get_default_generator(torch.device("cuda", 0)) is first


def test_ops_that_do_not_run_have_the_generator_of_the_cpu() -> None:
    for device in ("cpu", "meta", *(() if torch.cuda.is_available() else ("cuda",))):
        assert get_default_generator(torch.device(device)) is torch.default_generator


SORT = Call(aten.sort.default, (Ref(0),))


@pytest.mark.parametrize("is_after_forward", [False, True])
def test_an_output_that_the_backward_pass_does_not_make_is_not_freed_there(is_after_forward: bool) -> None:
    """As of a batch norm that runs again without its statistics."""
    tensors = (Tensor(0, "x", 16, ()), Tensor(1, "values", 16, (0,)), Tensor(2, "indices", 32, (0,)))
    graph = Graph((Op(0, "sort", "aten.sort", (0,), (1, 2), 1.0, phase=Phase.FORWARD),), tensors, frozenset({1}))
    calls = call_of(SORT, [(1, (0,)), (2, (1,))], again=Statement(SORT, ((1, (0,)),)))
    builder = PassBuilder(Program((calls,), (), None, (), ()))
    builder.add_tensor_list("static", [0])
    writer = PassWriter(graph, Program((calls,), (), None, (), ()))
    if is_after_forward:
        writer.end_forward()
    writer.write(builder, [Compute(0), Free(2)])
    made = builder.finish(Ref(1), "test")
    assert made.run([torch.tensor([2.0, 1.0])]).tolist() == [1.0, 2.0]
    assert list(writer.live) == [1]
    assert ("t2" in made.module.code) is not is_after_forward
