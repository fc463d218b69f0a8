"""The arena that the steps of a plan run in, as it is planned. Never imports torch."""

from graphs.ir import Graph, Kind
from solvers.arena.needs import ArenaRules

ALIGNMENT = 64  # that of PyTorch's CPU allocator, by which kernels choose how they compute
LEAST_BYTES = 1024  # smaller requests stay with the C library: they are many, and would leave gaps between large ones


def arena_rules(graph: Graph) -> ArenaRules:
    """Return which buffers of the step of `graph` are in its arena: all but small ones and the results that the caller gets."""
    results = frozenset(t for t in graph.kept if graph.tensors[t].kind is not Kind.GRADIENT)
    return ArenaRules(ALIGNMENT, LEAST_BYTES, results)
