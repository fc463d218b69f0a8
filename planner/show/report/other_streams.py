"""Rows of the report page on transfers: waits of the computation, other streams, and tensors that leave the device."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from planner.graphs.pools import COMPUTE, Pool
from planner.graphs.units import format_bytes, format_ratio, format_seconds
from planner.show.facts.streams import IdleTime, Offload, Stream, list_offloads, list_streams, list_waits
from planner.show.facts.timeline import PeakTensor, Timeline, get_module
from planner.show.report.describe import format_capacity, format_name, name_end_of_wait


@dataclass(frozen=True, slots=True)
class OtherStreams:
    """Facts about the other streams and pools of a plan; empty if the plan uses only the computation stream and the device.

    Attributes:
        in_short: a sentence to follow those on the computation.
        facts: tiles.
        said: the totals as sentences.
        streams: rows of name, executions, bytes, busy seconds, their share of the step as text, and the share in percent as a
            number.
        waits: the longest, in order: start, duration, awaited execution, next op; `waits_left_out` are omitted.
        offloads: the largest: size, tensor, block, pool, departure, return; `offloads_left_out` are omitted.
    """

    in_short: str = ""
    facts: tuple[tuple[str, str], ...] = ()
    said: str = ""
    streams: tuple[list[str], ...] = ()
    waits: tuple[list[str], ...] = ()
    waits_left_out: int = 0
    offloads: tuple[list[str], ...] = ()
    offloads_left_out: int = 0


def describe_other_streams(timeline: Timeline, listed: int) -> OtherStreams:
    """Return the facts about the other streams and pools, with at most `listed` rows in a table."""
    others = [stream for stream in list_streams(timeline)[1:] if stream.executions]
    if not others:
        return OtherStreams()
    stalls, gone = list_waits(timeline, COMPUTE), sorted(list_offloads(timeline), key=lambda offload: -offload.tensor.size_bytes)
    longest = sorted(sorted(stalls, key=lambda wait: -wait.time_s)[:listed], key=lambda wait: wait.start_s)
    waited_s = math.fsum(wait.time_s for wait in stalls)
    waited = (
        f"waits {format_seconds(waited_s)} ({format_ratio(_share(waited_s, timeline))} of the step)" if stalls else "never waits"
    )
    places = f", at {len(stalls):,} place{'' if len(stalls) == 1 else 's'}" if stalls else ""
    peaks = zip(timeline.graph.pools[1:], timeline.simulation.pool_peaks_bytes[1:], strict=True)
    most = [(pool, peak_bytes) for pool, peak_bytes in peaks if peak_bytes]
    ran = sum(len(stream.executions) for stream in others)
    return OtherStreams(
        in_short=f" {ran:,} more are on other streams, and the computation {waited} for them.",
        facts=(
            *((_format_memory(pool), format_bytes(peak_bytes)) for pool, peak_bytes in most),
            ("Waiting", format_seconds(waited_s)),
        ),
        said=" ".join(
            (
                f"The computation {waited}{places}.",
                *(f"{_format_memory(p)}: at most {format_bytes(size_bytes)}, {format_capacity(p)}." for p, size_bytes in most),
            )
        ),
        streams=tuple(_build_stream_row(stream, timeline) for stream in others),
        waits=tuple(map(_wait_row, longest)),
        waits_left_out=len(stalls) - listed,
        offloads=tuple(_offload_row(offload, timeline) for offload in gone[:listed]),
        offloads_left_out=len(gone) - listed,
    )


def describe_travels(timeline: Timeline, held: Iterable[PeakTensor]) -> list[str]:
    """Return for each of `held` when it leaves the device and when it is back; "" for a tensor that stays."""
    of: dict[int, list[Offload]] = {}
    for offload in list_offloads(timeline):
        of.setdefault(offload.tensor.id, []).append(offload)
    return ["; ".join(_format_travel(offload) for offload in of.get(one.tensor.id, ())) for one in held]


def _format_memory(pool: Pool) -> str:
    return f"{format_name(pool.name).capitalize()} memory"


def _format_travel(offload: Offload) -> str:
    back = f", back at {_format_times(offload)}" if offload.back else ""
    return f"to {format_name(offload.copy.pool)} at {format_seconds(offload.out.start_s)}{back}"


def _build_stream_row(stream: Stream, timeline: Timeline) -> list[str]:
    share = _share(stream.busy_s, timeline)
    times = (f"{len(stream.executions):,}", format_bytes(stream.made_bytes), format_seconds(stream.busy_s), format_ratio(share))
    return [format_name(stream.name), *times, f"{100 * share:.1f}"]


def _wait_row(wait: IdleTime) -> list[str]:
    return [format_seconds(wait.start_s), format_seconds(wait.time_s), wait.awaited.op.name, name_end_of_wait(wait)]


def _offload_row(offload: Offload, timeline: Timeline) -> list[str]:
    made_in = "" if offload.tensor.static else get_module(timeline.graph.ops[offload.tensor.producers[0]])
    out = (format_name(offload.copy.pool), format_seconds(offload.out.start_s))
    return [format_bytes(offload.tensor.size_bytes), offload.tensor.name, made_in, *out, _format_times(offload)]


def _format_times(offload: Offload) -> str:
    return ", ".join(format_seconds(execution.end_s) for execution in offload.back)


def _share(time_s: float, timeline: Timeline) -> float:
    return time_s / timeline.time_s if timeline.time_s else 0.0
