"""What the tests of the planner see of the solves that it makes, and the native library that its steps run in."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from planner.plans import search
from planner.settings.budget import Budget, Bytes
from tests.support.native import has_library


@pytest.fixture(scope="session", autouse=True)
def _native_library() -> None:
    """Steps run in C++ from the first on, and the eager runtime has its log, wherever there is a compiler."""
    has_library()


@pytest.fixture
def solves(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The budgets that were solved for, in order."""
    asked: list[object] = []
    solve = search.solve_graph

    def counted(graph: Any, budget: Budget, *settings: Any, **options: Any) -> Any:
        asked.append(budget.resolve(0) if isinstance(budget, Bytes) else budget)
        return solve(graph, budget, *settings, **options)

    monkeypatch.setattr(search, "solve_graph", counted)
    return asked


@pytest.fixture
def one_thread() -> Iterator[None]:
    """PyTorch has one thread: as many as another device, so that kernels are the same, and faster for tiny tensors."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
