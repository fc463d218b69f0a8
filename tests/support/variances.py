"""Small graphs with optional ops that are lossy."""

import random
from dataclasses import replace

from graphs.ir import Graph


def with_variances(graph: Graph, draw: random.Random) -> Graph:
    """`graph` with whole variances of most of its optional ops, and a limit below their sum, now and then none of them."""
    ops = tuple(replace(op, variance=float(draw.choice((0, 1, 1, 2, 3, 5)))) if op.optional else op for op in graph.ops)
    total = int(sum(op.variance for op in ops))
    return replace(graph, ops=ops, variance_limit=float(draw.randint(0, max(0, total - 1))))
