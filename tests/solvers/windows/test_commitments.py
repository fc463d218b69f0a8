"""Which of the plain graphs that solutions commit to is solved next."""

from graphs.ir import Graph
from graphs.options import remove_options
from graphs.synthetic.random_graphs import draw_options
from solvers.clock import WorkClock
from solvers.request import Request
from solvers.windows.decoding.plain_graph import build_plain_graph
from solvers.windows.driver import run_plain
from solvers.windows.part_process import Inbox
from solvers.windows.search import Search
from solvers.windows.strategies.commitments import Commitment, Commitments
from solvers.windows.strategies.substitution import list_simple_substitutions, substitute
from tests.support.budgets import budget_at


def commitments(graph: Graph) -> tuple[Commitments, list[Commitment]]:
    """Those of doing what the graph's simple choices are, each known of as what a relaxation does."""
    search = Search.of(Request(graph, budget_at(remove_options(graph), 0.6), clock=WorkClock(5.0)))
    found, own = Commitments(search), []
    for instead in [frozenset[int](), *list_simple_substitutions(search.problem)]:
        order = substitute(search.problem, instead)
        own.append(Commitment(build_plain_graph(search.problem, order.computed), instead, frozenset()))
    found.all = dict(enumerate(own))
    return found, own


def test_the_best_is_solved_for_as_long_as_all_others_that_come_in() -> None:
    found, (first, *_) = commitments(draw_options(7, 50))
    first.promise_s = 1.0
    turns = []
    for _ in range(9):
        new = Commitment(first.plain, first.instead, frozenset())  # one more each time, never solved
        found.all[len(found.all)] = new
        commitment = found.choose_next()
        assert commitment is not None
        turns.append(commitment is first)
        commitment.runs += 1
        commitment.spent += 3.0 if commitment is first else 1.0
        assert first.spent <= sum(c.spent for c in found.all.values() if c is not first) + 3.0
    assert turns == [True, False, False, False] * 2 + [True]


def test_commitments_alternate_and_closed_ones_are_skipped() -> None:
    found, (first, second, third, *rest) = commitments(draw_options(7, 50))
    for commitment in rest:
        commitment.closed = True
    first.runs, second.runs, third.runs = 2, 1, 1
    third.promise_s = 2.0
    third.spent = 1.0
    assert found.choose_next() is second  # the third is the best, and has had more than the others
    second.closed = True
    assert found.choose_next() is first
    first.closed = True
    assert found.choose_next() is third
    third.closed = True
    assert found.choose_next() is None


def test_a_solve_is_counted_by_the_clock() -> None:
    found, (first, *_) = commitments(draw_options(7, 50))
    first.promise_s = 1.0
    now = found.search.clock.now
    searches = found.generate_searches(Inbox())
    run_plain(next(searches))
    spent = found.search.clock.now - now
    next(searches)
    assert first.runs == 1
    assert first.spent == spent > 0
