"""Context managers that restore everything a training step changes: tensors, gradients, random states, Python objects."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from planner.capture.frontend.fake_execution import mute_output
from planner.capture.frontend.python_state import CreatedObjects, PythonState
from planner.capture.frontend.random_states import RandomStates, preserve_random_states
from planner.capture.rewrites.outputs import get_storage, list_tensors
from planner.capture.signature import Batch, call, list_leaves
from planner.torch_private.core import FakeTensor, TorchDispatchMode, list_names_of_parts, nn_module, preserve_version_counter

_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


@contextmanager
def preserve_training_state(
    step: nn.Module, batch: Batch, *, written: Iterable[torch.Tensor] = ()
) -> Iterator[Callable[[], None]]:
    """Restore all at the end, after errors too: tensors, gradients, random states, and the content of Python objects.

    It yields the function that restores Python objects, for several steps inside.

    What the step prints is dropped. Inside, hooks of parameters and of tensors of the batch are disabled: an optimizer may step
    there. Hooks of modules stay, since they may be part of what is computed.

    Args:
        step: a model, or a ``TrainingStep``, whose loss function is followed as well.
        batch: the arguments of the step.
        written: tensors that the step writes, apart from buffers, the batch, and other tensors that modules hold.
    """
    tensors = (*step.parameters(), *list_tensors(list_leaves(batch)))
    with preserve_state(step, batch, written=written) as restore, mute_output(), ExitStack() as stack:
        for tensor in {id(t): t for t in tensors if t.is_leaf}.values():
            stack.callback(setattr, tensor, "grad", tensor.grad)
            for name in _HOOKS:
                if hooks := getattr(tensor, name):
                    stack.callback(setattr, tensor, name, hooks)
                    setattr(tensor, name, None)
        yield restore


@contextmanager
def preserve_state(step: nn.Module, batch: Batch, *, written: Iterable[torch.Tensor] = ()) -> Iterator[Callable[[], None]]:
    """Do as ``preserve_training_state`` where no backward pass runs: gradients are not restored, hooks stay in place."""
    state = PythonState(_list_roots(step, batch))
    with ExitStack() as stack:
        stack.callback(state.restore)
        stack.enter_context(_preserve_tensors(step, batch, state, written))
        yield state.restore


def may_advance_iterators(step: nn.Module, batch: Batch) -> bool:
    """Return True if `step` holds an iterator, which no call of `step` can be undone for."""
    return bool(PythonState(_list_roots(step, batch)).iterators)


def initialize_lazy_layers(step: nn.Module, batch: Batch) -> None:
    """Call `step` for the first time if its layers take their sizes from `batch` (``nn.LazyLinear``); not on fake tensors."""
    tensors = (*step.parameters(), *step.buffers())
    if any(map(is_lazy, tensors)) and not any(isinstance(leaf, FakeTensor) for leaf in list_leaves(batch)):
        make_first_call(step, batch)


def make_first_call(step: nn.Module, batch: Batch, made: Collection[str] = ()) -> Callable[[], None] | None:
    """Call `step` without gradients, and keep what its first call sets: hooks, caches, lazy layers, values set from the data.

    What a second call changes too, such as counters and running statistics, is restored, and so are random states, unless the
    first call draws numbers that the second does not: those of parameters, which must not be drawn again.

    Args:
        made: attributes that are kept if each call sets them to a tensor, as the step may ask whether they are one.

    Returns:
        A function that restores what was kept, except lazy layers; None if nothing was, or if an iterator might advance.
    """
    before = PythonState(_list_roots(step, batch))
    lazy = [module for module in step.modules() if any(map(is_lazy, _iterate_own_tensors(module)))]
    if before.iterators and not lazy:
        return None
    with torch.no_grad(), ExitStack() as stack:
        stack.enter_context(mute_output())
        stack.enter_context(_preserve_tensors(step, batch, before))
        begun = RandomStates(_list_gpus())
        first = stack.enter_context(UndoWrites())
        try:
            with _preserve_lazy_buffers(lazy, stack), CreatedObjects() as created:
                call(step, batch)
            before.add(created)
            drawn, after_first = RandomStates(_list_gpus()), PythonState(_list_roots(step, batch))
            settled = [(tensor, tensor.clone()) for tensor in (*_iterate_held_tensors(step), *map(_view_whole, first.written))]
            begun.restore()
            with _preserve_tensors(step, batch, after_first), UndoWrites():
                call(step, batch)
                settled = [(tensor, value) for tensor, value in settled if has_same_values(tensor, value)]
                drawn_once = bool(drawn.find_changed())
        except BaseException:
            if not lazy:  # what initializes a layer cannot do so again
                before.restore()
            raise
        kept = before.keep_first_call(after_first, made)
    undo = [(tensor, tensor.clone()) for tensor, value in settled if not has_same_values(tensor, value)]
    _write(settled)
    if drawn_once:
        drawn.restore()
    return partial(_restore, before, undo, begun) if kept or undo or lazy or drawn_once else None


def _restore(before: PythonState, undo: Iterable[tuple[torch.Tensor, torch.Tensor]], begun: RandomStates) -> None:
    before.restore()
    _write(undo)
    begun.restore()


@contextmanager
def _preserve_lazy_buffers(lazy: Iterable[nn.Module], stack: ExitStack) -> Iterator[None]:
    """Restore the buffers that layers make in their first call, when `stack` is closed, to their values before its forward."""
    preserve = partial(_preserve_buffers, stack)
    hooks = [module.register_forward_pre_hook(preserve) for module in lazy]  # after their own, which initializes
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _preserve_buffers(stack: ExitStack, module: nn.Module, _: object) -> None:
    for buffer in module.buffers(recurse=False):
        stack.enter_context(preserve_tensor(buffer))


@torch.no_grad()
def _write(values: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for tensor, value in values:
        if not has_same_values(tensor, value):
            tensor.copy_(value)


def _list_roots(step: nn.Module, batch: Batch) -> list[object]:
    """Return the objects whose Python values a step may change: its own, and the hooks on all modules."""
    return [step, batch, *(getattr(nn_module, name) for name in vars(nn_module) if name.startswith("_global_"))]


@contextmanager
def _preserve_tensors(step: nn.Module, batch: Batch, state: PythonState, written: Iterable[torch.Tensor] = ()) -> Iterator[None]:
    """Restore tensors, which parameters are trained, and random states, with those of the generators in `state`."""
    tensors = {id(t): t for t in (*_iterate_held_tensors(step), *list_tensors(list_leaves(batch)), *written)}.values()
    with ExitStack() as stack:
        for generator in state.generators:
            stack.callback(generator.set_state, generator.get_state())
        for tensor in tensors:
            if not isinstance(tensor, FakeTensor):
                stack.enter_context(preserve_tensor(tensor))
        stack.enter_context(preserve_random_states(_list_gpus()))
        stack.callback(_restore_requires_grad, [(parameter, parameter.requires_grad) for parameter in step.parameters()])
        yield


def _restore_requires_grad(before: Iterable[tuple[nn.Parameter, bool]]) -> None:
    for parameter, was_trained in before:
        if parameter.requires_grad is not was_trained:
            parameter.requires_grad_(was_trained)


def _iterate_own_tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    yield from module.parameters(recurse=False)
    yield from module.buffers(recurse=False)


def _iterate_held_tensors(step: nn.Module) -> Iterator[torch.Tensor]:
    """Yield the tensors that modules hold apart from parameters, without buffers of layers that have not been called yet."""
    yield from (buffer for buffer in step.buffers() if not is_lazy(buffer))
    for module in step.modules():
        yield from (value for value in vars(module).values() if isinstance(value, torch.Tensor))


def _list_gpus() -> Iterable[int]:
    return range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()


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
        given = _collect_storages((args, named))
        if func._schema.is_mutable:
            given_as = {**dict(zip((a.name for a in func._schema.arguments), args, strict=False)), **named}
            for argument in func._schema.arguments:
                if argument.is_write:
                    self._keep(given_as.get(argument.name))
        returned = func(*args, **named)
        self._skipped |= _collect_storages(returned).keys() - given.keys()
        return returned

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        self._stack.close()

    def _keep(self, value: object) -> None:
        for identity, tensor in _collect_storages(value).items():
            if identity not in self._skipped:
                self._skipped.add(identity)
                self.written.append(tensor)
                self._stack.enter_context(preserve_tensor(_view_whole(tensor), tensor))


def _view_whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.new_empty(0).set_(tensor.untyped_storage())


def _collect_storages(values: object) -> dict[int, torch.Tensor]:
    """Return the storages of the tensors in `values`, each with a tensor that lies in it."""
    return {get_storage(tensor): tensor for tensor in list_tensors(values) if tensor.layout is torch.strided}


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
    if names := list_names_of_parts(a):
        return type(a) is type(b) and all(has_same_values(getattr(a, name), getattr(b, name)) for name in names)
    a, b = (x.to_dense() if x.layout is not torch.strided else x for x in (a, b))
    if torch.equal(a, b):
        return True
    numbers = a.is_floating_point() or a.is_complex()
    return numbers and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)
