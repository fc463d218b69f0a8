"""The machine around the device, as graph options need it: the link to the host, and other devices."""

import math
from dataclasses import dataclass, replace
from typing import Self

from planner.graphs.errors import GraphError
from planner.graphs.pools import DEVICE, HOST, Channel
from planner.graphs.units import format_bytes, format_seconds


@dataclass(frozen=True, slots=True)
class Link:
    """The link between the device and the host: two channels, which work in parallel with each other and with the computation.

    Attributes:
        out_bytes_per_s: from the device to the host.
        in_bytes_per_s: from the host to the device.
        latency_s: of each transfer, besides its bytes.

    Raises:
        GraphError: an impossible value.
    """

    out_bytes_per_s: float
    in_bytes_per_s: float
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        _ = self.out, self.back  # both raise an error for impossible values

    @classmethod
    def even(cls, bytes_per_s: float, latency_s: float = 0.0) -> Self:
        """Return a link with the same rate in both directions."""
        return cls(bytes_per_s, bytes_per_s, latency_s)

    @property
    def out(self) -> Channel:
        """The channel to the host."""
        return Channel(DEVICE, HOST, self.out_bytes_per_s, self.latency_s)

    @property
    def back(self) -> Channel:
        """The channel from the host."""
        return Channel(HOST, DEVICE, self.in_bytes_per_s, self.latency_s)


@dataclass(frozen=True, slots=True)
class OtherDevice:
    """A further device, with its own memory.

    Attributes:
        name: name of its pool, unique.
        times_s: for each op of the program, its seconds on this device; None if it cannot run there.
        bytes_per_s: rate of each channel between it and an earlier device, in either direction; channels work in parallel.
        capacity_bytes: memory that a step may use; None for no limit.
        differs: how its results may differ from the program's (rounding); "" if they are bit-identical.
        exact: ids of ops whose results are bit-identical in spite of `differs`.
        workspaces_bytes: for each op of the program, its workspace there; () for those of the main device.
        latency_s: of each transfer, besides its bytes.
        block_bytes: granularity of its allocator.

    Raises:
        GraphError: an impossible value.
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
        self.make_channel(DEVICE, self.name)  # raises an error for impossible values
        if self.block_bytes < 1:
            raise GraphError(f"the memory of {self.name!r} comes in blocks of {self.block_bytes!r} bytes: must be 1 or more")
        if self.workspaces_bytes and len(self.workspaces_bytes) != len(self.times_s):
            raise GraphError(
                f"device {self.name!r} has {len(self.times_s)} times and {len(self.workspaces_bytes)} workspaces: give one each"
            )

    def make_channel(self, source: str, target: str) -> Channel:
        """Return the channel between two pools, of which one is this device's."""
        return Channel(source, target, self.bytes_per_s, self.latency_s)

    @property
    def exactly(self) -> Self:
        """This device restricted to ops whose results are bit-identical to the program's."""
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
        link: between the device and the host; None if nothing is transferred there.
        host_bytes: pinned memory on the host that a step may use; None for no limit.
        others: devices that ops may be placed on (``planner.graphs.options.placement``).

    Raises:
        GraphError: an impossible value.
    """

    link: Link | None = None
    host_bytes: int | None = None
    others: tuple[OtherDevice, ...] = ()

    def __post_init__(self) -> None:
        if self.host_bytes is not None and self.host_bytes < 0:
            raise GraphError(f"the host has {self.host_bytes!r} bytes: must be 0 or more")
