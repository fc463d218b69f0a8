"""The link between a device and the host: measured and published transfer rates.

Rates are bytes per second in one direction. A step reaches a fraction of the published rate, and plans use that: on an H100,
whose PCIe 5 carries 64 GB/s, copies reach 50 to 54 GB/s alone and 23 to 32 GB/s inside a training step; on an A100, whose
PCIe 4 carries 32 GB/s, 25 GB/s alone and 11 GB/s in the slower direction where both are busy. Hence the factor 0.4. A rate
measured on the device itself takes precedence.

Published, in each direction:

- PCIe 5, 16 lanes: 64 GB/s (NVIDIA H100 and H200 datasheets: 128 GB/s of both)
- PCIe 4, 16 lanes: 32 GB/s (NVIDIA A100 and L4 datasheets: 64 GB/s of both; Ada whitepaper for the RTX 4090)
- NVLink-C2C: 450 GB/s (NVIDIA GH200 datasheet: 900 GB/s of both)
- a CPU is its own host: half of its memory's bandwidth, since a copy reads and writes
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType

import msgspec

from planner.graphs.errors import GraphError, MismatchError
from planner.graphs.options.surroundings import Link
from planner.graphs.units import format_bytes, format_seconds
from planner.settings.devices import DEVICES, find_device

MEASURED_LINK = "link_to_host"  # key in the provenance of a graph
_SLOWED = 0.9  # of a direction's rate alone: below, the two directions slow each other down

_REACHED = 0.4
_LATENCY_S = 1e-5  # from no document: a common time to start and await an asynchronous copy
_PCIE_4, _PCIE_5, _NVLINK_C2C = 32e9, 64e9, 450e9
_INTERFACES: Mapping[str, float] = MappingProxyType(
    {
        "gh200": _NVLINK_C2C,
        "h200": _PCIE_5,
        "h100": _PCIE_5,
        "a100": _PCIE_4,
        "l4": _PCIE_4,
        "rtx4090": _PCIE_4,
        "cpu": DEVICES["cpu"].bandwidth_bytes_per_s / 2,
    }
)


@dataclass(frozen=True, slots=True)
class LinkRates:
    """Transfer rates in bytes per second: out and in while the other direction is idle, and of each while both are busy.

    Raises:
        GraphError: a rate is impossible.
    """

    out_bytes_per_s: float
    in_bytes_per_s: float
    both_bytes_per_s: float

    def __post_init__(self) -> None:
        Link(self.out_bytes_per_s, self.in_bytes_per_s)
        Link.even(self.both_bytes_per_s)

    def __str__(self) -> str:
        out, back, both = (format_rate(rate) for rate in (self.out_bytes_per_s, self.in_bytes_per_s, self.both_bytes_per_s))
        return f"{out} out, {back} in, {both} each at once"


@dataclass(frozen=True, slots=True)
class LinkProfile:
    """The measured rates of a link.

    Attributes:
        alone: without computation.
        beside: during the computation of the step.
        latency_s: seconds of a copy besides its bytes, during the computation.

    Raises:
        GraphError: the latency is impossible.
    """

    alone: LinkRates
    beside: LinkRates
    latency_s: float

    def __post_init__(self) -> None:
        Link.even(self.beside.both_bytes_per_s, self.latency_s)

    @property
    def link(self) -> Link:
        """The link to plan with: the rates during computation; one rate for both directions if they slow each other down."""
        beside = self.beside
        if beside.both_bytes_per_s < _SLOWED * min(beside.out_bytes_per_s, beside.in_bytes_per_s):
            return Link.even(beside.both_bytes_per_s, self.latency_s)
        return Link(beside.out_bytes_per_s, beside.in_bytes_per_s, self.latency_s)

    @property
    def recorded(self) -> dict[str, object]:
        """The profile as it is stored in the provenance of a graph."""
        return asdict(self)

    def __str__(self) -> str:
        return f"{self.beside} beside the step; {self.alone} alone; {format_seconds(self.latency_s)} a copy"


def get_measured_link(provenance: Mapping[str, object]) -> LinkProfile | None:
    """Return the measured link in the provenance of a graph; None if there is none.

    Raises:
        MismatchError: its values are impossible.
    """
    said = provenance.get(MEASURED_LINK)
    if said is None:
        return None
    try:
        return msgspec.convert(said, LinkProfile)
    except (msgspec.ValidationError, GraphError) as error:
        raise MismatchError(
            f"the graph's provenance describes its link to the host in a way that no trace does ({error}): its file was "
            "edited; trace it again, or give its rate, as link='25GB/s' (--link 25GB/s)"
        ) from None


def get_published_link(device: str) -> Link | None:
    """Return the rate that a step reaches of the published one, by a device name as in a provenance; None if it is unknown."""
    found = find_device(device)
    return None if found is None else Link.even(_REACHED * _INTERFACES[found.name], _LATENCY_S)


def format_rate(bytes_per_s: float) -> str:
    """Return a rate for display, such as ``25.00 GB/s``."""
    return f"{format_bytes(bytes_per_s)}/s"
