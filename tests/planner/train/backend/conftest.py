"""What the tests of the backend see of it while it plans."""

from typing import Any

import pytest
import torch

from planner.runtime.transfers.channels import HostChannels
from planner.train.backend import shared_channels
from planner.train.backend.planned_graph import PlannedGraph
from planner.train.backend.shared_budget import SharedBudget


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[PlannedGraph]:
    """The graphs that were planned."""
    found: list[PlannedGraph] = []
    add = SharedBudget.add

    def noted(budget: SharedBudget, graph: PlannedGraph, *args: Any, **options: Any) -> None:
        add(budget, graph, *args, **options)
        found.append(graph)

    monkeypatch.setattr(SharedBudget, "add", noted)
    return found


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[HostChannels]:
    """The channels that were opened."""
    found: list[HostChannels] = []

    def noted(device: torch.device, host_bytes: int | None) -> HostChannels:
        found.append(HostChannels(device, host_bytes))
        return found[-1]

    monkeypatch.setattr(shared_channels, "HostChannels", noted)
    return found
