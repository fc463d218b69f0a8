"""Devices that tests of the runtime share."""

from collections.abc import Iterator

import pytest

from tests.support.cuda_device import Order, cuda_device


@pytest.fixture(params=["stand-in", pytest.param("gpu", marks=pytest.mark.gpu)])
def _cuda(request: pytest.FixtureRequest) -> Iterator[None]:
    """A CUDA device: a stand-in whose streams run in a random order, or a real one with ``-m gpu``."""
    if request.param == "gpu":
        yield
        return
    with cuda_device(order=Order.RANDOM, seed=len(request.node.name)):
        yield
