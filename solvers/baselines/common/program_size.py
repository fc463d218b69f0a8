"""Programs of whole graphs that are not begun: too large to solve, or without a solution before the time limit."""

import math
from dataclasses import dataclass

from planner.graphs.units import format_seconds
from planner.solvers.result import Reason


@dataclass(frozen=True, slots=True)
class ProgramSize:
    """The size of a program, which is known before it is written.

    Attributes:
        what: the program and its size, as in "POET's program for 90 ops has 70,000 variables".
        count, most: its size, and the most that its solver supports.
        least_s: about the least seconds to write it and solve its relaxation once, without which there is no solution.
    """

    what: str
    count: int
    most: int
    least_s: float

    def find_refusal(self, limit_s: float) -> tuple[str, Reason] | None:
        """Return why the program is not begun with this time limit; None if it is."""
        if self.count > self.most:
            why = f"{self.what}, more than {self.most:,}, the most that this solver supports: use the solver windows"
            return why, Reason.SIZE
        if self.least_s > limit_s:
            needs = f"to write it and solve its relaxation once takes about {format_seconds(self.least_s)} or more"
            limit = f"its limit is {format_seconds(limit_s)}"
            return f"{self.what}: {needs}, and {limit}. Raise the time limit, or use the solver windows", Reason.TIME
        return None

    @property
    def needed_s(self) -> float:
        """`least_s`; 0 if the program is refused in any time."""
        return 0.0 if self.find_refusal(math.inf) else self.least_s
