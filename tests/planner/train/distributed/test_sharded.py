"""FSDP2's units in the plan: the bits of FSDP2, and a measured peak that equals the planned one, on each process."""

import copy
import os
import re
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import planner
from benchmarks.models.parts import FunctionModule
from benchmarks.process_memory import read_status_bytes, reset_highest_rss
from planner.graphs.errors import BudgetError, EagerWarning, InfeasibleError, PlannerError, TraceError
from planner.graphs.options.gather import GATHER, REDUCE
from planner.graphs.pools import DEVICE_TO_HOST
from planner.graphs.schedule import Compute, Schedule
from planner.graphs.simulate import simulate
from planner.measure.steps import measure_memory
from planner.memory.least_budget import find_least_budget
from planner.runtime.arena_allocator import Missed
from planner.settings.budget import Bytes
from planner.settings.plan import PlanSettings
from planner.solvers.bounds import bound_least_budget
from planner.torch_private.core import get_local_tensor
from planner.torch_private.distributed import get_default_store
from planner.train.compile.compiler import Compiler
from planner.train.distributed import failures
from planner.train.distributed.collectives import run_on_buffer
from planner.train.distributed.failures import tell_failures, wait_for_others
from planner.train.distributed.wrappers import unwrap
from tests.support.budgets import HALF_WAY
from tests.support.distributed import get_executor, on_processes, update_both
from tests.support.marks import slow, slow_except
from tests.support.models.residual_blocks import mlp_block

Wrap = Callable[[nn.Module], nn.Module]
HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
CAST = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)
SIXTEEN = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float16)
SETTINGS: dict[str, Any] = {
    "optimizer": "adamw",
    "passes": 1,
    "tolerance": 0.05,
    "swap": "never",
    "wait": 0.5,
    "compare_eager": False,
}
OVERLAP = SETTINGS | {"options": ["overlap"]}
ARENA = SETTINGS | {"arena": True}
OFFLOAD = OVERLAP | {"options": ["overlap", "offload"], "link": "1000GB/s", "host_budget": "1GB"}


class Net(nn.Module):
    def __init__(self, *, vocabulary: int = 96, tied: bool = False, frozen: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, 24)
        self.blocks = nn.ModuleList(mlp_block(24) for _ in range(3))
        self.norm, self.head = nn.LayerNorm(24), nn.Linear(24, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        if frozen:
            self.blocks[1].layers[1].weight.requires_grad_(requires_grad=False)
            self.norm.requires_grad_(requires_grad=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Crossing(Net):
    """Blocks that each read what is encoded before them twice: FSDP2 sums the gradients of one block first."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks.extend(CrossBlock(24) for _ in range(3))

    def forward(self, tokens: Tensor) -> Tensor:
        x = encoded = self.blocks[0](self.embedding(tokens))
        for block in self.blocks[3:]:
            x = block(x, encoded)
        return self.head(self.norm(x))


class Placed(Net):
    """Adds a part of a buffer that is larger than what the plan takes for activations."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("positions", torch.randn(4096, 24))

    def forward(self, tokens: Tensor) -> Tensor:
        x, positions = self.embedding(tokens), self.positions[: tokens.shape[1]]
        x = sum(torch.sin(k * x + positions) for k in range(64))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class CrossBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.keys, self.values = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor, encoded: Tensor) -> Tensor:
        return x + (x * self.keys(encoded)).softmax(-1) * self.values(encoded)


def compute_loss(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), target.flatten())


def shard(model: Net, *, grouped: bool = False, ignored: bool = False, hybrid: bool = False, **options: Any) -> nn.Module:
    world = dist.get_world_size()
    names = ("replicate", "shard") if hybrid else ("shard",)
    mesh = init_device_mesh("cpu", (2, world // 2) if hybrid else (world,), mesh_dim_names=names)
    policy = options.pop("policy", {})
    if grouped:
        fully_shard([model.norm, model.head], mesh=mesh, **policy)
    inner = {"mp_policy": HALF} if policy.get("mp_policy") == CAST else policy
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **inner, **options)
    more = {"ignored_params": {model.norm.weight}} if ignored else {}
    return fully_shard(model, mesh=mesh, **policy, **more)


def make_batch(rank: int, vocabulary: int = 96, tokens: int = 12) -> tuple[Tensor, Tensor]:
    torch.manual_seed(100 + rank)
    return torch.randint(vocabulary, (8, tokens)), torch.randint(vocabulary, (8, tokens))


def count_gathers(step: planner.PlannedStep) -> tuple[int, int]:
    """Return the gathers of the program, and those of the schedule."""
    ops = get_executor(step).graph.ops
    return sum(op.target == GATHER for op in ops), sum(ops[op].target == GATHER for op in step.plan.schedule.computed)


def run_both(
    eager: nn.Module, step: planner.PlannedStep, batch: tuple[Tensor, Tensor], static_bytes: int | None, *, seed: int
) -> int:
    """Compare loss and random state of a step by a plan and by FSDP2; return its peak, 0 if `static_bytes` is None."""
    torch.manual_seed(seed)
    loss = compute_loss(eager(batch[0]), batch[1])
    loss.backward()
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    losses: list[Tensor] = []

    def run(*given: Tensor) -> Tensor:
        losses.append(step(*given))
        return losses[0]

    peak_bytes = 0
    if static_bytes is None:
        run(*batch).backward()
    else:
        peak_bytes = measure_memory(run, batch, static_bytes=static_bytes, device=torch.device("cpu")).peak_bytes
    assert torch.equal(loss, losses[0]) and torch.equal(state, torch.get_rng_state())
    return peak_bytes


def train(
    rank: int,
    model: Net,
    wrap: Wrap,
    *,
    budget: Any = HALF_WAY,
    batches: int = 1,
    tokens: int = 12,
    before: Callable[[nn.Module], None] | None = None,
    settings: dict[str, Any] = SETTINGS,
) -> planner.PlannedStep:
    """Train by a plan and by FSDP2, and compare bits and peak; `batches` are accumulated."""
    x, y = make_batch(rank, model.embedding.num_embeddings, tokens)
    eager, planned = wrap(copy.deepcopy(model)), wrap(copy.deepcopy(model))
    for each in (eager, planned):
        if before is not None:
            before(each)
    step = planner.compile(planned, compute_loss, (x, y), budget=budget, accumulate=batches > 1, **settings)
    static_bytes = get_executor(step).graph.static_bytes - 4  # autograd makes the gradient of the loss
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (eager, planned)]
    for turn in range(3):
        for batch in range(batches):
            peak_bytes = run_both(eager, step, (x, y), static_bytes, seed=10 * turn + batch + rank)
            if (arena := get_executor(step).arena) is None:
                assert peak_bytes == step.plan.peak_bytes == step.plan.measured_peak_bytes
                continue
            assert arena.missed == Missed()  # all that was planned in the slab lies in it, which PyTorch's profiler does not see
            if batch == batches - 1:  # the gradients of earlier batches are static, and are there
                assert peak_bytes + arena.size_bytes == step.plan.measured_peak_bytes <= step.plan.budget_bytes
        update_both(eager, planned, optimizers)
    return step


def check_bits(
    rank: int, *, model: dict[str, Any] | None = None, batches: int = 1, settings: dict[str, Any] = SETTINGS, **options: Any
) -> None:
    torch.manual_seed(0)
    train(rank, Net(**(model or {})), partial(shard, **options), batches=batches, settings=settings)


def check_crossing(rank: int) -> None:
    torch.manual_seed(0)
    train(rank, Crossing(), shard)


def check_room_of_copies(rank: int) -> None:
    """Copies of what may change between the passes do not raise the peak of the first step, wherever the budget is."""
    torch.manual_seed(0)
    batch, model = make_batch(rank), Placed()
    eager, planned = shard(copy.deepcopy(model)), shard(model)
    step = planner.compile(planned, compute_loss, batch, budget=HALF_WAY, **SETTINGS)
    executor = get_executor(step)
    assert "model.positions" in {executor.graph.tensors[t].name for t in executor.changed_inputs.recomputed_from}
    executor.start_training(100 * step.plan.budget_bytes, check_writes=False)
    peaks_bytes = [run_both(eager, step, batch, executor.graph.static_bytes - 4, seed=rank) for _ in range(2)]
    assert set(peaks_bytes) == {step.plan.peak_bytes}


def check_overlap(
    rank: int, *, model: dict[str, Any] | None = None, batches: int = 1, settings: dict[str, Any] = OVERLAP, **options: Any
) -> None:
    """Collectives in another thread: the same bits, and what they hold is planned, whenever they end."""
    torch.manual_seed(0)
    step = train(rank, Net(**(model or {})), partial(shard, **options), batches=batches, settings=settings)
    graph = get_executor(step).graph
    # Whether copies are worth their time depends on the machine: with the option there are some in most plans, not in all.
    assert settings == OFFLOAD or DEVICE_TO_HOST not in {graph.ops[op].stream for op in step.plan.schedule.computed}
    sent = [op for op in graph.program if op.is_transfer]
    assert len(sent) == 8 and {op.target for op in sent} == {GATHER, REDUCE}
    schedule = Schedule(tuple(x for x in step.plan.schedule.steps if isinstance(x, Compute)))
    order = [graph.ops[op] for op in schedule.computed]
    early = [a for a, b in pairwise(order) if a.target == GATHER and set(a.outputs).isdisjoint(b.inputs)]
    assert early or any(b.target != REDUCE for a, b in pairwise(order) if a.target == REDUCE)


def check_comparison(rank: int) -> None:
    """A plan is compared with a step of FSDP2, by all processes at once, and the model trains on as it would have."""
    torch.manual_seed(0)
    settings = SETTINGS | {"compare_eager": True}
    eager = train(rank, Net(), shard, settings=settings).plan.eager
    assert eager.identical and eager.reference == "FSDP2" and eager.peak_bytes and eager.planned_time_s

    def double(_: nn.Module, __: Any, logits: Tensor) -> Tensor:
        return 2 * logits

    double.__module__ = "torch.distributed.fsdp"  # as a hook that is not captured
    other = shard(Net())
    if rank:
        other.register_forward_hook(double)
    with pytest.warns(EagerWarning, match=f"planned step differs from FSDP2 in {'loss' if rank else 'gradient of'}"):
        step = planner.compile(other, compute_loss, make_batch(rank), budget="100%", **settings)
    assert step.plan.eager.first_op is None


def check_sums(
    rank: int,
    *,
    model: dict[str, Any] | None = None,
    together: bool = True,
    settings: dict[str, Any] = SETTINGS,
    **options: Any,
) -> None:
    """Whole gradients of two batches are summed, in all units if `together`, and reduced with a third: by a plan for each."""
    torch.manual_seed(0)
    net = Net(**(model or {}))
    x, y = make_batch(rank, net.embedding.num_embeddings)
    eager, planned = (shard(copy.deepcopy(net), **options) for _ in range(2))
    step = planner.compile(planned, compute_loss, (x, y), budget="1GB", **settings)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (eager, planned)]
    for turn in range(5):
        for batch in range(3):
            for each in (eager, planned):
                each.set_requires_gradient_sync(batch == 2, recurse=together)
            are_made = bool(turn and batch)  # the sums are there, and so are the plans
            used = step._modes.step((x, y)) if are_made and step._modes.in_other_mode else step
            static_bytes = get_executor(used).graph.static_bytes - 4 if are_made else None
            peak_bytes = run_both(eager, step, (x, y), static_bytes, seed=10 * turn + batch + rank)
            assert not are_made or peak_bytes == used.plan.peak_bytes == used.plan.measured_peak_bytes
        assert all(p.unsharded_accumulated_grad is None for unit in unwrap(planned)._units for p in unit._group.fsdp_params)
        update_both(eager, planned, optimizers)
    assert len(step.plans) == 3


def check_sums_of_a_repeated_unit(rank: int) -> None:
    """FSDP2 reduces sums of gradients when it leaves a unit for the first time, and the gradients of this step after the last."""
    model, batch = shard(Net()), make_batch(rank)
    model.blocks.append(model.blocks[0])
    step = planner.compile(model, compute_loss, batch, budget="1GB", **SETTINGS)
    step(*batch).backward()
    model.set_requires_gradient_sync(False)
    step(*batch).backward()
    model.set_requires_gradient_sync(True)
    with pytest.raises(TraceError, match=r"blocks.0 is called 2 times in the step, and there are sums"):
        step(*batch)


def check_changes_between_passes(rank: int) -> None:
    """A backward pass that is to do something else with gradients than its forward pass has planned for is refused."""
    model, batch = shard(Net()), make_batch(rank)
    step = planner.compile(model, compute_loss, batch, budget="1GB", **SETTINGS)
    loss = step(*batch)
    model.set_requires_gradient_sync(False)
    with pytest.raises(PlannerError, match="set_requires_gradient_sync was called between a forward and its backward pass"):
        loss.backward()


def check_sums_over_budget(rank: int) -> None:
    """Sums of whole gradients are memory of the step: where they do not fit, the error says so."""
    model, batch = shard(Net()), make_batch(rank, tokens=1)
    step = planner.compile(model, compute_loss, batch, budget=HALF_WAY, **SETTINGS)
    model.set_requires_gradient_sync(False)
    with pytest.raises(InfeasibleError, match=r"with whole gradients of several batches in memory \(set_requires_gradient_sync"):
        step(*batch)


def check_peak_in_a_reduction(rank: int, *, settings: dict[str, Any] = SETTINGS) -> None:
    """Where a reduction holds the most, its division by the number of processes counts too, also in another thread."""
    torch.manual_seed(0)
    step = train(rank, Net(vocabulary=3000), shard, budget="100%", tokens=1, settings=settings)
    assert count_gathers(step) == (5, 5)  # of the root unit, what is read before and after the blocks apart
    graph, schedule = get_executor(step).graph, step.plan.schedule
    memory_bytes = simulate(graph, schedule).memory_bytes
    peak = memory_bytes.index(max(memory_bytes))
    assert isinstance(schedule.steps[peak], Compute) and graph.ops[schedule.steps[peak].op].target == REDUCE


def check_options_of_steps(rank: int) -> None:
    """Options that are found in a step are, though its parameters have no values while it is measured."""
    torch.manual_seed(0)
    x, y = make_batch(rank)
    step = planner.compile(shard(Net()), compute_loss, (x, y), budget="90%", options=["pack", "in-place"], **SETTINGS)
    step(x, y).backward()
    assert "pack" in str(step.measured.provenance)


def check_divide_factor(rank: int, *, factors: tuple[float, ...] = (3.0, 5.0), only_sums: bool = True, **options: Any) -> None:
    """The divisor of gradients is FSDP2's in each step, also where it has changed since the plan was made."""
    torch.manual_seed(0)
    eager, planned = (shard(copy.deepcopy(net), **options) for net in [Net()] * 2)
    batch = make_batch(rank)

    def divide(factor: float) -> None:
        for module in (eager, *eager.blocks, planned, *planned.blocks):
            module.set_gradient_divide_factor(factor)
            module.set_force_sum_reduction_for_comms(only_sums)

    divide(factors[0])
    step = planner.compile(planned, compute_loss, batch, budget="1GB", **SETTINGS)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (eager, planned)]
    for turn, factor in enumerate(factors):
        divide(factor)
        run_both(eager, step, batch, None, seed=turn + rank)
        update_both(eager, planned, optimizers)
    assert len(step.plans) == len(factors)


def check_least(rank: int) -> None:
    """Near the least feasible budget, units are gathered again."""
    torch.manual_seed(0)
    kept = train(rank, Net(), shard, budget="100%")
    graph = get_executor(kept).graph
    assert count_gathers(kept) == (4, 4)
    least_bytes = bound_least_budget(graph).budget_bytes
    with pytest.raises(InfeasibleError, match="the least any schedule of this graph needs"):
        train(rank, Net(), shard, budget=least_bytes - 1)
    found_bytes = find_least_budget(kept.measured).found_bytes
    tight = train(rank, Net(), shard, budget=found_bytes + found_bytes // 50)  # which a solve under load may miss by bytes
    program, scheduled = count_gathers(tight)
    assert scheduled > program


def check_capture(rank: int) -> None:
    """Nothing is gathered to capture: the captured step has parameters without memory."""
    wrapper = unwrap(shard(Net()))
    gathers: list[object] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "broadcast", lambda *args, **kwargs: gathers.append(args))
        captured = wrapper.capture(compute_loss, make_batch(rank), PlanSettings())
    assert not gathers and captured.graph.ops
    assert all(isinstance(p, DTensor) for p in wrapper.module.parameters())


def check_gathered_parts(rank: int) -> None:
    """A model whose sharded part stays gathered behind an evaluation is sharded all the same."""
    model, (x, _) = shard(Net()), make_batch(rank)
    with torch.no_grad():
        model(x)
    assert not isinstance(model.embedding.weight, DTensor)
    assert unwrap(nn.Sequential(model)).sharding is not None
    assert isinstance(model.embedding.weight, DTensor)


def check_memory_of_planning(rank: int) -> None:
    """A model is planned whose gathered parameters alone pass the budget: nothing beyond it is allocated while that is done."""
    width, layers = 2048, 24
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)), nn.LayerNorm(width))
    model[:-1].requires_grad_(requires_grad=False)
    for module in (*model, model):
        fully_shard(module, mesh=init_device_mesh("cpu", (2,)))
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.normal_(parameter.to_local(), std=0.02)
    unit_bytes = 4 * width * width
    batch = torch.randn(4, width), torch.randn(4, width)
    budget_bytes = layers * unit_bytes // 2 + 4 * unit_bytes
    assert budget_bytes < layers * unit_bytes
    before = read_status_bytes("VmRSS")
    reset_highest_rss()
    step = planner.compile(model, F.mse_loss, batch, budget=budget_bytes, **{**SETTINGS, "wait": 0})
    planned = read_status_bytes("VmHWM") - before
    step(*batch).backward()
    assert step.plan.measured_peak_bytes <= budget_bytes
    allowed_bytes = 4 * unit_bytes + 130_000_000  # what a solve in the process takes of Python and HiGHS
    assert planned < allowed_bytes < layers * unit_bytes, planned


def check_around_steps(rank: int, folder: Path) -> None:
    """What uses shards works as ever: evaluation, clipping, and a checkpoint from which the run goes on to the bit."""
    torch.manual_seed(0)
    model = Net()
    eager, planned, resumed = (shard(copy.deepcopy(model)) for _ in range(3))
    x, y = make_batch(rank)
    step = planner.compile(planned, compute_loss, (x, y), budget=HALF_WAY, **SETTINGS)
    again = planner.compile(resumed, compute_loss, (x, y), budget=Bytes(step.plan.budget_bytes).size_bytes, **SETTINGS)
    runs = [(eager, lambda: compute_loss(eager(x), y)), (planned, lambda: step(x, y)), (resumed, lambda: again(x, y))]
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each, _ in runs]

    def turn(seed: int, which: tuple[int, ...]) -> None:
        for i in which:
            torch.manual_seed(seed + rank)
            runs[i][1]().backward()
            torch.nn.utils.clip_grad_norm_(runs[i][0].parameters(), 0.1)
            optimizers[i].step()
            optimizers[i].zero_grad()
            with torch.no_grad():
                runs[i][0].eval()(x)
            runs[i][0].train()

    turn(1, (0, 1))
    parameters, states = get_state_dict(planned, optimizers[1])
    dcp.save({"model": parameters, "optimizer": states}, checkpoint_id=folder / "saved")
    parameters, states = get_state_dict(resumed, optimizers[2])
    dcp.load({"model": parameters, "optimizer": states}, checkpoint_id=folder / "saved")
    set_state_dict(resumed, optimizers[2], model_state_dict=parameters, optim_state_dict=states)
    turn(2, (0, 1, 2))
    for wanted, *found in zip(*(each.parameters() for each, _ in runs), strict=True):
        assert all(torch.equal(get_local_tensor(wanted), get_local_tensor(value)) for value in found)


def check_earlier_gradients(rank: int) -> None:
    """Shards of gradients of an earlier step count: where they do not fit, all processes raise before anything is gathered."""
    torch.manual_seed(0)
    x, y = make_batch(rank)
    step = planner.compile(shard(Net()), compute_loss, (x, y), budget=HALF_WAY, **SETTINGS)
    step(x, y).backward()
    with pytest.raises(BudgetError, match=r"gradients of an earlier step .* free them before the step"):
        step(x, y).backward()


class Extended(Tensor):
    """A tensor whose gather is its own."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def unwrap_data(value: Any) -> Any:
            return value.data_ if isinstance(value, Extended) else value

        made = func(*torch.utils._pytree.tree_map(unwrap_data, args), **(kwargs or {}))
        keeps = {torch.ops.aten.split.Tensor, torch.ops.aten.new_zeros.default, torch.ops.aten.view.default}
        keeps |= {torch.ops.aten.slice.Tensor, torch.ops.aten.detach.default, torch.ops.aten.as_strided.default}
        return torch.utils._pytree.tree_map(lambda t: cls(t) if isinstance(t, Tensor) else t, made) if func in keeps else made

    @staticmethod
    def __new__(cls, data: Tensor) -> "Extended":
        made = Tensor._make_wrapper_subclass(cls, data.shape, strides=data.stride(), dtype=data.dtype, device=data.device)
        made.data_ = data
        return made

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[Tensor, ...], object]:
        return (self.data_,), None

    def fsdp_post_all_gather(self, outputs: Any, metadata: object, dtype: torch.dtype, *, out: Tensor | None = None) -> Any:
        return outputs[0], outputs


def check_refusals(rank: int) -> None:
    """Each kind of sharding that is not planned is one error, which names the parameter or the unit."""
    batch = make_batch(rank)

    def refuse(model: nn.Module, message: str) -> None:
        with pytest.raises(TraceError, match=message):
            planner.compile(model, compute_loss, batch, budget="1GB")

    by_columns = shard(Net(), shard_placement_fn=lambda p: Shard(1) if p.dim() > 1 else None)
    refuse(by_columns, r"blocks\.0\.layers\.1\.weight is sharded as Shard\(dim=1\) by shard_placement_fn: only Shard\(dim=0\)")
    on_host = shard(Net(), policy={"offload_policy": CPUOffloadPolicy(pin_memory=False)})
    refuse(on_host, r"the unit root of fully_shard has a CPUOffloadPolicy")
    extended = Net()
    extended.head.weight = nn.Parameter(Extended(extended.head.weight.detach()))
    refuse(shard(extended), r"the parameter head\.weight is a Extended, whose fsdp_pre_all_gather is not planned")
    premultiplied = shard(Net())
    premultiplied.set_gradient_divide_factor(3.0)
    refuse(
        premultiplied, r"factor\(3\.0\) on root needs a reduction that gloo does not have: call set_force_sum_reduction_for_com"
    )
    with pytest.raises(RuntimeError, match="Cannot use ReduceOp"):  # of the collective, and of no other process
        wait_for_others(dist.all_reduce(torch.ones(1), torch.distributed._make_nccl_premul_sum(3.0), async_op=True))
    unused = Net()
    unused.blocks[0].more = nn.Linear(2, 2)
    shard(unused).set_reduce_scatter_unused_params(True)
    refuse(unused, r"set_reduce_scatter_unused_params\(True\) on blocks\.0, but the step does not train blocks\.0\.more\.weight")


class OwnReduction(DefaultReduceScatter):
    """A reduction that is not FSDP2's."""


def check_own_communication(rank: int) -> None:
    """A collective that is not FSDP2's is refused, also in a step that was planned before it was set."""
    model, batch = shard(Net()), make_batch(rank)
    step = planner.compile(model, compute_loss, batch, budget="1GB", **SETTINGS)
    model.blocks[1].set_custom_reduce_scatter(OwnReduction())
    with pytest.raises(PlannerError, match=r"set_custom_reduce_scatter\(\) on blocks\.1, but a planned step has its own collect"):
        step(*batch)
    model.blocks[1].set_custom_reduce_scatter(DefaultReduceScatter())
    model.set_all_reduce_hook(torch.zero_)
    with pytest.raises(PlannerError, match=r"set_all_reduce_hook\(\) on root, but a planned step has its own collectives"):
        step(*batch)


def check_refusals_of_meshes(rank: int) -> None:
    batch = make_batch(rank)
    number = shard(Net(), reshard_after_forward=2)
    with pytest.raises(TraceError, match=r"the unit blocks\.0 of fully_shard has reshard_after_forward=2: give True or False"):
        planner.compile(number, compute_loss, batch, budget="1GB")
    hybrid = shard(Net(), hybrid=True)
    hybrid.set_requires_all_reduce(False)
    with pytest.raises(PlannerError, match=r"set_requires_all_reduce\(False\) on .*, but a planned step reduces .* whole mesh"):
        planner.compile(hybrid, compute_loss, batch, budget="1GB")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = Net()
    parallel = distribute_tensor(model.head.weight.detach(), mesh["tensor"], [Shard(0)])
    model.head.weight = nn.Parameter(parallel)
    for block in (model.head,):
        fully_shard(block, mesh=mesh["data"])
    with pytest.raises(TraceError, match=r"the parameter weight was a DTensor before fully_shard \(tensor parallelism\)"):
        planner.compile(model.head, compute_loss, batch, budget="1GB")


Options = dict[str, Any]
TIED: Options = {"model": {"tied": True, "frozen": True}}
UNEVEN: Options = {"model": {"vocabulary": 97}}
ON_HALF, ON_CAST, ON_SIXTEEN = ({"policy": {"mp_policy": policy}} for policy in (HALF, CAST, SIXTEEN))


def list_checks(check: Callable[..., None], *options: Options) -> list[Callable[[int], None]]:
    """Return `check` with each of `options`."""
    return [partial(check, **each) for each in options]


# The number of processes, and what each of them checks.
CHECKS: dict[str, tuple[int, Sequence[Callable[[int], None]]]] = {
    "bits and memory": (
        2,
        (
            *list_checks(check_bits, TIED),
            *(check_crossing, check_peak_in_a_reduction, check_room_of_copies, check_capture),
            *(check_gathered_parts, check_comparison),
        ),
    ),
    # An output and a buffer of a reduction have one size; gradients of several batches are added.
    "arena": (2, list_checks(check_bits, {**ON_SIXTEEN, "settings": ARENA}, {"batches": 2, "settings": ARENA})),
    "settings of reductions": (2, (check_divide_factor, check_own_communication, check_refusals)),
    "overlap": (
        2,
        (*list_checks(check_overlap, TIED, {"settings": OFFLOAD}), partial(check_peak_in_a_reduction, settings=OVERLAP)),
    ),
    "sums": (2, (check_sums, check_sums_of_a_repeated_unit, check_changes_between_passes, check_sums_over_budget)),
    "arena of a hybrid mesh": (4, list_checks(check_bits, {"hybrid": True, "settings": ARENA})),
    "overlap in half precision": (2, list_checks(check_overlap, ON_HALF, ON_SIXTEEN, {"batches": 2})),
    "overlap on three processes": (3, list_checks(check_overlap, UNEVEN)),
    "overlap in a hybrid mesh": (4, list_checks(check_overlap, {"hybrid": True}, {"hybrid": True, **ON_SIXTEEN})),
    "sums in half precision and of some units": (
        2,
        list_checks(check_sums, ON_HALF, ON_CAST, ON_SIXTEEN, TIED, {"together": False}, {"settings": OVERLAP}),
    ),
    "sums on three processes": (3, list_checks(check_sums, UNEVEN, {**UNEVEN, **ON_HALF})),
    "least budget": (2, (check_least,)),
    "half precision": (2, list_checks(check_bits, ON_HALF, ON_CAST, ON_SIXTEEN)),
    "groups, ignored parameters and accumulation": (
        2,
        (
            *list_checks(check_bits, {"grouped": True}, {"ignored": True}, {"batches": 2}),
            *(check_earlier_gradients, check_options_of_steps),
        ),
    ),
    "uneven sizes": (3, list_checks(check_bits, UNEVEN, {"model": {"vocabulary": 97, "tied": True}}, {**UNEVEN, **ON_HALF})),
    "hybrid mesh": (
        4,
        (
            *list_checks(check_bits, {"hybrid": True}, {"hybrid": True, **ON_HALF}, {"hybrid": True, **ON_SIXTEEN}),
            # With 2, the only factor that gloo has.
            partial(check_divide_factor, factors=(2.0,), only_sums=False, hybrid=True),
            check_refusals_of_meshes,
        ),
    ),
}


@pytest.mark.parametrize("name", slow_except(CHECKS, "bits and memory", "arena", "settings of reductions", "overlap", "sums"))
def test_processes_train_as_fsdp2(name: str, tmp_path: Path) -> None:
    if "arena" in name and shutil.which("g++") is None:
        pytest.skip("the allocator is compiled with g++")
    on_processes(*CHECKS[name], tmp_path)


@pytest.mark.slow
def test_checkpoints_clipping_and_evaluation_between_steps(tmp_path: Path) -> None:
    on_processes(2, (partial(check_around_steps, folder=tmp_path),), tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads the memory of the process from /proc")
def test_planning_takes_no_more_than_the_budget(tmp_path: Path) -> None:
    on_processes(2, (check_memory_of_planning,), tmp_path)


def test_a_collective_is_waited_for_until_its_buffer_is_free() -> None:
    held: list[Tensor] = []

    def issue(view: Tensor) -> list[None]:
        held.append(view)
        threading.Timer(0.2, held.clear).start()  # as a thread of gloo does, after the end of a collective
        return []

    run_on_buffer(torch.zeros(4), issue)
    assert not held


def leave_alone(rank: int, *, how: str, settings: dict[str, Any]) -> None:
    """Rank 1 fails in its loss and stays, or ends: the others do not wait for it."""
    model, (x, y) = shard(Net()), make_batch(rank)
    step = planner.compile(model, compute_loss, (x, y), budget="100%", **settings)
    step(x, y).backward()
    model.zero_grad()
    begun, store = time.monotonic(), get_default_store()
    if rank != 1:
        said = {
            "ends": "a process that trains with this one has ended",
            "loss": r"^rank 1: IndexError: Target \d+ is out of bounds",
        }
        with pytest.raises(PlannerError, match=said[how]) as raised:
            step(x, y).backward()
        assert str(raised.value).count("waited for") == (how != "ends")
        assert time.monotonic() - begun < 7
        begun, later = time.monotonic(), dist.all_reduce(torch.ones(1), async_op=True)
        with tell_failures(), pytest.raises(PlannerError, match=re.escape(str(raised.value))):
            wait_for_others(later)
        assert time.monotonic() - begun < 1.9  # what was issued after it is not waited for
        assert store.get(failures._key).decode() == str(raised.value)  # as others hear it
        store.set(f"ended {rank}", "")
    elif how != "ends":
        with pytest.raises(IndexError):
            step(x, y + 96)
        store.wait([f"ended {other}" for other in range(dist.get_world_size()) if other != 1])
    os._exit(0)  # the group is of no more use


def fail_to_plan(rank: int) -> None:
    """Rank 1 has no memory for what it does alone while all plan, and stays: rank 0 hears of it."""
    model, batch, store = shard(Net()), make_batch(rank), get_default_store()
    with pytest.MonkeyPatch.context() as patch:
        if rank:
            patch.setattr(Compiler, "_make_executor", lambda *_: bytearray(1 << 62))
        said = "^out of memory while rehearsing" if rank else "^rank 1: OutOfMemoryError: .* waited for that one"
        with pytest.raises(PlannerError, match=said):
            planner.compile(model, compute_loss, batch, budget="100%", **SETTINGS)
    if rank:
        store.wait(["heard"])
    else:
        store.set("heard", "")
    os._exit(0)  # the group is of no more use


def test_a_process_that_fails_to_plan_is_not_waited_for(tmp_path: Path) -> None:
    on_processes(2, (fail_to_plan,), tmp_path)


def stop_alone(rank: int, *, when: str, settings: dict[str, Any]) -> None:
    """Rank 1 is stopped by a signal: the others say so, in a step or between steps, though rank 1 tells nothing."""
    model, batch = shard(Net()), make_batch(rank)
    step = planner.compile(model, compute_loss, batch, budget="100%", **settings)
    step(*batch).backward()
    model.zero_grad()
    processes = [None] * dist.get_world_size()
    dist.all_gather_object(processes, os.getpid())
    run = {"between": lambda: unwrap(model).ranks.gather(rank), "forward": lambda: step(*batch)}
    if when == "backward":
        run[when] = step(*batch).backward
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        begun = time.monotonic()
        with pytest.raises(PlannerError, match=r"^rank 1 \(process \d+\) is stopped, and this process has waited for it"):
            run[when]()
        assert time.monotonic() - begun < 10
        os.kill(processes[1], signal.SIGCONT)
    os._exit(0)  # the group is of no more use


@pytest.mark.parametrize(
    ("when", "settings"),
    [
        ("forward", OVERLAP),
        *slow(("backward", OVERLAP), ("between", OVERLAP), ("forward", SETTINGS), ("backward", SETTINGS)),
    ],
)
def test_a_process_that_is_stopped_is_not_waited_for(when: str, settings: dict[str, Any], tmp_path: Path) -> None:
    on_processes(2, (partial(stop_alone, when=when, settings=settings),), tmp_path)


@pytest.mark.parametrize(
    ("how", "settings"), [("ends", SETTINGS), ("loss", OVERLAP), *slow(("ends", OVERLAP), ("loss", SETTINGS))]
)
def test_a_process_that_fails_or_ends_is_not_waited_for(how: str, settings: dict[str, Any], tmp_path: Path) -> None:
    on_processes(2, (partial(leave_alone, how=how, settings=settings),), tmp_path)


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
