"""Wrappers of models for several processes: which module is captured, what memory counts, and how a step is called.

Gradients are averaged, and parameters gathered, by the wrapper's own hooks; a planned step runs between them.

Known weaknesses: the planned step is one node of autograd, so the wrapper gets all gradients at its end and sends none of them
during the backward pass; and under FSDP2 all parameters are gathered before the step, so that its peak contains the whole model.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from graphs.errors import MismatchError, TraceError
from graphs.ir import Graph, Kind
from planner.capture.lowering.lower import Capture
from planner.capture.signature import Batch
from planner.capture.step import LossFn, check_module
from planner.capture.workload.models import Workload
from planner.measure.tracing import capture_step
from planner.runtime.earlier_gradients import BUCKETS, SHARDS, TO_SEND
from planner.runtime.executor import Executor
from planner.runtime.transfers.channels import HostChannels
from planner.settings.plan import PlanSettings
from planner.train.distributed.ranks import Ranks, SingleProcess

if TYPE_CHECKING:
    from planner.capture.kernels.variants import CompileVariant  # importing Inductor takes a second


class Unwrapped:
    """A model without a wrapper.

    Attributes:
        module: the module that is captured, and whose parameters are trained.
        ranks: the processes that must have the same plan.
    """

    def __init__(self, module: nn.Module, ranks: SingleProcess) -> None:
        self.module = module
        self.ranks = ranks
        self._channels: HostChannels | None = None

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

    def add_slab_gradients(self, captured: Capture) -> Capture:
        """Return `captured` with the gradients that the wrapper holds in addition to their room in the slab."""
        return captured

    def wrap(self, executor: Executor) -> Callable[..., Any]:
        """Return `executor` as a function for the training loop."""
        return executor


class Replicated(Unwrapped):
    """A model in ``DistributedDataParallel``."""

    def __init__(self, model: DistributedDataParallel) -> None:
        if model.mixed_precision is not None:
            raise TraceError("DistributedDataParallel with mixed_precision= is not planned: use torch.autocast around the step")
        # Assigned first, so that it is freed before the group in `ranks`: DDP's reducer holds the group too, and as its last
        # owner would join gloo's threads with the GIL held, for which a thread may wait that frees objects of the backward pass.
        self._model = model
        super().__init__(model.module, Ranks(model.process_group))

    def open(self) -> AbstractContextManager[None]:
        """Replace the parameters, so that the wrapper does not wait for their gradients."""
        return _replace_parameters(self.module)

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
            self._model.module = planned
            try:
                return self._model(*args, **kwargs)
            finally:
                self._model.module = self.module

        return step


class InReplicated(Replicated):
    """A step inside the forward pass of ``DistributedDataParallel``."""

    def __init__(self, step: nn.Module, model: DistributedDataParallel) -> None:
        super().__init__(model)
        self.module = step

    def wrap(self, executor: Executor) -> Callable[..., Any]:
        """Return `executor` itself: the wrapper's forward pass surrounds it."""
        return executor


class Sharded(Unwrapped):
    """A model under ``fully_shard`` (FSDP2). All parameters are gathered before the step and resharded after it."""

    def __init__(self, model: FSDPModule) -> None:
        assert isinstance(model, nn.Module)
        self._units: list[FSDPModule] = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self._reshard()  # the outermost unit stays gathered after a forward pass
        meshes = {p.device_mesh for p in model.parameters() if isinstance(p, DTensor)}
        if len(meshes) != 1 or (mesh := meshes.pop()).ndim != 1:
            raise TraceError(
                "the model is not sharded by fully_shard over one mesh of one dimension, the only kind of sharding that is "
                "planned"
            )
        if any(unit._get_fsdp_state()._mp_policy.param_dtype is not None for unit in self._units):
            raise TraceError("fully_shard with a mixed precision policy is not planned: use torch.autocast around the step")
        super().__init__(model, Ranks(mesh.get_group()))
        self._shard_bytes, self._trained_shard_bytes = _count_local_bytes(model.parameters()), _count_trained_bytes(model)

    @contextmanager
    def open(self) -> Iterator[None]:
        """Gather the parameters inside the context, and reshard them at its end."""
        self._gather()
        try:
            with _remove_hooks(self._units):
                yield
        finally:
            self._reshard()

    def capture(
        self, loss_fn: LossFn | None, batch: Batch, settings: PlanSettings, variant: "CompileVariant | None" = None
    ) -> Capture:
        """Return the captured step on whole parameters, with this rank's shards, and the optimizer state of the shards only.

        Earlier gradients are whole until they are sent (``set_requires_gradient_sync(False)``).
        """
        whole_bytes, unit_bytes = _count_trained_bytes(self.module), max(_count_own_bytes(unit) for unit in self._units)
        captured = super().capture(loss_fn, batch, settings, variant)
        if isinstance(settings.optimizer, str):  # a measured state is of the shards
            captured = _shrink(captured, self._trained_shard_bytes / max(1, whole_bytes))
        graph = captured.graph.holding(Kind.PARAMETER, "parameter_shards", self._shard_bytes)
        return replace(captured, graph=graph.holding(Kind.ACCUMULATED_GRADIENT, TO_SEND, unit_bytes))

    def add_slab_gradients(self, captured: Capture) -> Capture:
        """Return `captured` with this rank's shards of the gradients."""
        graph = captured.graph.holding(Kind.ACCUMULATED_GRADIENT, SHARDS, self._trained_shard_bytes)
        return replace(captured, graph=graph)

    def wrap(self, executor: Executor) -> Callable[..., Any]:
        """Return the forward pass of the outermost module, with its hooks, around the planned one."""
        numbers: list[object] = []  # those of the present step

        def forward(*args: object, **kwargs: object) -> Any:
            self._gather()
            return executor.run([*executor.signature.flatten(*args, **kwargs), *numbers])

        def step(*args: object, **kwargs: object) -> Any:
            if not torch.is_grad_enabled():
                return executor.evaluate(*args, **kwargs)
            # Checked on gathered parameters, as captured; an error inside the wrapper would leave its hooks half done.
            self._gather()
            try:
                with _remove_hooks(self._units):
                    numbers[:] = executor.check(*args, **kwargs)[len(executor.signature.names) :]
            except MismatchError:
                self._reshard()
                raise
            self.module.forward = forward
            try:
                return self.module(*args, **kwargs)
            finally:
                del self.module.forward

        return step

    def _gather(self) -> None:
        for unit in self._units:
            unit.unshard()

    def _reshard(self) -> None:
        for unit in self._units:
            unit.reshard()


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
        raise TraceError("parts of the model are sharded, but not the model itself: call fully_shard(model) after its blocks")
    if any(isinstance(p, DTensor) for p in model.parameters()):
        raise TraceError("the parameters of the model are DTensors: plan the model before, or shard it with fully_shard")
    return Unwrapped(model, SingleProcess())


class _Proxy(nn.Module):
    """A module with the parameters and buffers of another one, which wrappers look for, and another computation."""

    def __init__(self, module: nn.Module, compute: Callable[..., Any]) -> None:
        super().__init__()
        self._modules, self._parameters, self._buffers = module._modules, module._parameters, module._buffers
        self._compute = compute

    def forward(self, *args: object, **kwargs: object) -> Any:
        return self._compute(*args, **kwargs)


@contextmanager
def _replace_parameters(module: nn.Module) -> Iterator[None]:
    """Replace the parameters by others on the same memory, so that hooks on the real ones see no gradients."""
    places = [(owner, name, p) for owner in module.modules() for name, p in owner._parameters.items() if p is not None]
    others = {p: nn.Parameter(p.detach(), requires_grad=p.requires_grad) for _, _, p in places}
    try:
        for owner, name, parameter in places:
            owner._parameters[name] = others[parameter]
        yield
    finally:
        for owner, name, parameter in places:
            owner._parameters[name] = parameter


@contextmanager
def _remove_hooks(units: Sequence[FSDPModule]) -> Iterator[None]:
    """Remove the hooks that gather parameters when a unit is called, so that it can be captured."""
    tables = [hooks for unit in units for hooks in (unit._forward_hooks, unit._forward_pre_hooks)]  # type: ignore[attr-defined]
    before = [dict(hooks) for hooks in tables]
    try:
        for hooks in tables:
            for key in [key for key, hook in hooks.items() if hook.__module__.startswith("torch.distributed.fsdp")]:
                del hooks[key]
        yield
    finally:
        for hooks, all_hooks in zip(tables, before, strict=True):
            hooks.clear()
            hooks.update(all_hooks)


def _shrink(captured: Capture, share: float) -> Capture:
    """Return `captured` with this share of the optimizer state."""
    graph = captured.graph
    tensors = tuple(
        replace(t, size_bytes=round(t.size_bytes * share)) if t.kind is Kind.OPTIMIZER_STATE else t for t in graph.tensors
    )
    return replace(captured, graph=Graph(graph.ops, tensors, graph.kept, graph.provenance))


def _count_trained_bytes(module: nn.Module) -> int:
    return _count_local_bytes(p for p in module.parameters() if p.requires_grad)


def _count_own_bytes(unit: FSDPModule) -> int:
    """Return the bytes of the trained parameters that `unit` gathers itself."""
    assert isinstance(unit, nn.Module)
    inner = {p for module in list(unit.modules())[1:] if isinstance(module, FSDPModule) for p in module.parameters()}
    return _count_local_bytes(p for p in unit.parameters() if p.requires_grad and p not in inner)


def _count_local_bytes(parameters: Iterable[nn.Parameter]) -> int:
    """Return the bytes of `parameters` that this process holds."""
    local = (p.to_local() if isinstance(p, DTensor) else p for p in parameters)
    return sum(tensor.numel() * tensor.element_size() for tensor in local)
