"""Programs of whole graphs that are not begun: too large to solve, or without a solution before the time limit."""

from graphs.units import format_seconds
from solvers.result import Reason


def find_refusal(what: str, count: int, most: int, least_s: float, limit_s: float) -> tuple[str, Reason] | None:
    """Return why a program is not begun; None if it is.

    Args:
        what: the program and its size, as in "POET's program for 90 ops has 70,000 variables".
        count, most: its size, and the most that its solver supports.
        least_s: about the least seconds to write it and solve its relaxation once, without which there is no solution.
        limit_s: the time limit of the solve.
    """
    if count > most:
        return f"{what}, more than {most:,}, the most that this solver supports: use the solver windows", Reason.SIZE
    if least_s > limit_s:
        needs = f"to write it and solve its relaxation once takes about {format_seconds(least_s)} or more"
        limit = f"its limit is {format_seconds(limit_s)}"
        return f"{what}: {needs}, and {limit}. Raise the time limit, or use the solver windows", Reason.TIME
    return None
