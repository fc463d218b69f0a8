"""Rules for the sizes of outputs, beside what the ops make."""

from itertools import product
from typing import Any

import pytest
import torch

from planner.train.eager.size_rules import get_rule, iterate_tensors
from planner.train.eager.sizes import OutputSizes

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


def made_bytes(call: Call) -> int:
    function, args, kwargs = call
    there = {t.untyped_storage()._cdata for t in iterate_tensors(args)}
    outputs = {t.untyped_storage()._cdata: t for t in iterate_tensors(function(*args, **kwargs))}
    return sum(t.untyped_storage().nbytes() for address, t in outputs.items() if address not in there)


@pytest.mark.parametrize("number", range(len(EXACT)))
def test_rules_return_the_bytes_of_the_outputs(number: int) -> None:
    function, args, kwargs = EXACT[number]
    rule = get_rule(function)
    assert (
        sum(rule(args, kwargs))
        == made_bytes(EXACT[number])
        == OutputSizes(torch.device("cpu")).count_out_bytes(function, args, kwargs)
    )


@pytest.mark.parametrize("number", range(len(UNKNOWN)))
def test_rules_leave_types_that_are_promoted_to_pytorch(number: int) -> None:
    function, args, kwargs = UNKNOWN[number]
    rule = get_rule(function)
    assert rule is not None and rule(args, kwargs) is None
    assert OutputSizes(torch.device("cpu")).count_out_bytes(function, args, kwargs) == made_bytes(UNKNOWN[number])


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
def test_rules_are_exact_for_all_types(default: torch.dtype) -> None:
    calls: list[Call] = [(op, (a,), {}) for op in UNARY for a in operands()]
    calls += [(op, pair, {}) for op in BINARY for pair in product(operands(), repeat=2)]
    calls += [(op, (a, number), {}) for op in (aten.add.Scalar, aten.mul.Scalar) for a in operands() for number in (2, 2.0, 2j)]
    calls += [(aten.where.self, (torch.ones(4) > 0, a, b), {}) for a, b in product(operands(), repeat=2)]
    calls += [(op, (a,), {"dtype": dtype}) for op in (aten.sum, aten.clone) for a in operands() for dtype in (*TYPES, None)]
    decided, before = 0, torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        for op, args, kwargs in calls:
            function = getattr(op, "default", op)
            kwargs = {} if op is aten.clone else kwargs
            try:
                made = made_bytes((function, args, kwargs))
            except (RuntimeError, TypeError):  # no kernel for these types
                continue
            rule = get_rule(function)
            sizes = rule(args, kwargs)
            decided += sizes is not None
            assert sizes is None or sum(sizes) == made, (function, [(a.dtype, a.shape) for a in iterate_tensors(args)], kwargs)
    finally:
        torch.set_default_dtype(before)
    assert decided > len(calls) / 4


@pytest.mark.parametrize(
    "function", [aten.cumsum.default, aten.arange.default, aten.equal.default, aten.nonzero.default, aten.frexp.Tensor]
)
def test_unsupported_ops_have_no_size_rule(function: object) -> None:
    assert get_rule(function) is None


def test_only_memory_of_the_device_counts() -> None:
    sizes = OutputSizes(torch.device("meta"))
    assert sizes.count_out_bytes(aten.relu.default, (torch.ones(5, device="meta"),), {}) == 20
    assert sizes.count_out_bytes(aten.relu.default, (torch.ones(5),), {}) == 0


def test_numbers_may_be_on_another_device() -> None:
    sizes = OutputSizes(torch.device("meta"))
    assert sizes.count_out_bytes(aten.mul.Tensor, (torch.ones(()), torch.ones((), device="meta")), {}) == 4
    assert sizes.count_out_bytes(aten.mul.Tensor, (torch.ones(()), torch.ones(3, device="meta")), {}) == 12


def test_wrong_arguments_are_left_to_the_op() -> None:
    assert OutputSizes(torch.device("cpu")).count_out_bytes(aten.mm.default, (x[0], torch.ones(())), {}) == 0
