"""Training within a budget: every result is eager PyTorch's to the last bit, and the bytes of all tensors stay within it."""

import gc
from contextlib import AbstractContextManager, nullcontext
from itertools import count

import numpy as np
import pytest
import torch

from benchmarks.storages import LiveStorages
from planner.eager import memory
from planner.eager.session import Rematerialization, rematerialize
from tests.support.eager_models import LOOPS

_STEPS = 3


def train(name: str, block: AbstractContextManager[Rematerialization] | None = None) -> tuple[list[np.ndarray], int]:
    """Return all results of three steps, and the most bytes that storages took at any time."""
    torch.manual_seed(0)
    loop = LOOPS[name]()
    results = []
    # It is entered before the block, so that it sees the ops of the runtime too.
    static = [*loop.parameters(), *(b for m in loop.modules for b in m.buffers()), *loop.data]
    with LiveStorages(static) as live, block or nullcontext():
        for index in range(_STEPS):
            results += loop.step(index)
    return [*results, *loop.state()], live.peak_bytes


def other_bytes() -> int:
    """Return the bytes of tensors that were there before; the runtime counts them as well."""
    gc.collect()
    tensors = [value for value in gc.get_objects() if type(value) in (torch.Tensor, torch.nn.Parameter)]
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


@pytest.mark.parametrize("share", [0.8, 0.6, 0.4])
@pytest.mark.parametrize("name", LOOPS)
def test_results_are_eager_pytorchs_and_the_budget_holds(name: str, share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, eager_peak = train(name)
    others = other_bytes()
    budget = int(share * eager_peak)
    monkeypatch.setattr(memory, "perf_counter", count().__next__)  # all ops cost the same: choices do not depend on the machine
    block = rematerialize(others + budget, max_recomputation=100)
    results, peak = train(name, block)
    assert len(results) == len(expected)
    for result, wanted in zip(results, expected, strict=True):
        assert torch.equal(torch.from_numpy(result), torch.from_numpy(wanted))
    assert peak <= budget
    assert block.evictions > 0
    assert block.peak_bytes <= block.budget_bytes
