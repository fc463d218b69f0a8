"""Products of a constant sparse matrix, such as the adjacency of a graph, with a dense one; sums with a sparse tensor.

Neither Dynamo nor AOTAutograd supports sparse tensors. A capture therefore sees the dense parts of a sparse matrix, which lie in
the same memory, and an operator on the parts, which computes what eager PyTorch does. A sparse tensor that the step makes of its
entries is an object of ``Entries`` in the capture, which may be added to a dense tensor, or made one.

Known weaknesses: only products of a constant matrix in the formats of ``_MULTIPLIED``, and sums; other uses of sparse tensors are
refused by ``planner.compile`` and run between graphs under ``torch.compile(backend="planner")``.
"""

from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from operator import add, iadd, matmul
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from planner.torch_private import capture as private
from planner.torch_private.patches import wrap

_MULTIPLIED = (torch.sparse_coo, torch.sparse_csr)  # the layouts that products are captured of
_PRODUCTS = (torch.sparse.mm, torch.mm, torch.matmul, torch.spmm)


def is_sparse(value: Tensor) -> bool:
    """Return True if `value` consists of other tensors, without a storage of its own."""
    return value.layout is not torch.strided


def list_strided_parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return the strided tensors that hold the data of `tensor`: itself, or the indices and values of a sparse one."""
    if tensor.layout is torch.strided:
        return (tensor,)
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return ()


@torch.library.custom_op("planner::sparse_mm", mutates_args=())
def sparse_mm(matrix: Sequence[Tensor], size: Sequence[int], coalesced: bool, dense: Tensor) -> Tensor:  # noqa: FBT001
    """Return the product of the sparse matrix with the parts `matrix` and a dense one."""
    product: Tensor = torch.sparse.mm(_build_matrix(matrix, size, coalesced=coalesced), dense)
    return product


@sparse_mm.register_fake
def _(matrix: Sequence[Tensor], size: Sequence[int], coalesced: bool, dense: Tensor) -> Tensor:  # noqa: FBT001
    return dense.new_empty(size[0], dense.shape[1])


@torch.library.custom_op("planner::sparse_mm_backward", mutates_args=())
def sparse_mm_backward(matrix: Sequence[Tensor], size: Sequence[int], coalesced: bool, gradient: Tensor) -> Tensor:  # noqa: FBT001
    """Return the gradient of the dense matrix."""
    return _build_matrix(matrix, size, coalesced=coalesced).t().mm(gradient)


@sparse_mm_backward.register_fake
def _(matrix: Sequence[Tensor], size: Sequence[int], coalesced: bool, gradient: Tensor) -> Tensor:  # noqa: FBT001
    return gradient.new_empty(size[1], gradient.shape[1])


def _build_matrix(made_of: Sequence[Tensor], size: Sequence[int], *, coalesced: bool) -> Tensor:
    *positions, values = made_of
    if len(positions) == 1:
        return torch.sparse_coo_tensor(positions[0], values, tuple(size), check_invariants=False, is_coalesced=coalesced)
    return torch.sparse_csr_tensor(positions[0], positions[1], values, tuple(size), check_invariants=False)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    matrix, ctx.size, ctx.coalesced, _ = inputs
    ctx.save_for_backward(*matrix)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    matrix = list(ctx.saved_tensors)
    return [None] * len(matrix), None, None, torch.ops.planner.sparse_mm_backward(matrix, ctx.size, ctx.coalesced, gradient)


sparse_mm.register_autograd(_backward, setup_context=_save)


class Entries:
    """The entries of a sparse tensor that the step makes, while code is captured: the columns of `indices`, and their values."""

    def __init__(self, indices: Tensor, values: Tensor, size: Sequence[int], **options: Any) -> None:
        self.indices, self.values, self.size = indices, values.to(**options), size

    def to_dense(self) -> Tensor:
        """Return a dense tensor with these entries."""
        return _add_in_place(self.values.new_zeros(self.size), self)


def _add_in_place(dense: Tensor, entries: Entries) -> Tensor:
    return dense.index_put_(tuple(entries.indices.unbind(0)), entries.values, accumulate=True)


# What Dynamo traces in place of these functions.
_TRACED: dict[object, Any] = {
    torch.sparse_coo_tensor: lambda indices, values, size, **options: Entries(indices, values, size, **options),
    iadd: _add_in_place,
    add: lambda dense, entries: _add_in_place(dense.clone(), entries),
}


def get_part_addresses(matrix: Tensor) -> tuple[int, ...]:
    """Return the addresses of the parts of a sparse matrix: writing to it may replace its parts."""
    return tuple(part.data_ptr() for part in _list_parts(matrix))


def _list_parts(matrix: Tensor) -> list[Tensor]:
    """Return the parts of `matrix`, as tensors that are no views of it."""
    views = list_strided_parts(matrix)
    return [view.new_empty(0).set_(view.untyped_storage(), view.storage_offset(), view.shape, view.stride()) for view in views]


@dataclass(frozen=True, slots=True)
class SparseMatrices:
    """The sparse matrices in the products of a captured step.

    Attributes:
        names: their names, as Dynamo writes them.
        parts: their parts, by the names of attributes of the captured module.
    """

    names: set[str] = field(default_factory=set)
    parts: dict[str, Tensor] = field(default_factory=dict)

    def add_parts(self, module: nn.Module) -> None:
        """Set the parts as attributes of the captured `module`, which has the buffers of the user's model only."""
        vars(module).update(self.parts)

    def call_product(
        self, name: str, products: Container[object], call: Callable[..., Any], variable: Any, tx: Any, args: Any, kwargs: Any
    ) -> Any:
        """Call the function that `variable` has as attribute `name`: one of the `products` of a sparse matrix by its parts."""
        if len(args) == 2 and not kwargs and getattr(variable, name) in products:
            matrix, dense = (arg.realize() for arg in args)
            if isinstance(matrix, private.UserDefinedObjectVariable) and isinstance(matrix.value, Tensor) and dense.is_tensor():
                self.names.add(private.get_source_name(matrix.source))
                return _build_product(tx, matrix.value, dense, self.parts)
        return call(variable, tx, args, kwargs)


@contextmanager
def decompose_sparse_matrices() -> Iterator[SparseMatrices]:
    """Make Dynamo capture products of sparse matrices as products of their parts, and sums with tensors made of entries."""
    found = SparseMatrices()
    wraps = private.VariableBuilder._type_dispatch()  # by types; Dynamo caches it
    with (
        patch.object(
            private.VariableBuilder, "_type_dispatch", lambda *_: {**wraps, Tensor: partial(_wrap_matrix, wraps[Tensor])}
        ),
        wrap(private.TorchInGraphFunctionVariable, "call_function", partial(found.call_product, "value", _PRODUCTS)),
        wrap(private.BuiltinVariable, "call_function", partial(found.call_product, "fn", {matmul})),
        wrap(private.BuiltinVariable, "call_function", _call_sum),
        wrap(private.SkipFunctionVariable, "call_function", _call_entries),
    ):
        yield found


def _wrap_matrix(wrap_tensor: Callable[..., Any], builder: Any, value: Tensor) -> Any:
    if value.layout not in _MULTIPLIED or value.dim() != 2 or value.requires_grad:
        return wrap_tensor(builder, value)
    return private.UserDefinedObjectVariable(value, source=builder.get_source())


def _call_entries(
    call: Callable[..., Any], variable: Any, tx: private.InstructionTranslatorBase, args: list[Any], kwargs: Any
) -> Any:
    if variable.value is torch.sparse_coo_tensor and len(args) == 3 and kwargs.keys() <= {"dtype", "device"}:
        return private.UserFunctionVariable(_TRACED[variable.value]).call_function(tx, args, kwargs)
    return call(variable, tx, args, kwargs)


def _call_sum(
    call: Callable[..., Any], variable: Any, tx: private.InstructionTranslatorBase, args: list[Any], kwargs: Any
) -> Any:
    if variable.fn in _TRACED and len(args) == 2 and getattr(args[1].realize(), "value_type", None) is Entries:
        return private.UserFunctionVariable(_TRACED[variable.fn]).call_function(tx, args, kwargs)
    return call(variable, tx, args, kwargs)


def _build_product(tx: private.InstructionTranslatorBase, matrix: Tensor, dense: Any, parts: dict[str, Tensor]) -> Any:
    made_of, mode = [], tx.fake_mode
    assert mode is not None
    for part in _list_parts(matrix):
        proxy = tx.output.register_static_attr_and_return_proxy("sparse_part", part)
        proxy.node.meta["example_value"] = mode.from_tensor(part)
        parts[str(proxy.node.target)] = part
        made_of.append(proxy)
    coalesced = matrix.layout is torch.sparse_coo and matrix.is_coalesced()
    arguments = (made_of, list(matrix.shape), coalesced, dense.as_proxy())
    return private.wrap_fx_proxy(tx, tx.output.create_proxy("call_function", torch.ops.planner.sparse_mm, arguments, {}))


def hide_sparse_buffers(module: nn.Module) -> AbstractContextManager[object]:
    """Leave sparse buffers out of those of `module`: AOTAutograd would take them for inputs of the graph."""
    return wrap(module, "named_buffers", _iterate_dense_buffers)


def _iterate_dense_buffers(named_buffers: Callable[..., Any], *args: Any, **options: Any) -> Iterator[tuple[str, Tensor]]:
    return ((name, buffer) for name, buffer in named_buffers(*args, **options) if not is_sparse(buffer))
