"""The instances of other projects, where they are."""

from pathlib import Path

import pytest

from graphs.importers import simrd
from graphs.ir import Graph

INSTANCES = Path(__file__).parents[2] / ".." / "shared" / "instances"


def public(name: str) -> Path:
    path = INSTANCES / name
    if not path.exists():
        pytest.skip(f"the public instances are not here: no {path}")
    return path


def public_log(name: str, *, views: bool = False) -> Graph:
    """A log of those published with DTR."""
    return simrd.read(public(f"simrd/{name}.log.gz"), name=name, views=views)
