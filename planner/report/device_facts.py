"""What is known of other devices that the ops of a graph were measured on, before it is planned."""

import math
from dataclasses import dataclass

from graphs.cost.link import format_rate
from graphs.ir import Graph
from graphs.options import with_options
from graphs.options.placement import movable
from graphs.options.surroundings import Link, OtherDevice, Surroundings
from graphs.simulate import simulate
from graphs.units import format_bytes, format_seconds
from planner.visible import visible
from solvers.bounds import least_budget_bound
from solvers.clock import WorkClock
from solvers.least import least_known
from solvers.order.reorder import reordered
from solvers.pass_ends import with_pass_ends


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """What another device that the ops of a graph were measured on offers.

    Attributes:
        ops, inexact_ops: of the program that may run there; and those of them that may differ from what they make here.
        time_s, here_s: seconds of all of these, there and here.
        bytes_per_s, latency_s: of copies from and to it.
        capacity_bytes: of its memory; None for no limit.
        least_budget_bytes, least_budget_found_bytes: no budget of the main device with it is below the former, and the latter is
            known to do; None where no op may run there.
    """

    ops: int
    inexact_ops: int
    time_s: float
    here_s: float
    bytes_per_s: float
    latency_s: float
    capacity_bytes: int | None
    least_budget_bytes: int | None
    least_budget_found_bytes: int | None


def device_facts(graph: Graph, device: OtherDevice, finding: float) -> DeviceFacts:
    """What `device` offers the ops of the program of `graph`.

    Args:
        finding: units of work, to look for a schedule that needs little.

    Raises:
        GraphError: it has not a time, or None, for each of them.
    """
    offered = movable(graph, device)
    proved_bytes, found_bytes = None, None
    if offered:
        around = Surroundings(Link.even(1.0), others=(device,))
        proved_bytes, found_bytes = least_with(with_options(graph, ("placement",), around), finding)
    return DeviceFacts(
        ops=len(offered),
        inexact_ops=sum(bool(device.differs) and op.id not in device.exact for op, _ in offered),
        time_s=math.fsum(time_s for _, time_s in offered),
        here_s=math.fsum(op.time_s for op, _ in offered),
        bytes_per_s=device.bytes_per_s,
        latency_s=device.latency_s,
        capacity_bytes=device.capacity_bytes,
        least_budget_bytes=proved_bytes,
        least_budget_found_bytes=found_bytes,
    )


def least_with(graph: Graph, finding: float) -> tuple[int, int]:
    """What no budget of a graph with choices is below, and one that is known to do; `finding` as in ``device_facts``."""
    order = with_pass_ends(reordered(graph).graph).graph
    proved_bytes = least_budget_bound(order).budget_bytes
    known = least_known(order, WorkClock(finding), proved_bytes=proved_bytes)
    return proved_bytes, simulate(order, known).peak_bytes


def device_lines(name: str, facts: DeviceFacts, ops: int, order: str) -> list[tuple[str, str]]:
    """The device called `name` for people; the program has so many `ops`, and `order` says of which order a bound is."""
    lines = [("with placement", _device_line(name, facts, ops))]
    if facts.least_budget_bytes is not None and facts.least_budget_found_bytes is not None:
        lines.append(("  least budget", f"no less than {format_bytes(facts.least_budget_bytes)} {order}"))
        lines.append(("    known", format_bytes(facts.least_budget_found_bytes)))
    return lines


def _device_line(name: str, facts: DeviceFacts, ops: int) -> str:
    exactness = f"{facts.inexact_ops:,} of them not exact" if facts.inexact_ops else "all exact"
    room = "" if facts.capacity_bytes is None else f", {format_bytes(facts.capacity_bytes)} of memory"
    times = f"{format_seconds(facts.time_s)} there and {format_seconds(facts.here_s)} here"
    copies = f"copies at {format_rate(facts.bytes_per_s)} and {format_seconds(facts.latency_s)} each"
    return f"{facts.ops:,} of {ops:,} ops may run on {visible(name)}, {exactness}: {times}{room}, {copies}"
