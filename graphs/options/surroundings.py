"""What options of a graph need to know of the machine around the device."""

import math
from dataclasses import dataclass, replace
from typing import Self

from graphs.errors import GraphError
from graphs.units import format_bytes, format_seconds


@dataclass(frozen=True, slots=True)
class Link:
    """What carries copies between the device and the host, beside each other and beside the computation.

    Attributes:
        out_bytes_per_s: from the device to the host.
        in_bytes_per_s: from the host to the device.
        latency_s: that each copy takes besides its bytes.

    Raises:
        GraphError: a value that no machine has.
    """

    out_bytes_per_s: float
    in_bytes_per_s: float
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        for rate in (self.out_bytes_per_s, self.in_bytes_per_s):
            if not math.isfinite(rate) or rate <= 0:
                raise GraphError(f"the link carries {rate!r} bytes a second: must be above 0, such as 25e9")
        if not math.isfinite(self.latency_s) or self.latency_s < 0:
            raise GraphError(
                f"a copy over the link takes {self.latency_s!r} s besides its bytes: must be 0 or more, such as 1e-5"
            )

    @classmethod
    def even(cls, bytes_per_s: float, latency_s: float = 0.0) -> Self:
        """With one figure for both directions."""
        return cls(bytes_per_s, bytes_per_s, latency_s)

    def out_s(self, size_bytes: int) -> float:
        """Seconds of a copy to the host."""
        return self.latency_s + size_bytes / self.out_bytes_per_s

    def in_s(self, size_bytes: int) -> float:
        """Seconds of a copy back."""
        return self.latency_s + size_bytes / self.in_bytes_per_s


@dataclass(frozen=True, slots=True)
class OtherDevice:
    """A device beside the one that the program is for, with a memory of its own.

    Attributes:
        name: of its pool, unlike those of the other pools.
        times_s: for each op of the program the seconds that it takes there; None where it cannot run.
        bytes_per_s: what is copied in a second from it to each device before it and back, beside all other copies and
            beside the computation.
        capacity_bytes: of its memory that a step may take; None for no limit.
        differs: what may differ from the program's results where it computes (rounding); "" for not a bit.
        exact: ids of ops that make the program's bits there, whatever `differs` says.
        workspaces_bytes: for each op of the program what it holds there while it runs; () for as much as on the main device.
        latency_s: that each copy takes besides its bytes.
        block_bytes: its memory is handed out in blocks of so many.

    Raises:
        GraphError: a value that no machine has.
    """

    name: str
    times_s: tuple[float | None, ...]
    bytes_per_s: float
    capacity_bytes: int | None = None
    differs: str = ""
    exact: tuple[int, ...] = ()
    workspaces_bytes: tuple[int, ...] = ()
    latency_s: float = 0.0
    block_bytes: int = 1

    def __post_init__(self) -> None:
        if not math.isfinite(self.bytes_per_s) or self.bytes_per_s <= 0:
            raise GraphError(f"the link of {self.name!r} carries {self.bytes_per_s!r} bytes a second: must be above 0, as 25e9")
        if not math.isfinite(self.latency_s) or self.latency_s < 0:
            raise GraphError(f"a copy from or to {self.name!r} takes {self.latency_s!r} s besides its bytes: must be 0 or more")
        if self.block_bytes < 1:
            raise GraphError(f"the memory of {self.name!r} comes in blocks of {self.block_bytes!r} bytes: must be 1 or more")
        if self.workspaces_bytes and len(self.workspaces_bytes) != len(self.times_s):
            raise GraphError(
                f"device {self.name!r} has {len(self.times_s)} times and {len(self.workspaces_bytes)} workspaces: give one each"
            )

    @property
    def exactly(self) -> Self:
        """This device with those of its ops alone that make the program's bits there."""
        if not self.differs:
            return self
        times_s = tuple(time_s if op in self.exact else None for op, time_s in enumerate(self.times_s))
        return replace(self, times_s=times_s, differs="")

    def __str__(self) -> str:
        times = [time_s for time_s in self.times_s if time_s is not None]
        seconds = format_seconds(math.fsum(times))
        return f"{self.name}: {len(times)} of {len(self.times_s)} ops in {seconds}, {format_bytes(self.bytes_per_s)}/s"


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The host, the link to it, and other devices.

    Attributes:
        link: between the device and the host.
        host_bytes: of pinned memory on the host that a step may take; None for no limit.
        others: devices that ops may be placed on (``graphs.options.placement``).

    Raises:
        GraphError: a value that no machine has.
    """

    link: Link
    host_bytes: int | None = None
    others: tuple[OtherDevice, ...] = ()

    def __post_init__(self) -> None:
        if self.host_bytes is not None and self.host_bytes < 0:
            raise GraphError(f"the host has {self.host_bytes!r} bytes: must be 0 or more")
