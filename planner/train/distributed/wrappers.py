"""Wrappers of models for several processes: which module is captured, what memory counts, and how a step is called.

Under DDP gradients are averaged by the wrapper's own hooks; under FSDP2 the collectives of each unit are ops of the plan, and the
wrapper's hooks do not run in a step.

Known weaknesses: the planned step is one node of autograd, so DDP gets all gradients at its end and sends none of them during the
backward pass; and FSDP2's collectives overlap with the computation only with the option ``overlap``.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from planner.capture.lowering.lower import Capture
from planner.capture.signature import Batch
from planner.capture.step import LossFn, check_module
from planner.capture.workload.models import Workload
from planner.graphs.errors import TraceError
from planner.graphs.ir import Kind
from planner.graphs.options.gather import CollectiveCost
from planner.measure.tracing import capture_step
from planner.runtime.earlier_gradients import BUCKETS
from planner.runtime.executor import Executor
from planner.runtime.sharding import Unsharded
from planner.runtime.transfers.channels import HostChannels
from planner.settings.plan import PlanSettings
from planner.train.distributed.failures import begin_step, tell_failures
from planner.train.distributed.gathers import Collective, add_units, measure_time, set_state_of_shards
from planner.train.distributed.ranks import ALONE, Ranks, SingleProcess
from planner.train.distributed.units import (
    Sharding,
    UnitPasses,
    describe_synchronization,
    get_process_group,
    list_units,
    put_parameters,
)

if TYPE_CHECKING:
    from planner.capture.kernels.variants import CompileVariant  # importing Inductor takes a second


class Unwrapped:
    """A model without a wrapper.

    Attributes:
        module: the module that is captured, and whose parameters are trained.
        ranks: the processes that must have the same plan.
        together: those that plan and run each step together, because it has collectives.
        sharding: how its parameters are sharded.
    """

    def __init__(self, module: nn.Module, ranks: SingleProcess) -> None:
        self.module = module
        self.ranks = ranks
        self.together = ALONE
        self.sharding = Unsharded()
        self._channels: HostChannels | None = None

    @property
    def can_replan(self) -> bool:
        """True if it may be planned again between steps: its processes agree before each step, or there is one."""
        return self.together is self.ranks

    def capture_on_all(self, capture: Callable[[], Capture]) -> Capture:
        """Return the result of `capture` on this process; raise on all if it fails on one."""
        return self.ranks.run_each(capture)

    @property
    def mode(self) -> Hashable:
        """The treatment of gradients, which decides on the ops of a step; None if it is the same in each."""
        return None

    @property
    def sums_gradients(self) -> bool:
        """True if a step adds whole gradients to sums of the wrapper."""
        return False

    def reshard(self) -> None:
        """Free what the wrapper has gathered outside of steps."""

    def create_channels(self, host_bytes: int | None) -> HostChannels:
        """Return the channels to the host for all plans of this wrapper, with the `host_bytes` of the first call."""
        if self._channels is None:
            self._channels = HostChannels(next(self.module.parameters()).device, host_bytes)
        return self._channels

    def open(self) -> AbstractContextManager[None]:
        """Make the module's parameters plain tensors without hooks of the wrapper; all ranks enter it together."""
        return nullcontext()

    def capture(
        self, loss_fn: LossFn | None, batch: Batch, settings: PlanSettings, variant: "CompileVariant | None" = None
    ) -> Capture:
        """Return the captured step, with all static memory of this process. Called inside ``open``.

        Args:
            loss_fn, batch, settings, variant: as in ``planner.measure.tracing.capture_step``.
        """
        return capture_step(Workload(self.module, loss_fn, batch), settings, variant=variant)

    def add_units(self, captured: Capture, settings: PlanSettings) -> Capture:
        """Return the profiled step `captured` with the collectives of the wrapper."""
        del settings
        return captured

    def wrap(self, executor: Executor) -> Callable[..., Any]:
        """Return `executor` as a function for the training loop."""
        return executor


class Replicated(Unwrapped):
    """A model in ``DistributedDataParallel``, or a `step` on it."""

    def __init__(self, model: DistributedDataParallel, step: nn.Module | None = None) -> None:
        if model.mixed_precision is not None:
            raise TraceError("DistributedDataParallel with mixed_precision= is not planned: use torch.autocast around the step")
        # Assigned first, so that it is freed before the group in `ranks`: DDP's reducer holds the group too, and as its last
        # owner would join gloo's threads with the GIL held, for which a thread may wait that frees objects of the backward pass.
        self._model = model
        super().__init__(model.module if step is None else step, Ranks(model.process_group))

    def open(self) -> AbstractContextManager[None]:
        """Replace the parameters by others on the same memory, whose gradients the wrapper's hooks do not see or wait for."""
        others = {p: nn.Parameter(p.detach(), requires_grad=p.requires_grad) for p in self.module.parameters()}
        tables = [owner._parameters for owner in self.module.modules()]
        return put_parameters([(table, name, others[p]) for table in tables for name, p in table.items() if p is not None])

    def capture(
        self, loss_fn: LossFn | None, batch: Batch, settings: PlanSettings, variant: "CompileVariant | None" = None
    ) -> Capture:
        """Return the captured step, with the buckets in which gradients are sent; earlier gradients may lie in them."""
        in_buckets = self._model.gradient_as_bucket_view
        accumulate = settings.accumulate and not in_buckets
        captured = super().capture(loss_fn, batch, replace(settings, accumulate=accumulate), variant)
        name = "gradients_in_buckets" if in_buckets else BUCKETS
        graph = captured.graph.holding(Kind.ACCUMULATED_GRADIENT, name, _count_trained_bytes(self.module))
        return replace(captured, graph=graph)

    def wrap(self, executor: Executor) -> Callable[..., Any]:
        """Return the wrapper's own forward pass, around the planned one."""
        planned = _Proxy(self.module, executor)

        def step(*args: object, **kwargs: object) -> Any:
            module, self._model.module = self._model.module, planned
            try:
                return self._model(*args, **kwargs)
            finally:
                self._model.module = module

        return step


class InReplicated(Replicated):
    """A step inside the forward pass of ``DistributedDataParallel``."""

    def wrap(self, executor: Executor) -> Callable[..., Any]:
        """Return `executor` itself: the wrapper's forward pass surrounds it."""
        return executor


class Sharded(Unwrapped):
    """A model under ``fully_shard`` (FSDP2). Its units are gathered and reduced by ops of the plan."""

    def __init__(self, model: nn.Module) -> None:
        self._modules: list[FSDPModule] = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self.reshard()  # the outermost unit stays gathered after a forward pass
        meshes = {p.device_mesh for p in model.parameters() if isinstance(p, DTensor)}
        if len(meshes) != 1 or (mesh := meshes.pop()).ndim > 2:
            raise TraceError(
                "the model is not sharded by fully_shard over one mesh of one dimension, or of two (replicate, shard): the only "
                "kinds of sharding that are planned"
            )
        super().__init__(model, Ranks(get_process_group(mesh)))
        self.together = self.ranks
        self._units = list_units(model)
        self.sharding = Sharding(model, self._units, self.ranks)
        self._costs: dict[object, CollectiveCost] = {}
        self._looks = True  # at masks of the batch

    @property
    def mode(self) -> Hashable:
        """The treatment of the gradients of each unit."""
        return describe_synchronization(self._units)

    @property
    def sums_gradients(self) -> bool:
        """True if gradients of a unit are added to a sum, as ``set_requires_gradient_sync`` says."""
        return any(unit.adds for unit in self._units)

    @contextmanager
    def open(self) -> Iterator[None]:
        """Leave the parameters sharded; reshard those that are gathered. A process that fails tells the others."""
        self.reshard()
        begin_step()
        with tell_failures():
            yield

    def capture(
        self, loss_fn: LossFn | None, batch: Batch, settings: PlanSettings, variant: "CompileVariant | None" = None
    ) -> Capture:
        """Return the captured step on whole parameters. Nothing is gathered."""
        settings = replace(settings, replan=settings.replan if self._looks else False)
        with self.sharding.enter_captured_state():
            return super().capture(loss_fn, batch, settings, variant)

    def capture_on_all(self, capture: Callable[[], Capture]) -> Capture:
        """Return the result of `capture`, which is the same step on all processes: they run the same collectives.

        Libraries look at masks of the batch, as in eager PyTorch, until the steps of the processes differ.

        Raises:
            TraceError: the steps differ; names the branch that processes take differently, if there is one.
        """
        captured = super().capture_on_all(capture)
        read = [(source.kind, source.name) for source in captured.program.sources]
        if not self.ranks.is_same((captured.graph.fingerprint, read)):
            if self._looks:
                self._looks = False
                return self.capture_on_all(capture)
            taken = () if captured.conditions is None else captured.conditions.describe()
            raise TraceError(_describe_difference(self.ranks.gather(taken)))
        return captured

    def add_units(self, captured: Capture, settings: PlanSettings) -> Capture:
        """Return `captured` with the collectives of the units, timed on the processes together."""
        shard_bytes = {p.name: p.shard_bytes for unit in self._units for p in unit.parameters}
        named = self.module.named_parameters()
        trained_bytes = [shard_bytes.get(name, p.nbytes) for name, p in named if p.requires_grad]
        captured = set_state_of_shards(captured, trained_bytes, settings)
        return add_units(captured, self._units, self._measure)

    def _measure(self, collective: Collective) -> CollectiveCost:
        """Return the cost of a collective; its time on rank 0 counts."""
        device = next(self.module.parameters()).device
        requests = collective.list_requests(device)
        key = type(collective), collective.packed, requests
        if key not in self._costs:
            seconds = self.ranks.gather(measure_time(collective, device))
            self._costs[key] = CollectiveCost(seconds[0], requests)
        return self._costs[key]

    def wrap(self, executor: Executor) -> Callable[..., Any]:
        """Return `executor` between two sharded states; without gradients FSDP2 evaluates by its own hooks."""
        executor.observe(UnitPasses(self._units))

        def step(*args: object, **kwargs: object) -> Any:
            if not torch.is_grad_enabled():
                return executor(*args, **kwargs)
            begin_step()
            with tell_failures():
                self.reshard()  # what an evaluation has gathered
                return executor(*args, **kwargs)

        return step

    def reshard(self) -> None:
        """Free the parameters that FSDP2 has gathered."""
        for module in self._modules:
            module.reshard()


def unwrap(model: nn.Module | Unwrapped) -> Unwrapped:
    """Return the wrapper of `model`; `model` itself if it is one.

    Raises:
        TraceError: it is no module, or has an unsupported wrapper; names the supported ones.
    """
    if isinstance(model, Unwrapped):
        return model
    check_module(model)
    if isinstance(model, DistributedDataParallel):
        return Replicated(model)
    if isinstance(model, FSDPModule):
        return Sharded(model)
    if isinstance(model, nn.DataParallel):
        raise TraceError("DataParallel is not planned: start a process for each device (torchrun), with DistributedDataParallel")
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        raise TraceError("FullyShardedDataParallel (FSDP1) is not planned: use fully_shard (FSDP2), or DistributedDataParallel")
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        wrapper = Sharded(model)  # after an evaluation some parameters are gathered until then
        if whole := [name for name, p in model.named_parameters() if not isinstance(p, DTensor)]:
            raise TraceError(
                f"parts of the model are sharded, but not the parameter {whole[0]}: call fully_shard(model) after its blocks"
            )
        return wrapper
    if any(isinstance(p, DTensor) for p in model.parameters()):
        raise TraceError("the parameters of the model are DTensors: plan the model before, or shard it with fully_shard")
    return Unwrapped(model, ALONE)


def _describe_difference(conditions: Sequence[Sequence[str]]) -> str:
    """Return the message that processes have captured different steps, from what branches on data gave on each."""
    same = "under fully_shard all processes run the same collectives"
    for given in zip(*conditions, strict=False):
        if len(set(given)) > 1:
            found = "; ".join(f"rank {rank}: {each}" for rank, each in enumerate(given))
            return (
                f"a branch on data is taken differently by the processes ({found}), and {same}: compute both sides and choose "
                "with torch.where, or branch on a number that all processes have"
            )
    return f"the steps of the processes differ, and {same}: give all of them the same model and batches of the same sizes"


class _Proxy(nn.Module):
    """A module with the parameters and buffers of another one, which wrappers look for, and another computation."""

    def __init__(self, module: nn.Module, compute: Callable[..., Any]) -> None:
        super().__init__()
        self._modules, self._parameters, self._buffers = module._modules, module._parameters, module._buffers
        self._compute = compute

    def forward(self, *args: object, **kwargs: object) -> Any:
        return self._compute(*args, **kwargs)


def _count_trained_bytes(module: nn.Module) -> int:
    return sum(p.nbytes for p in module.parameters() if p.requires_grad)
