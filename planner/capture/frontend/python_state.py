"""Snapshots of the Python objects that a training step can change, to restore them."""

import sys
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from functools import partial
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn

# Nearest first; further away are data sets and loops, which a step does not change.
_MOST_OBJECTS = 50_000


class PythonState:
    """A snapshot of all that is reachable from some objects.

    It follows attributes of modules, containers, and the user's own functions and objects: their closures and the globals
    that they name. Objects that libraries define are not followed.

    Attributes:
        generators: the random number generators that were found.
    """

    def __init__(self, roots: Iterable[object]) -> None:
        self.generators: list[torch.Generator] = []
        self._restore: list[Callable[[], None]] = []
        self._seen: dict[int, object] = {}  # referenced, so that no other object gets the same id
        waiting = deque(roots)
        while waiting and len(self._seen) < _MOST_OBJECTS:
            found = waiting.popleft()
            if id(found) not in self._seen and not isinstance(found, str | int | float | bytes | type | None):
                self._seen[id(found)] = found
                waiting.extend(self._visit(found))

    def restore(self) -> None:
        """Restore the values of the snapshot."""
        for put_back in self._restore:
            put_back()

    def _visit(self, found: Any) -> Iterator[object]:
        """Save the content of `found`, and yield it."""
        if (restore := restoring_items(found)) is not None:
            self._restore.append(restore)
        match found:
            case torch.Tensor():
                pass  # no Python state
            case torch.Generator():
                self.generators.append(found)
            case dict():
                yield from found.values()
            case list() | deque() | tuple():
                yield from found
            case partial():
                yield from (found.func, found.args, found.keywords)
            case MethodType():
                yield from (found.__self__, found.__func__)
            case FunctionType():
                if _is_own(found.__module__):
                    yield from self._visit_function(found)
            case CellType():
                with suppress(ValueError):  # not assigned yet
                    held = found.cell_contents
                    self._restore.append(partial(setattr, found, "cell_contents", held))
                    yield held
            case nn.Module() | object(__dict__=dict()):
                own = _is_own(type(found).__module__)
                if own or isinstance(found, nn.Module):
                    yield vars(found)
                if own:  # a method may name a global
                    yield from (value for value in vars(type(found)).values() if isinstance(value, FunctionType))

    def _visit_function(self, function: FunctionType) -> Iterator[object]:
        yield from function.__closure__ or ()
        yield from function.__defaults__ or ()
        yield from (function.__kwdefaults__ or {}).values()
        for name in _names(function.__code__):
            if name in function.__globals__:
                value = function.__globals__[name]
                self._restore.append(partial(function.__globals__.__setitem__, name, value))
                yield value


def _is_own(module: str | None) -> bool:
    """Return whether the user wrote `module`, judged by the place of its file."""
    root = (module or "").partition(".")[0]
    if root in sys.stdlib_module_names and root != "__main__":
        return False
    file = getattr(sys.modules.get(module or ""), "__file__", None) or ""
    return root not in ("torch", "graphs", "planner", "solvers") and "-packages" not in file


def _names(code: CodeType) -> Iterator[str]:
    """Yield the globals that `code` may name, nested functions included."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def restoring_items(found: Any) -> Callable[[], None] | None:
    """Return a function that restores the present items of a dict, list, deque or set; None for other objects."""
    match found:
        case dict():
            return partial(_restore_items, found, dict(found), found.update)
        case list() | deque():
            return partial(_restore_items, found, list(found), found.extend)
        case set():
            return partial(_restore_items, found, set(found), found.update)
    return None


def _restore_items(place: Any, before: Any, refill: Callable[[Any], None]) -> None:
    same = place == before if isinstance(place, set) else _same(place, before)
    if not same or (isinstance(place, dict) and not _same(place.values(), before.values())):
        place.clear()
        refill(before)


def _same(now: Collection[object], before: Collection[object]) -> bool:
    return len(now) == len(before) and all(a is b for a, b in zip(now, before, strict=True))
