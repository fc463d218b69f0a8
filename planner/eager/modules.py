"""Names of the modules in which ops run, for the report: ``Encoder.layers.3.attention``."""

import threading
import weakref
from contextlib import ExitStack
from typing import Any, Protocol, Self

from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook


class Noted(Protocol):
    """Where the number of the module that is running is noted; 0 outside of modules."""

    module: int


class CurrentModule:
    """The module of the entering thread whose forward pass is running, by hooks on all modules while entered.

    Args:
        noted: where its number is noted.

    Attributes:
        names: by number; class of the outermost module that was running, then the path from it; "" outside of modules.
    """

    def __init__(self, noted: Noted) -> None:
        self.names = [""]
        self._noted = noted
        self._numbers: dict[str, int] = {}
        self._running: list[tuple[nn.Module, int]] = []
        self._parts: dict[int, int] = {}  # numbers of the modules in the outermost one, by identity
        self._parts_of: weakref.WeakKeyDictionary[nn.Module, dict[int, int]] = weakref.WeakKeyDictionary()
        self._thread = threading.get_ident()
        self._hooks = ExitStack()

    @property
    def name(self) -> str:
        """The name of the module."""
        return self.names[self._noted.module]

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
        self._noted.module = 0

    def _begin(self, module: nn.Module, _inputs: Any) -> None:
        if threading.get_ident() == self._thread:
            number = self._parts.get(id(module)) if self._running else self._begin_outermost(module)
            if number is None:
                number = self._number_of_added(module)
            self._running.append((module, number))
            self._noted.module = number

    def _end(self, module: nn.Module, _inputs: Any, _outputs: Any) -> None:
        if threading.get_ident() != self._thread:
            return
        running = self._running
        while running and running.pop()[0] is not module:
            pass  # a forward pass that an exception has ended
        self._noted.module = running[-1][1] if running else 0

    def _begin_outermost(self, module: nn.Module) -> int:
        self._parts = self._parts_of.setdefault(module, {})
        return self._number(type(module).__name__)

    def _number_of_added(self, module: nn.Module) -> int:
        """Return the number of a module that is not known as a part of the outermost one yet."""
        outermost, number = self._running[0]
        name = self.names[number]
        parts = {id(part): self._number(f"{name}.{path}" if path else name) for path, part in outermost.named_modules()}
        self._parts = self._parts_of[outermost] = parts
        found = parts.get(id(module))
        return self._number(f"{self.names[self._running[-1][1]]}.{type(module).__name__}") if found is None else found

    def _number(self, name: str) -> int:
        number = self._numbers.setdefault(name, len(self.names))
        if number == len(self.names):
            self.names.append(name)
        return number
