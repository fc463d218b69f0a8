"""A schedule in a model, and the model with most of its choices fixed as they are there."""

from collections.abc import Container, Iterator
from dataclasses import dataclass, replace

import numpy as np

from solvers.highs.program import Floats, Milp
from solvers.windows.decoding.decode import Trial
from solvers.windows.relaxation.discretization import Model

Columns = list[int]


@dataclass(frozen=True, slots=True)
class Placed:
    """A schedule, and what it is in a model."""

    trial: Trial
    model: Model
    start: Floats

    def repeated(self) -> Iterator[tuple[tuple[int, int], float]]:
        """(window, op) that is executed again, and what that costs; or whose output is fetched, and what that takes."""
        model, problem = self.model, self.model.problem
        yield from ((key, model.program.cost[column]) for key, column in model.again.items() if self.start[column] > 0.5)
        if problem.copies is not None:
            for (k, t), column in model.taken.items():
                if self.start[column] > 0.5:
                    yield (k, problem.producers[t]), problem.units(problem.copies.trips[t].in_s)


def fixed_but_for(placed: Placed, opened: Columns) -> Milp:
    """The program with its choices fixed as in `placed`, but for the columns `opened`."""
    model, start = placed.model, placed.start
    fixed = np.zeros(len(start), dtype=bool)
    fixed[[*model.again.values(), *model.handed.values(), *model.taken.values(), *model.instead.values()]] = True
    fixed[opened] = False
    fixed &= ~np.isnan(start)
    lower, upper = model.program.lower.copy(), model.program.upper.copy()
    lower[fixed] = upper[fixed] = start[fixed]
    return replace(model.program, lower=lower, upper=upper)


def columns_in(model: Model, windows: Container[int]) -> Columns:
    """Choices in these windows, and at their ends."""
    window, replaces = model.detail.window_of, model.problem.places.replaces
    return [
        *(column for (k, _), column in model.again.items() if k in windows),
        *(column for (k, _), column in model.handed.items() if k in windows or k - 1 in windows),
        *(column for (k, _), column in model.taken.items() if k in windows),
        *(column for b, column in model.instead.items() if any(window(i) in windows for i in (b, *replaces[b]))),
    ]


def columns_of(model: Model, ops: Container[int]) -> Columns:
    """Choices of these ops and of what they make, in all windows, and what stands for them."""
    producers, replaces = model.problem.producers, model.problem.places.replaces
    return [
        *(column for (_, i), column in model.again.items() if i in ops),
        *(column for (_, t), column in model.handed.items() if producers[t] in ops),
        *(column for (_, t), column in model.taken.items() if producers[t] in ops),
        *(column for b, column in model.instead.items() if any(i in ops for i in (b, *replaces[b]))),
    ]
