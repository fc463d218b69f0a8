"""The allocator of a CUDA device within a cap, on the emulated device."""

import pytest
import torch

from planner.runtime.allocator import limit_allocator
from tests.support.cuda_device import cuda_device

_MB = 2**20


def zeros(megabytes: int) -> torch.Tensor:
    return torch.zeros(megabytes * _MB, dtype=torch.uint8, device="cuda")


def test_no_more_is_reserved_than_the_cap() -> None:
    with cuda_device(capacity_bytes=256 * _MB):
        with limit_allocator(torch.device("cuda:0"), 96 * _MB):
            kept = zeros(64)
            with pytest.raises(torch.OutOfMemoryError):
                zeros(64)
        assert zeros(64).numel() == kept.numel()  # the cap is gone


def test_capped_allocator_first_releases_unused_reserved_memory() -> None:
    with cuda_device(capacity_bytes=256 * _MB):
        zeros(128)
        assert torch.cuda.memory_reserved() == 128 * _MB
        with limit_allocator(torch.device("cuda:0"), 96 * _MB):
            assert torch.cuda.memory_reserved() == 0


def test_a_lower_cap_of_the_process_stays() -> None:
    with cuda_device(capacity_bytes=256 * _MB):
        torch.cuda.set_per_process_memory_fraction(0.25)
        with limit_allocator(torch.device("cuda:0"), 128 * _MB), pytest.raises(torch.OutOfMemoryError):
            zeros(96)
        assert torch.cuda.get_per_process_memory_fraction() == 0.25
