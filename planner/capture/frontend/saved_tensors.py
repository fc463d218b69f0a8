"""Hooks that a step sets on the tensors that autograd saves (``torch.autograd.graph.saved_tensors_hooks``).

AOTAutograd traces the step with the hooks in place, so that what they compute, such as a cast to half precision, is part of the
graph. Hooks that cannot be traced (files) are tried on random values: they are left out if they return the same bits, since a
plan decides itself where tensors are.

Dynamo follows the hooks too, on small and large tensors: what it captures of them is dropped, and its guards on what they read of
Python objects stay. Known weakness: what they read only of other tensors, such as parameters, has no guards.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch.autograd.graph import saved_tensors_hooks

from planner.capture.frontend.preserved_state import has_same_values
from planner.capture.frontend.rebuilt_values import build_finder
from planner.capture.source_lines import GRAPH_BREAK_ADVICE, find_current_line, format_location
from planner.graphs.errors import TraceError, typed_line
from planner.graphs.short_tracebacks import warn_caller
from planner.torch_private import capture as private
from planner.torch_private.core import disable_current_modes, disable_python_dispatcher, enable_saved_tensors_hooks

_SIZES = tuple(((1,) * rank, (2 ** (24 // rank),) * rank) for rank in range(1, 5))  # of tensors that hooks are followed on


@dataclass(slots=True, eq=False)
class _Hooks:
    """The hooks of one ``with`` statement, and where it is.

    Attributes:
        obstacle: why Dynamo does not follow them: they may then be left out, but are no part of a plan; "" if it does.
        refusal: what is wrong with them in the present trace; "" if nothing.
    """

    pack: Callable[[Tensor], Any]
    unpack: Callable[[Any], Tensor]
    where: str
    obstacle: str
    refusal: str = ""
    _in_place: ExitStack = field(default_factory=ExitStack)

    def enter(self) -> None:
        """Set the hooks, while AOTAutograd traces."""
        self._in_place.enter_context(enable_saved_tensors_hooks())
        self._in_place.enter_context(saved_tensors_hooks(self._save, self._load))

    def leave(self) -> None:
        """Remove the hooks, if they are in place."""
        self._in_place.close()

    def _save(self, tensor: Tensor) -> tuple[bool, Any]:
        """Return True and what the hook packs; or False and `tensor`, if the hooks cannot be traced and may be left out."""
        obstacle = self.obstacle
        if not obstacle:
            try:
                self.unpack(self.pack(tensor))
                return True, self.pack(tensor)
            except Exception as error:  # noqa: BLE001  # whatever stops it
                obstacle = typed_line(error)
        if not self._returns_same_bits(tensor):
            self.refusal = (
                f"{self.where} sets hooks on saved tensors that change them and cannot be traced ({obstacle}): let them compute "
                "with PyTorch's ops only, and change no Python objects; leave them out, as a plan keeps tensors within its "
                "budget itself; or train in a block of planner.rematerialize(budget=...), which needs no graph"
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


@contextmanager
def remove_saved_tensors_hooks(module: fx.GraphModule) -> Iterator[None]:
    """Remove at the end the hooks that a trace of `module` has left in place.

    Raises:
        TraceError: hooks cannot be traced.
    """
    found: list[_Hooks] = [node.target.__self__ for node in module.graph.nodes if _calls(node, _Hooks.enter)]
    try:
        yield
        if refused := [hooks.refusal for hooks in found if hooks.refusal]:
            raise TraceError(refused[0])
    finally:
        for hooks in reversed(found):
            hooks.leave()
            hooks.refusal = ""


def _calls(node: Any, method: Callable[..., object]) -> bool:
    return getattr(node.target, "__func__", None) is method


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
        hooks = _Hooks(find(pack), find(unpack), where, _guard_reads(tx, pack, unpack))
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


def _guard_reads(tx: Any, pack: Any, unpack: Any) -> str:
    """Let Dynamo follow hooks, for its guards on what they read; return what stops it, or ""."""
    guards, failures = tx.output.tracing_context.guards_context, list[str]()
    before, function = guards.copy_graphstate(), cast("FunctionType", _try_out)
    for sizes in _SIZES:  # of which hooks may refuse some
        given = [private.VariableTracker.build(tx, sizes), pack, unpack]
        try:
            private.speculate_subgraph(tx, private.UserFunctionVariable(function), given, {}, "hooks on saved tensors")
        except private.TorchDynamoException as error:
            failures.append(typed_line(error))
            if isinstance(error, private.Unsupported) or len(failures) == len(_SIZES):
                guards.restore_graphstate(before)  # some may be on what the hooks change
                return failures[-1]
    return ""


def _try_out(sizes: tuple[tuple[int, ...], ...], pack: Any, unpack: Any) -> None:
    """Call hooks, in captured code."""
    for size in sizes:
        unpack(pack(torch.zeros(size)))


def _find(output: Any, hook: Any) -> Any:
    return build_finder(output, hook.realize())(output.local_scope, output.global_scope)


def _capture_unset(_: Any, tx: Any) -> Any:
    tx.output.create_proxy("call_function", _find_innermost(tx.output.graph.nodes).leave, (), {})
    return private.ConstantVariable.create(None)


def _find_innermost(nodes: Iterable[Any]) -> _Hooks:
    """Return the hooks that captured code has set last and not removed."""
    entered: list[Any] = []
    for node in nodes:
        if _calls(node, _Hooks.enter):
            entered.append(node.target)
        elif _calls(node, _Hooks.leave):
            entered.pop()
    hooks: _Hooks = entered[-1].__self__
    return hooks


private.TorchInGraphFunctionVariable._get_handlers().update({_set: _capture_set, _unset: _capture_unset})
