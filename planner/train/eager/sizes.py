"""Bytes that an op will allocate for its outputs, known before it runs: computed once for each signature.

Shapes are inferred once for each signature, on meta tensors first, and on fake ones where these do not do. A size is needed
before an op runs, since room has to be made for it; an op whose size depends on data is bounded from above.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, Protocol

import torch

from planner.capture.lowering.statics import compute_allocated_bytes
from planner.torch_private.core import FakeTensorMode, disable_current_modes, has_meta_kernel, pytree, silence_fakes
from planner.train.eager.tensor_arguments import (
    count_broadcast_elements,
    count_indexed_bytes,
    iterate_tensors,
    list_names_of_outs,
)


class KnownOp(Protocol):
    """Facts about the ops of one signature (``planner/native/recorded_op.h``).

    Attributes:
        out_bytes: bytes of the outputs; 0 if they are not known.
        workspace_bytes: further bytes that it takes while it runs.
        guessed: `workspace_bytes` is a guess, because it was not measured yet.
        needs_block: ``may_take_free_memory`` is true for it.
        seconds: the shortest time of an execution.
        number: the hash of the signature; 0 if the sizes depend on more than the signature.
        measurements: number of executions that were measured on the device.
    """

    out_bytes: int
    seconds: float
    number: int
    workspace_bytes: int
    guessed: bool
    needs_block: bool
    measurements: int


# Position of the argument that asks for the inverse; next to it is the one that asks for counts.
_INVERSE_AT = {
    "aten::_unique": 2,
    "aten::_unique2": 2,
    "aten::unique_consecutive": 1,
    "aten::unique_dim": 3,
    "aten::unique_dim_consecutive": 2,
}


class OutputSizes:
    """Sizes by signature: the operator, the shapes and dtypes of its tensors, and its other arguments.

    The C++ library asks once for each, and keeps the answers.

    Args:
        device: the device whose memory is counted.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._fake: FakeTensorMode | None = None

    def learn(self, known: KnownOp, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Fill in the bytes that the ops of a signature will allocate."""
        known.out_bytes = self.count_out_bytes(function, args, kwargs)
        if guess := self.guess_bytes(function, args, kwargs, known.out_bytes):
            known.workspace_bytes, known.guessed = guess, True

    def guess_bytes(self, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], out_bytes: int) -> int:
        """Return a guess of the bytes that an op takes in addition to the `out_bytes` of outputs that fake tensors show.

        These are the workspace of a convolution on CUDA, and what the CPU's LSTM keeps for its backward pass.
        """
        if self.device.type == "cuda" and may_take_free_memory(function):
            # cuDNN's workspace is often about as large as inputs and outputs together, and rarely twice as large.
            inputs = iterate_tensors((*args, *kwargs.values()))
            return 2 * (out_bytes + sum(self.count_bytes(t.untyped_storage().nbytes(), t.device) for t in inputs))
        if function is not torch.ops.aten.mkldnn_rnn_layer.default or not (args[-1] and torch.is_grad_enabled()):
            return 0
        steps, batch, inputs = args[0].shape
        return self.count_bytes(count_lstm_workspace_bytes(steps, batch, inputs, args[10]), args[0].device)

    def count_out_bytes(self, function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> int:
        """Return the bytes that an op will allocate for its outputs, by executing it without memory; 0 if that fails.

        The C++ library has rules for common ops, which take a microsecond. Meta tensors take a hundred times as long, and fake
        ones, which know more ops and devices, several times as long again.
        """
        if not list_names_of_outs(function) and all(value.alias_info is not None for value in function._schema.returns):
            return 0
        with disable_current_modes():
            found = None
            if has_meta_kernel(function) and self._is_on_device((*args, *kwargs.values())):
                found = self._count_made_bytes(nullcontext(), function, args, kwargs, "meta")
            if found is None:
                self._fake = self._fake or FakeTensorMode()
                found = self._count_made_bytes(self._fake, function, args, kwargs, None)
            return found or 0

    def _is_on_device(self, values: Sequence[object]) -> bool:
        """Return True if there are tensors among the arguments of an op, all on the budget's device, and no device."""
        if any(isinstance(value, torch.device) for value in values):
            return False
        return {tensor.device for tensor in iterate_tensors(values)} == {self.device}

    def _count_made_bytes(
        self,
        mode: AbstractContextManager[object],
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        device: str | None,
    ) -> int | None:
        """Return the bytes that an op makes of copies of its tensors in `mode`, on `device` or their own; None if it fails.

        Tensors for results count if the results are larger. Their copies are empty: then no kernel warns that it resizes them.
        """
        copies: dict[int, torch.Tensor] = {}
        outs = iterate_tensors([kwargs.get(name) for name in list_names_of_outs(function)])
        room_bytes = {id(tensor): tensor.untyped_storage().nbytes() for tensor in outs}

        def copy(value: object) -> object:
            if not isinstance(value, torch.Tensor):
                return value
            if id(value) not in copies:
                on = value.device if device is None else device
                shape, stride = ((0,), (1,)) if id(value) in room_bytes else (value.shape, value.stride())
                copies[id(value)] = torch.empty_strided(shape, stride, dtype=value.dtype, device=on)
            return copies[id(value)]

        try:
            with mode, silence_fakes():
                copied_args, copied_kwargs = pytree.tree_map(copy, (tuple(args), kwargs))
                outputs = function(*copied_args, **copied_kwargs)
        except Exception:  # noqa: BLE001  a kernel may be missing or raise anything; the real op decides
            return None
        there = {value.untyped_storage()._cdata: room_bytes.get(key, math.inf) for key, value in copies.items()}
        found = [value for value in (*copies.values(), *iterate_tensors(outputs)) if value.layout is torch.strided]
        storages = {value.untyped_storage()._cdata: (value.untyped_storage().nbytes(), value.device) for value in found}
        return sum(
            # A tensor on `device` stands for one on the budget's.
            self.count_bytes(size_bytes, of if device is None else self.device)
            for address, (size_bytes, of) in storages.items()
            if size_bytes > there.get(address, 0)
        )

    def count_bytes(self, size_bytes: int, device: torch.device) -> int:
        """Return the bytes that the allocator takes for a storage of `size_bytes`; 0 if `device` is not the budget's."""
        if device != self.device:
            return 0
        return size_bytes if self.device.type == "cpu" else compute_allocated_bytes(size_bytes, self.device)


def count_lstm_workspace_bytes(steps: int, batch: int, inputs: int, hidden: int) -> int:
    """Return the workspace of oneDNN for one layer and direction of an LSTM in float32: ``set_workspace_sizes``.

    Parts are aligned to pages, and rows to cache lines, with one more line where rows would map to the same cache sets. The parts
    are the gates of each step; twice, for one step more, the states of the layer and of the step before, and the gradients; and
    the output.
    """

    def count_part(rows: int, width: int) -> int:
        return -(-rows * width * 4 // 4096) * 4096

    def align(width: int) -> int:
        lines = -(-width // 16) * 16
        return lines + 16 if lines % 256 == 0 else lines

    rows = 2 * (steps + 1) * batch
    states = 3 * count_part(rows, align(max(inputs, hidden))) + 2 * count_part(rows, hidden)
    return count_part(steps * batch, align(4 * hidden)) + states + count_part(steps * batch, align(hidden))


def may_take_workspace(function: object) -> bool:
    """Return True if ``OutputSizes.guess_bytes`` may guess a workspace of an op."""
    return may_take_free_memory(function) or function is torch.ops.aten.mkldnn_rnn_layer.default


def may_take_free_memory(function: object) -> bool:
    """Return True if the algorithm of an op on CUDA depends on the workspace that it gets, as for cuDNN's convolutions."""
    return "convolution" in str(function)


def bound_data_dependent_bytes(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> int:
    """Return an upper bound, in bytes, for the outputs of an op whose sizes depend on data; 0 if that fails.

    It may read the data.
    """
    with suppress(Exception):  # the real op raises its own error
        return _bound_bytes(name, args, kwargs)
    return 0


def _bound_bytes(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> int:
    first, *others = iterate_tensors(args)
    item_bytes = first.element_size()
    match name:
        case "aten::masked_select":
            return count_broadcast_elements([first.shape, others[0].shape]) * item_bytes
        case "aten::index":
            return count_indexed_bytes(first, args[1])
        case "aten::bincount":
            least = int(args[2]) if len(args) > 2 else 0
            return 8 * max(least, int(first.max()) + 1 if first.numel() else 0)
        case "aten::repeat_interleave":
            length = kwargs.get("output_size")
            return int(first.sum() if length is None else length) * item_bytes
        case "aten::_ctc_loss":
            steps, batch = first.shape[:2]
            return (1 + steps * (2 * others[0].shape[-1] + 1)) * batch * item_bytes
        case "aten::linalg_lstsq":
            *batch_of_left, rows, columns = first.shape
            *batch_of_right, _, sides = others[0].shape if others[0].dim() >= first.dim() else (*others[0].shape, 1)
            elements = max(rows, columns) * sides + rows + columns + sides + 1
            return elements * count_broadcast_elements([batch_of_left, batch_of_right]) * max(item_bytes, 8)
        case "aten::_pack_padded_sequence":  # with the number of sequences in each step
            return first.numel() * item_bytes + 8 * max(first.shape[:2])
    indices = sum(value is True for value in args[_INVERSE_AT[name] :]) if name in _INVERSE_AT else 2
    return first.numel() * (item_bytes + 8 * indices)
