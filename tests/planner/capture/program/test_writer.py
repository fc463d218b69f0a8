"""Steps of schedules as passes."""

import pytest
import torch

from graphs.ir import Graph, Op, Phase, Tensor
from graphs.schedule import Compute, Free
from planner.capture.program.builder import PassBuilder
from planner.capture.program.program import Call, Program, Ref, Statement, call_of
from planner.capture.program.writer import PassWriter

aten = torch.ops.aten
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
