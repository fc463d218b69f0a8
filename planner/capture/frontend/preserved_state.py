"""Context managers that restore everything a training step changes: tensors, gradients, random states, Python objects."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from planner.capture.frontend.python_state import PythonState
from planner.capture.frontend.random_states import preserve_random_states
from planner.capture.rewrites.outputs import storage, tensors_in
from planner.capture.signature import Batch, call, leaves
from planner.torch_private.core import FakeTensor, TorchDispatchMode, nn_module, preserve_version_counter

_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


@contextmanager
def preserve_training_state(step: nn.Module, batch: Batch, *, written: Iterable[torch.Tensor] = ()) -> Iterator[None]:
    """Restore all at the end, after errors too: tensors, gradients, random states, and the content of Python objects.

    Inside, hooks of parameters and of tensors of the batch are disabled: an optimizer may step there. Hooks of modules stay,
    since they may be part of what is computed.

    Args:
        step: a model, or a ``TrainingStep``, whose loss function is followed as well.
        batch: the arguments of the step.
        written: tensors that the step writes, apart from buffers, the batch, and other tensors that modules hold.
    """
    tensors = (*step.parameters(), *tensors_in(leaves(batch)))
    with preserve_state(step, batch, written=written), ExitStack() as stack:
        for tensor in {id(t): t for t in tensors if t.is_leaf}.values():
            stack.callback(setattr, tensor, "grad", tensor.grad)
            for name in _HOOKS:
                if hooks := getattr(tensor, name):
                    stack.callback(setattr, tensor, name, hooks)
                    setattr(tensor, name, None)
        yield


@contextmanager
def preserve_state(step: nn.Module, batch: Batch, *, written: Iterable[torch.Tensor] = ()) -> Iterator[None]:
    """Do as ``preserve_training_state`` where no backward pass runs: gradients are not restored, hooks stay in place."""
    state = PythonState(_roots(step, batch))
    with ExitStack() as stack:
        stack.callback(state.restore)
        stack.enter_context(_preserve_tensors(step, batch, state, written))
        yield


def make_first_call(step: nn.Module, batch: Batch) -> Callable[[], None] | None:
    """Call `step` without gradients, and keep the Python values that its first call sets: hooks, caches, lazy attributes.

    Values that a second call changes too, such as counters, are restored, as are tensors and random states.

    Returns:
        A function that restores what was kept; None if nothing was.
    """
    before = PythonState(_roots(step, batch))
    with torch.no_grad(), _preserve_tensors(step, batch, before), UndoWrites():
        try:
            call(step, batch)
            after_first = PythonState(_roots(step, batch))
            with _preserve_tensors(step, batch, after_first), UndoWrites():
                call(step, batch)
        except BaseException:
            before.restore()
            raise
        return before.restore if before.keep_first_call(after_first) else None


def _roots(step: nn.Module, batch: Batch) -> list[object]:
    """Return the objects whose Python values a step may change: its own, and the hooks on all modules."""
    return [step, batch, *(getattr(nn_module, name) for name in vars(nn_module) if name.startswith("_global_"))]


@contextmanager
def _preserve_tensors(step: nn.Module, batch: Batch, state: PythonState, written: Iterable[torch.Tensor] = ()) -> Iterator[None]:
    """Restore tensors and random states, with those of the generators in `state`."""
    held = (value for module in step.modules() for value in vars(module).values() if isinstance(value, torch.Tensor))
    tensors = {id(t): t for t in (*step.buffers(), *held, *tensors_in(leaves(batch)), *written)}.values()
    with ExitStack() as stack:
        for generator in state.generators:
            stack.callback(generator.set_state, generator.get_state())
        for tensor in tensors:
            if not isinstance(tensor, FakeTensor):
                stack.enter_context(preserve_tensor(tensor))
        gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
        stack.enter_context(preserve_random_states(gpus))
        yield


class UndoWrites(TorchDispatchMode):
    """A mode that undoes the writes into tensors that existed before it was entered.

    Enter it inside ``preserve_training_state``: some kernels do not declare that they write to buffers, and restoring those is
    a write itself.

    Attributes:
        written: the tensors that were written; for each storage the first one.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.written: list[torch.Tensor] = []
        self._skipped: set[int] = set()  # storages that were made inside, or are preserved already
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
        self._skipped |= _storages(returned).keys() - given.keys()
        return returned

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        self._stack.close()

    def _keep(self, value: object) -> None:
        for identity, tensor in _storages(value).items():
            if identity not in self._skipped:
                self._skipped.add(identity)
                self.written.append(tensor)
                whole = tensor.new_empty(0).set_(tensor.untyped_storage())
                self._stack.enter_context(preserve_tensor(whole, tensor))


def _storages(values: object) -> dict[int, torch.Tensor]:
    """Return the storages of the tensors in `values`, each with a tensor that lies in it."""
    return {storage(tensor): tensor for tensor in tensors_in(values) if tensor.layout is torch.strided}


@contextmanager
def preserve_tensor(tensor: torch.Tensor, view: torch.Tensor | None = None) -> Iterator[None]:
    """Restore `tensor` at the end: its values, requires_grad, and the version counter of it (or of its `view`) in autograd.

    The copy of what is on a GPU is in the host's memory: the device may have none left besides what the step takes. With `view`,
    whose whole storage is `tensor`, an op is about to write it, and the copy is made where the op runs.
    """
    place = torch.device("cpu") if tensor.is_cuda and view is None else tensor.device
    counted = tensor if view is None else view
    before = tensor.detach().to(place, copy=True)
    versioned = nullcontext() if counted.is_inference() else preserve_version_counter(counted)
    trained = tensor.requires_grad
    try:
        yield
    finally:
        with torch.no_grad(), versioned:
            if not has_same_values(tensor.detach().to(place), before):
                tensor.copy_(before)
        if tensor.is_leaf and tensor.requires_grad is not trained:
            tensor.requires_grad_(trained)


def has_same_values(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return True if both tensors have the same shape, type and values; NaN equals NaN."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    a, b = (x.to_dense() if x.layout is not torch.strided else x for x in (a, b))
    if torch.equal(a, b):
        return True
    numbers = a.is_floating_point() or a.is_complex()
    return numbers and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)
