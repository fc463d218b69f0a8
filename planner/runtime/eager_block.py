"""The block of ``planner.rematerialize`` that a thread is in: planned steps neither are made nor run there."""

import threading

from planner.graphs.errors import PlannerError

ACTIVE = threading.local()  # its attribute `session` is the block, if there is one


def is_in_block() -> bool:
    """Return True if this thread is in a block of ``planner.rematerialize``."""
    return getattr(ACTIVE, "session", None) is not None


def check_no_block(what: str) -> None:
    """Raise a PlannerError that begins with `what` in a block of ``planner.rematerialize``."""
    if is_in_block():
        raise PlannerError(
            f"{what} in a block of planner.rematerialize, and each has a budget of its own: use one of them, the block with "
            "model(...) itself, or the planned step outside of it"
        )
