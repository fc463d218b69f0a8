"""Graphs and plans in files, in the JSON formats described in docs/formats.md."""

import os

from graphs.checks import check_sums
from graphs.errors import GraphError
from graphs.io.documents import PLAN_FORMAT
from graphs.io.files import layout, read_object, write_text
from graphs.io.graph_document import graph_from_dict, graph_to_dict
from graphs.io.plan_document import plan_from_dict, plan_to_dict
from graphs.ir import Graph
from graphs.plan import Plan


def read_graph(path: str | os.PathLike[str]) -> Graph:
    """The graph in the file `path`.

    Raises:
        FormatError: the file is not a graph of a version this planner reads.
        GraphError: it is, but does not describe a training step.
    """
    return _summable(graph_from_dict(read_object(path), source=str(path)), str(path))


def write_graph(graph: Graph, path: str | os.PathLike[str]) -> None:
    """Write `graph` to the file `path`, whole or not at all.

    Raises:
        FormatError: the provenance has no JSON form.
        GraphError: it is one that ``read_graph`` refuses.
        OutputError: the file cannot be written.
    """
    write_text(path, layout(graph_to_dict(_summable(graph, str(path)))))


def read_plan(path: str | os.PathLike[str]) -> Plan:
    """The plan in the file `path`. Whether it runs on a graph is for ``simulate`` to say.

    Raises:
        FormatError: the file is not a plan of a version this planner reads.
    """
    return plan_from_dict(read_object(path), source=str(path))


def write_plan(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write `plan` to the file `path`, whole or not at all.

    Raises:
        FormatError: provenance, settings or versions have no JSON form, or a step has none.
        OutputError: the file cannot be written.
    """
    write_text(path, layout(plan_to_dict(plan)))


def read_graph_or_plan(path: str | os.PathLike[str]) -> Graph | Plan:
    """What the file `path` holds, for commands that take either.

    Raises:
        FormatError, GraphError: as ``read_graph`` and ``read_plan``.
    """
    data = read_object(path)
    if data.get("format") == PLAN_FORMAT:
        return plan_from_dict(data, source=str(path))
    return _summable(graph_from_dict(data, source=str(path)), str(path))


def _summable(graph: Graph, source: str) -> Graph:
    """`graph`, if it can be worked with."""
    try:
        check_sums(graph)
    except GraphError as error:
        raise GraphError(f"{source}: {error}") from None
    return graph
