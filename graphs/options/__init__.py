"""Choices that a graph may be given, by name: rewrites that add optional ops. Adding one is adding one file and one line."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from graphs.errors import GraphError
from graphs.ir import Graph
from graphs.options.offload import offloaded
from graphs.options.placement import placed
from graphs.options.surroundings import Surroundings

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
