"""Snapshots of the Python objects that a training step can change, to restore them."""

import sys
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, suppress
from functools import partial
from io import IOBase
from types import CellType, CodeType, FrameType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

# Nearest first; further away are data sets and loops, which a step does not change.
_MOST_OBJECTS = 50_000


class PythonState:
    """A snapshot of all that is reachable from some objects.

    It follows attributes of modules, containers, and the user's own functions and objects: their closures and the globals
    that they name. Objects that libraries define are not followed.

    Attributes:
        generators: the random number generators that were found.
        iterators: what was found that cannot be set back, such as generators and ``itertools.cycle``.
    """

    def __init__(self, roots: Iterable[object]) -> None:
        self.generators: list[torch.Generator] = []
        self.iterators: list[Iterator[object]] = []
        self._contents: dict[int, Any] = {}  # copies of containers, by their ids
        self._variables: list[tuple[Callable[[object], None], object]] = []  # cells and globals: how to set them
        self._classes: list[tuple[Any, type]] = []  # which parametrizations replace
        self._seen: dict[int, Any] = {}  # referenced, so that no other object gets the same id
        waiting = deque(roots)
        while waiting and len(self._seen) < _MOST_OBJECTS:
            found = waiting.popleft()
            if id(found) not in self._seen and not isinstance(found, str | int | float | bytes | type | None):
                self._seen[id(found)] = found
                waiting.extend(self._visit(found))

    def add(self, created: "CreatedObjects") -> None:
        """Take what objects began with that were made after the snapshot as their values in it."""
        for _, containers in created.found.values():
            for found, content in containers:
                self._seen[id(found)], self._contents[id(found)] = found, content

    def restore(self) -> None:
        """Restore the values of the snapshot."""
        for place, before in self._contents.items():
            _restore_items(self._seen[place], before)
        for write, before in self._variables:
            write(before)
        for found, kind in self._classes:
            if type(found) is not kind:
                found.__class__ = kind

    def keep_first_call(self, after_first: "PythonState", made: Collection[str] = ()) -> bool:
        """Restore what has changed since `after_first` too, and keep what has changed between the snapshots only.

        Args:
            made: attributes that stay tensors if both calls have set them to one.

        Returns:
            True if anything was kept.
        """
        kept = any(type(found) is not kind for found, kind in self._classes)
        for place, before in self._contents.items():
            found = self._seen[place]
            first = after_first._contents.get(place, before)
            if isinstance(found, dict):
                values = ((key, found.get(key, _ABSENT)) for key in {**before, **found})
                stays = {key for key in made if all(isinstance(each.get(key), torch.Tensor) for each in (first, found))}
                wanted = {
                    key: now if key in stays or _is_one(now, first.get(key, _ABSENT)) else before.get(key, _ABSENT)
                    for key, now in values
                }
                wanted = {key: value for key, value in wanted.items() if value is not _ABSENT}
            else:
                wanted = _copy_content(found) if _has_same(found, first) else before
            kept |= not _has_same(wanted, before)
            _restore_items(found, wanted)
        for place, first in after_first._contents.items():
            if place not in self._contents:  # made by the first call
                found = after_first._seen[place]
                _restore_items(found, _take_back(first, found))
        for write, before in self._variables:
            write(before)
        return kept

    def _visit(self, found: Any) -> Iterator[object]:
        """Save the content of `found`, and yield it."""
        if isinstance(found, dict | list | deque | set):
            self._contents[id(found)] = _copy_content(found)
        if isinstance(found, Iterator) and not is_own(type(found).__module__) and not isinstance(found, IOBase):
            self.iterators.append(found)
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
                if is_own(found.__module__):
                    yield from self._visit_function(found)
                else:  # of a front end, around the user's
                    yield from found.__closure__ or () if found.__module__.startswith("planner.") else ()
            case CellType():
                with suppress(ValueError):  # not assigned yet
                    held = found.cell_contents
                    self._variables.append((partial(setattr, found, "cell_contents"), held))
                    yield held
            case nn.Module() | object(__dict__=dict()):
                own = is_own(type(found).__module__)
                if own or isinstance(found, nn.Module):
                    if not isinstance(found, LazyModuleMixin):  # which is another class for good once it has run
                        self._classes.append((found, type(found)))
                    yield vars(found)
                if own:  # a method may name a global
                    yield from (value for value in vars(type(found)).values() if isinstance(value, FunctionType))

    def _visit_function(self, function: FunctionType) -> Iterator[object]:
        yield from function.__closure__ or ()
        yield from function.__defaults__ or ()
        yield from (function.__kwdefaults__ or {}).values()
        for name in _iterate_names(function.__code__):
            if name in function.__globals__:
                value = function.__globals__[name]
                self._variables.append((partial(function.__globals__.__setitem__, name), value))
                yield value


class CreatedObjects(AbstractContextManager["CreatedObjects"]):
    """The user's own objects that are made while it is entered and still live, such as meters that fill a ``defaultdict``.

    Attributes:
        found: by the id of each a reference to it, and its attributes and containers with what they held after ``__init__``.
    """

    def __init__(self) -> None:
        self.found: dict[int, tuple[weakref.ref[Any], list[tuple[Any, Any]]]] = {}

    def __enter__(self) -> "CreatedObjects":
        self._outer = sys.getprofile()
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(self._outer)

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "return" and code.co_name == "__init__" and code.co_varnames and is_own(frame.f_globals.get("__name__")):
            made = frame.f_locals.get(code.co_varnames[0])
            attributes = getattr(made, "__dict__", {})
            containers = [each for each in (attributes, *attributes.values()) if isinstance(each, dict | list | deque | set)]
            with suppress(TypeError):  # it takes no weak references
                reference = weakref.ref(made, partial(self._forget, id(made)))
                self.found[id(made)] = reference, [(each, _copy_content(each)) for each in containers]

    def _forget(self, place: int, _: object) -> None:
        self.found.pop(place, None)


def is_own(module: str | None) -> bool:
    """Return True if the user wrote `module`, judged by the place of its file."""
    root = (module or "").partition(".")[0]
    if root in sys.stdlib_module_names and root != "__main__":
        return False
    file = getattr(sys.modules.get(module or ""), "__file__", None) or ""
    return root not in ("torch", "planner") and "-packages" not in file


def is_followed(module: str) -> bool:
    """Return True if functions of `module` are captured, also with values that are known after the step."""
    return is_own(module) or module.partition(".")[0] in ("torch", "planner")


def _iterate_names(code: CodeType) -> Iterator[str]:
    """Yield the globals that `code` may name, nested functions included."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _iterate_names(constant)


def make_restore_items(found: Any) -> Callable[[], None] | None:
    """Return a function that restores the present items of a dict, list, deque or set; None for other objects."""
    return partial(_restore_items, found, _copy_content(found)) if isinstance(found, dict | list | deque | set) else None


_ABSENT = object()


def _copy_content(found: Any) -> Any:
    """Return a copy of a container, as a plain dict, list or set."""
    kind = dict if isinstance(found, dict) else set if isinstance(found, set) else list
    return kind(found)


def _restore_items(place: Any, before: Any) -> None:
    if not _has_same(place, before):
        place.clear()
        (place.extend if isinstance(place, list | deque) else place.update)(before)


def _take_back(first: Any, second: Any) -> Any:
    """Return what a container began with that held `first` after one call, and `second` after another: both append as much."""
    added = len(second) - len(first)
    grows = isinstance(second, list | deque) and 0 < added <= len(first) and _is_same(first, list(second)[: len(first)])
    return first[: len(first) - added] if grows else first


def _has_same(now: Any, before: Any) -> bool:
    """Return True if two containers have the same objects, in the same order unless they are sets."""
    if isinstance(now, set):
        return bool(now == before)
    if isinstance(now, dict) and not _is_same(now.values(), before.values()):
        return False
    return _is_same(now, before)


def _is_same(now: Collection[object], before: Collection[object]) -> bool:
    return len(now) == len(before) and all(a is b for a, b in zip(now, before, strict=True))


def _is_one(a: object, b: object) -> bool:
    """Return True if both are one object, or equal numbers or texts."""
    return a is b or (type(a) is type(b) and isinstance(a, int | float | str | bytes) and a == b)
