"""A file with a graph."""

from pathlib import Path

import pytest

from planner.graphs.io.formats import write_graph
from tests.support.cli import chain


@pytest.fixture
def graph_file(tmp_path: Path) -> Path:
    path = tmp_path / "model.json"
    write_graph(chain(), path)
    return path
