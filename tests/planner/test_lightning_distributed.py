"""PyTorch Lightning on two processes: training and logs bitwise equal to DDP or FSDP2 without a plan."""

import copy
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

pl = pytest.importorskip("lightning.pytorch")

from lightning.pytorch.strategies import ModelParallelStrategy  # noqa: E402

from planner.graphs.errors import PlannerError  # noqa: E402
from planner.graphs.options.gather import GATHER, REDUCE  # noqa: E402
from planner.lightning import PlannedTraining  # noqa: E402
from planner.torch_private.core import get_local_tensor  # noqa: E402
from tests.support.budgets import HALF_WAY  # noqa: E402
from tests.support.distributed import on_processes  # noqa: E402
from tests.support.integrations.lightning import QUICK, Module, trained  # noqa: E402
from tests.support.marks import slow  # noqa: E402


class Loaded(Module):
    """Has three batches for each of two processes, and logs over both."""

    def train_dataloader(self) -> Any:
        draw = torch.Generator().manual_seed(1)
        inputs = torch.randn(48, 3, 16, 16, generator=draw), torch.randint(5, (48,), generator=draw)
        return DataLoader(TensorDataset(*inputs), batch_size=8)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("together", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log("alone", loss, on_step=True, on_epoch=True)
        return {"loss": loss, "most": loss.exp()}


class Unused(Loaded):
    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.ones(3))


class ShardedUnits(pl.LightningModule):
    """Shards its layers by FSDP2, as ``ModelParallelStrategy`` expects."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        wide = nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1)
        self.body = nn.Sequential(nn.Linear(32, 64), nn.GELU(), *wide, nn.Linear(64, 8))

    def configure_model(self) -> None:
        for module in (self.body[0], self.body[2], self.body):
            fully_shard(module, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = F.cross_entropy(self.body(batch[0]), batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def train_dataloader(self) -> Any:
        draw = torch.Generator().manual_seed(1)
        inputs = torch.randn(96, 32, generator=draw), torch.randint(8, (96,), generator=draw)
        return DataLoader(TensorDataset(*inputs), batch_size=16)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Uneven(Loaded):
    """The second batch of rank 1 is smaller."""

    def train_dataloader(self) -> Any:
        sizes = (8, 4, 8) if self.global_rank else (8, 8, 8)
        return DataLoader([(torch.randn(size, 3, 16, 16), torch.randint(5, (size,))) for size in sizes], batch_size=None)


def fitted(module: Any, *callbacks: Any, strategy: Any, **more: Any) -> tuple[Any, list[dict[str, float]]]:
    with TemporaryDirectory() as folder:
        return trained(
            module, Path(folder), *callbacks, data=(), accelerator="auto", devices=2, strategy=copy.copy(strategy), **more
        )


def compared(make: type, **more: Any) -> PlannedTraining:
    eager, eager_logs = fitted(make(), **more)
    callback = PlannedTraining(HALF_WAY, **QUICK)
    planned, planned_logs = fitted(make(), callback, **more)
    assert planned_logs == eager_logs
    assert_same(planned, eager)
    assert "training_step" not in vars(planned)
    return callback


def assert_same(planned: nn.Module, eager: nn.Module) -> None:
    pairs = zip(planned.state_dict().items(), eager.state_dict().items(), strict=True)
    assert [name for (name, a), (_, b) in pairs if not torch.equal(get_local_tensor(a), get_local_tensor(b))] == []


def check_ddp(rank: int) -> None:
    callback = compared(Loaded, strategy="ddp")
    plan = callback.planned.plan
    measured = [use.plan.measured_peak_bytes for use in callback.planned.history]
    assert measured[0] is not None  # of a better one that came with the last step it may not be known
    assert all(peak_bytes is None or peak_bytes <= plan.budget_bytes for peak_bytes in measured)
    assert len(plan.schedule.computed) > plan.graph.ops
    assert "gradient_buckets" in {tensor.name for tensor in callback.planned.measured.tensors}


def check_variants(rank: int) -> None:
    more = {"accumulate_grad_batches": 2, "precision": "bf16-mixed"}
    compared(Unused, strategy="ddp_find_unused_parameters_true", **more)
    compared(Loaded, strategy=pl.strategies.DDPStrategy(static_graph=True))


def check_sharded(rank: int) -> None:
    callback = compared(ShardedUnits, strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1))
    plan, graph = callback.planned.plan, callback.planned.measured
    assert plan.measured_peak_bytes is None or plan.measured_peak_bytes <= plan.budget_bytes
    assert sum(op.target == GATHER for op in graph.ops) == sum(op.target == REDUCE for op in graph.ops) == 3


def check_differing_sizes(rank: int) -> None:
    found = r"rank 0: \[8, 3, 16, 16\], \[8\]; rank 1: \[4, 3, 16, 16\], \[4\]"
    with pytest.raises(PlannerError, match=rf"the batches of the processes differ \({found}\), but one plan is for all"):
        fitted(Uneven(), PlannedTraining(HALF_WAY, **QUICK), strategy="ddp", use_distributed_sampler=False)


@pytest.mark.parametrize("check", [check_ddp, *slow(check_sharded, check_differing_sizes, check_variants)])
def test_trains_as_lightning_alone(check: Callable[[int], None], tmp_path: Path) -> None:
    on_processes(2, (check,), tmp_path)


@pytest.mark.slow
def test_planned_training_equals_ddp_spawn() -> None:
    eager, _ = fitted(Loaded(), strategy="ddp_spawn")
    planned, _ = fitted(Loaded(), PlannedTraining("100%", **QUICK), strategy="ddp_spawn")
    assert_same(planned, eager)
