"""Generators of random ops."""

import torch

from planner.capture.program.draws import get_default_generator
from tests.support.cuda_device import cuda_device


def test_a_device_without_an_index_is_the_current_one() -> None:
    with cuda_device(devices=2):
        first, second = torch.cuda.default_generators
        assert get_default_generator(torch.device("cuda")) is first
        torch.cuda.set_device(1)
        assert get_default_generator(torch.device("cuda")) is second
        assert get_default_generator(torch.device("cuda", 0)) is first


def test_ops_that_do_not_run_have_the_generator_of_the_cpu() -> None:
    for device in ("cpu", "meta", *(() if torch.cuda.is_available() else ("cuda",))):
        assert get_default_generator(torch.device(device)) is torch.default_generator
