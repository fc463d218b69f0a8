"""Local margins: memory that a schedule leaves free while some of its ops run."""

from collections.abc import Mapping
from dataclasses import replace

from graphs.ir import Graph

Margins = Mapping[int, int]  # by op, bytes that are added to its workspace


def with_margins(graph: Graph, margins: Margins) -> Graph:
    """Return `graph` with larger workspaces, which every schedule of it has room for."""
    if not margins:
        return graph
    ops = tuple(replace(op, workspace_bytes=op.workspace_bytes + margins.get(op.id, 0)) for op in graph.ops)
    return replace(graph, ops=ops)


def between(low: Margins, high: Margins) -> Margins:
    """Return the margins half way from `low` to `high`, of the ops of `high`, without empty ones."""
    found = {op: (low.get(op, 0) + size) // 2 for op, size in high.items()}
    return {op: size for op, size in found.items() if size}


def most_above(high: Margins, low: Margins) -> int:
    """Return the most bytes by which a margin of `high` differs from that of `low`."""
    return max((abs(size - low.get(op, 0)) for op, size in high.items()), default=0)
