"""DDP and FSDP2 on two processes: one plan for both, gradients bitwise equal to the wrapper's, and shared errors."""

import copy
import gc
import shutil
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import planner
from planner.graphs.errors import InfeasibleError, LimitError, MismatchError, PlannerError, TraceError
from planner.measure.steps import measure_memory
from planner.plans.plan import Plan
from planner.plans.search import StepSearch
from planner.progress import Progress
from planner.runtime import arena_allocator
from planner.runtime.arena_allocator import Slab
from planner.settings.option_settings import apply_recorded_options
from planner.solvers.clock import WorkClock
from planner.solvers.eviction.least_peak import find_least_evicting_schedule
from planner.train.compile import compiler
from planner.train.compile.improvement import Improvement
from planner.train.distributed.wrappers import unwrap
from tests.support.budgets import HALF_WAY
from tests.support.distributed import get_executor, on_processes
from tests.support.models.residual_blocks import mlp_block

Batch = tuple[Tensor, Tensor]
Loss = Callable[[Tensor, Tensor], Tensor]


class Net(nn.Module):
    """Blocks, a batch norm, a frozen bias, and optionally a parameter that is never used."""

    def __init__(self, *, unused: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(mlp_block(32) for _ in range(2))
        self.norm = nn.BatchNorm1d(32)
        self.head = nn.Linear(32, 3)
        self.head.bias.requires_grad_(requires_grad=False)
        if unused:
            self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def pair(wrap: Callable[[nn.Module], nn.Module], **options: Any) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = Net(**options)
    twin = copy.deepcopy(model)
    return wrap(model), wrap(twin)


def batch_of(rank: int, size: int = 256) -> Batch:
    torch.manual_seed(rank)
    return torch.randn(size, 32), torch.randint(3, (size,))


def whole(tensors: Iterable[Tensor | None]) -> list[Tensor | None]:
    return [t.full_tensor() if isinstance(t, DTensor) else t for t in tensors]


def state(model: nn.Module) -> list[Tensor | None]:
    parameters = list(model.parameters())
    return whole([*parameters, *model.buffers(), *(p.grad for p in parameters)])


def assert_trains_as(
    eager: nn.Module, planned: nn.Module, step: Loss, batch: Batch, *, sync: Callable[[nn.Module, bool], None] | None = None
) -> None:
    """Two steps of AdamW, of two batches each where `sync` turns averaging off and on."""
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in (eager, planned)]
    for turn in range(2):
        for last in (True,) if sync is None else (False, True):
            losses = []
            for model, run in ((eager, lambda x, y: F.cross_entropy(eager(x), y)), (planned, step)):
                torch.manual_seed(10 * turn + last)
                if sync is not None:
                    sync(model, last)
                losses.append(run(*batch))
                losses[-1].backward()
            assert torch.equal(*losses)
        for wanted, found in zip(state(eager), state(planned), strict=True):
            assert (wanted is found is None) or torch.equal(wanted, found)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def assert_one_plan(step: planner.PlannedStep) -> None:
    plans: list[Any] = [None, None]
    dist.all_gather_object(plans, (step.plan.schedule, step.plan.graph, step.plan.budget_bytes))
    assert plans[0] == plans[1]


def assert_within_budget(step: planner.PlannedStep, model: nn.Module, batch: Batch, *, outside_bytes: int) -> None:
    """`outside_bytes`: what is in memory before the step and behind it."""
    # On a busy machine gloo's threads let go of what they have sent only a while later: the least of some steps is the step's.
    peaks = []
    for _ in range(5):
        model.zero_grad()
        peaks.append(measure_memory(step, batch, static_bytes=outside_bytes, device=torch.device("cpu")).peak_bytes)
    assert min(peaks) <= step.plan.budget_bytes, (peaks, step.plan.budget_bytes)


def bytes_of(tensors: Iterable[Tensor]) -> int:
    return sum(t.nbytes for t in tensors)


def ddp_bytes(model: nn.Module, batch: Batch) -> int:
    """Parameters, the batch, the buckets, and two tensors of AdamW for each trained parameter."""
    return bytes_of([*model.parameters(), *model.buffers(), *batch]) + 3 * bytes_of(trained(model))


def fsdp2_bytes(model: nn.Module, batch: Batch) -> int:
    """The same of the shards of this process, without buckets; the outermost module stays gathered behind a forward pass."""
    model.reshard()
    shards = [p.to_local() for p in model.parameters()]
    return bytes_of([*shards, *model.buffers(), *batch]) + 2 * bytes_of(p.to_local() for p in trained(model))


def trained(model: nn.Module) -> list[Tensor]:
    return [p for p in model.parameters() if p.requires_grad]


def ddp_sync(model: nn.Module, last: bool) -> None:
    model.require_backward_grad_sync = last  # what no_sync() does


def reduce_each(model: nn.Module, last: bool) -> None:
    """FSDP2's default: gradients are reduced in each batch, and shards are added."""


def check_ddp(rank: int) -> None:
    batch, profiles = batch_of(rank), []
    profiled = compiler.profile_capture
    compiler.profile_capture = lambda *args, **kwargs: profiles.append(rank) or profiled(*args, **kwargs)

    eager, planned = pair(DistributedDataParallel)
    seen: list[Progress] = []
    options = {"optimizer": "adamw", "passes": 1, "tolerance": 0.05, "on_progress": seen.append}
    step = planner.compile(planned, F.cross_entropy, batch, budget=HALF_WAY, **options)
    assert profiles == ([0] if rank == 0 else [])
    assert bool(seen) == (rank == 0)
    assert all(p.grad is None for p in planned.parameters())
    assert_one_plan(step)
    assert len(step.plan.schedule.computed) > step.plan.graph.ops
    assert_trains_as(eager, planned, step, batch)
    assert_within_budget(step, planned, batch, outside_bytes=ddp_bytes(planned, batch))

    options = {"find_unused_parameters": True, "gradient_as_bucket_view": True}
    eager, planned = pair(lambda model: DistributedDataParallel(model, **options), unused=True)
    step = planner.compile(planned, F.cross_entropy, batch, budget=HALF_WAY, accumulate=True, passes=1, tolerance=0.05)
    assert_trains_as(eager, planned, step, batch, sync=ddp_sync)

    eager, planned = pair(lambda model: DistributedDataParallel(model, static_graph=True))
    step = planner.compile(planned, F.cross_entropy, batch, budget="100%", passes=1, tolerance=0.05)
    assert_trains_as(eager, planned, step, batch)


def check_swaps(rank: int, **options: bool) -> None:
    """A better plan comes into use on both at the same step, and the same bits come of it."""
    batch = batch_of(rank)
    eager, planned = pair(DistributedDataParallel)
    settings = {"passes": 1, "tolerance": 0.05, "swap": "exact", **options}
    step = planner.compile(planned, F.cross_entropy, batch, budget=HALF_WAY, **settings)
    first = step.plan
    offered = apply_recorded_options(step.measured, first.settings).out_of_place()
    other = find_least_evicting_schedule(offered, WorkClock(1.0))
    assert other is not None and other != first.schedule

    def advance(_: Improvement, steps: int) -> Plan | None:
        assert rank == 0
        return replace(first, schedule=other, time_s=0.9 * first.time_s) if steps == 2 else None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Improvement, "advance", advance)
        assert_trains_as(eager, planned, step, batch)
    assert [use.step for use in step.history] == [1, 2]
    assert step.plan.schedule == other
    assert_one_plan(step)


def check_errors(rank: int) -> None:
    model, batch = DistributedDataParallel(Net()), batch_of(rank)
    there = "rank 0: " if rank else ""
    with pytest.raises(InfeasibleError, match=f"^{there}budget 1.00 kB is below .*, the least"):
        planner.compile(model, F.cross_entropy, batch, budget="1kB", passes=1, tolerance=0.05)

    def fail(_: object) -> None:
        raise ZeroDivisionError("by chance")

    kind, said = (PlannerError, "rank 0: ZeroDivisionError: by chance") if rank else (ZeroDivisionError, "by chance")
    with pytest.raises(kind, match=said):
        planner.compile(model, F.cross_entropy, batch, budget=HALF_WAY, passes=1, tolerance=0.05, on_progress=fail)
    there = "" if rank else "rank 1: "
    with pytest.raises(MismatchError, match=f"^{there}the plan is for another graph .* inputs"):
        planner.compile(model, F.cross_entropy, batch_of(rank, size=256 + rank), budget="100%", passes=1, tolerance=0.05)
    # Nothing of it is left behind.
    planner.compile(model, F.cross_entropy, batch, budget="100%", passes=1, tolerance=0.05)(*batch).backward()


def sharded(model: nn.Module) -> nn.Module:
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def check_fsdp2(rank: int) -> None:
    batch = batch_of(rank)
    eager, planned = pair(sharded)
    step = planner.compile(planned, F.cross_entropy, batch, budget=HALF_WAY, optimizer="adamw", passes=1, tolerance=0.05)
    assert all(isinstance(p, DTensor) and p.grad is None for p in planned.parameters())
    assert_one_plan(step)
    assert len(step.plan.schedule.computed) > step.plan.graph.ops
    assert_trains_as(eager, planned, step, batch)
    assert all(isinstance(p, DTensor) for p in planned.parameters())
    with torch.no_grad():  # the model itself, by its own hooks
        assert torch.equal(planned.eval()(batch[0]), eager.eval()(batch[0]))
        assert torch.equal(step(*batch), F.cross_entropy(eager(batch[0]), batch[1]))
    assert_within_budget(step, planned.train(), batch, outside_bytes=fsdp2_bytes(planned, batch))

    eager, planned = pair(sharded)
    step = planner.compile(planned, F.cross_entropy, batch, budget="100%", accumulate=True, passes=1, tolerance=0.05)
    assert_trains_as(eager, planned, step, batch, sync=reduce_each)

    blocks = Net()
    fully_shard(blocks.blocks[0])
    with pytest.raises(TraceError, match=r"parts of the model are sharded, .* call fully_shard\(model\) after its blocks"):
        planner.compile(blocks, F.cross_entropy, batch, budget="1GB")
    old = FullyShardedDataParallel(mlp_block(32), device_id=torch.device("cpu"))
    with pytest.raises(TraceError, match=r"FSDP1\) is not planned: use fully_shard"):
        planner.compile(old, F.cross_entropy, batch, budget="1GB")


def check_backend(rank: int, wrap: Callable[[nn.Module], nn.Module], **options: object) -> None:
    eager, planned = pair(wrap)
    options = {"budget": "100%", "tolerance": 0.05, **options}
    compiled = torch.compile(planned, backend="planner", dynamic=False, options=options)
    assert_trains_as(eager, planned, lambda x, y: F.cross_entropy(compiled(x), y), batch_of(rank))


def check_backend_with_offload(rank: int, wrap: Callable[[nn.Module], nn.Module]) -> None:
    asked: dict[str, object] = {"options": ["offload"], "link": 1e12}
    with pytest.raises(BackendCompilerFailed, match="a share of host memory does not go with several processes"):
        check_backend(rank, wrap, **asked)
    check_backend(rank, wrap, budget="75%", time_limit_s=2, host_budget="1GB", **asked)


def check_arena(rank: int, wrap: Callable[[nn.Module], nn.Module], sync: Callable[[nn.Module, bool], None]) -> None:
    """The slab, which PyTorch's profiler does not see, and what PyTorch's allocator gives are within the budget together."""
    batch = batch_of(rank)
    eager, planned = pair(wrap)
    options: dict[str, Any] = {"passes": 1, "tolerance": 0.05, "arena": True}
    step = planner.compile(planned, F.cross_entropy, batch, budget=HALF_WAY, optimizer="adamw", **options)
    assert_one_plan(step)
    assert len(step.plan.schedule.computed) > step.plan.graph.ops
    assert_trains_as(eager, planned, step, batch)
    planned.zero_grad()
    (slab,) = (found for found in gc.get_objects() if type(found) is Slab)
    assert slab.size_bytes == step.plan.arena_bytes
    outside = ddp_bytes if isinstance(planned, DistributedDataParallel) else fsdp2_bytes
    assert_within_budget(step, planned, batch, outside_bytes=outside(planned, batch) + slab.size_bytes)

    eager, planned = pair(wrap)
    step = planner.compile(planned, F.cross_entropy, batch, budget="100%", accumulate=True, **options)
    assert_trains_as(eager, planned, step, batch, sync=sync)


def check_tight_memory(rank: int, wrap: Callable[[nn.Module], nn.Module]) -> None:
    """Memory is tight for one process: both run in arenas, or in none if the plan of the first has none."""
    batch = batch_of(rank)
    arena_allocator.install()  # compiled
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "is_memory_tight", lambda *_: rank == 1)
        eager, planned = pair(wrap)
        step = planner.compile(planned, F.cross_entropy, batch, budget=HALF_WAY, passes=1, tolerance=0.05)
        assert_trains_as(eager, planned, step, batch)
        assert step.plan.arena
        assert step.plan.measured_peak_bytes <= step.plan.budget_bytes
        assert_one_plan(step)

        find = StepSearch.find_first_plan

        def refuse(search: StepSearch, *args: Any) -> Plan:
            if search.settings.arena:
                raise LimitError("no schedule was found")
            return find(search, *args)

        patch.setattr(StepSearch, "find_first_plan", refuse)
        eager, planned = pair(wrap)
        step = planner.compile(planned, F.cross_entropy, batch, budget=HALF_WAY, passes=1, tolerance=0.05)
        assert_trains_as(eager, planned, step, batch)
        assert step.plan.no_arena == "no arena: no schedule was found"
        assert get_executor(step).arena is None


def check_offload(rank: int, wrap: Callable[[nn.Module], nn.Module]) -> None:
    eager, planned = pair(wrap)
    batch = batch_of(rank)
    asked: dict[str, Any] = {"budget": HALF_WAY, "passes": 1, "tolerance": 1e-3, "options": ["offload"], "link": 1e12}
    with pytest.raises(PlannerError, match="a share of host memory does not go with several processes: each"):
        planner.compile(planned, F.cross_entropy, batch, **asked)
    step = planner.compile(planned, F.cross_entropy, batch, host_budget="1GB", **asked)
    assert step.plan.copied
    assert_one_plan(step)
    assert_trains_as(eager, planned, step, batch)


def test_two_processes_train_by_one_plan(tmp_path: Path) -> None:
    """One test of all, as starting the processes takes as long as several checks."""
    on_processes(2, (partial(check_backend, wrap=DistributedDataParallel), check_errors, check_ddp, check_fsdp2), tmp_path)


@pytest.mark.slow
def test_two_processes_copy_to_the_host_and_swap_plans(tmp_path: Path) -> None:
    with_ddp = (partial(check, wrap=DistributedDataParallel) for check in (check_offload, check_backend_with_offload))
    with_fsdp2 = (partial(check, wrap=sharded) for check in (check_offload, check_backend))
    on_processes(2, (*with_ddp, check_swaps, *with_fsdp2), tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="the allocator is compiled with g++")
def test_two_processes_train_in_arenas(tmp_path: Path) -> None:
    with_ddp = partial(check_arena, wrap=DistributedDataParallel, sync=ddp_sync)
    with_fsdp2 = partial(check_arena, wrap=sharded, sync=reduce_each)
    with_backend = (partial(check_backend, wrap=wrap, arena=True) for wrap in (DistributedDataParallel, sharded))
    tight = (partial(check_tight_memory, wrap=wrap) for wrap in (DistributedDataParallel, sharded))
    on_processes(2, (with_ddp, partial(check_swaps, arena=True), with_fsdp2, *with_backend, *tight), tmp_path)


def test_plain_models_are_not_wrapped_and_data_parallel_raises() -> None:
    model = Net()
    assert unwrap(model).module is model
    with pytest.raises(TraceError, match="DataParallel is not planned: start a process for each device"):
        unwrap(nn.DataParallel(model))
