"""Names of the modules in which ops run, for the report: ``Encoder.layers.3.attention``."""

import threading
import weakref
from collections.abc import Callable
from threading import get_ident
from typing import Any, Protocol, Self

from torch import nn


class Noted(Protocol):
    """Where the number of the module that is running is noted; 0 outside of modules."""

    module: int


class CurrentModule:
    """The module of the entering thread whose forward pass is running, while entered.

    ``Module.__call__`` is replaced meanwhile: PyTorch's hooks on all modules have each call take another, slower way.

    Args:
        noted: where its number is noted.

    Attributes:
        noted: the same.
        parts: numbers of the modules that are known to be parts of the outermost one, by identity.
        names: by number; class of the outermost module that was running, then the path from it; "" outside of modules.
    """

    def __init__(self, noted: Noted) -> None:
        self.noted = noted
        self.names = [""]
        self.parts: dict[int, int] = {}
        self._outermost: weakref.ref[nn.Module] | None = None
        self._parts_of: weakref.WeakKeyDictionary[nn.Module, dict[int, int]] = weakref.WeakKeyDictionary()
        self._numbers: dict[str, int] = {}
        self._thread = 0

    @property
    def name(self) -> str:
        """The name of the module."""
        return self.names[self.noted.module]

    def __enter__(self) -> Self:
        """Begin to note modules."""
        self._thread = get_ident()
        with _LOCK:
            if not _ENTERED:
                _CALLS.append(nn.Module.__call__)
                _CALLS.append(_noting(nn.Module.__call__))
                nn.Module.__call__ = _CALLS[1]  # type: ignore[method-assign]
            _ENTERED[self._thread] = self
        return self

    def __exit__(self, *_: object) -> None:
        """Stop to note modules."""
        with _LOCK:
            del _ENTERED[self._thread]
            if not _ENTERED:
                if nn.Module.__call__ is _CALLS[1]:  # else something else was put over it, and calls it
                    nn.Module.__call__ = _CALLS[0]  # type: ignore[method-assign]
                _CALLS.clear()
        self.noted.module = 0

    def begin_outermost(self, module: nn.Module) -> int:
        """Return the number of a module that is called outside of modules."""
        self._outermost = weakref.ref(module)
        self.parts = self._parts_of.setdefault(module, {})
        return self._number(type(module).__name__)

    def number_of_new(self, module: nn.Module) -> int:
        """Return the number of a module that is not known to be a part of the outermost one yet."""
        outermost = None if self._outermost is None else self._outermost()
        assert outermost is not None  # it is running
        name = type(outermost).__name__
        parts = {id(part): self._number(f"{name}.{path}" if path else name) for path, part in outermost.named_modules()}
        self.parts = self._parts_of[outermost] = parts
        found = parts.get(id(module))
        return self._number(f"{self.name}.{type(module).__name__}") if found is None else found

    def _number(self, name: str) -> int:
        number = self._numbers.setdefault(name, len(self.names))
        if number == len(self.names):
            self.names.append(name)
        return number


_LOCK = threading.Lock()
_ENTERED: dict[int, CurrentModule] = {}  # by thread
_CALLS: list[Callable[..., Any]] = []  # ``Module.__call__``, and what is in its place


def _noting(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return what calls a module by `call`, and notes its number meanwhile."""

    def noted_call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        current = _ENTERED.get(get_ident())
        if current is None:
            return call(module, *args, **kwargs)
        noted = current.noted
        before = noted.module
        number = current.parts.get(id(module)) if before else current.begin_outermost(module)
        noted.module = current.number_of_new(module) if number is None else number
        try:
            return call(module, *args, **kwargs)
        finally:
            noted.module = before

    return noted_call
