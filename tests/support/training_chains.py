"""A training chain with sizes that people read."""

from dataclasses import replace

from graphs.ir import Graph
from graphs.synthetic.small import training_chain


def chain_of_six() -> Graph:
    """``training_chain(6)`` with tensors of a kilobyte: a peak of 7000 bytes, a least budget of 3000."""
    graph = training_chain(6)
    return replace(graph, tensors=tuple(replace(tensor, size_bytes=1000) for tensor in graph.tensors))
