"""What is known of other devices that the ops of a graph were measured on, before it is planned."""

import math
from dataclasses import dataclass

from graphs.cost.link import format_rate
from graphs.ir import Graph
from graphs.options.placement import movable
from graphs.options.surroundings import OtherDevice
from graphs.units import format_bytes, format_seconds
from planner.visible import visible


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """What another device that the ops of a graph were measured on offers.

    Attributes:
        ops, inexact_ops: of the program that may run there; and those of them that may differ from what they make here.
        time_s, here_s: seconds of all of these, there and here.
        bytes_per_s, latency_s: of copies from and to it.
        capacity_bytes: of its memory; None for no limit.
    """

    ops: int
    inexact_ops: int
    time_s: float
    here_s: float
    bytes_per_s: float
    latency_s: float
    capacity_bytes: int | None


def device_facts(graph: Graph, device: OtherDevice) -> DeviceFacts:
    """What `device` offers the ops of the program of `graph`.

    Raises:
        GraphError: it has not a time, or None, for each of them.
    """
    offered = movable(graph, device)
    return DeviceFacts(
        ops=len(offered),
        inexact_ops=sum(bool(device.differs) and op.id not in device.exact for op, _ in offered),
        time_s=math.fsum(time_s for _, time_s in offered),
        here_s=math.fsum(op.time_s for op, _ in offered),
        bytes_per_s=device.bytes_per_s,
        latency_s=device.latency_s,
        capacity_bytes=device.capacity_bytes,
    )


def device_line(name: str, facts: DeviceFacts, ops: int) -> str:
    """The device called `name` for people; the program has so many `ops`."""
    exactness = f"{facts.inexact_ops:,} of them not exact" if facts.inexact_ops else "all exact"
    room = "" if facts.capacity_bytes is None else f", {format_bytes(facts.capacity_bytes)} of memory"
    times = f"{format_seconds(facts.time_s)} there and {format_seconds(facts.here_s)} here"
    copies = f"copies at {format_rate(facts.bytes_per_s)} and {format_seconds(facts.latency_s)} each"
    return f"{facts.ops:,} of {ops:,} ops may run on {visible(name)}, {exactness}: {times}{room}, {copies}"
