"""The training graph of a model at any batch size."""

from dataclasses import replace

import torch

from graphs.errors import ModelError, UnknownOptionError
from graphs.ir import Graph
from planner.models.tracing import Tracing
from planner.models.workload import ModelSpec


class Batches:
    """A model whose batch size is an option of the function that builds it.

    Args:
        model: what is trained; where it gives the batch size, the search begins there.
        option: name of the option.
        tracing: how graphs are made.

    Raises:
        ModelError: the batch size that the model gives is no whole number above 0.
    """

    def __init__(self, model: ModelSpec, option: str, tracing: Tracing) -> None:
        given = dict(model.options).get(option, "1")
        if not given.isdecimal() or int(given) < 1:
            raise ModelError(f"option {option!r} of {model} is {given!r}: a batch size is a whole number above 0")
        self.first = int(given)
        self._model = model
        self._option = option
        self._tracing = tracing

    def graph(self, batch: int) -> Graph:
        """The graph of the training step on `batch` samples.

        Raises:
            ModelError: the model has no such option, or cannot be built.
            TraceError: the step cannot be captured.
            MemoryError: it was to be measured, and the device has not enough memory.
        """
        options = {**dict(self._model.options), self._option: str(batch)}
        spec = replace(self._model, options=tuple(options.items()))
        try:
            return self._tracing.graph(spec)
        except torch.OutOfMemoryError as error:
            raise MemoryError(str(error)) from error
        except UnknownOptionError as error:
            if error.option == self._option:
                raise ModelError(f"{error}; name the one that is the batch size with --batch-option") from error
            raise
