"""Choices that a graph may be given, by name: rewrites that add optional ops. Adding one is adding one file and one line."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from graphs.errors import GraphError
from graphs.ir import Graph, Tensor, check_plain
from graphs.options.offload import offloaded
from graphs.options.placement import placed
from graphs.options.surroundings import Surroundings
from graphs.pools import DEVICE

Rewrite = Callable[[Graph, Surroundings], Graph]  # the graph with more optional ops


@dataclass(frozen=True, slots=True)
class Option:
    """A rewrite and one line about it."""

    rewrite: Rewrite
    description: str


OPTIONS: Mapping[str, Option] = MappingProxyType(
    {
        "offload": Option(offloaded, "tensors may go to the host and come back, beside the computation"),
        "placement": Option(placed, "ops may run on other devices, with copies between (in Python: Surroundings.others)"),
    }
)


def with_options(graph: Graph, names: Sequence[str], surroundings: Surroundings) -> Graph:
    """`graph` with the choices called `names`.

    Raises:
        GraphError: there is no such choice, or one cannot be added to this graph.
    """
    for name in names:
        if name not in OPTIONS:
            raise GraphError(f"there is no option {name!r} of a graph: choose of {', '.join(OPTIONS)}")
        graph = OPTIONS[name].rewrite(graph, surroundings)
    return graph


def without_options(graph: Graph) -> Graph:
    """The program alone, with the same ids. What only optional ops make is left out, or has no bytes if other tensors follow.

    Raises:
        GraphError: the program itself has several pools or streams.
    """
    if graph.plain:
        return graph
    n = len(graph.program)
    tensors: list[Tensor] = []
    count = 0
    for t in graph.tensors:
        made = tuple(p for p in t.producers if p < n)
        if made or t.static:
            count = t.id + 1
        tensors.append(replace(t, producers=made) if made or t.static else replace(t, producers=(), size_bytes=0, pool=DEVICE))
    program = Graph(graph.program, tuple(tensors[:count]), graph.kept, graph.provenance)
    check_plain(program)
    return program
