"""Recorded actions of PyTorch's caching allocator on a device, and a comparison with its model on the same requests."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from planner.graphs.allocators.caching import DEFAULT, Block, CachingAllocator, Rules


class ActionKind(StrEnum):
    """The kinds of recorded actions."""

    ALLOC = "alloc"
    FREE = "free"
    RESERVE = "reserve"
    RELEASE = "release"


# The names of TraceEntry::Action in c10/cuda/CUDACachingAllocator.h. A free is complete once no other stream uses the block.
_KINDS: Mapping[str, ActionKind] = {
    "alloc": ActionKind.ALLOC,
    "free_completed": ActionKind.FREE,
    "segment_alloc": ActionKind.RESERVE,
    "segment_map": ActionKind.RESERVE,
    "segment_free": ActionKind.RELEASE,
    "segment_unmap": ActionKind.RELEASE,
}


@dataclass(frozen=True, slots=True)
class AllocatorAction:
    """A recorded action of the allocator.

    Attributes:
        address: address of the block, segment or pages.
        size_bytes: requested size of a block; size of a segment or of pages.
        stream: number of the stream.
    """

    kind: ActionKind
    address: int
    size_bytes: int
    stream: int


def read_actions(trace: Iterable[Mapping[str, Any]]) -> list[AllocatorAction]:
    """Return the actions of one device of ``torch.cuda.memory._snapshot()["device_traces"]``, streams numbered as they occur."""
    streams: dict[int, int] = {}
    return [
        AllocatorAction(kind, entry["addr"], entry["size"], streams.setdefault(entry["stream"], len(streams)))
        for entry in trace
        if (kind := _KINDS.get(entry["action"])) is not None
    ]


@dataclass(slots=True)
class Agreement:
    """The result of comparing a recording of the allocator with its model.

    Attributes:
        same_place: number of requests whose block is in the same segment at the same offset in both.
        reserved_bytes: peak of the reserved bytes in the recording.
        modelled_bytes: peak of the reserved bytes in the model.
        differences: a line for each request after which the reserved bytes differ.
    """

    requests: int = 0
    same_place: int = 0
    reserved_bytes: int = 0
    modelled_bytes: int = 0
    differences: list[str] = field(default_factory=list)


def compare_with_model(actions: Sequence[AllocatorAction], rules: Rules = DEFAULT) -> Agreement:
    """Replay the requests of `actions` on the model with settings `rules`, and return how well both agree.

    The recording must begin with the allocator's first request. The model releases unused memory at each recorded release.
    """
    # Among free blocks of a size the lowest is taken: segments have the addresses that the driver gave them.
    addresses = None if rules.expandable_segments else (a.address for a in actions if a.kind is ActionKind.RESERVE)
    model, agreement = CachingAllocator(rules=rules, numbers=addresses), Agreement()
    blocks: dict[int, Block] = {}
    beginnings: dict[int, int] = {}  # addresses by the number of a segment
    reserved = 0
    releasing = False
    for index, action in enumerate(actions):
        if action.kind is ActionKind.RELEASE:
            if not releasing:
                model.release_unused()
            reserved -= action.size_bytes
        elif action.kind is ActionKind.RESERVE:
            reserved += action.size_bytes
        elif action.kind is ActionKind.FREE:
            model.free(blocks.pop(action.address))
        else:
            block = blocks[action.address] = model.allocate(action.size_bytes, action.stream)
            agreement.requests += 1
            beginning = action.address - block.offset
            agreement.same_place += beginnings.setdefault(block.segment.number, beginning) == beginning
        releasing = action.kind is ActionKind.RELEASE
        agreement.reserved_bytes = max(agreement.reserved_bytes, reserved)
        if action.kind is ActionKind.ALLOC and model.reserved.bytes != reserved:
            agreement.differences.append(
                f"action {index}, {action.size_bytes} B: {reserved} B are reserved, {model.reserved.bytes} B by the model"
            )
    agreement.modelled_bytes = model.reserved.peak_bytes
    return agreement


_HEADER = "kind,address,size_bytes,stream"


def format_lines(actions: Iterable[AllocatorAction]) -> Iterator[str]:
    """Yield the lines of a CSV file of actions, addresses counted in units of 512 bytes from the lowest."""
    found = list(actions)
    lowest = min((action.address for action in found), default=0)
    yield _HEADER
    for action in found:
        yield f"{action.kind},{(action.address - lowest) // 512},{action.size_bytes},{action.stream}"
