"""Names of the modules in which ops run, for the report: ``Encoder.layers.3.attention``."""

import threading
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Self

from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook


class CurrentModule:
    """The module of the entering thread whose forward pass is running, by hooks on all modules while entered.

    Attributes:
        name: class of the outermost module that is running, then the path from it; "" outside of modules.
        on_change: called with each new name.
    """

    def __init__(self) -> None:
        self.name = ""
        self.on_change: Callable[[str], None] | None = None
        self._running: list[tuple[nn.Module, str]] = []
        self._paths: weakref.WeakKeyDictionary[nn.Module, dict[int, str]] = weakref.WeakKeyDictionary()
        self._thread = threading.get_ident()
        self._hooks = ExitStack()

    def __enter__(self) -> Self:
        """Register the hooks."""
        self._thread = threading.get_ident()
        for hook in (register_module_forward_pre_hook(self._begin), register_module_forward_hook(self._end, always_call=True)):
            self._hooks.callback(hook.remove)
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the hooks."""
        self._hooks.close()
        self._running.clear()
        self.name = ""

    def _begin(self, module: nn.Module, _inputs: Any) -> None:
        if threading.get_ident() == self._thread:
            self._change(self._path(module))
            self._running.append((module, self.name))

    def _end(self, module: nn.Module, _inputs: Any, _outputs: Any) -> None:
        if threading.get_ident() != self._thread:
            return
        while self._running and self._running.pop()[0] is not module:
            pass  # a forward pass that an exception has ended
        self._change(self._running[-1][1] if self._running else "")

    def _change(self, name: str) -> None:
        self.name = name
        if self.on_change is not None:
            self.on_change(name)

    def _path(self, module: nn.Module) -> str:
        if not self._running:
            return type(module).__name__
        outermost, name = self._running[0]
        paths = self._paths.get(outermost)
        if paths is None or id(module) not in paths:
            paths = self._paths[outermost] = {id(part): path for path, part in outermost.named_modules()}
        path = paths.get(id(module))
        return f"{self._running[-1][1]}.{type(module).__name__}" if path is None else f"{name}.{path}" if path else name
