"""What rules of eviction come to, as orders of execution."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Unpack

from solvers.eviction.engine import evicting_order
from solvers.eviction.round_trips import evicting_with_copies
from solvers.eviction.rules import EvictionRule, Limits
from solvers.problem import Problem
from solvers.windows.decoding.decode import Order, late_writers, order_of
from solvers.windows.relaxation.discretization import Discretization


def evicted(problem: Problem, rule: EvictionRule, **limits: Unpack[Limits]) -> Order | None:
    """The order that `rule` comes to, with round trips where `problem` has them.

    None if it fails, or computes again what reads what has been written over: eviction does not look at that.
    """
    whole = Discretization((problem.ops - 1,))
    if problem.copies is None:
        computed = evicting_order(problem, rule, **limits)
        found = None if computed is None else order_of(whole, computed)
    else:
        both = evicting_with_copies(problem, rule, **limits)
        found = None if both is None else order_of(whole, *both)
    return None if found is None or late_writers(problem, found) else found


def with_prices(problem: Problem, rules: Sequence[EvictionRule], prices: Sequence[float]) -> Iterator[EvictionRule]:
    """`rules`; with round trips at one price of the channels' time after another."""
    if problem.copies is None:
        yield from rules
    else:
        yield from (replace(rule, channel=price) for price in prices for rule in rules)
