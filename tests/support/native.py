"""The C++ library in tests."""

import pytest

from planner.graphs.errors import PlannerError
from planner.native.library import wait_for_library


def has_library() -> bool:
    """Whether it is loaded, after compiling it if necessary."""
    try:
        wait_for_library()
    except PlannerError:
        return False
    return True


NEEDS_LIBRARY = pytest.mark.skipif(not has_library(), reason="there is no C++ compiler")
