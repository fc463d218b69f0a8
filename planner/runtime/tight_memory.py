"""Preparation of the process for steps that barely fit into the memory of the host."""

import torch

from graphs.ir import Graph
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
