"""Reader of PyTorch's memory snapshots: the memory at the peak, and the Python lines that allocated it.

The format is that of ``torch.cuda.memory._snapshot``, pickled by ``_dump_snapshot``: the segments with their blocks as they
were when it was taken, and for each device the last actions of the allocator before that. Torch is not imported.

Snapshots come from elsewhere, and unpickling runs what a file says. So the unpickler allows plain containers only. Known
weakness: it was tried on snapshots that were written by hand.
"""

import pickle
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from planner.graphs.errors import FormatError

_UNKNOWN = "unknown (no frames were recorded)"
_BEFORE = "in memory before the recorded actions"
# Files of PyTorch and of Python itself: the line of the user is below theirs.
_LIBRARIES = ("/torch/", "/torch_", "<frozen ", "<string>", "<eval_with_key>")


@dataclass(frozen=True, slots=True)
class Holder:
    """Bytes and blocks that one line of Python, or one FX node, held at the peak."""

    name: str
    size_bytes: int
    blocks: int


@dataclass(frozen=True, slots=True)
class DevicePeak:
    """The peak memory of one device in the snapshot.

    Attributes:
        device: its index.
        peak_bytes: sum of the requested sizes at the peak.
        end_bytes: sum of the requested sizes when the snapshot was taken.
        reserved_bytes: bytes of all segments when the snapshot was taken.
        actions: number of recorded actions of the allocator.
        at_action: the action after which the peak occurred; None if it was before the first.
        holders: holders of memory at the peak, the largest first.
        out_of_memory_bytes: the last request that failed; None if there was none.
    """

    device: int
    peak_bytes: int
    end_bytes: int
    reserved_bytes: int
    actions: int
    at_action: int | None
    holders: tuple[Holder, ...]
    out_of_memory_bytes: int | None


@dataclass(frozen=True, slots=True)
class _HeldBlock:
    size_bytes: int
    holder: str


class _PlainUnpickler(pickle.Unpickler):
    """Unpickler for containers, numbers and text only: other pickles could execute arbitrary code."""

    def find_class(self, module_name: str, global_name: str, /) -> NoReturn:
        raise pickle.UnpicklingError(f"it names {module_name}.{global_name}")


def read_snapshot(path: str) -> tuple[DevicePeak, ...]:
    """Return the peak of each device that the snapshot in the file `path` holds something of.

    Raises:
        FormatError: it is no snapshot, or holds more than plain containers.
    """
    with Path(path).open("rb") as file:
        data = _load_plain(file, path)
    try:
        return _find_peaks(data)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise FormatError(f"{path} is not a memory snapshot of PyTorch: {type(error).__name__} {error}") from error


def _load_plain(file: BinaryIO, path: str) -> Any:
    try:
        return _PlainUnpickler(file).load()
    except Exception as error:
        raise FormatError(
            f"{path} is not a memory snapshot of PyTorch, which is a pickle of lists, dicts, numbers and text alone: {error}"
        ) from error


def _find_peaks(data: Mapping[str, Any]) -> tuple[DevicePeak, ...]:
    segments: dict[int, list[Mapping[str, Any]]] = {}
    for segment in data["segments"]:
        segments.setdefault(int(segment.get("device", 0)), []).append(segment)
    traces = list(data.get("device_traces", ()))
    devices = range(max(len(traces), 1 + max(segments, default=-1)))
    found = (_find_peak(i, segments.get(i, ()), traces[i] if i < len(traces) else ()) for i in devices)
    return tuple(peak for peak in found if peak.actions or peak.reserved_bytes)


def _find_peak(device: int, segments: Sequence[Mapping[str, Any]], trace: Sequence[Mapping[str, Any]]) -> DevicePeak:
    before = _find_blocks_before(segments, trace)
    levels = list(_apply_actions(dict(before), trace))
    peak_bytes = max(levels)
    actions = levels.index(peak_bytes)  # until it is first reached
    live = dict(before)
    deque(_apply_actions(live, trace[:actions]), maxlen=0)
    return DevicePeak(
        device=device,
        peak_bytes=peak_bytes,
        end_bytes=levels[-1],
        reserved_bytes=sum(int(segment["total_size"]) for segment in segments),
        actions=len(trace),
        at_action=actions - 1 if actions else None,
        holders=_list_holders(live.values()),
        out_of_memory_bytes=next((int(entry["size"]) for entry in reversed(trace) if entry["action"] == "oom"), None),
    )


def _find_blocks_before(segments: Sequence[Mapping[str, Any]], trace: Sequence[Mapping[str, Any]]) -> dict[int, _HeldBlock]:
    """Return the blocks in memory before the first action, by address: those freed later, or still there at the end."""
    found: dict[int, _HeldBlock] = {}
    touched: set[int] = set()
    for entry in trace:
        if entry["action"] == "alloc":
            touched.add(entry["addr"])
        elif entry["action"] == "free_requested" and entry["addr"] not in touched:
            touched.add(entry["addr"])
            found[entry["addr"]] = _HeldBlock(int(entry["size"]), _BEFORE)
    for segment in segments:
        address = segment.get("address") or 0
        for block in segment["blocks"]:
            own = block.get("address", address)
            if block["state"] == "active_allocated" and own not in touched:
                size_bytes = int(block.get("requested_size", block["size"]))
                found[own] = _HeldBlock(size_bytes, _find_holder(block.get("frames", ())))
            address = own + int(block["size"])
    return found


def _apply_actions(live: dict[int, _HeldBlock], trace: Sequence[Mapping[str, Any]]) -> Iterator[int]:
    """Yield the bytes of the blocks `live`, and those after each action of `trace`, which is applied to them."""
    level_bytes = sum(block.size_bytes for block in live.values())
    yield level_bytes
    for entry in trace:
        match entry["action"]:
            case "alloc":
                live[entry["addr"]] = _HeldBlock(int(entry["size"]), _find_holder(entry.get("frames", ())))
                level_bytes += int(entry["size"])
            case "free_requested":
                level_bytes -= live.pop(entry["addr"]).size_bytes
        yield level_bytes


def _list_holders(blocks: Iterable[_HeldBlock]) -> tuple[Holder, ...]:
    sizes, counts = Counter[str](), Counter[str]()
    for block in blocks:
        sizes[block.holder] += block.size_bytes
        counts[block.holder] += 1
    return tuple(Holder(name, size_bytes, counts[name]) for name, size_bytes in sizes.most_common())


def _find_holder(frames: Sequence[Mapping[str, Any]]) -> str:
    """Return the innermost line of the user's own Python, with the FX node if known; frames come innermost first."""
    python = [frame for frame in frames if str(frame["filename"]).endswith(".py") or "fx_node_name" in frame]
    own = [frame for frame in python if not any(part in str(frame["filename"]) for part in _LIBRARIES)]
    node = next((str(frame["fx_node_name"]) for frame in frames if "fx_node_name" in frame), "")
    if not (candidates := own or python or list(frames)):
        return _UNKNOWN
    frame = candidates[0]
    line = f"{str(frame['filename']).rpartition('/')[2]}:{int(frame['line'])} {frame['name']}"
    return f"{line}, node {node}" if node else line
