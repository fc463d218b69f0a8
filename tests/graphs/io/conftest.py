"""A graph of three ops, and its plan."""

import pytest

from planner.graphs.ir import Graph, Kind, Op, Tensor
from planner.plans.plan import Plan
from planner.plans.solve import solve


@pytest.fixture
def graph() -> Graph:
    tensors = (
        Tensor(0, "x", 8, (), Kind.INPUT, (2,), "float32"),
        Tensor(1, "h", 16, (0,)),
        Tensor(2, "y", 16, (1,)),
        Tensor(3, "loss", 4, (2,), Kind.OUTPUT),
    )
    ops = (
        Op(0, "f", "aten.f", (0,), (1,), 0.1, workspace_bytes=3, random=True, module="net.0"),
        Op(1, "g", "aten.g", (1,), (2,), 1 / 3, recomputable=False, mutates=(0,)),
        Op(2, "l", "aten.l", (2,), (3,), 2.5e-7),
    )
    return Graph(ops, tensors, frozenset({3}), {"model": "example", "inputs": ["float32[2]"], "threads": 2})


@pytest.fixture
def plan(graph: Graph) -> Plan:
    return solve(graph, "100%", solver="keep-everything")
