"""Small graphs with optional ops that are lossy."""

import random
from dataclasses import replace

from graphs.ir import Graph
from graphs.options.compress import VARIANCE


def with_variances(graph: Graph, draw: random.Random, resource: str = VARIANCE) -> Graph:
    """`graph` where most of its optional ops use whole amounts of `resource`, and a limit below their sum, now and then 0."""
    ops = tuple(op.using(resource, float(draw.choice((0, 1, 1, 2, 3, 5)))) if op.optional else op for op in graph.ops)
    total = int(sum(op.used(resource) for op in ops))
    return replace(graph, ops=ops, limits=(*graph.limits, (resource, float(draw.randint(0, max(0, total - 1))))))
