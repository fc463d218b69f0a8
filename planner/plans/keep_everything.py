"""The memory of a step that keeps everything, as eager PyTorch does, compared with the free memory."""

import torch

from planner.graphs.ir import Graph
from planner.graphs.units import format_bytes
from planner.memory.free_memory import free_bytes
from planner.plans.summary import summarize

# The bytes of a fragmented heap over those of its tensors. 1.8 was measured with everything kept, and 7 for plans of 130 MB.
_MOST_HEAP = 2


def count_keep_everything_bytes(graph: Graph) -> int:
    """Return the bytes that keeping everything needs besides the static tensors."""
    summary = summarize(graph)
    return summary.keep_everything_peak_bytes - summary.static_bytes


def is_memory_tight(graph: Graph, device: torch.device) -> bool:
    """Return True if `device` is the CPU, and keeping everything may not fit into its free memory, with a fragmented heap."""
    return device.type == "cpu" and _MOST_HEAP * count_keep_everything_bytes(graph) > free_bytes(device)


def explain_not_fitting(graph: Graph, device: torch.device) -> str:
    """Return the needed and free bytes as a reason not to run a step that keeps everything for comparison; "" if it fits."""
    summary = summarize(graph)
    # The results of both steps are compared in the host's memory.
    compared_bytes = 2 * sum(graph.tensors[t].size_bytes for t in graph.kept) if device.type == "cpu" else 0
    all_bytes, room_bytes = summary.keep_everything_peak_bytes + compared_bytes, free_bytes(device) + summary.static_bytes
    if all_bytes <= room_bytes:
        return ""
    return f"it needs {format_bytes(all_bytes)}, and there is room for {format_bytes(room_bytes)}"
