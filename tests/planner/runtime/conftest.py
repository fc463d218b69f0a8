"""Devices that tests of the runtime share."""

from collections.abc import Iterator

import pytest

from tests.support.cuda_device import Order, cuda_device


@pytest.fixture
def _stand_in(request: pytest.FixtureRequest) -> Iterator[None]:
    """A stand-in for a CUDA device, whose streams run in a random order."""
    with cuda_device(order=Order.RANDOM, seed=len(request.node.name)):
        yield


@pytest.fixture(params=["stand-in", pytest.param("gpu", marks=pytest.mark.gpu)])
def _cuda(request: pytest.FixtureRequest) -> None:
    """A CUDA device: the stand-in, or a real one with ``-m gpu``."""
    if request.param == "stand-in":
        request.getfixturevalue("_stand_in")
