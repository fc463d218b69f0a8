"""Reading and writing graphs and plans in the JSON formats of docs/formats.md."""

import os

from graphs.checks import check_sums
from graphs.errors import GraphError
from graphs.io.documents import PLAN_FORMAT
from graphs.io.files import format_json, read_object, write_text
from graphs.io.graph_document import graph_from_dict, graph_to_dict
from graphs.io.plan_document import plan_from_dict, plan_to_dict
from graphs.ir import Graph
from graphs.plan import Plan


def read_graph(path: str | os.PathLike[str]) -> Graph:
    """Return the graph in the file `path`.

    Raises:
        FormatError: the file is not a graph of a version that this planner reads.
        GraphError: it is, but does not describe a training step.
    """
    return _check_sums(graph_from_dict(read_object(path), source=str(path)), str(path))


def write_graph(graph: Graph, path: str | os.PathLike[str]) -> None:
    """Write `graph` to the file `path` atomically.

    Raises:
        FormatError: the provenance has no JSON form.
        GraphError: ``read_graph`` would refuse the graph.
        OutputError: the file cannot be written.
    """
    write_text(path, format_json(graph_to_dict(_check_sums(graph, str(path)))))


def read_plan(path: str | os.PathLike[str]) -> Plan:
    """Return the plan in the file `path`. ``simulate`` checks whether it runs on a graph.

    Raises:
        FormatError: the file is not a plan of a version that this planner reads.
    """
    return plan_from_dict(read_object(path), source=str(path))


def write_plan(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write `plan` to the file `path` atomically.

    Raises:
        FormatError: provenance, settings, versions or a step have no JSON form.
        OutputError: the file cannot be written.
    """
    write_text(path, format_json(plan_to_dict(plan)))


def read_graph_or_plan(path: str | os.PathLike[str]) -> Graph | Plan:
    """Return the graph or plan in the file `path`, for commands that take either.

    Raises:
        FormatError, GraphError: as ``read_graph`` and ``read_plan``.
    """
    data = read_object(path)
    if data.get("format") == PLAN_FORMAT:
        return plan_from_dict(data, source=str(path))
    return _check_sums(graph_from_dict(data, source=str(path)), str(path))


def _check_sums(graph: Graph, source: str) -> Graph:
    """Return `graph`, if its sums can be computed; else raise a GraphError that names `source`."""
    try:
        check_sums(graph)
    except GraphError as error:
        raise GraphError(f"{source}: {error}") from None
    return graph
