"""Guards of a step, most of which need not be checked where it holds the objects that it held before (``stored_values.cpp``).

At each step all guards were checked: with the cold caches of a training loop that took a tenth of the time of a step of eager
PyTorch whose kernels are short, two thirds of all that is around the passes.
"""

import gc
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from planner.capture.guards.python_guards import PythonGuards
from planner.capture.guards.replaced_names import ABSENT, Table
from planner.capture.guards.stored_values import ANY, is_constant
from planner.capture.program.program import Source
from planner.graphs.ir import Kind
from planner.native.library import Library, find_library

_TRIES = 3  # a step that differs each time is not looked at again


class StepGuards:
    """The guards of a captured step, checked before each call."""

    def __init__(self, guards: PythonGuards, step: nn.Module, sources: Sequence[Source] = ()) -> None:
        """Initialize for `step`, whose objects are compared, and the `sources` of its tensors; () if it does not hold them."""
        self._guards, self._step, self._names = guards, step, guards.replaceable.names
        self._state: object = None
        self._places = [_find_place(source) for source in sources]
        self._tries = _TRIES
        self._kept: list[object] = []

    def check(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> tuple[tuple[Any, ...], list[Any]]:
        """Return the numbers of the step, and the tensors of its sources, if it is as it was captured (``PythonGuards.check``).

        None stands for a tensor of the batch. There are no tensors unless they are known to be those of an earlier step.
        """
        library = find_library()
        tensors = None if self._state is None or library is None else library.find_unchanged(self._state)
        is_unchanged = tensors is not None
        numbers = self._guards.check(self._step, args, kwargs, is_unchanged=is_unchanged)
        if is_unchanged:
            self._tries = _TRIES
        elif library is not None and self._tries > 0:
            self._tries -= 1
            self._remember(library)
        return numbers, tensors or []

    def _remember(self, library: Library) -> None:
        """Remember what the step holds, which has passed its guards."""
        self._state = None
        try:
            objects, values = self._guards.stored.list_objects(self._step)
        except LookupError:
            return
        # What is compared by its address only. To keep everything would keep parameters in memory that are replaced.
        self._kept = [(type(value), keys, [each for each in held if is_constant(each)]) for value, _, keys, held in objects]
        names = [
            (_get_dict(each.table), each.keys, tuple(ANY if v is ABSENT else v for v in each.values)) for each in self._names
        ]
        are_known = all(place is None or place in values for place in self._places)
        tensors = [None if place is None else values[place] for place in self._places] if are_known else []
        self._state = library.new_stored_values(objects, names, ANY, tensors)


def _find_place(source: Source) -> str | None:
    """Return the name of a tensor of the step as Dynamo writes it; None for one of the batch, and ``""`` for any other."""
    *path, name = source.name.split(".")
    if source.parts or source.kind is Kind.CONSTANT:
        return ""
    if source.kind not in (Kind.PARAMETER, Kind.BUFFER):
        return None
    kind = "_parameters" if source.kind is Kind.PARAMETER else "_buffers"
    return "".join(["L['self']", *(f"._modules['{part}']" for part in path), f".{kind}['{name}']"])


def _get_dict(table: Table) -> object:
    """Return a dict, or that which a ``mappingproxy``, such as the attributes of a class, gives access to."""
    return table if isinstance(table, dict) else gc.get_referents(table)[0]
