"""Saved states of generators: put back, compared to the last number that waits, and free of counted memory."""

from collections.abc import Callable

import pytest
import torch

from planner.runtime.allocator import record_cpu_allocations
from planner.runtime.random_state import RandomState


def test_restoring_draws_the_same_numbers() -> None:
    generator = torch.Generator().manual_seed(1)
    saved = RandomState.of(generator)
    first = torch.randn(5, generator=generator)
    saved.restore(generator)
    assert torch.equal(first, torch.randn(5, generator=generator))


@pytest.mark.parametrize(
    "draw",
    [
        lambda generator: torch.rand(1, generator=generator),
        lambda generator: torch.randint(3, (1,), generator=generator),
        lambda generator: torch.randn(1, generator=generator),
        lambda generator: torch.randn(1, dtype=torch.float64, generator=generator),
    ],
)
@pytest.mark.parametrize("drawn_before", [0, 1])
def test_states_differ_after_any_draw(draw: Callable[[torch.Generator], torch.Tensor], drawn_before: int) -> None:
    """After one normal number the next waits, and drawing that leaves the engine where it is."""
    generator = torch.Generator().manual_seed(2)
    for _ in range(drawn_before):
        torch.randn(1, generator=generator)
        torch.randn(1, dtype=torch.float64, generator=generator)
    before = RandomState.of(generator)
    assert before == RandomState.of(generator)
    draw(generator)
    assert before != RandomState.of(generator)


def test_saving_and_comparing_takes_no_counted_memory() -> None:
    generator = torch.Generator()
    assert not record_cpu_allocations(lambda: RandomState.of(generator) == RandomState.of(generator))
