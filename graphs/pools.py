"""Memory pools that hold tensors, streams that run ops, and channels that carry tensors between pools.

The main device, other devices and the host are alike: a pool, and channels between it and the others. The stream that computes on
a device owns its pool; the host computes nothing, so its pool is owned by the channel that fills it.
"""

import math
from dataclasses import dataclass

from planner.graphs.errors import GraphError

DEVICE = "device"  # the pool whose capacity is the budget
HOST = "host"
COMPUTE = "compute"  # the stream that owns the device's
TRANSFER = "copy"  # target of the ops that carry a tensor from one pool to another
COLLECTIVES = "collectives"  # the channel of what processes send each other


def name_stream(pool: str) -> str:
    """Return the name of the stream that computes in `pool`, and owns it."""
    return COMPUTE if pool == DEVICE else f"{COMPUTE}@{pool}"


def is_channel(stream: str) -> bool:
    """Return True if `stream` computes in no pool: what runs on it sends tensors, in parallel with the computation."""
    return stream != COMPUTE and not stream.startswith(f"{COMPUTE}@")


def name_channel(source: str, target: str) -> str:
    """Return the name of the stream of transfers from one pool to another."""
    return f"{source}_to_{target}"


DEVICE_TO_HOST, HOST_TO_DEVICE = name_channel(DEVICE, HOST), name_channel(HOST, DEVICE)


@dataclass(frozen=True, slots=True)
class Pool:
    """A memory that holds tensors.

    Attributes:
        name: unique; the first pool of a graph is ``DEVICE``.
        owner: the stream in whose order its memory is allocated and freed; other streams wait for it.
        capacity_bytes: None for no limit. The device has none here: its capacity is the budget.
    """

    name: str
    owner: str
    capacity_bytes: int | None = None

    @property
    def computes(self) -> bool:
        """True if it is the memory of a device that runs ops."""
        return self.owner == name_stream(self.name)


@dataclass(frozen=True, slots=True)
class Channel:
    """A link that carries transfers from one pool to another, one at a time, in parallel with computation and other channels.

    Attributes:
        latency_s: of each transfer, besides its bytes.

    Raises:
        GraphError: an impossible value.
    """

    source: str
    target: str
    bytes_per_s: float
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        if not math.isfinite(self.bytes_per_s) or self.bytes_per_s <= 0:
            raise GraphError(
                f"the link from {self.source!r} to {self.target!r} has a rate of {self.bytes_per_s!r} bytes a second: must be "
                "above 0, such as 25e9"
            )
        if not math.isfinite(self.latency_s) or self.latency_s < 0:
            raise GraphError(
                f"a copy from {self.source!r} to {self.target!r} has a latency of {self.latency_s!r} s: must be "
                "0 or more, such as 1e-5"
            )

    @property
    def stream(self) -> str:
        """The name of its stream."""
        return name_channel(self.source, self.target)

    def time_s(self, size_bytes: int) -> float:
        """Return the seconds of a transfer."""
        return self.latency_s + size_bytes / self.bytes_per_s
