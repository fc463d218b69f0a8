"""Channels and host memory that the graphs of a compiled model share."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import torch

from planner.graphs.errors import PlannerError
from planner.graphs.ir import Graph
from planner.graphs.pools import HOST
from planner.runtime.transfers.channels import HostChannels

G = TypeVar("G")


class SharedChannels:
    """The channels of one ``torch.compile`` call.

    Attributes:
        host_bytes: host memory for all graphs together.
    """

    def __init__(self, host_bytes: int) -> None:
        """Initialize with `host_bytes` of host memory."""
        self.host_bytes = host_bytes
        self._opened: tuple[torch.device, HostChannels] | None = None

    def open_channels(self, device: torch.device) -> HostChannels:
        """Return the channels between a graph's `device` and the host; all graphs share them, so that there may be one device."""
        if self._opened is None:
            self._opened = device, HostChannels(device, self.host_bytes)
        there, channels = self._opened
        if there != device:
            raise PlannerError(
                f"graphs of the model run on {there} and on {device}, and only one device can offload tensors to the host: leave "
                "out options=['offload'], or put the model on one device"
            )
        return channels


def set_host_bytes(graph: Graph, host_bytes: int) -> Graph:
    """Return `graph`, which offers offloading, with `host_bytes` of host memory."""
    pools = tuple(replace(pool, capacity_bytes=host_bytes) if pool.name == HOST else pool for pool in graph.pools)
    return replace(graph, pools=pools)


def compute_host_room(order: Sequence[G], graph: G, taken: Mapping[G, tuple[int, int]], whole_bytes: int) -> int:
    """Return the host memory that `graph` may use at any time, in bytes.

    Args:
        order: the graphs of a step in the order of their forward passes; a graph may occur several times.
        taken: host memory of a plan at its peak, and between its passes, by graph; missing graphs use none.
    """
    room, before, own = whole_bytes, 0, 0
    for run in order:
        peak, kept = (0, 0) if run is graph else taken.get(run, (0, 0))
        own += run is graph
        if own:
            room = min(room, (whole_bytes - before - peak) // own)
        before += kept
    return max(0, room)
