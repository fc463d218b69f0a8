"""The ledger that the eager runtime asks for victims, in C++ (``ledger.cpp``): that of ``solvers.online`` is its definition."""

from planner.native.library import wait_for_library
from solvers.online.heuristics import make_heuristic
from solvers.online.ledger import Ledger


def create_ledger(heuristic: str) -> Ledger:
    """Return an empty ledger for the heuristic called `heuristic`."""
    created: Ledger = wait_for_library().ledger(heuristic, make_heuristic(heuristic))  # it has the methods that the runtime calls
    return created
