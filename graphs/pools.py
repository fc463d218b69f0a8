"""Where tensors are (pools) and where ops run (streams)."""

from dataclasses import dataclass

DEVICE = "device"  # the pool whose capacity is the budget
HOST = "host"
COMPUTE = "compute"  # the stream that owns the device's
TRANSFER = "copy"  # target of the ops that copy from one pool to another
HOST_TO_DEVICE = "host_to_device"
DEVICE_TO_HOST = "device_to_host"
COLLECTIVES = "collectives"
HOST_COMPUTE = "host_compute"


@dataclass(frozen=True, slots=True)
class Pool:
    """A memory that tensors are in.

    Attributes:
        name: unique; the first pool of a graph is ``DEVICE``.
        owner: the stream in whose order its bytes are taken and given back; other streams wait for it.
        capacity_bytes: what it holds at most, None for no limit. The device has none here: that is the budget.
    """

    name: str
    owner: str
    capacity_bytes: int | None = None
