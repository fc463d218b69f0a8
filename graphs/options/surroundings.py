"""What options of a graph need to know of the machine around the device."""

import math
from dataclasses import dataclass, replace
from typing import Self

from graphs.errors import GraphError
from graphs.pools import DEVICE, HOST, Channel
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
        _ = self.out, self.back  # which refuse what no machine has

    @classmethod
    def even(cls, bytes_per_s: float, latency_s: float = 0.0) -> Self:
        """With one figure for both directions."""
        return cls(bytes_per_s, bytes_per_s, latency_s)

    @property
    def out(self) -> Channel:
        """To the host."""
        return Channel(DEVICE, HOST, self.out_bytes_per_s, self.latency_s)

    @property
    def back(self) -> Channel:
        """From the host."""
        return Channel(HOST, DEVICE, self.in_bytes_per_s, self.latency_s)


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
        self.channel(DEVICE, self.name)  # which refuses what no machine has
        if self.block_bytes < 1:
            raise GraphError(f"the memory of {self.name!r} comes in blocks of {self.block_bytes!r} bytes: must be 1 or more")
        if self.workspaces_bytes and len(self.workspaces_bytes) != len(self.times_s):
            raise GraphError(
                f"device {self.name!r} has {len(self.times_s)} times and {len(self.workspaces_bytes)} workspaces: give one each"
            )

    def channel(self, source: str, target: str) -> Channel:
        """Return the channel between two pools, of which one is this device's."""
        return Channel(source, target, self.bytes_per_s, self.latency_s)

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
