"""Guards of a step, most of which need not be checked where it holds the objects that it held before (``stored_values.cpp``).

At each step all guards were checked: with the cold caches of a training loop that took a tenth of the time of a step of eager
PyTorch whose kernels are short, two thirds of all that is around the passes.
"""

import gc
from collections.abc import Mapping
from typing import Any

from torch import nn

from planner.capture.guards.python_guards import PythonGuards
from planner.capture.guards.replaced_names import ABSENT, Table
from planner.capture.guards.stored_values import ANY, is_constant
from planner.native.library import Library, find_library

_TRIES = 3  # a step that differs each time is not looked at again


class StepGuards:
    """The guards of a captured step, checked before each call."""

    def __init__(self, guards: PythonGuards, step: nn.Module) -> None:
        """Initialize for `step`, whose objects are compared."""
        self._guards, self._step, self._names = guards, step, guards.replaceable.names
        self._state: object = None
        self._tries = _TRIES
        self._kept: list[object] = []

    def check(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> tuple[Any, ...]:
        """Return the numbers of the step if it is as it was captured (``PythonGuards.check``)."""
        library = find_library()
        is_unchanged = self._state is not None and library is not None and library.are_unchanged(self._state)
        numbers = self._guards.check(self._step, args, kwargs, is_unchanged=is_unchanged)
        if is_unchanged:
            self._tries = _TRIES
        elif library is not None and self._tries > 0:
            self._tries -= 1
            self._remember(library)
        return numbers

    def _remember(self, library: Library) -> None:
        """Remember what the step holds, which has passed its guards."""
        self._state = None
        try:
            objects = self._guards.stored.list_objects(self._step)
        except LookupError:
            return
        # What is compared by its address only. To keep everything would keep parameters in memory that are replaced.
        self._kept = [(type(value), keys, [each for each in held if is_constant(each)]) for value, _, keys, held in objects]
        names = [
            (_get_dict(each.table), each.keys, tuple(ANY if v is ABSENT else v for v in each.values)) for each in self._names
        ]
        self._state = library.new_stored_values(objects, names, ANY)


def _get_dict(table: Table) -> object:
    """Return a dict, or that which a ``mappingproxy``, such as the attributes of a class, gives access to."""
    return table if isinstance(table, dict) else gc.get_referents(table)[0]
