"""Methods that offload saved tensors to the host by autograd's saved-tensor hooks, as PyTorch and torchtune do.

On the CPU, device and host share one memory: ``torch.autograd.graph.save_on_cpu`` moves nothing there, and torchtune's class is
for CUDA. Both are implemented with hooks that copy by ``runtime.transfers.channels``, as plans do: an offloaded tensor is
copied into memory that PyTorch's allocator does not count, and reloaded into memory that it counts when it is read. Peaks of the
device and the host thus mean the same as for a plan.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from planner.capture.step import LossFn, TrainingStep
from planner.measure.steps import Step
from planner.runtime.transfers.channels import HostChannels
from planner.runtime.transfers.host_memory import HostTensor
from planner.runtime.transfers.transfers import Transfer
from planner.solvers.baselines.sac import LISTS, SacRule
from planner.studies.baselines import Method, find_checkpointed_blocks, run_checkpointed, run_selectively
from planner.torch_private.core import current_autograd_node

_HOOKS = "respect_saved_tensors_hooks"
_THROUGH_HOOKS = {_HOOKS: True} if _HOOKS in signature(checkpoint).parameters else {}
_STASH, _LEAST_BYTES = 5, 1024  # values of torchtune's OffloadActivations


def list_offloading_methods(channels: HostChannels) -> list[Method]:
    """Return the methods, with copies by `channels`, which limit the host memory."""
    checkpointing = offload_checkpoints(channels), offload_checkpoints(channels, SacRule.LISTED)
    return [save_on_cpu(channels), *checkpointing, offload_activations(channels)]


def save_on_cpu(channels: HostChannels) -> Method:
    """Return the method of ``torch.autograd.graph.save_on_cpu``: all saved tensors and parameters, with synchronous copies."""
    return _build_method("save-on-cpu", channels, stash=0, least_bytes=0, parameters=True)


def offload_activations(channels: HostChannels) -> Method:
    """Return the method of torchtune's ``OffloadActivations``: saved tensors of 1024 bytes and more, without parameters.

    Offloads run concurrently with the computation. The last five tensors form a stash on the device, which is freed once a second
    node of the backward pass reads a saved tensor. All others are reloaded when they are read, as in torchtune: there CUDA's
    streams run ahead of the computation, while the CPU waits. A view of a parameter counts as one here.
    """
    return _build_method("offload-activations", channels, stash=_STASH, least_bytes=_LEAST_BYTES, parameters=False)


def offload_checkpoints(channels: HostChannels, rule: SacRule | None = None) -> Method:
    """Return ``save_on_cpu`` around each checkpointed block, as ``offload=True`` of Transformers' checkpointing does.

    The inputs of blocks go to the host. With a `rule` blocks are checkpointed selectively: what is saved in them goes to the host
    as well from torch 2.14 on (``respect_saved_tensors_hooks``); before, it bypasses hooks and stays on the device.
    """
    return Method(f"save-on-cpu {rule or 'checkpoint-blocks'}", partial(_prepare_blocks, channels, rule))


def _prepare_blocks(channels: HostChannels, rule: SacRule | None, model: nn.Module, loss_fn: LossFn | None) -> Step:
    return partial(_run_blocks, TrainingStep(model, loss_fn), find_checkpointed_blocks(model), channels, rule)


def _run_blocks(
    step: Step, modules: Sequence[nn.Module], channels: HostChannels, rule: SacRule | None, /, *args: object, **kwargs: object
) -> Any:
    run = partial(_run_hooked, _Hooks(channels, 0, 0, frozenset()), checkpoint)
    if rule is None:
        return run_checkpointed(step, modules, run, *args, **kwargs)
    return run_selectively(step, modules, partial(run, **_THROUGH_HOOKS), LISTS[rule], str(rule), *args, **kwargs)


def _run_hooked(hooks: "_Hooks", run: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    with saved_tensors_hooks(hooks.pack, hooks.unpack):
        return run(*args, **kwargs)


def _build_method(name: str, channels: HostChannels, *, stash: int, least_bytes: int, parameters: bool) -> Method:
    def prepare(model: nn.Module, loss_fn: LossFn | None) -> Step:
        step = TrainingStep(model, loss_fn)
        kept = frozenset() if parameters else frozenset(_get_storage(p) for p in (*model.parameters(), *model.buffers()))
        return lambda *args, **kwargs: _run_hooked(_Hooks(channels, stash, least_bytes, kept), step, *args, **kwargs)

    return Method(name, prepare)


@dataclass(slots=True)
class _Sent:
    """A saved tensor on the host, and on the device while it is in the stash, with its copy until that was waited for."""

    host: HostTensor
    here: torch.Tensor | None
    copy: Transfer | None


class _Hooks:
    """The saved-tensor hooks of one forward pass and its backward pass."""

    def __init__(self, channels: HostChannels, stash: int, least_bytes: int, kept: frozenset[int]) -> None:
        """Keep `stash` tensors on the device; do not offload those below `least_bytes` or with a storage in `kept`."""
        self._channels = channels
        self._stash: deque[_Sent] = deque()
        self._stash_size, self._least_bytes, self._kept = stash, least_bytes, kept
        self._first_reader: object = None

    def pack(self, tensor: torch.Tensor) -> "_Sent | torch.Tensor":
        """Offload `tensor`, and return its handle, which autograd saves in its place; `tensor` itself if it is small or kept."""
        if not tensor.nbytes or tensor.nbytes < self._least_bytes or _get_storage(tensor) in self._kept:
            return tensor
        with torch.no_grad():
            tensor = tensor.detach()
            if tensor.nbytes < tensor.untyped_storage().nbytes():
                tensor = tensor.clone()  # of a slice of a storage, only the slice is copied
        host, copy = self._channels.offload(tensor)
        sent = _Sent(host, tensor, copy)
        self._stash.append(sent)
        while len(self._stash) > self._stash_size:
            self._let_go(self._stash.popleft())
        return sent

    def unpack(self, saved: "_Sent | torch.Tensor") -> torch.Tensor:
        """Return the saved tensor for the node that reads it."""
        if isinstance(saved, torch.Tensor):
            return saved
        reader = current_autograd_node()
        if self._first_reader is None:
            self._first_reader = reader
        elif reader is not self._first_reader:
            while self._stash:
                self._let_go(self._stash.popleft())
        if saved.here is not None:
            return saved.here
        taken, copy = self._channels.reload(saved.host)
        return copy.wait_for_arrival(taken)

    def _let_go(self, sent: _Sent) -> None:
        if sent.copy is not None:
            sent.copy.finish()
        sent.here = sent.copy = None


def _get_storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
