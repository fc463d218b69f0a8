"""What the tests of benchmarks share."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    """The number of threads as it was: benchmarks set it to one."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
