"""The signature of a training step: its nested arguments and results, flattened and unflattened."""

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import nn

from planner.graphs.errors import MismatchError, NumberMismatchError, TraceError
from planner.torch_private.core import pytree


@dataclass(frozen=True, slots=True)
class Constant:
    """A result of a step that is no tensor: a part of the structure of what it returns, in which it is the value itself."""

    value: object


# A NaN is equal to itself in a tuple only.
pytree.register_pytree_node(Constant, lambda constant: ([], (constant.value,)), lambda _, held: held[0])
# Types of constants that a step may return.
RETURNED = (
    *(int, float, complex, str, bytes, slice, range, Enum, type(None)),
    *(torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format),
)

# The arguments of a step: by position, or by name.
Batch = Sequence[object] | Mapping[str, object]
Shapes = tuple[tuple[int, ...], ...]


def split_arguments(batch: Batch) -> tuple[tuple[object, ...], dict[str, object]]:
    """Return the positional and keyword arguments of the step; raise TraceError if `batch` is no sequence or mapping."""
    if isinstance(batch, Mapping):
        return (), dict(batch)
    if isinstance(batch, torch.Tensor | str) or not (isinstance(batch, Iterable) and hasattr(batch, "__getitem__")):
        given = "None" if batch is None else f"a {type(batch).__name__}"
        raise TraceError(
            f"the batch is {given}: give what the step is called with, as in (inputs, targets), or by name in a dict"
        )
    return tuple(batch), {}


def check_batch(batch: Batch) -> None:
    """Raise a TraceError if `batch` has values that no step can be captured with."""
    given = split_arguments(batch)
    tensors = [leaf for leaf in pytree.tree_leaves(given) if isinstance(leaf, torch.Tensor)]
    if tensors and all(tensor.numel() == 0 for tensor in tensors):
        shapes = ", ".join(str(list(tensor.shape)) for tensor in tensors)
        raise TraceError(f"the batch is empty (tensors of {shapes}), so that there is nothing to train on: skip such batches")
    for name, leaf in zip(_list_names(given), pytree.tree_leaves(given), strict=True):
        if isinstance(leaf, np.ndarray | np.generic):
            raise TraceError(
                f"{name} is a numpy.{type(leaf).__name__}, which no step takes: pass a tensor (torch.as_tensor) or a plain number"
            )
        held = () if isinstance(leaf, torch.Tensor) else getattr(leaf, "__dict__", {}).values()
        if any(isinstance(value, torch.Tensor) for value in held):
            kind = type(leaf).__name__
            raise TraceError(
                f"{name} is a {kind}, whose tensors are not seen: pass them by themselves, register the class if it is a "
                f"dataclass (torch.export.register_dataclass({kind})), or train with planner.checkpoint(model, budget=...)"
            )
        if isinstance(leaf, torch.Tensor) and leaf.is_nested:
            raise TraceError(
                f"{name} is a nested tensor, which planner.compile does not take: pass its values() and offsets(), and make it "
                "in the step (torch.nested.nested_tensor_from_jagged), or train with planner.checkpoint(model, budget=...)"
            )
        if isinstance(leaf, torch.Tensor) and leaf.layout is not torch.strided:
            raise TraceError(
                f"{name} is a sparse tensor, which no step takes: give a matrix that does not change to the model "
                "(register_buffer), pass others as dense tensors, or train with planner.checkpoint(model, budget=...), which "
                "plans the parts of the model around them"
            )


def list_leaves(batch: Batch) -> list[object]:
    """Return the tensors and other values in `batch`, in the order of the step's inputs."""
    return pytree.tree_leaves(split_arguments(batch))


def list_shapes(batch: Batch) -> Shapes:
    """Return the shape of each leaf of `batch`; () for a leaf that is no tensor."""
    return tuple(tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else () for leaf in list_leaves(batch))


def format_shapes(batch: Batch) -> str:
    """Return the shapes of the tensors of `batch` for messages."""
    return ", ".join(str(list(leaf.shape)) for leaf in list_leaves(batch) if isinstance(leaf, torch.Tensor))


def has_fewer_rows(shape: Sequence[int], planned: Sequence[int]) -> bool:
    """Return True if `shape` has a smaller first dimension than the planned shape, and equals it otherwise."""
    return len(shape) == len(planned) > 0 and shape[0] < planned[0] and tuple(shape[1:]) == tuple(planned[1:])


def call(step: Callable[..., Any], batch: Batch) -> Any:
    """Return the result of `step` on `batch`."""
    args, kwargs = split_arguments(batch)
    return step(*args, **kwargs)


def detach_batch(batch: Batch) -> Batch:
    """Return `batch` with tensors that have or may get gradients replaced by leaves on the same memory.

    A measurement on it leaves no gradient in the caller's tensors, does not run backward through their history, and does not
    make them require a gradient.
    """
    tensors = [
        leaf for leaf in list_leaves(batch) if isinstance(leaf, torch.Tensor) and (leaf.requires_grad or leaf.is_floating_point())
    ]
    if not tensors:
        return batch
    # A tensor that is passed twice stays one.
    leaf_of = {id(tensor): tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors}
    args: tuple[object, ...]
    kwargs: dict[str, object]
    args, kwargs = pytree.tree_map(lambda leaf: leaf_of.get(id(leaf), leaf), split_arguments(batch))
    return kwargs or args


def list_target_names(loss_fn: Callable[..., object] | None) -> frozenset[str]:
    """Return the names of the arguments of a loss function, without the model's output."""
    try:
        function = loss_fn.forward if isinstance(loss_fn, nn.Module) else loss_fn
        parameters = list(inspect.signature(function).parameters.values())[1:]  # type: ignore[arg-type]
    except (TypeError, ValueError):  # none, or written in C
        return frozenset()
    return frozenset(p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))


def split_returned(returned: object) -> tuple[torch.Tensor, object]:
    """Return the loss, and the other results: detached tensors, and a ``Constant`` for each Python value.

    A tuple begins with the loss, a mapping has it as "loss". Of an object with an attribute ``loss`` only the loss is
    returned: to keep its other outputs (such as logits) would cost memory.

    Raises:
        TraceError: it is none of these, or something in it is neither a tensor nor a plain value.
    """
    loss: object = returned
    rest: object = ()
    if isinstance(returned, tuple | list) and returned:
        loss, rest = returned[0], tuple(returned[1:])
    elif not isinstance(returned, bool | int | float) and hasattr(returned, "loss"):
        loss = returned.loss
    elif isinstance(returned, Mapping):
        loss = returned.get("loss")
        rest = {name: value for name, value in returned.items() if name != "loss"}
    return _check_tensor(loss), pytree.tree_map(_settle, rest, is_leaf=lambda value: isinstance(value, torch.Size))


def _settle(value: object) -> object:
    """Return a result of a step beside its loss as ``split_returned`` does."""
    return Constant(value) if isinstance(value, RETURNED) else _check_tensor(value).detach()


def _check_tensor(value: object) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value
    raise build_wrong_result(type(value))


def build_wrong_result(kind: type) -> TraceError:
    """Return the error of a step that returns a value of `kind` in the place of a tensor."""
    return TraceError(
        f"the step returns a {kind.__name__} where the loss or another tensor is expected: return a scalar tensor, a tuple of "
        "tensors that begins with it, or a dict of tensors with a 'loss'; where it is a number, leave out .item()"
    )


def join_returned(loss: torch.Tensor, rest: object) -> object:
    """Return the inverse of ``split_returned``; only the loss if there was nothing else."""
    return _join(loss, pytree.tree_map(lambda tensor: tensor, rest))  # which makes constants their values


def _join(loss: torch.Tensor, rest: object) -> object:
    if isinstance(rest, tuple):
        return (loss, *rest) if rest else loss
    assert isinstance(rest, dict)
    return {"loss": loss, **rest}


@dataclass(frozen=True, slots=True)
class Signature:
    """The structure of the arguments and results of a captured step.

    Attributes:
        given: structure of the positional and keyword arguments.
        names: name of each leaf, for messages.
        values: for each leaf None if it is a tensor, else a tuple of its value, which is part of the graph.
        trained: for each leaf True if it is a tensor that requires grad, and gets a gradient.
        devices: for each leaf the type of its device, "" if it is no tensor; a step on CUDA may read lengths on the CPU.
        returned: structure of the loss and the other results, as ``split_returned`` gives them; and of the tensors for later
            calls, if there are any.
        unread: positions of leaves whose values the graph does not depend on.
        flat: names of the keyword arguments and types of all arguments, if each is a leaf; else None.
    """

    given: pytree.TreeSpec
    names: tuple[str, ...]
    values: tuple[tuple[object] | None, ...]
    trained: tuple[bool, ...]
    devices: tuple[str, ...]
    returned: pytree.TreeSpec
    unread: frozenset[int] = frozenset()
    flat: tuple[tuple[str, ...], list[type]] | None = None

    @staticmethod
    def of(batch: Batch, returned: pytree.TreeSpec, unread: Collection[int] = ()) -> "Signature":
        """Return the signature of a step that was captured on `batch`; `unread` as in the class."""
        args, kwargs = split_arguments(batch)
        flat, given = pytree.tree_flatten((args, kwargs))
        are_leaves = [*map(id, flat)] == [*map(id, (*args, *kwargs.values()))]
        values = tuple(None if isinstance(leaf, torch.Tensor) else (leaf,) for leaf in flat)
        trained = tuple(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in flat)
        devices = tuple(leaf.device.type if isinstance(leaf, torch.Tensor) else "" for leaf in flat)
        return Signature(
            *(given, _list_names((args, kwargs)), values, trained, devices, returned, frozenset(unread)),
            flat=(tuple(kwargs), [*map(type, flat)]) if are_leaves else None,
        )

    def flatten(self, *args: object, **kwargs: object) -> list[object]:
        """Return the leaves of a call in the order of the captured one; raise MismatchError if the call has another structure."""
        flat = [*args, *kwargs.values()]
        if self.flat is not None and (tuple(kwargs), [*map(type, flat)]) == self.flat:
            return flat
        try:
            flat, given = pytree.tree_flatten((args, kwargs))
            if given != self.given:  # dicts in another order will do
                flat = self.given.flatten_up_to((args, kwargs))
        except ValueError:
            names = ", ".join(_list_names((args, kwargs))) or "nothing"
            raise MismatchError(
                f"the batch has {names}, but the step was planned for {', '.join(self.names)}: pass what it was planned with"
            ) from None
        return flat

    def check_values(self, leaves: Sequence[object]) -> None:
        """Raise MismatchError if one of the leaves that are no tensors differs from the captured one."""
        for i, (name, value, leaf) in enumerate(zip(self.names, self.values, leaves, strict=True)):
            if value is not None and i not in self.unread and not _is_same(leaf, value[0]):
                kind = NumberMismatchError if is_plain(leaf) and is_plain(value[0]) else MismatchError
                raise kind(
                    f"{name} is {leaf!r}, but the step was planned for {value[0]!r}",
                    ", which is part of its graph: make another plan for this value, or pass it as a tensor",
                )

    def is_equal_but_for_numbers(self, leaves: Sequence[object]) -> bool:
        """Return True if the leaves that are no tensors have the captured values, except numbers, such as a count of rows."""
        pairs = ((value[0], leaf) for value, leaf in zip(self.values, leaves, strict=True) if value is not None)
        return all(_is_same(leaf, value) or type(value) is type(leaf) in (int, float) for value, leaf in pairs)

    def build_results(self, results: Sequence[torch.Tensor]) -> object:
        """Return the results of the step, from the loss and the other tensors."""
        loss, rest, *_ = pytree.tree_unflatten(results, self.returned)
        return _join(loss, rest)

    def list_for_later(self, results: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Return the tensors for calls that are made after the forward pass."""
        _, _, *later = pytree.tree_unflatten(results, self.returned)
        return later[0] if later else ()


def is_plain(value: object) -> bool:
    """Return True for a value that a step follows where it changes: a number, a flag, a text, None, an enum's member, a tuple."""
    return all(map(is_plain, value)) if isinstance(value, tuple) else isinstance(value, int | float | str | Enum | None)


def _is_same(value: object, other: object) -> bool:
    """Return True if both values are equal and of one type; NaN equals NaN."""
    return type(value) is type(other) and bool(value == other or (value != value and other != other))


def _list_names(given: tuple[tuple[object, ...], dict[str, object]]) -> tuple[str, ...]:
    paths, _ = pytree.tree_flatten_with_path(given)
    return tuple(f"input {_format_path(path)}" for path, _ in paths)


def _format_path(path: tuple[pytree.KeyEntry, ...]) -> str:
    """Return `0` for the first positional argument or `'mask'` for a keyword argument, then the path of the leaf in it."""
    _, first, *inner = path
    name = repr(first.key) if isinstance(first, pytree.MappingKey) else str(first).strip("[]")
    return name + pytree.keystr(tuple(inner))
