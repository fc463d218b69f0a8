"""Processes that train together, as ``torchrun --nproc-per-node 2`` starts them."""

import faulthandler
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import planner
from planner.runtime.executor import Executor
from planner.torch_private.core import get_local_tensor
from tests.support.budgets import half_way_known
from tests.support.processes import FORKSERVER, begin


def on_processes(count: int, checks: Sequence[Callable[[int], None]], folder: Path) -> None:
    """Call each of `checks` with its rank, on `count` processes; what fails there fails here."""
    given = (count, checks, str(folder / "store"))
    torch.multiprocessing.start_processes(_fork, given, nprocs=1, start_method=FORKSERVER)


def get_executor(step: planner.PlannedStep) -> Executor:
    """Return what executes a step, whose `debug` is a function around it."""
    assert step._executor is not None
    return step._executor


def update_both(eager: nn.Module, planned: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
    """Compare gradients, update both models, and compare parameters."""
    for wanted, found in zip(eager.parameters(), planned.parameters(), strict=True):
        assert (wanted.grad is None) == (found.grad is None)
        if wanted.grad is not None:
            assert type(wanted.grad) is type(found.grad) and wanted.grad.shape == found.grad.shape
            assert torch.equal(get_local_tensor(wanted.grad), get_local_tensor(found.grad))
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    for wanted, found in zip(eager.parameters(), planned.parameters(), strict=True):
        assert torch.equal(get_local_tensor(wanted), get_local_tensor(found))


def _fork(_: int, count: int, checks: Sequence[Callable[[int], None]], store: str) -> None:
    """Start all of them from a process that has imported the rest of what `checks` need, and has started no thread yet."""
    torch.multiprocessing.start_processes(_worker, (count, checks, store), nprocs=count, start_method="fork")


def _worker(rank: int, count: int, checks: Sequence[Callable[[int], None]], store: str) -> None:
    world = str(count)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0", "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "none"}  # a file, no port, is used
    faulthandler.enable()  # where a process dies of a signal, its stacks are all there is to see
    begin()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=count, timeout=timedelta(seconds=100))
    with half_way_known():
        for check in checks:
            check(rank)
    dist.destroy_process_group()
