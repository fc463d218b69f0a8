"""Errors of ops in a planned step under FSDP2, in a group of this process alone."""

import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import planner
from benchmarks.models.parts import FunctionModule


def reads_table(m: Any, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Two layers, and a table that is read after both: ops that gather stand before the op that reads it."""
    hidden = m.second(torch.relu(m.first(x)))
    found = m.table(rows)
    return (hidden * found).sum()


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("steps", [0, 5])  # the first ones are timed
def test_an_op_that_fails_beside_gathers_is_named_at_its_line(steps: int) -> None:
    model = FunctionModule(reads_table, first=nn.Linear(16, 16), second=nn.Linear(16, 16), table=nn.Embedding(4, 16))
    for unit in (model.first, model.second, model):
        fully_shard(unit)
    step = planner.compile(model, None, (torch.randn(8, 16), torch.arange(8) % 4), budget="100%")
    for _ in range(steps):
        step(torch.randn(8, 16), torch.arange(8) % 4).backward()
        model.zero_grad()
    with pytest.raises(IndexError) as raised:
        step(torch.randn(8, 16), torch.full((8,), 9))
    assert traceback.extract_tb(raised.value.__traceback__)[-1].line == "found = m.table(rows)"
    assert "by op 'embedding'" in raised.value.__notes__[0]
