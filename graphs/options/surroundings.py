"""What options of a graph need to know of the machine around the device."""

import math
from dataclasses import dataclass

from graphs.errors import GraphError


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The host, and the link to it.

    Attributes:
        link_bytes_per_s: what is copied in a second in each direction, beside the other and beside the computation.
        host_bytes: of pinned memory on the host that a step may take; None for no limit.

    Raises:
        GraphError: a value that no machine has.
    """

    link_bytes_per_s: float
    host_bytes: int | None = None

    def __post_init__(self) -> None:
        if not math.isfinite(self.link_bytes_per_s) or self.link_bytes_per_s <= 0:
            raise GraphError(f"the link carries {self.link_bytes_per_s!r} bytes a second: must be above 0, such as 25e9")
        if self.host_bytes is not None and self.host_bytes < 0:
            raise GraphError(f"the host has {self.host_bytes!r} bytes: must be 0 or more")
