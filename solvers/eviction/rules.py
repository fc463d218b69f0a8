"""By which rules tensors are evicted."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypedDict

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class EvictionRule:
    """How tensors are ranked: evicted first is the one of least cost^a / (bytes^b x distance^c).

    The cost is the time to make it again with what is missing for that; the distance is the number of
    ops until its next use in the program, be it by what was evicted and is made of it.

    Attributes:
        gradients_stay: where there would be no room to make a tensor again beside all gradients that are alive when
            it is used next, it is evicted last.
        guided: times its rank for what a guide hands on, and one over that for what it does not.
        rounds: an op executed so often before the next new one goes round in circles.
        channel: what a second of a channel costs, in seconds of computation: copies of what is cheaper to make again
            leave it to others. Only for graphs with round trips.
    """

    cost: float = 1.0
    size: float = 1.0
    distance: float = 1.0
    gradients_stay: bool = False
    guided: float = 30.0
    rounds: int = 5
    channel: float = 0.03


@dataclass(frozen=True, slots=True)
class Guide:
    """What a solution of a model says on what to keep; see ``Choice``.

    Attributes:
        ends: last op of each window.
        handed: (windows, tensors), whether a tensor is handed on at the end of the window.
    """

    ends: tuple[int, ...]
    handed: NDArray[np.bool_]


class Limits(TypedDict, total=False):
    """What a run of a rule keeps to.

    Attributes:
        capacity_bytes: that tensors are to fit into, static ones left out; None: that of the problem.
        bias: for each tensor a factor to its rank; None: 1.
        guide: what is handed on from window to window, as far as there is room.
        max_factor: it has failed when it executes more than this many ops per op of the graph.
        max_time_s: likewise when all it executes takes longer than this.
        should_stop: polled; once True, it has failed.
    """

    capacity_bytes: int | None
    bias: NDArray[np.float64] | None
    guide: Guide | None
    max_factor: float
    max_time_s: float
    should_stop: Callable[[], bool] | None


RULES = (
    EvictionRule(distance=0.5),
    EvictionRule(distance=0.0),
    EvictionRule(),
    EvictionRule(cost=0.5),
    EvictionRule(size=0.5),
    EvictionRule(size=0.0),
)
# Where memory is so scarce that these fail.
TIGHT_RULES = tuple(replace(rule, gradients_stay=True) for rule in RULES)
