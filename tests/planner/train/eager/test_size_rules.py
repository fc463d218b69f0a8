"""The C++ library's rules for the sizes of outputs, beside what the ops make."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch

from planner.train.eager.session import rematerialize
from planner.train.eager.sizes import OutputSizes
from tests.support.native import NEEDS_LIBRARY

pytestmark = NEEDS_LIBRARY

aten = torch.ops.aten
x, y, rows = torch.ones(6, 8, 10), torch.ones(10, 7), torch.tensor([0, 2, 2])
Call = tuple[Any, tuple[Any, ...], dict[str, Any]]

EXACT: list[Call] = [
    (aten._log_softmax.default, (x.double(), 1, False), {}),
    (aten._log_softmax_backward_data.default, (x, x, 1, torch.float32), {}),
    (aten._softmax.default, (x.bfloat16(), 1, False), {}),
    (aten._softmax.default, (x, 1, False), {}),
    (aten._softmax_backward_data.default, (x, x, 1, torch.float32), {}),
    (aten._to_copy.default, (x,), {"dtype": torch.bfloat16}),
    (aten._to_copy.default, (x,), {"dtype": torch.complex128}),
    (aten._unsafe_view.default, (x, [48, 10]), {}),
    (aten.add.Tensor, (torch.ones(0, 3), torch.ones(1)), {}),
    (aten.add.Tensor, (x, x[0]), {}),
    (aten.add_.Tensor, (x.clone(), 1.0), {}),
    (aten.addmm.default, (torch.ones(7), y.new_ones(4, 10), y), {}),
    (aten.binary_cross_entropy.default, (x, x, x[0]), {}),
    (aten.bmm.default, (x, torch.ones(6, 10, 3)), {}),
    (aten.cat.default, ([x, x[:, :3]], 1), {}),
    (aten.clone.default, (x[0],), {}),
    (aten.embedding.default, (x[0], rows[:, None]), {}),
    (aten.empty_like.default, (x,), {"dtype": torch.float64}),
    (aten.eq.Scalar, (rows, 2), {}),
    (aten.gather.default, (x, 0, rows[:, None, None]), {}),
    (aten.gelu_backward.default, (x, x), {}),
    (aten.index.Tensor, (x, [None, rows[:, None], rows]), {}),
    (aten.index.Tensor, (x, [rows]), {}),
    (aten.index_add.default, (x, 0, rows, x[:3]), {}),
    (aten.index_put_.default, (x.clone(), [rows], torch.ones(())), {}),
    (aten.index_select.default, (x, -1, rows), {}),
    (aten.mean.default, (x,), {}),
    (aten.mm.default, (x[0].to(torch.float16), y.to(torch.float16)), {}),
    (aten.mse_loss.default, (x, x[0].double()), {}),
    (aten.mse_loss.default, (x, x, 0), {}),
    (aten.mul.Tensor, (torch.ones(6, 1, 5), torch.ones(4, 1)), {}),
    (aten.mul.Tensor, (x, x.double()[0, 0, 0]), {}),
    (aten.native_layer_norm.default, (x, [8, 10], None, None, 1e-5), {}),
    (aten.new_zeros.default, (x, [3, 5]), {}),
    (aten.new_zeros.default, (x, [3, 5]), {"dtype": torch.bool}),
    (aten.scatter_add.default, (x, 0, rows[:, None, None], x), {}),
    (aten.smooth_l1_loss.default, (x, x, 2), {}),
    (aten.soft_margin_loss.default, (x, x), {}),
    (aten.nonzero.default, (torch.ones(3, 4),), {}),
    (aten.sum.default, (x,), {}),
    (aten.triu.default, (x[0],), {}),
    (aten.sum.dim_IntList, (x, [-1, 0]), {}),
    (aten.sum.dim_IntList, (x, [1], True), {"dtype": torch.float64}),
    (aten.sum.dim_IntList, (x, None), {}),
    (aten.where.self, (torch.ones(3, 1) > 0, torch.ones(1, 7), torch.ones(())), {}),
]
# The rules leave these to PyTorch, as types are promoted.
UNKNOWN: list[Call] = [
    (aten.abs.default, (x.to(torch.complex64),), {}),
    (aten.add.Tensor, (x.half(), x.bfloat16()), {}),
    (aten.cat.default, ([x, x.double()],), {}),
    (aten.native_layer_norm.default, (x.bfloat16(), [10], None, None, 1e-5), {}),
    (aten.bitwise_and.Tensor, (rows > 0, rows > 1), {}),
    (aten.mul.Scalar, (rows, 2j), {}),
    (aten.mul.Scalar, (x, 2j), {}),
    (aten.mul.Tensor, (x, x.to(torch.complex64)), {}),
    (aten.mul.Tensor, (x, torch.ones((), dtype=torch.complex128)), {}),
]


class Misjudged(NamedTuple):
    """The ops of a block for whose sizes there was no rule, and those that made other bytes than expected."""

    unknown: list[Any]
    wrong: list[Any]
    asked: list[object]

    def call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Call an op. It asks for room before it runs, and again if it has made other bytes than expected."""
        self.asked.clear()
        function(*args, **kwargs)
        if len(self.asked) > 1:
            self.wrong.append(function)


@contextmanager
def watch_sizes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Misjudged]:
    found = Misjudged([], [], [])
    count_out_bytes = OutputSizes.count_out_bytes

    def count(self: OutputSizes, function: Any, *args: Any) -> int:
        found.unknown.append(function)
        return count_out_bytes(self, function, *args)

    monkeypatch.setattr(OutputSizes, "count_out_bytes", count)
    with rematerialize("100GB") as session:
        session.debug.memory.budget_bytes = 0
        session.debug.collect_garbage = lambda: None
        session.debug.bound_bytes = lambda operator, *_: found.unknown.append(operator.function) or 0
        session.debug.raise_too_small = lambda _, purpose: found.asked.append(purpose)
        yield found


@pytest.mark.parametrize(
    ("cases", "number"), [*((EXACT, number) for number in range(len(EXACT))), *((UNKNOWN, n) for n in range(len(UNKNOWN)))]
)
def test_rules_return_the_bytes_of_the_outputs_or_leave_promoted_types_to_pytorch(
    cases: Any, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    function, args, kwargs = cases[number]
    with watch_sizes(monkeypatch) as found:
        found.call(function, args, kwargs)
    assert found.unknown == ([function] if cases is UNKNOWN else []) and not found.wrong


TYPES = (torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64)
UNARY = (
    aten.abs,
    aten.neg,
    aten.exp,
    aten.relu,
    aten.sqrt,
    aten.sign,
    aten.logical_not,
    aten.isnan,
    aten.signbit,
    aten.bitwise_not,
)
BINARY = (
    aten.add.Tensor,
    aten.div.Tensor,
    aten.mul.Tensor,
    aten.pow.Tensor_Tensor,
    aten.maximum,
    aten.atan2,
    aten.lt.Tensor,
    aten.fmod.Tensor,
)


def operands() -> list[torch.Tensor]:
    return [torch.ones(shape).to(dtype) for shape in ((3, 4), (1, 4), ()) for dtype in TYPES]


@pytest.mark.parametrize("default", [torch.float32, torch.float64])
def test_rules_are_exact_for_all_types(default: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Call] = [(op, (a,), {}) for op in UNARY for a in operands()]
    calls += [(op, pair, {}) for op in BINARY for pair in product(operands(), repeat=2)]
    calls += [(op, (a, number), {}) for op in (aten.add.Scalar, aten.mul.Scalar) for a in operands() for number in (2, 2.0, 2j)]
    calls += [(aten.where.self, (torch.ones(4) > 0, a, b), {}) for a, b in product(operands(), repeat=2)]
    calls += [(aten.sum, (a,), {"dtype": dtype}) for a in operands() for dtype in (*TYPES, None)]
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        with watch_sizes(monkeypatch) as found:
            for op, args, kwargs in calls:
                with suppress(RuntimeError, TypeError):  # no kernel for these types
                    found.call(op, args, kwargs)
    finally:
        torch.set_default_dtype(before)
    assert found.wrong == []
    assert len(found.unknown) < 0.75 * len(calls)


def test_only_memory_of_the_device_counts() -> None:
    sizes = OutputSizes(torch.device("meta"))
    assert sizes.count_out_bytes(aten.relu.default, (torch.ones(5, device="meta"),), {}) == 20
    assert sizes.count_out_bytes(aten.relu.default, (torch.ones(5),), {}) == 0


@pytest.mark.parametrize("args", [(x[0], torch.ones(())), (torch.ones(()), x[0]), (x, x)])
def test_wrong_arguments_are_left_to_the_op(args: tuple[torch.Tensor, ...]) -> None:
    with pytest.raises(RuntimeError) as expected:
        aten.mm.default(*args)
    with rematerialize("1GB"), pytest.raises(RuntimeError, match="mat") as found:
        aten.mm.default(*args)
    assert str(found.value) == str(expected.value)
