"""Capturing and running a training step so that nothing of it stays."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from planner.capture.frontend.python_state import PythonState
from planner.capture.frontend.random_states import random_states_kept
from planner.capture.signature import Batch, leaves
from planner.torch_private.core import FakeTensor, TorchDispatchMode, nn_module, preserve_version_counter, pytree

_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


@contextmanager
def unchanged(step: nn.Module, batch: Batch, *, written: Iterable[torch.Tensor] = ()) -> Iterator[None]:
    """Afterwards all is as before, however it ends: tensors, gradients, random states, and what Python objects hold.

    Inside, no hook of a parameter or of a tensor of the batch acts: an optimizer may step there. Those of modules do, for
    they may be part of what is computed.

    Args:
        step: a model, or a ``TrainingStep``, whose loss function is looked through as well.
        batch: what it is called with.
        written: tensors that the step writes, besides buffers, the batch, and other tensors that modules hold.
    """
    tensors = (*step.parameters(), *_inputs(batch))
    with restored(step, batch, written=written), ExitStack() as stack:
        for tensor in {id(t): t for t in tensors if t.is_leaf}.values():
            stack.callback(setattr, tensor, "grad", tensor.grad)
            for name in _HOOKS:
                if hooks := getattr(tensor, name):
                    stack.callback(setattr, tensor, name, hooks)
                    setattr(tensor, name, None)
        yield


@contextmanager
def restored(step: nn.Module, batch: Batch, *, written: Iterable[torch.Tensor] = ()) -> Iterator[None]:
    """As ``unchanged``, where no backward pass is run: gradients are not looked after, and hooks are left in place."""
    hooks = [getattr(nn_module, name) for name in vars(nn_module) if name.startswith("_global_")]
    state = PythonState([step, batch, *hooks])
    held = (value for module in step.modules() for value in vars(module).values() if isinstance(value, torch.Tensor))
    tensors = {id(t): t for t in (*step.buffers(), *held, *_inputs(batch), *written)}.values()
    with ExitStack() as stack:
        stack.callback(state.restore)
        for generator in state.generators:
            stack.callback(generator.set_state, generator.get_state())
        for tensor in tensors:
            if not isinstance(tensor, FakeTensor):
                stack.enter_context(kept(tensor))
        gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
        stack.enter_context(random_states_kept(gpus))
        yield


class WritesUndone(TorchDispatchMode):
    """Inside, what is written into a tensor that was there before is undone at the end.

    Entered inside ``unchanged``: some kernels do not say that they write to buffers, and what puts those back is a write.

    Attributes:
        written: such tensors; for each storage the first that was written through.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.written: list[torch.Tensor] = []
        self._known: set[int] = set()  # storages that were made inside, or are kept already
        self._stack = ExitStack()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        given = _storages((args, named))
        if func._schema.is_mutable:
            given_as = {**dict(zip((a.name for a in func._schema.arguments), args, strict=False)), **named}
            for argument in func._schema.arguments:
                if argument.is_write:
                    self._keep(given_as.get(argument.name))
        returned = func(*args, **named)
        self._known |= _storages(returned).keys() - given.keys()
        return returned

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        self._stack.close()

    def _keep(self, value: object) -> None:
        for storage, tensor in _storages(value).items():
            if storage not in self._known:
                self._known.add(storage)
                self.written.append(tensor)
                whole = tensor.new_empty(0).set_(tensor.untyped_storage())
                self._stack.enter_context(kept(whole, tensor))


def _inputs(batch: Batch) -> list[torch.Tensor]:
    return [leaf for leaf in leaves(batch) if isinstance(leaf, torch.Tensor)]


def _storages(values: object) -> dict[int, torch.Tensor]:
    """The storages of the tensors in `values`, each with a tensor that lies in it."""
    found = (leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided)
    return {tensor.untyped_storage()._cdata: tensor for tensor in found}


@contextmanager
def kept(tensor: torch.Tensor, view: torch.Tensor | None = None) -> Iterator[None]:
    """Afterwards `tensor` has its present values, and it (or `view` of it) the version that autograd knows them by."""
    before, known = tensor.detach().clone(), tensor if view is None else view
    versioned = nullcontext() if known.is_inference() else preserve_version_counter(known)
    try:
        yield
    finally:
        with torch.no_grad(), versioned:
            if not same(tensor, before):
                tensor.copy_(before)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether both hold the same values; NaN is the same as NaN: a diverged step is still the same step."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    a, b = (x.to_dense() if x.layout is not torch.strided else x for x in (a, b))
    if torch.equal(a, b):
        return True
    numbers = a.is_floating_point() or a.is_complex()
    return numbers and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)
