"""Values that guards read along attributes and items of a step, each held by the one before.

Nine of ten guards are of this kind. Where a step, its modules and their dicts hold the objects that they held when all guards
passed, these pass again: to compare addresses takes a tenth of the time (``planner.native.unchanged``).

Versions of dicts would do with less work, but Python 3.14 has none.

Known weakness: attributes of objects whose class has a ``__getattribute__`` of its own, such as the configurations of
Transformers, and what functions, classes and globals hold are read by Dynamo's guards in each step.
"""

import re
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from planner.torch_private.capture import Guard, get_attribute_name, get_other_name

ANY = object()  # in a dict: a value that no guard reads

_ROOT = "L['self']"
_STEP = re.compile(r"(?P<holder>.+)(?:\.(?P<attribute>\w+)|\['(?P<key>[^'\\]*)'\]|\[(?P<index>\d+)\])")
_CONTAINERS = (dict, OrderedDict, list, tuple)
_TENSORS = (torch.Tensor, nn.Parameter)
_CONSTANTS = (int, float, bool, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
# Guards that hold as long as a value is the same constant.
_OF_CONSTANTS = {"CONSTANT_MATCH", "EQUALS_MATCH", "BOOL_MATCH", "NONE_MATCH"}
_OF_DICTS = {"DICT_KEYS_MATCH", "DICT_CONTAINS", "DICT_NOT_CONTAINS"}

Stored = tuple[object, object, tuple[object, ...], tuple[object, ...]]  # an object, its container, and keys and values of that


@dataclass(frozen=True, slots=True)
class StoredValues:
    """The values that guards read so.

    Attributes:
        places: by its name, where a value is: the name of what holds it, whether it is an item, and its attribute or key. What
            holds a value is before it.
    """

    places: dict[str, tuple[str, bool, Any]]

    def list_objects(self, step: object) -> tuple[list[Stored], dict[str, object]]:
        """Return the objects that hold the values of `step`, each after one that holds it, with the tensors; and the values.

        Raises:
            LookupError: a value is held in another way than when its guards were made.
        """
        values: dict[str, object] = {_ROOT: step}
        read: dict[int, tuple[object, set[object]]] = {id(step): (step, set())}  # by object, the keys that guards read
        for name, (holder, is_item, key) in self.places.items():
            value = values[name] = _read(values[holder], key, is_item=is_item)
            read[id(values[holder])][1].add(key)
            read.setdefault(id(value), (value, set()))
        return [_describe(value, keys) for value, keys in read.values() if not is_constant(value)], values


def divide_guards(guards: Iterable[Guard], step: nn.Module) -> tuple[StoredValues, list[Guard]]:
    """Return the values whose guards pass as long as `step` holds the same objects, and the other guards."""
    places: dict[str, tuple[str, bool, Any]] = {}
    values: dict[str, object] = {_ROOT: step}
    others = []
    for guard in guards:
        try:
            if not _depends_on_stored(guard, places, values):
                others.append(guard)
        except LookupError:
            others.append(guard)
    return StoredValues(places), others


def _depends_on_stored(guard: Guard, places: dict[str, tuple[str, bool, Any]], values: dict[str, object]) -> bool:
    """Return True if a guard passes as long as the same objects are stored; raise LookupError if it reads what is not stored."""
    kind, value = guard.create_fn_name(), _collect(guard.name, places, values)
    match kind:
        case "TYPE_MATCH":
            return True
        case "TENSOR_MATCH":
            return type(value) in _TENSORS
        case "DUPLICATE_INPUT":
            _collect(get_other_name(guard) or "", places, values)
            return True
        case "NOT_PRESENT_IN_GENERIC_DICT":
            return _is_object(value)
        case "HASATTR":
            return _is_object(value) and get_attribute_name(guard).rpartition(".")[2] in vars(value)
        case "EMPTY_NN_MODULE_HOOKS_DICT":
            return isinstance(value, dict)
        case "SEQUENCE_LENGTH":
            return type(value) in _CONTAINERS
    return (kind in _OF_CONSTANTS and is_constant(value)) or (kind in _OF_DICTS and type(value) is dict)


def _collect(name: str, places: dict[str, tuple[str, bool, Any]], values: dict[str, object]) -> object:
    """Return the value called `name`, and add it and what holds it to `places` and `values`; raise LookupError if none is."""
    if name in values:
        return values[name]
    if (found := _STEP.fullmatch(name)) is None:
        raise LookupError(name)
    holder, attribute, key, index = found.groups()
    is_item = attribute is None
    place = (holder, is_item, int(index) if index else key if is_item else attribute)
    value = _read(_collect(holder, places, values), place[2], is_item=is_item)
    if not (is_constant(value) or type(value) in (*_TENSORS, *_CONTAINERS) or _is_object(value)):
        raise LookupError(name)
    places[name], values[name] = place, value
    return value


def _read(holder: Any, key: Any, *, is_item: bool) -> object:
    """Return an attribute or an item of an object; raise LookupError if it is not in its dict, or not an item of a container."""
    if is_item and type(holder) in _CONTAINERS:
        return holder[key]
    if is_item or not _is_object(holder) or hasattr(getattr(type(holder), key, None), "__set__"):
        raise LookupError(key)
    return vars(holder)[key]


def _is_object(value: object) -> bool:
    """Return True for an object whose attributes are in its dict."""
    own = type(value)
    return (
        own not in (*_TENSORS, *_CONTAINERS)
        and not isinstance(value, type | torch.Tensor)
        and own.__getattribute__ is object.__getattribute__
        and isinstance(getattr(value, "__dict__", None), dict)
    )


def is_constant(value: object) -> bool:
    """Return True for a value whose contents never change."""
    return type(value) in _CONSTANTS or (type(value) in (tuple, torch.Size) and all(map(is_constant, value)))  # type: ignore[call-overload]


def _describe(value: Any, keys: set[object]) -> Stored:
    """Return an object with the values of its container that guards read, by `keys`; raise LookupError for other keys."""
    if isinstance(value, torch.Tensor):
        return (value, None, (), ())
    if isinstance(value, list | tuple):
        return (value, value, (), tuple(item if i in keys else ANY for i, item in enumerate(value)))
    container = value if type(value) in _CONTAINERS else vars(value)
    if not all(map(is_constant, container)):
        raise LookupError(container)
    return (value, container, tuple(container), tuple(item if key in keys else ANY for key, item in container.items()))
