"""The ledger that the eager runtime asks for victims: in C++ (``ledger.cpp``) once the library is loaded, in Python before."""

from planner.native.library import find_library
from solvers.online.heuristics import make_heuristic
from solvers.online.ledger import Ledger


def create_ledger(heuristic: str) -> Ledger:
    """Return an empty ledger for the heuristic called `heuristic`; both kinds choose the same storages."""
    library = find_library()
    if library is None:
        return Ledger(heuristic)
    created: Ledger = library.ledger(heuristic, make_heuristic(heuristic))  # it has the methods that the runtime calls
    return created
