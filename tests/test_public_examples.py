"""The examples in the docstrings of the public functions and classes."""

import doctest
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import planner
from graphs.ir import Graph

PUBLIC = [name for name in planner.__all__ if name != "__version__"]
X, Y = torch.ones(16, 32), torch.ones(16, 8)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))


@pytest.fixture(scope="module")
def graph() -> Graph:
    return planner.trace(network(), nn.functional.mse_loss, (X, Y))


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("name", PUBLIC)
def test_the_example_of_a_public_name_runs(name: str, graph: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    public, model, loss_fn, plan = getattr(planner, name), network(), nn.functional.mse_loss, planner.solve(graph, "100%")
    given = {"planner": planner, "model": model, "loss_fn": loss_fn, "x": X, "y": Y, "graph": graph, "plan": plan}
    given["graph_peak_bytes"] = plan.graph.keep_everything_peak_bytes
    if name == "OutOfMemoryError":
        given["step"] = planner.compile(model, loss_fn, (X, Y), budget="1GB")
    names = {**vars(sys.modules[public.__module__]), **given}
    (example,) = [found for found in doctest.DocTestFinder(recurse=False).find(public, name, globs=names) if found.examples]
    said: list[str] = []
    ended = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example, out=said.append)
    assert ended.failed == 0, "".join(said)
