"""Preparation of the process for steps that barely fit into the memory of the host."""

import torch

from planner.graphs.ir import Graph
from planner.graphs.short_tracebacks import warn_caller
from planner.graphs.units import format_bytes
from planner.memory.free_memory import free_bytes
from planner.memory.release import return_large_blocks
from planner.plans.keep_everything import is_memory_tight
from planner.runtime.arena_allocator import use_large_pages


def prepare_for_tight_memory(graph: Graph, device: torch.device) -> None:
    """Make the process return freed memory to the host at once, if memory is tight, and take it again by large pages.

    To be called as soon as sizes are known, since the heap does not shrink. With Inductor's kernels they are known from the
    profile only. Steps in no arena take pages anew each time: with small pages alone those of ResNet-50 needed 1.5 times the time
    of the processor.
    """
    if is_memory_tight(graph, device):
        return_large_blocks()
        use_large_pages()


def warn_of_missing_memory(graph: Graph, peak_bytes: int, device: torch.device) -> None:
    """Warn if a step whose peak is `peak_bytes` finds no memory on `device`, where the static memory of `graph` already is."""
    room_bytes = free_bytes(device) + graph.static_bytes
    if peak_bytes > room_bytes:
        warn_caller(
            f"the plan takes {format_bytes(peak_bytes)}, and there is room for {format_bytes(room_bytes)}: the first step is "
            "likely to find no memory. Plan for a lower budget, or free memory before training"
        )
