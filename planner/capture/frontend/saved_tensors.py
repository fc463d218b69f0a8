"""Hooks that a step sets on the tensors that autograd saves (``torch.autograd.graph.saved_tensors_hooks``).

AOTAutograd traces the step with the hooks in place, so that what they compute, such as a cast to half precision, is part of the
graph. Hooks that cannot be traced (files) are tried on random values: they are left out if they return the same bits, since a
plan decides itself where tensors are.

Known weakness: what a hook reads of Python objects, other than which functions it is made of, is not guarded.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from graphs.errors import TraceError, typed_line
from graphs.short_tracebacks import warn_caller
from planner.capture.frontend.preserved_state import has_same_values
from planner.capture.frontend.rebuilt_values import build_finder
from planner.capture.frontend.source_lines import GRAPH_BREAK_ADVICE, find_current_line, format_location
from planner.torch_private import capture as private
from planner.torch_private.core import disable_current_modes, disable_python_dispatcher, enable_saved_tensors_hooks

_ENTERED: list[ExitStack] = []  # hooks in place where AOTAutograd traces
_REFUSALS: list[str] = []  # what is wrong with hooks of the present trace


@dataclass(frozen=True, slots=True, eq=False)
class _Hooks:
    """The hooks of one ``with`` statement, and where it is."""

    pack: Callable[[Tensor], Any]
    unpack: Callable[[Any], Tensor]
    where: str

    def enter(self) -> None:
        """Set the hooks, while AOTAutograd traces."""
        _ENTERED.append(ExitStack())
        _ENTERED[-1].enter_context(enable_saved_tensors_hooks())
        _ENTERED[-1].enter_context(saved_tensors_hooks(self._save, self._load))

    def _save(self, tensor: Tensor) -> tuple[bool, Any]:
        """Return True and what the hook packs; or False and `tensor`, if the hooks cannot be traced and may be left out."""
        try:
            self.unpack(self.pack(tensor))
            return True, self.pack(tensor)
        except Exception as error:  # noqa: BLE001  # whatever stops it
            if not self._returns_same_bits(tensor):
                _REFUSALS.append(
                    f"{self.where} sets hooks on saved tensors that change them and cannot be traced ({typed_line(error)}): let "
                    "them compute with PyTorch's ops only, leave them out, as a plan keeps tensors within its budget itself, or "
                    "train in a block of planner.rematerialize(budget=...), which needs no graph"
                )
            return False, tensor

    def _load(self, saved: tuple[bool, Any]) -> Any:
        is_packed, value = saved
        return self.unpack(value) if is_packed else value

    def _returns_same_bits(self, tensor: Tensor) -> bool:
        shape, stride, dtype, device = tensor.shape, tensor.stride(), tensor.dtype, tensor.device
        with disable_current_modes(), disable_python_dispatcher(), private.tracing(None), torch.no_grad():
            drawn = torch.randn(shape, generator=torch.Generator().manual_seed(0))
            given = torch.empty_strided(shape, stride, dtype=dtype, device=device).copy_(drawn)
            try:
                returned = self.unpack(self.pack(given.clone()))
            except Exception:  # noqa: BLE001  # refused as well
                return False
            is_same = isinstance(returned, Tensor) and returned.device == device and returned.stride() == stride
            return is_same and has_same_values(returned, given)


def _leave() -> None:
    """Remove the innermost hooks, while AOTAutograd traces."""
    _ENTERED.pop().close()


@contextmanager
def remove_saved_tensors_hooks() -> Iterator[None]:
    """Remove at the end the hooks that a trace has left in place; raise a TraceError if hooks cannot be traced."""
    try:
        yield
        if _REFUSALS:
            raise TraceError(_REFUSALS[0])
    finally:
        _REFUSALS.clear()
        while _ENTERED:
            _leave()


def init_hooks(context: Any, pack_hook: Any, unpack_hook: Any) -> None:
    """Do what ``saved_tensors_hooks.__init__`` does, in captured code."""
    context.pack_hook, context.unpack_hook = pack_hook, unpack_hook


def enter_hooks(context: Any) -> None:
    """Do what ``saved_tensors_hooks.__enter__`` does, in captured code."""
    _set(context.pack_hook, context.unpack_hook)


def exit_hooks(_: Any, *__: Any) -> None:
    """Do what ``saved_tensors_hooks.__exit__`` does, in captured code."""
    _unset()


@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
def _set(pack: Any, unpack: Any) -> None:
    """Set hooks; only Dynamo calls it."""


@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
def _unset() -> None:
    """Remove hooks; only Dynamo calls it."""


def _capture_set(_: Any, tx: Any, pack: Any, unpack: Any) -> Any:
    where = format_location(find_current_line())
    find = partial(_find, tx.output)
    try:
        hooks = _Hooks(find(pack), find(unpack), where)
    except TraceError as error:
        raise TraceError(
            f"{where} sets hooks on saved tensors that read or change {error}: let them read what exists before the step; or "
            f"{GRAPH_BREAK_ADVICE}"
        ) from error
    warn_caller(
        f"{where} sets hooks on saved tensors: what they compute is part of the plan, and they are left out if they return what "
        "they are given. They are called where the step is captured, and not in the steps after it"
    )
    tx.output.create_proxy("call_function", hooks.enter, (), {})
    return private.ConstantVariable.create(None)


def _find(output: Any, hook: Any) -> Any:
    return build_finder(output, hook.realize())(output.local_scope, output.global_scope)


def _capture_unset(_: Any, tx: Any) -> Any:
    tx.output.create_proxy("call_function", _leave, (), {})
    return private.ConstantVariable.create(None)


private.TorchInGraphFunctionVariable._get_handlers().update({_set: _capture_set, _unset: _capture_unset})
