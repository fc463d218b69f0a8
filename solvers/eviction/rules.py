"""Rules by which tensors are evicted.

With all exponents 1 it is DTR's h, with the distance to the next use in place of the time since the last. None is known to be
best, so several are tried.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

SLACK_EXECUTIONS = 1000  # for small graphs, where executions are cheap


@dataclass(frozen=True, slots=True)
class EvictionRule:
    """A ranking of tensors: the one of least cost^`cost` / (bytes^`size` x distance^`distance`) is evicted first.

    The cost is the time to recompute the tensor with its missing ancestors; the distance is the number of ops until its next use
    in the program, also by way of evicted tensors that are computed from it.

    Attributes:
        gradients_stay: True to evict last the tensors that could not be recomputed beside all gradients alive at their next use.
        guided: factor to the rank of tensors that a guide hands over; its inverse for the others.
        rounds: most executions of an op before the next new op; more are a loop.
        channel: price of a second of a channel, in seconds of computation: tensors that are cheaper to recompute leave channels
            to others. Only for graphs with offloading.
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
    """Tensors to keep, from a solution of a model; see ``Solution``.

    Attributes:
        ends: last op of each window.
        handed: (windows, tensors), True if a tensor is handed over at the end of the window.
    """

    ends: tuple[int, ...]
    handed: NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class EvictionSettings:
    """Settings of one run of a rule.

    Attributes:
        capacity_bytes: of memory without static tensors; None: that of the problem.
        bias: for each tensor a factor to its rank; None: 1.
        guide: tensors to hand over from window to window if there is room.
        max_factor: the run fails if it executes more than this many ops per op of the graph, and ``SLACK_EXECUTIONS`` more.
        max_time_s: the run fails if its executions take longer than this.
        should_stop: polled; the run fails once it returns True.
    """

    capacity_bytes: int | None = None
    bias: NDArray[np.float64] | None = None
    guide: Guide | None = None
    max_factor: float = 30.0
    max_time_s: float = math.inf
    should_stop: Callable[[], bool] | None = None


DEFAULT = EvictionSettings()

RULES = (
    EvictionRule(distance=0.5),
    EvictionRule(distance=0.0),
    EvictionRule(),
    EvictionRule(cost=0.5),
    EvictionRule(size=0.5),
    EvictionRule(size=0.0),
)
# For budgets so tight that these fail.
TIGHT_RULES = tuple(replace(rule, gradients_stay=True) for rule in RULES)
