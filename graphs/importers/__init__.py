"""Importers of training graphs in other formats.

Supported are the profiled graphs published with Gurobi's results on Checkmate's program (``checkmate.py``), networkx node-link
graphs as published with Moccasin (``moccasin.py``), and the operator logs of DTR's simulator, plain or gzipped (``simrd.py``).
See docs/formats.md.
"""

import os
from pathlib import Path

from planner.graphs.errors import FormatError
from planner.graphs.importers import checkmate, moccasin, simrd
from planner.graphs.importers.simrd_lines import is_log
from planner.graphs.io.files import read_object
from planner.graphs.ir import Graph


def import_graph(path: str | os.PathLike[str]) -> Graph:
    """Return the graph in the file `path`, whose format is detected from its content.

    Raises:
        FormatError: the file has none of the formats, or is cut short or wrong; names the place and the value.
        GraphError: the file has one of the formats, but does not describe a training step.
    """
    source, name = str(path), Path(path).name.removesuffix(".gz").rsplit(".", 1)[0]
    if is_log(path):
        return simrd.read(path, name=name)
    data = read_object(path)
    if "parents" in data:
        return checkmate.read_graph(data, source=source, name=name)
    if "nodes" in data:
        return moccasin.read_graph(data, source=source, name=name)
    if "format" in data:
        raise FormatError(f"{source}: is a file of this planner already: use it as it is")
    raise FormatError(
        f"{source}: not a graph in a format that can be imported: neither lines with INSTRUCTION (DTR log), "
        "nor an object with 'parents' (Checkmate instance) or 'nodes' (node-link graph)"
    )
