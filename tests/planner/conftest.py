"""What the tests of the planner see of the solves that it makes."""

from typing import Any

import pytest

from planner.plans import search


@pytest.fixture
def solves(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The budgets that were solved for, in order."""
    asked: list[int] = []
    solve = search.solve_graph

    def counted(graph: Any, budget: int, *settings: Any, **options: Any) -> Any:
        asked.append(budget)
        return solve(graph, budget, *settings, **options)

    monkeypatch.setattr(search, "solve_graph", counted)
    return asked
