"""Steps under ``fully_shard`` that change while they train: all processes run the same one, or all refuse the batch."""

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import planner
from planner.graphs.errors import MismatchError, PlannerError, TraceError
from planner.train.distributed.ranks import Ranks
from tests.support.distributed import on_processes, update_both

SETTINGS: dict[str, Any] = {"passes": 1, "tolerance": 0.05, "swap": "never", "wait": 0.2, "compare_eager": False}
BUDGET = "200%"


class Changing(nn.Module):
    """A model with branches on its batch, on a buffer and on an attribute, and a number that changes."""

    def __init__(self, *, branches: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(12, 12), nn.GELU()) for _ in range(2))
        self.extra = nn.Linear(12, 12)
        self.register_buffer("seen", torch.zeros(()))
        self.branches, self.scale, self.skips, self.means = branches, 1.0, False, 0.0

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x) * self.scale
        if self.branches and x.shape[0] > 1 and self.seen > 0:
            x = x.tanh()
        self.means += x.mean().item()  # only recorded
        return x if self.skips else self.extra(x)


class Asking(Changing):
    def forward(self, x: Tensor) -> Tensor:
        asked = bool(x.sum() > 0)
        return super().forward(x).sigmoid() if asked else super().forward(x)


def compute_loss(found: Tensor, wanted: Tensor) -> Tensor:
    return (found - wanted).square().mean()


def shard(model: Changing) -> Changing:
    for layer in model.layers:
        fully_shard(layer)
    return fully_shard(model)


def make_batch(rank: int, *, rows: int = 8, sign: float = 1.0) -> tuple[Tensor, Tensor]:
    x, y = torch.rand(2, rows, 12, generator=torch.Generator().manual_seed(rank))
    return sign * x, y


class Pair:
    """A model that is trained by a plan, beside one that FSDP2 trains."""

    def __init__(self, rank: int, model: Changing, **settings: Any) -> None:
        torch.manual_seed(0)
        self.rank = rank
        self.eager, self.planned = (shard(copy.deepcopy(model)) for _ in range(2))
        self.step = planner.compile(self.planned, compute_loss, make_batch(rank), budget=BUDGET, **SETTINGS | settings)
        self.optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (self.eager, self.planned)]

    def train(self, batch: tuple[Tensor, Tensor], **attributes: Any) -> None:
        """Set attributes of both models and train them by one step; compare loss, gradients and parameters."""
        for model in (self.eager, self.planned):
            for name, value in attributes.items():
                setattr(model, name, value.clone() if isinstance(value, Tensor) else value)
        loss = compute_loss(self.eager(batch[0]), batch[1])
        loss.backward()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = self.step(*batch)
        assert torch.equal(loss, found)
        assert self.eager.means == self.planned.means
        found.backward()
        update_both(self.eager, self.planned, self.optimizers)


def check_following(rank: int) -> None:
    """Branches on data and on attributes, and numbers, are followed where all processes take the same side."""
    pair = Pair(rank, Asking())
    for turn in range(6):
        sign = 1.0 if turn in (0, 1, 4) else -1.0
        pair.train(make_batch(rank, sign=sign), seen=torch.tensor(float(turn > 2)))
    for scale in (0.5, 0.25 + rank, 0.125):  # numbers may differ between processes
        pair.train(make_batch(rank), scale=scale)
    pair.train(make_batch(rank), skips=True)
    pair.train(make_batch(rank), skips=False)
    pair.train(make_batch(rank, rows=5))
    pair.train(make_batch(rank))


def check_differences(rank: int) -> None:
    """Where processes take different sides, all raise one error that names the branch, and the step goes on."""
    mine = -1.0 if rank else 1.0
    with pytest.raises(TraceError, match=r"taken differently by the processes \(rank 0: .*if asked.* True; rank 1: .* False\)"):
        planner.compile(shard(Asking()), compute_loss, make_batch(rank, sign=mine), budget=BUDGET, **SETTINGS)
    pair = Pair(rank, Asking())
    pair.train(make_batch(rank))
    with pytest.raises(TraceError, match=r"taken differently by the processes \(rank 0: .*if asked.* True; rank 1: .* False\)"):
        pair.step(*make_batch(rank, sign=mine))
    pair.train(make_batch(rank, sign=-1.0))
    pair.planned.skips = rank == 1
    with pytest.raises(TraceError, match=r"^rank 1: .*skips.*, and the steps of the processes differ, and under fully_shard"):
        pair.step(*make_batch(rank, sign=-1.0))
    pair.planned.skips = False
    x, y = make_batch(rank)
    with pytest.raises(MismatchError, match=r"^rank 1: input 0 of the batch is float64.*processes run each step together"):
        pair.step(-x.double() if rank else -x, y)
    with pytest.raises(PlannerError, match=r"batches of the processes differ \(rank 0: \[5, 12\], \[5, 12\]; rank 1: \[6, 12\]"):
        pair.step(*make_batch(rank, rows=5 + rank))
    pair.train(make_batch(rank))


def check_replanning(rank: int) -> None:
    pair = Pair(rank, Asking(), replan=True)
    for rows, sign in ((8, 1.0), (12, 1.0), (8, -1.0), (12, 1.0)):
        pair.train(make_batch(rank, rows=rows, sign=sign))
    pair = Pair(rank, Changing(), dynamic=True)
    for rows in (8, 16, 3, 8):
        pair.train(make_batch(rank, rows=rows))
    with pytest.MonkeyPatch.context() as patch:
        compared: list[object] = []
        patch.setattr(Ranks, "is_same", lambda _, value, is_same=Ranks.is_same: compared.append(value) or is_same(_, value))
        pair.train(make_batch(rank, rows=16))
        assert len(compared) == 1  # as in a step of one size
    with pytest.raises(PlannerError, match=r"batches of the processes differ \(rank 0: \[8, 12\], \[8, 12\]; rank 1: \[5, 12\]"):
        pair.step(*make_batch(rank, rows=5 if rank else 8))
    pair.train(make_batch(rank))


def test_steps_that_change_are_followed_by_all_processes(tmp_path: Path) -> None:
    on_processes(2, (check_following, check_differences), tmp_path)


@pytest.mark.slow
def test_plans_of_many_sizes_are_made_by_all_processes(tmp_path: Path) -> None:
    on_processes(2, (check_replanning,), tmp_path)
