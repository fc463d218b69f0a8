"""Training within a budget: every result is eager PyTorch's to the last bit, and the bytes of all tensors stay within it."""

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import count

import numpy as np
import pytest
import torch

from benchmarks.storages import LiveStorages
from planner.graphs.errors import BudgetError
from planner.train.eager.session import Rematerialization, rematerialize
from tests.support.eager.models import LOOPS, TRANSFORMERS, Loop
from tests.support.eager.tensors import existing, other_bytes
from tests.support.marks import slow, slow_among

_STEPS = 3


def train(
    build: Callable[[], Loop], block: AbstractContextManager[Rematerialization] | None = None
) -> tuple[list[np.ndarray], int]:
    """Return all results of three steps, and the most bytes that all tensors of the process took at any time."""
    torch.manual_seed(0)
    loop = build()
    results = []
    # The count is entered before the block, so that it sees the ops of the runtime too.
    with LiveStorages(existing()) as live, block or nullcontext() as session:
        if session is not None:  # each op takes as long as any other, so that choices do not depend on the machine
            session.debug.memory.clock = map(float, count()).__next__
        for index in range(_STEPS):
            results += loop.step(index)
    return [*results, *loop.state()], live.peak_bytes


def check(build: Callable[[], Loop], share: float) -> Rematerialization:
    """Train without a block, and in one whose budget is that share of the peak; return the block."""
    others = other_bytes()
    expected, eager_peak = train(build)
    others_now = other_bytes()
    block = rematerialize(others_now + int(share * (eager_peak - others)), max_recomputation=100)
    results, peak = train(build, block)
    assert len(results) == len(expected)
    for result, wanted in zip(results, expected, strict=True):
        assert torch.equal(torch.from_numpy(result), torch.from_numpy(wanted))
    assert peak <= block.budget_bytes
    assert block.peak_bytes <= block.budget_bytes
    assert block.evictions > 0
    return block


@pytest.fixture(autouse=True)
def _no_collector() -> Iterator[None]:
    """Run without the garbage collector: memory is freed before it would run."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("share", [0.4, *slow(0.8, 0.6)])
@pytest.mark.parametrize("name", slow_among(LOOPS, "python_lstm", "tree_lstm", "unrolled_gan"))
def test_results_are_eager_pytorchs_and_the_budget_holds(name: str, share: float) -> None:
    check(LOOPS[name], share)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "share"),
    # At one op of Reformer's own backward pass 59.4% of the peak are in use.
    [(name, share) for name in TRANSFORMERS for share in (0.8, 0.6, 0.595 if name == "reformer" else 0.4)],
)
def test_models_that_cannot_be_traced(name: str, share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr(torch, "seed", lambda: 5)  # Reformer seeds its hashes by the clock
    check(TRANSFORMERS[name], share)


@pytest.mark.slow
def test_reformer_does_not_fit_into_less(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr(torch, "seed", lambda: 5)
    with pytest.raises(BudgetError, match=r"are in use and cannot be evicted, and aten\.mul\.Tensor needs"):
        check(TRANSFORMERS["reformer"], 0.59)
