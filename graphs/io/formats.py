"""Reading and writing graphs as files, in the JSON format described in docs/formats.md."""

import os

from planner.graphs.checks import check_sums
from planner.graphs.errors import GraphError
from planner.graphs.io.files import format_json, read_object, write_text
from planner.graphs.io.graph_document import build_from_dict, convert_to_dict
from planner.graphs.ir import Graph


def read_graph(path: str | os.PathLike[str]) -> Graph:
    """Return the graph in the file `path`.

    Raises:
        FormatError: the file is not a graph of a version that this planner reads.
        GraphError: it is, but does not describe a training step.
    """
    return summable(build_from_dict(read_object(path), source=str(path)), str(path))


def write_graph(graph: Graph, path: str | os.PathLike[str]) -> None:
    """Write `graph` to the file `path` atomically.

    Raises:
        FormatError: the provenance has no JSON form.
        GraphError: ``read_graph`` would refuse the graph.
        OutputError: the file cannot be written.
    """
    write_text(path, format_json(convert_to_dict(summable(graph, str(path)))))


def summable(graph: Graph, source: str) -> Graph:
    """Return `graph` unchanged; raise GraphError, naming `source`, if its sizes or times overflow."""
    try:
        check_sums(graph)
    except GraphError as error:
        raise GraphError(f"{source}: {error}") from None
    return graph
