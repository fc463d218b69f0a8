"""Names of the modules in which ops run, for the report: ``Encoder.layers.3.attention``."""

import ctypes
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any, Self

from torch import nn

from planner.train.eager.shared_context import SharedContext


class CurrentModule:
    """The module whose forward pass is running in the thread that has entered this context.

    ``Module.__call__`` is replaced meanwhile: PyTorch's global module hooks make every call take a slower path.

    Attributes:
        number: the number of the running module, which the C++ library reads; 0 outside of modules.
        parts: numbers of the known submodules of the outermost module, by identity.
        names: names by number: the class of the outermost running module, then the path from it; "" outside of modules.
    """

    def __init__(self) -> None:
        self.number = ctypes.c_int64(0)
        self.names = [""]
        self.parts: dict[int, int] = {}
        self._outermost: weakref.ref[nn.Module] | None = None
        self._parts_of: weakref.WeakKeyDictionary[nn.Module, dict[int, int]] = weakref.WeakKeyDictionary()
        self._numbers: dict[str, int] = {}
        self._thread = 0

    @property
    def name(self) -> str:
        """The name of the running module."""
        return self.names[self.number.value]

    def __enter__(self) -> Self:
        """Start to note modules."""
        _NOTED_CALLS.__enter__()
        self._thread = get_ident()
        _ENTERED[self._thread] = self
        return self

    def __exit__(self, *_: object) -> None:
        """Stop noting modules."""
        del _ENTERED[self._thread]
        _NOTED_CALLS.__exit__()
        self.number.value = 0

    def begin_outermost(self, module: nn.Module) -> int:
        """Return the number of a module that is called outside of other modules."""
        self._outermost = weakref.ref(module)
        self.parts = self._parts_of.setdefault(module, {})
        return self._number(type(module).__name__)

    def number_of_new(self, module: nn.Module) -> int:
        """Return the number of a module that is not yet known as a submodule of the outermost one."""
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


_ENTERED: dict[int, CurrentModule] = {}  # by thread


@contextmanager
def _note_calls() -> Iterator[None]:
    """Replace ``Module.__call__`` by a function that notes the running module."""
    call = nn.Module.__call__
    nn.Module.__call__ = noted_call = _wrap_call(call)  # type: ignore[method-assign]
    try:
        yield
    finally:
        if nn.Module.__call__ is noted_call:  # otherwise it was replaced again by a function that calls it
            nn.Module.__call__ = call  # type: ignore[method-assign]


_NOTED_CALLS = SharedContext(_note_calls)


def _wrap_call(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls a module with `call`, and notes its number while it runs."""

    def note_call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        current = _ENTERED.get(get_ident())
        if current is None:
            return call(module, *args, **kwargs)
        running = current.number
        before = running.value
        number = current.parts.get(id(module)) if before else current.begin_outermost(module)
        running.value = current.number_of_new(module) if number is None else number
        try:
            return call(module, *args, **kwargs)
        finally:
            running.value = before

    return note_call
