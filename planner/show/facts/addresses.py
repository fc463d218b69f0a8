"""Addresses of the tensors of a plan over its schedule: where PyTorch's caching allocator puts them, and where they could lie."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from planner.graphs.addresses import Buffer, buffers_of
from planner.graphs.allocators.caching import CachingAllocator
from planner.graphs.allocators.training import Training, play
from planner.memory.arena_rules import plan_device_arena
from planner.memory.reserved import build_training, get_rules, is_on_cuda
from planner.show.facts.timeline import Timeline
from planner.solvers.addresses.solve import solve

_ALIGNMENT = 512
_WORK = 2.0  # for the search of addresses, after constructions


@dataclass(frozen=True, slots=True)
class PlacedBuffer:
    """A buffer of the step at its address.

    Attributes:
        tensor: name of its tensor; "" for workspaces and second copies.
        first_step, end_step: in use from the first to before the second of these steps of the schedule.
        address, size_bytes: its range of addresses.
    """

    tensor: str
    first_step: int
    end_step: int
    address: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class StepAddresses:
    """The addresses of a step.

    Attributes:
        total_bytes: size of the whole range.
        borders: begin of each segment, which lie one above the other; empty for an arena.
        by_step: bytes reserved after each step of the schedule; empty for an arena, which takes `total_bytes` throughout.
    """

    stays: tuple[PlacedBuffer, ...]
    total_bytes: int
    borders: tuple[int, ...] = ()
    by_step: tuple[int, ...] = ()


def compute_reserved_addresses(timeline: Timeline) -> StepAddresses | None:
    """Return the addresses in the third step of training by the plan of `timeline`; None on the CPU, which has no such allocator.

    Static memory and workspaces of libraries lie where no stay is. Of a step in an arena, they are those in the arena.
    """
    graph, plan = timeline.graph, timeline.plan
    if not is_on_cuda(graph):
        return None
    training = build_training(graph, plan.schedule)
    if plan.arena_bytes is not None:
        return _compute_arena_addresses(timeline, training)
    allocator = CachingAllocator(rules=get_rules(plan.memory))
    usage = play(training, allocator)
    begins = dict(zip(allocator.segments, accumulate((s.size_bytes for s in allocator), initial=0), strict=False))
    changes = {time // training.moments: size for (time, _, _), size in zip(training.events, usage.by_step[-1], strict=True)}
    by_step = accumulate(
        range(len(plan.schedule.steps)), lambda held, step: changes.get(step, held), initial=usage.by_step[-2][-1]
    )
    return StepAddresses(
        stays=_place_buffers(
            timeline,
            training.buffers,
            [begins[place.segment] + place.offset for place in usage.places],
            [place.size_bytes for place in usage.places],
            moments=training.moments,
        ),
        total_bytes=allocator.reserved.bytes,
        borders=tuple(begins.values()),
        by_step=tuple(by_step)[1:],
    )


def _compute_arena_addresses(timeline: Timeline, training: Training) -> StepAddresses:
    arena = plan_device_arena(training)
    placed = [index for index in arena.holes if index not in arena.missed]
    buffers = [training.buffers[index] for index in placed]
    return StepAddresses(
        stays=_place_buffers(
            timeline,
            buffers,
            [arena.holes[index].offset for index in placed],
            [buffer.size for buffer in buffers],
            moments=training.moments,
        ),
        total_bytes=arena.slab_bytes,
    )


def plan_addresses(timeline: Timeline) -> StepAddresses:
    """Return addresses of all tensors of the step in one arena, by a short search; static memory is outside of it."""
    buffers = buffers_of(timeline.graph, timeline.plan.schedule, alignment=_ALIGNMENT)
    result = solve(buffers, work_limit=_WORK)
    assert result.offsets is not None
    offsets = result.offsets.offsets
    return StepAddresses(_place_buffers(timeline, buffers, offsets, [buffer.size for buffer in buffers]), result.height_bytes)


def _place_buffers(
    timeline: Timeline, buffers: Sequence[Buffer], addresses: Sequence[int], sizes: Sequence[int], *, moments: int = 1
) -> tuple[PlacedBuffer, ...]:
    names = {tensor.name for tensor in timeline.graph.tensors}
    found = []
    for buffer, address, size in zip(buffers, addresses, sizes, strict=True):
        name = next((name for name in (buffer.id, buffer.id.rpartition("#")[0]) if name in names), "")
        found.append(PlacedBuffer(name, buffer.lower // moments, -(-buffer.upper // moments), address, size))
    return tuple(found)
