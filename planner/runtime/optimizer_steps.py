"""Steps of optimizers: the server of their memory learns when one begins and when it has ended.

It is the one that trains its parameters, and of several the one whose backward pass was the last in the thread. Hooks of
``torch.optim``, put in place once in a process, say when an optimizer's step begins and ends. One that fails has no end: it is
taken to be over when a planned step, or another one of an optimizer, begins in the thread.
"""

import threading
from collections.abc import Callable, Container
from functools import cache
from typing import Any, Protocol
from weakref import ref

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook


class OptimizerServer(Protocol):
    """Memory for the steps of optimizers."""

    def has_optimizer(self, optimizer: Optimizer) -> bool:
        """Return True if it is for this optimizer."""

    def begin_optimizer(self, optimizer: Optimizer) -> None:
        """Serve the requests of this thread from here on."""

    def end_optimizer(self, optimizer: Optimizer, *, is_whole: bool) -> None:
        """Serve none any more; the step of the optimizer was interrupted unless it `is_whole`."""


class _Thread(threading.local):
    """The state of a thread.

    Attributes:
        servers: those with a backward pass in this thread, the last one first.
        served: the optimizer whose step is under way, with its server; None between steps.
        depth: number of nested steps of it that are under way: its method may call that of its base class.
    """

    servers: "tuple[ref[OptimizerServer], ...]" = ()
    served: tuple[OptimizerServer, Optimizer] | None = None
    depth: int = 0


_thread = _Thread()


@cache
def install() -> None:
    """Put the hooks in place; they are no part of steps that are compiled."""
    register_optimizer_step_pre_hook(torch.compiler.disable(_begin_step))
    register_optimizer_step_post_hook(torch.compiler.disable(_end_step))


def has_any(optimizer: Optimizer, parameters: Container[int]) -> bool:
    """Return True if `optimizer` has one of `parameters`, given by id."""
    return any(id(parameter) in parameters for group in optimizer.param_groups for parameter in group["params"])


def follow(server: OptimizerServer) -> None:
    """Let `server` serve the steps of optimizers in this thread, before all others."""
    if not _thread.servers or _thread.servers[0]() is not server:
        _thread.servers = (ref(server), *(other for other in _thread.servers if other() not in (server, None)))


def interrupt() -> None:
    """End the step of an optimizer that is under way in this thread: it has failed, or runs its closure."""
    _end(is_whole=False)


def _begin_step(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Begin a step, or have its closure do so."""
    if _is_served(optimizer):
        _thread.depth += 1
        return None
    interrupt()
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is None:
        _begin(optimizer)
        return None
    resuming = _wrap_closure(optimizer, closure)
    return ((args[0], resuming, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": resuming})


def _end_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    del args, kwargs
    if _is_served(optimizer):
        _thread.depth -= 1
        if not _thread.depth:
            _end(is_whole=True)


def _wrap_closure(optimizer: Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
    """Return `closure` such that the step of `optimizer` is served behind it, unless it is called again."""
    is_first = True

    def run() -> Any:
        nonlocal is_first
        interrupt()
        returned = closure()
        if is_first and not _is_served(optimizer):  # else the base class has the closure too
            _begin(optimizer)
        is_first = False
        return returned

    return run


def _is_served(optimizer: Optimizer) -> bool:
    return _thread.served is not None and _thread.served[1] is optimizer


def _begin(optimizer: Optimizer) -> None:
    alive = (server() for server in _thread.servers)
    server = next((server for server in alive if server is not None and server.has_optimizer(optimizer)), None)
    if server is not None:
        _thread.served, _thread.depth = (server, optimizer), 1
        server.begin_optimizer(optimizer)


def _end(*, is_whole: bool) -> None:
    if _thread.served is not None:
        (server, optimizer), _thread.served = _thread.served, None
        server.end_optimizer(optimizer, is_whole=is_whole)
