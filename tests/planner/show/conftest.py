"""What the tests of reports share."""

from collections.abc import Iterator

import pytest

from planner.show.facts import addresses


@pytest.fixture(scope="session", autouse=True)
def _short_search() -> Iterator[None]:
    """A report looks for smaller arenas for seconds: here for a tenth of that."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(addresses, "_WORK", addresses._WORK / 10)
        yield
