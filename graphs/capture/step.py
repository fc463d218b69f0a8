"""What is captured: one training step of a model, from a batch to its loss."""

from collections.abc import Callable

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from graphs.capture.signature import take_apart, target_names
from graphs.errors import TraceError
from graphs.torch_private.core import pytree

LossFn = Callable[..., object]


def check_module(model: object) -> None:
    """Raise a TraceError unless `model` is a module that can be called."""
    if not isinstance(model, nn.Module):
        kind = f"the class {model.__name__}" if isinstance(model, type) else f"a {type(model).__name__}"
        given = "None" if model is None else kind
        raise TraceError(f"the model is {given}, and must be a torch.nn.Module: give an object of such a class")


def check_tensors(model: nn.Module) -> None:
    """Raise a TraceError if `model` has parameters or buffers that cannot be trained as they are."""
    for path, module in model.named_modules():
        name = f"{path or 'the model'} ({type(module).__name__})"
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            if is_lazy(tensor):
                raise TraceError(
                    f"{name} has no values before the model is called for the first time: call the model once on a batch, and "
                    "plan it then"
                )
            if isinstance(tensor, nn.Parameter) and tensor.is_inference():
                raise TraceError(f"{name} was made under torch.inference_mode(), and cannot be trained: make it outside")


class TrainingStep(nn.Module):
    """One step's loss, and whatever else the loss function returns, detached.

    Called by position, the last item is the loss function's target: ``loss_fn(model(*inputs), target)``. Called by
    name, the loss function gets what it names, the model the others: ``loss_fn(model(**inputs), **targets)``.
    Without a loss function the model gets all, and returns the loss itself, a tuple that begins with it, a dict
    with a "loss", or an object with an attribute ``loss``.
    """

    def __init__(self, model: nn.Module, loss_fn: LossFn | None) -> None:
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn
        self._target_names = target_names(loss_fn)

    def forward(self, *args: object, **kwargs: object) -> tuple[torch.Tensor, object]:
        """The loss, and what else is returned (``take_apart``)."""
        if self.loss_fn is None:
            returned = self.model(*args, **kwargs)
        elif args:
            returned = self.loss_fn(self.model(*args[:-1]), args[-1])
        else:
            targets = {name: value for name, value in kwargs.items() if name in self._target_names}
            inputs = {name: value for name, value in kwargs.items() if name not in self._target_names}
            returned = self.loss_fn(self.model(**inputs), **targets)
        loss, rest = take_apart(returned)
        return loss, pytree.tree_map(torch.Tensor.detach, rest)
