"""What the eager runtime has recorded, in a form that can be compared between blocks."""

import gc
from typing import Any

from planner.train.eager.recording import Recorder
from planner.train.eager.saved_tensors import SavedTensor
from planner.train.eager.storages import RecordedOp, Reference, TrackedStorage


def describe_records(recorder: Recorder) -> list[Any]:
    """Return how each saved tensor can be recomputed, with numbers in place of storages."""
    numbers: dict[int, int] = {}
    found: list[Any] = []

    def described(value: object) -> object:
        if isinstance(value, Reference):
            storage = value.storage
            # Versions of what is pinned are counted from the first step on, or from when it was opened.
            version = 0 if storage is not None and storage.pinned else value.version
            return None if storage is None else number_of(storage), version, *value[2:]
        if isinstance(value, list | tuple):
            return [described(item) for item in value]
        return value if isinstance(value, int | float | str | bool | None) else str(value)

    def number_of(storage: TrackedStorage) -> int:
        if id(storage) not in numbers:
            number = numbers[id(storage)] = len(numbers)
            chain_of_it = [op_of(op, storage) for op in storage.chain]
            version = 0 if storage.pinned else storage.version
            found.append((number, storage.size_bytes, version, storage.pinned, bool(storage.address), chain_of_it))
        return numbers[id(storage)]

    def op_of(op: RecordedOp, storage: TrackedStorage) -> object:
        positions = [position for position, weak in op.outputs if weak() is storage]
        draws = None if op.draws is None else op.draws[1].copy.get_state().tolist()
        return str(op.function), described(op.args), described(list(op.kwargs.items())), positions, op.module, op.in_place, draws

    saved = sorted((value for value in gc.get_objects() if isinstance(value, SavedTensor) and value._recorder is recorder),
                   key=lambda value: value._number)  # fmt: skip
    assert saved
    return [*((number_of(value.storage), value.version) for value in saved), found]
