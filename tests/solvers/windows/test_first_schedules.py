"""A schedule is there before the relaxation is solved, which may take all the time there is."""

import pytest

from graphs.synthetic.small import make_training_chain
from solvers.windows import solve
from solvers.windows.strategies.refinement import Relaxation
from tests.support.budgets import budget_at
from tests.support.solvers.answers import ask


class RelaxedError(BaseException):
    """Ends the solve where the relaxation would begin."""


@pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
def test_rules_of_eviction_are_asked_before_the_relaxation(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    graph, found = make_training_chain(20), []

    def begin(relaxation: Relaxation, limit: float) -> None:
        found.append(relaxation.search.incumbent.best is not None)
        raise RelaxedError

    monkeypatch.setattr(Relaxation, "step", begin)
    with pytest.raises(RelaxedError):
        solve(ask(graph, budget_at(graph, share)))
    assert found == [True]
