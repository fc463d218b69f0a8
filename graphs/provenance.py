"""The provenance of a graph: where it and its times come from, in fields with types and as the mapping that files have."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import ClassVar, Literal

from planner.graphs.documents import RecordedMapping, convert_document
from planner.graphs.optimizers import MeasuredOptimizer


class Times(StrEnum):
    """Where the times of ops come from."""

    MEASURED = "measured"  # each op alone
    IN_STEPS = "measured in training steps"
    MODELLED = "modelled"  # by a roofline


@dataclass(frozen=True, eq=False, init=False)
class Provenance(RecordedMapping):
    """The origin of a graph; as a mapping, what files have: also the entries that only people read, in their order.

    Example:
        >>> origin = Provenance.of({"model": "gpt2", "threads": 2})
        >>> origin.model, origin["threads"], origin.times
        ('gpt2', 2, None)
    """

    _recorded: ClassVar[Mapping[str, object]] = {}  # of an instance: the mapping that it was made of

    model: str = ""
    device: str = ""  # of the step, as torch or ``planner.settings.devices`` names it
    torch: str = ""  # its version
    times: Times | None = None
    optimizer: Literal["none", "sgd", "momentum", "adamw"] | MeasuredOptimizer = "none"  # that the graph was traced for
    accumulate: bool = False  # True if gradients are accumulated over several batches
    variant: str = ""  # of Inductor's kernels
    compile_seconds: float | None = None  # that Inductor took for them
    context_bytes: int | None = None  # of CUDA's context, as measured on the device
    shares_of_bytes: int | None = None  # the peak that shares refer to, if it is not that of the graph itself
    allocated_bytes: Sequence[tuple[int, int]] = ()  # by tensor, where its kernel allocates another size than its shape needs
    unrepeatable_ops: Sequence[int] = ()  # executed once because their bits differ between two executions
    options: Sequence[str] = ()  # that the graph was traced with
    left_out: Sequence[str] = ()  # names of their ops that were dropped as useless

    @staticmethod
    def of(recorded: Mapping[str, object], source: str = "graph", path: str = "provenance") -> "Provenance":
        """Return `recorded`, what files have, with types; `source` and `path` name it in messages.

        Raises:
            FormatError: a field is of another type.
        """
        if isinstance(recorded, Provenance):
            return recorded
        typed = {one.name: recorded[one.name] for one in fields(Provenance) if one.name in recorded}
        found = convert_document(typed, Provenance, source, path=path)
        plain = {name: str(value) if isinstance(value, StrEnum) else value for name, value in recorded.items()}
        object.__setattr__(found, "_recorded", plain)
        return found

    def record(self, **changes: object) -> "Provenance":
        """Return this provenance with `changes`, those of new entries last; raise a FormatError if one is of another type."""
        return Provenance.of({**self, **changes})

    def remove(self, name: str) -> "Provenance":
        """Return this provenance without an entry."""
        return Provenance.of({key: value for key, value in self.items() if key != name})

    @property
    def recorded(self) -> Mapping[str, object]:
        """The mapping that it was made of."""
        return self._recorded
