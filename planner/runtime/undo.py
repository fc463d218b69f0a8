"""A step that fails leaves the model as it was before: what it has written is written back."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch

from graphs.capture.program import Program
from graphs.ir import Graph
from graphs.torch_private.core import preserve_version_counter
from planner.runtime.codegen import Code


def undoing(graph: Graph, program: Program, code: Code) -> Code:
    """`code` which, where a pass raises, puts back what the step has written in place.

    Where the forward pass does, the generator is put back too. In the backward pass, tensors that have been written since
    the forward pass ended stay as they are: another step may have done so.
    """
    undo = _Undo(graph, program, code)
    return replace(code, forward=undo.forward, backward=undo.backward)


class _Undo:
    """Both passes, with copies on the host of what the forward pass writes: running statistics, mostly, which are small."""

    def __init__(self, graph: Graph, program: Program, code: Code) -> None:
        overwritten = {t for op in graph.ops for t in op.mutates}
        self._written = [i for i, source in enumerate(program.sources) if source.tensor in overwritten]
        self._draws = any(op.random for op in graph.ops)
        self._generator: Any = program.namespace[program.generator]
        self._lock: Any = program.namespace[program.lock]
        self._code = code

    def forward(self, static: Sequence[Any]) -> tuple[Any, tuple[Any, ...], list[Any]]:
        before = [_Before(static[i]) for i in self._written]
        # Copied, for on the CPU a tensor would count as memory of the step.
        state = self._generator.get_state().numpy().copy() if self._draws else None
        try:
            loss, extras, alive = self._code.forward(static)
        except BaseException:
            for tensor in before:
                tensor.write_back()
            if state is not None:
                with self._lock:
                    self._generator.set_state(torch.from_numpy(state))
            raise
        for tensor in before:
            tensor.written()
        return loss, extras, [*alive, before]

    def backward(self, static: Sequence[Any], alive: list[Any]) -> tuple[Any, ...]:
        before = alive.pop()
        try:
            return self._code.backward(static, alive)
        except BaseException:
            for tensor in before:
                if tensor.as_written:
                    tensor.write_back()
            raise


class _Before:
    """What a tensor held before the step, and the version that autograd knew it by."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self._versioned = nullcontext() if tensor.is_inference() else preserve_version_counter(tensor)
        value = tensor.detach()
        if value.is_cuda:
            self._value = torch.empty(value.shape, dtype=value.dtype, pin_memory=True).copy_(value, non_blocking=True)
        else:  # in memory that PyTorch's allocator does not count
            values = value.reshape(-1).view(torch.uint8).numpy().copy()
            self._value = torch.from_numpy(values).view(value.dtype).view(value.shape)

    def written(self) -> None:
        """The step has written all that it does."""
        self._version = self._now

    @property
    def as_written(self) -> bool:
        """Whether nobody has written to it since."""
        return self._version == self._now

    @property
    def _now(self) -> int:
        return 0 if self._tensor.is_inference() else self._tensor._version

    def write_back(self) -> None:
        """Let the tensor hold it again."""
        with torch.no_grad(), self._versioned:
            self._tensor.copy_(self._value)
