"""A schedule is there before the relaxation is solved, which may take all the time there is."""

import pytest

from graphs.synthetic.small import training_chain
from solvers.windows import driver, solve
from solvers.windows.search import Search
from tests.support.budgets import budget_at
from tests.support.requests import ask


class RelaxedError(Exception):
    """Ends the solve where the relaxation would begin."""


@pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
def test_rules_of_eviction_are_asked_before_the_relaxation(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    graph, found = training_chain(20), []

    def begin(search: Search, *_: object, **__: object) -> None:
        found.append(search.incumbent.best is not None)
        raise RelaxedError

    monkeypatch.setattr(driver, "refine", begin)
    with pytest.raises(RelaxedError):
        solve(ask(graph, budget_at(graph, share)))
    assert found == [True]
