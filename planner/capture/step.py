"""The training step of a model, from a batch to its loss."""

import inspect
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from planner.capture.signature import Batch, list_target_names, split_arguments, split_returned
from planner.graphs.errors import TraceError, quote

LossFn = Callable[..., object]
_EMPTY = "nothing, as the batch is empty"


def check_module(model: object) -> None:
    """Raise a TraceError unless `model` is a module that can be called."""
    if not isinstance(model, nn.Module):
        kind = f"the class {model.__name__}" if isinstance(model, type) else f"a {type(model).__name__}"
        given = "None" if model is None else kind
        raise TraceError(f"the model is {given}, and must be a torch.nn.Module: give an object of such a class")


def check_loss_fn(loss_fn: object) -> None:
    """Raise a TraceError unless `loss_fn` is a function that can be called with outputs and targets, or None."""
    if isinstance(loss_fn, type) or not (loss_fn is None or callable(loss_fn)):
        given = f"the class {loss_fn.__name__}" if isinstance(loss_fn, type) else quote(loss_fn)
        raise TraceError(
            f"the loss function is {given}: give a function or an object, as torch.nn.functional.mse_loss or torch.nn.MSELoss(), "
            "or None if the model returns the loss"
        )


def check_tensors(model: nn.Module) -> None:
    """Raise a TraceError if `model` has parameters or buffers that cannot be trained."""
    for path, module in model.named_modules():
        name = f"{path or 'the model'} ({type(module).__name__})"
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            if is_lazy(tensor):
                raise TraceError(
                    f"{name} has no values before it is called for the first time, on real tensors: call the model once on a "
                    "batch that reaches it, and plan it then"
                )
            if isinstance(tensor, nn.Parameter) and tensor.is_inference():
                raise TraceError(f"{name} was made under torch.inference_mode(), and cannot be trained: make it outside")


class TrainingStep(nn.Module):
    """One training step: returns the loss, and detached what else the loss function returns.

    If called by position, the last argument is the loss function's target: ``loss_fn(model(*inputs), target)``. If called by
    name, the loss function gets the arguments that it names, the model the others: ``loss_fn(model(**inputs), **targets)``.
    Without a loss function the model gets all arguments, and returns the loss itself, a tuple that begins with it, a dict
    with a "loss", or an object with an attribute ``loss``.
    """

    def __init__(self, model: nn.Module, loss_fn: LossFn | None) -> None:
        super().__init__()
        check_loss_fn(loss_fn)
        self.model = model
        self.loss_fn = loss_fn
        self._target_names = list_target_names(loss_fn)

    def forward(self, *args: object, **kwargs: object) -> tuple[torch.Tensor, object]:
        """Return the loss and the other results (see ``split_returned``)."""
        if self.loss_fn is None:
            returned = self.model(*args, **kwargs)
        elif args:
            returned = self.loss_fn(self.model(*args[:-1]), args[-1])
        else:
            inputs, targets = self._split_by_name(kwargs)
            returned = self.loss_fn(self.model(**inputs), **targets)
        return split_returned(returned)

    def describe_wrong_call(self, batch: Batch) -> str | None:
        """Return a message if the model or the loss function does not accept its part of `batch`, else None."""
        args, kwargs = split_arguments(batch)
        names = [f"input {i}" for i in range(len(args))]
        if self.loss_fn is None:
            return _describe_wrong_call("the model", self.model, names, list(kwargs))
        if args:
            only = "nothing, as all of the batch is the target"
            return _describe_wrong_call("the model", self.model, names[:-1], [], only) or _describe_wrong_call(
                "the loss function", self.loss_fn, ["the model's output", names[-1]], []
            )
        inputs, targets = self._split_by_name(kwargs)
        return _describe_wrong_call("the model", self.model, [], list(inputs)) or _describe_wrong_call(
            "the loss function", self.loss_fn, ["the model's output"], list(targets)
        )

    def _split_by_name(self, kwargs: Mapping[str, object]) -> tuple[dict[str, object], dict[str, object]]:
        """Return the arguments of the model and of the loss function, of a batch by name."""
        targets = {name: value for name, value in kwargs.items() if name in self._target_names}
        return {name: value for name, value in kwargs.items() if name not in targets}, targets


def _describe_wrong_call(
    what: str, function: Callable[..., object], positional: Sequence[str], by_name: Sequence[str], none: str = _EMPTY
) -> str | None:
    """Return a message if `function` does not accept so many arguments, or not by these names, else None.

    `none` says why there are no arguments.
    """
    try:
        signature = inspect.signature(function.forward if isinstance(function, nn.Module) else function)
    except (TypeError, ValueError):  # written in C
        return None
    try:
        signature.bind(*positional, **dict.fromkeys(by_name))
    except TypeError as error:
        plain = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in signature.parameters.values()]
        takes = signature.replace(parameters=plain, return_annotation=inspect.Signature.empty)
        given = " and ".join([*positional, *(f"{name}=" for name in by_name)]) or none
        return (
            f"{what} takes {takes}, and is given {given} ({error}): a batch is (*inputs, target), for loss_fn(model(*inputs), "
            "target), or a dict of what model and loss_fn take by name; without a loss_fn the model gets all of it"
        )
    return None
