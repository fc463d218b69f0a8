"""Costs of collectives."""

from planner.graphs.options.gather import CollectiveCost
from planner.graphs.requests import WORKSPACE, MemoryRequest


def build_cost(time_s: float, workspace_bytes: int) -> CollectiveCost:
    return CollectiveCost(time_s, (MemoryRequest(WORKSPACE, workspace_bytes, 1),) if workspace_bytes else ())
