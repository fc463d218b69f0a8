"""Memory that planning returns."""

import gc

import pytest
import torch
from torch.nn import functional as F

import planner


@pytest.mark.parametrize("frozen", [False, True])
def test_planning_leaves_present_objects_out_of_collections(*, frozen: bool) -> None:
    gc.unfreeze()
    if frozen:
        gc.freeze()
    counts: set[int] = set()
    batch = torch.ones(2, 4), torch.ones(2, 3)
    try:
        options = {"on_progress": lambda _: counts.add(gc.get_freeze_count()), "compare_eager": False, "time_limit_s": 1.0}
        planner.compile(torch.nn.Linear(4, 3), F.mse_loss, batch, budget="1MB", **options)
        assert min(counts) > 0
        assert bool(gc.get_freeze_count()) is frozen
    finally:
        gc.unfreeze()
